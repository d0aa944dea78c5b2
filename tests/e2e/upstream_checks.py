"""What a front door that asks workers itself owes its clients, whichever engine is behind them."""

from __future__ import annotations

import json
import re
from typing import Any

from front_door_process import Door

HELLO = [{"role": "user", "content": "Hello there"}]
SAMPLED: dict[str, Any] = {"messages": HELLO, "temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}


def ask(door: Door, **fields: Any) -> Any:
    """The answer to a chat."""
    status, text = door.post("chat/completions", **{**SAMPLED, **fields})
    assert status == 200, text
    return json.loads(text)


def said(door: Door, **fields: Any) -> str:
    """The text of it."""
    return str(ask(door, **fields)["choices"][0]["message"]["content"])


def check_controls(door: Door, engine: str) -> None:
    """Every kind of control arrives: fields, guides, processors, scores, ids, priorities."""
    plain = said(door)
    assert plain == said(door) == said(door, nvext={"agent_hints": {"priority": 3}})
    assert plain != said(door, logit_bias={"40": -100, "41": 9})
    forced = [{"name": "forced_sequence", "args": {"text": "Hello world!"}}]
    answer = ask(door, logits_processors={"processors": forced, "receipt": True}, ignore_eos=False)
    assert str(answer["choices"][0]["message"]["content"]).startswith("Hello world!")
    assert answer["nvext"]["engine_data"]["logits_processors"]["engine"]["name"] == engine
    assert re.fullmatch("[a-c]{5}!", said(door, guided_regex="[a-c]{5}!", ignore_eos=False))
    assert set(said(door, allowed_token_ids=[40, 41])) <= set("DE")
    stops = {"stop": ["DDD"], "include_stop_str_in_output": True, "ignore_eos": False}
    assert said(door, allowed_token_ids=[40], **stops) == "DDD"
    (choice,) = ask(door, logprobs=True, top_logprobs=2, return_token_ids=True)["choices"]
    content = choice["logprobs"]["content"]
    assert [each["token_id"] for each in content] == choice["token_ids"]
    assert all(len(each["top_logprobs"]) == 2 for each in content)


def check_refusals(door: Door, *cases: tuple[dict[str, Any], str]) -> None:
    """Each of ``cases``, fields and a name, is refused by the client's own name for the field."""
    common: list[tuple[dict[str, Any], str]] = [
        ({"top_p": 7}, "top_p"),
        ({"logits_processors": [{"name": "none"}]}, "logits_processors[0].name"),
    ]
    for fields, param in [*common, *cases]:
        status, text = door.post("chat/completions", **{**SAMPLED, **fields})
        assert (status, json.loads(text)["error"]["param"]) == (400, param), text
