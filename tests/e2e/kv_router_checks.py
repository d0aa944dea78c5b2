"""Checks that the KV router sends a prompt to the worker that has its beginning."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from e2e_stack import Stack, http, wait_for


def complete(stack: Stack, prompt: list[int], **body: Any) -> dict[str, Any]:
    """Usage of a completion of two tokens."""
    status, text = stack.post("completions", prompt=prompt, max_tokens=2, ignore_eos=True, **body)
    assert status == 200, text
    return dict(json.loads(text)["usage"])


def num_cached(stack: Stack, prompt: list[int], **body: Any) -> int:
    """Cached tokens of a completion."""
    return int((complete(stack, prompt, **body).get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def num_stored(stack: Stack) -> int:
    """Events of stored blocks that the router has taken in: they come behind the answer."""
    text = http(f"{stack.url}/metrics")[1]
    counts = re.findall(r'kv_cache_events_applied\{.*event_type="stored".*status="ok".*\} (\d+)', text)
    return sum(map(int, counts))


def prompt_of(number: int, length: int) -> list[int]:
    """Random tokens, the same for a number."""
    return random.Random(number).choices(range(300, 900), k=length)


def check_prefixes_stay(stack: Stack, length: int, **body: Any) -> None:
    """Four prefixes of so many tokens, whole blocks, are found again whenever they are asked."""
    wait_for(lambda: stack.post("completions", prompt="ready?", max_tokens=1)[0] == 200, "an answer")
    prefixes = [prompt_of(number, length) for number in range(4)]
    for prefix in prefixes:
        before = num_stored(stack)
        assert num_cached(stack, [*prefix, 301], **body) == 0
        wait_for(lambda before=before: num_stored(stack) > before, "that the router hears of the prefix")
    for round_number in range(4):
        for number, prefix in enumerate(prefixes):
            prompt = prefix + prompt_of(100 + 10 * round_number + number, 5)
            assert num_cached(stack, prompt, **body) == length
