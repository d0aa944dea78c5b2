"""The front door before real processes of workers behind OpenEngine: answers are those that come
through Dynamo's frontend, and a worker that is killed changes none.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import MODEL, Worker, http, running_stack
from engine_stack import EXACT, EngineStack, running_engines
from front_door_process import Door

HELLO = [{"role": "user", "content": "Hello there"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
SAMPLED = {"messages": HELLO, "temperature": 1.0, "seed": 7, "max_tokens": 30}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"const": {"a": 1}}}}
NGRAMS = {"processors": [{"name": "no_repeat_ngram", "args": {"n": 2}}]}
REPEATED = {"name": "forced_prefix", "args": {"token_ids": [60, 61, 60, 61]}}
NO_REPEAT = {"name": "no_repeat_ngram", "args": {"n": 2}}
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("chat/completions", {"messages": HELLO, "max_tokens": 20}),
    "sampled": ("chat/completions", {**SAMPLED, "top_p": 0.9, "top_k": 50, "min_p": 0.01}),
    "penalties": ("chat/completions", {**SAMPLED, "frequency_penalty": 1.0, "repetition_penalty": 1.3}),
    "choices": ("chat/completions", {**SAMPLED, "n": 3}),
    "bias": ("chat/completions", {**SAMPLED, "logit_bias": {"40": 6, "41": -100}}),
    "tokens": ("chat/completions", {**SAMPLED, "allowed_token_ids": [40, 41, 42, 43]}),
    "stop": ("chat/completions", {**SAMPLED, "stop": ["e", "a"]}),
    "shown stop": ("chat/completions", {**SAMPLED, "stop": ["e", "a"], "include_stop_str_in_output": True}),
    "schema": ("chat/completions", {**SAMPLED, "guided_regex": "[a-f]{20}"}),
    "parts": ("chat/completions", {**SAMPLED, "messages": PARTS}),
    "processors": ("chat/completions", {**SAMPLED, "logits_processors": NGRAMS}),
    "logprobs": ("chat/completions", {**SAMPLED, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
    "completion": ("completions", {"prompt": "Once upon", "max_tokens": 20}),
    "token ids": ("completions", {"prompt": [5, 6, 7], "max_tokens": 20}),
    "prompts": ("completions", {"prompt": ["Once", "upon"], "max_tokens": 8}),
    "scores": ("completions", {"prompt": "Once upon", "max_tokens": 8, "logprobs": 2}),
    "echo": ("completions", {"prompt": "Hello world", "max_tokens": 2, "logprobs": 1, "echo": True}),
    "responses": ("responses", {"input": "Hello", "max_output_tokens": 20, "temperature": 1.0, "top_p": 0.5}),
    "no such model": ("chat/completions", {"messages": HELLO, "model": "other"}),
    "bad value": ("completions", {"prompt": "a", "guided_regex": "("}),
    "no token is left": ("chat/completions", {**SAMPLED, "logits_processors": [REPEATED, NO_REPEAT]}),
}  # fmt: skip

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Door, Door]]:
    flags = [part for name, value in EXACT.items() for part in (f"--{name.lower().replace('_', '-')}", value)]
    directory = tmp_path_factory.mktemp("both")
    with (
        running_stack(directory / "dynamo", tiny_model) as dynamo,
        running_engines(directory / "own", tiny_model) as own,
    ):
        dynamo.start_frontend()
        dynamo.start_worker(*flags)
        own.start_engine()
        yield Door(dynamo, "--model-path", str(tiny_model)), Door(own)


@pytest.mark.parametrize("name", TABLE)
def test_an_answer_is_that_through_dynamo(doors: tuple[Door, Door], name: str) -> None:
    path, body = TABLE[name]
    if name == "responses":
        body = {**body, "logits_processors": [{"name": "forced_sequence", "args": {"text": "Yes, I do"}}]}
    theirs, ours = (door.post(path, **body) for door in doors)
    assert ours[0] == theirs[0], ours
    assert comparable(json.loads(ours[1])) == comparable(json.loads(theirs[1]))


_OWN = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "cached_tokens",
    "text_offset",
    "token_id",
}
_OWN |= {"token", "bytes"}  # of a part of a character, which Dynamo's frontend shows as it came
"""Keys of one answer, and those that only one of the two has."""


def comparable(data: Any) -> Any:
    """Data of an answer; Dynamo's frontend rounds numbers to 32 bits, and has other empty keys."""
    if isinstance(data, dict):
        return {key: comparable(value) for key, value in data.items() if key not in _OWN and value is not None}
    if isinstance(data, list):
        return [comparable(each) for each in data]
    if isinstance(data, str):
        return data.rstrip("\ufffd")  # a part of a character at the end, which 1.4.2 does not show
    return pytest.approx(data, abs=1e-5) if isinstance(data, float) else data


def test_a_killed_worker_changes_no_answer(tmp_path: Path, tiny_model: Path) -> None:
    body: dict[str, Any] = {**SAMPLED, "max_tokens": 900, "logprobs": True, "logits_processors": NGRAMS}
    asked = {"model": MODEL, "ignore_eos": True, **body}
    with running_engines(tmp_path, tiny_model) as stack:
        workers = [stack.start_engine(), stack.start_engine()]
        door = Door(stack)
        with door.client() as client:
            answers = []
            for kills in (False, True):
                found: list[Any] = []
                extra = {name: asked[name] for name in ("logits_processors", "ignore_eos")}
                own = {name: value for name, value in asked.items() if name not in extra}
                for chunk in client.chat.completions.create(**own, stream=True, extra_body=extra):
                    found += [(choice.delta.content, choice.logprobs) for choice in chunk.choices]
                    if kills and len(found) == 20:
                        busy(stack, door, workers).signal(signal.SIGKILL)
                tokens = [each for _, logprobs in found if logprobs for each in logprobs.content]
                answers.append(("".join(text or "" for text, _ in found), tokens))
        assert sorted(each.running for each in workers) == [False, True]
    assert len(answers[0][1]) == 900
    assert answers[0] == answers[1]


def busy(stack: EngineStack, door: Door, workers: list[Worker]) -> Worker:
    """The worker that answers."""
    lines = http(f"{door.url}/metrics")[1].splitlines()
    (place,) = [i for i, url in enumerate(stack.targets) if f'dlw_upstream_requests{{worker="{url}"}} 1' in lines]
    return workers[place]
