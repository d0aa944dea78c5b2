"""The KV router sends a prompt to the worker that has its beginning, and usage says how much it
had.
"""

from __future__ import annotations

import json
import random
from typing import Any

from e2e_stack import Stack, wait_for

ENGINE = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--enable-kv-routing", "true")


def complete(stack: Stack, prompt: list[int]) -> dict[str, Any]:
    status, text = stack.post("completions", prompt=prompt, max_tokens=2, ignore_eos=True)
    assert status == 200, text
    return dict(json.loads(text)["usage"])


def prompt_of(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(300, 900), k=length)


def test_prefixes_stay_with_their_worker(stack: Stack) -> None:
    stack.start_frontend("--router-mode", "kv")
    workers = [stack.start_worker(*ENGINE, wait=False) for _ in range(2)]
    for worker in workers:
        stack.wait_registered(worker)
    wait_for(lambda: stack.post("completions", prompt="ready?", max_tokens=1)[0] == 200, "an answer")
    prefixes = [prompt_of(number, 96) for number in range(4)]
    for prefix in prefixes:
        assert complete(stack, [*prefix, 301])["prompt_tokens_details"]["cached_tokens"] == 0
    for round_number in range(4):
        for number, prefix in enumerate(prefixes):
            ending = prompt_of(100 + 10 * round_number + number, 5)

            def cached(prompt: list[int]) -> int:
                return int(complete(stack, prompt)["prompt_tokens_details"]["cached_tokens"])

            if round_number == 0:  # the events of the first answer may still be on their way
                wait_for(lambda prefix=prefix, ending=ending: cached(prefix + ending) == 96, "the prefix is known")
            else:
                assert cached(prefix + ending) == 96
    for worker in workers:
        assert "block_hash mismatch" not in worker.log
