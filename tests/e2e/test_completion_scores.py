"""Completions with echo and log probabilities, and log probabilities of prompts, through Dynamo's
frontend with the stock client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from e2e_stack import MODEL, http, running_stack
from front_door_process import Door
from scored_completions import in_vllm_form

from worker.engines.embedded.offline import Engine
from worker.sampling import SamplingParams

IDS = [9, 30, 41, 77, 130, 41, 12, 9, 30, 500, 594, 739, 776]
TEXT = "Once upon a time: Grüße"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Door]:
    with running_stack(tmp_path_factory.mktemp("served"), tiny_model) as stack:
        stack.start_frontend()
        stack.start_worker("--device", "cpu", "--dtype", "float32")
        yield Door(stack)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine(tiny_model, device="cpu", dtype="float32", numerics="exact")


def complete(door: Door, **fields: Any) -> Any:
    with door.client() as client:
        return client.completions.create(**{"model": MODEL, "prompt": TEXT, "max_tokens": 3, **fields})


def scores(engine: Engine, prompt: Any, count: int) -> list[Any]:
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=count))
    assert result.prompt_logprobs is not None
    return result.prompt_logprobs


def check_logprobs(text: str, logprobs: Any, count: int) -> None:
    """The four lists fit each other and the text."""
    assert len(logprobs.tokens) == len(logprobs.token_logprobs)
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset)
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert (logprob is None) == (top is None)
        if top is not None:
            assert top[token] == logprob or "\ufffd" in token or token == ""
            assert len(top) <= count + 1
    assert all(start <= end for start, end in pairwise(logprobs.text_offset))
    if "".join(logprobs.tokens) == text:
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert text[offset:].startswith(token)


@pytest.mark.parametrize("prompt", [TEXT, IDS], ids=["text", "ids"])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_with_logprobs(door: Door, engine: Engine, prompt: Any, max_tokens: int) -> None:
    answer = complete(door, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0, seed=1)
    (choice,) = answer.choices
    ids = engine.tokenizer.encode(TEXT) if prompt is TEXT else IDS
    text = engine.tokenizer.decode(ids)
    assert choice.text.startswith(text)
    assert max_tokens or choice.text == text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), max_tokens)
    assert answer.usage.total_tokens == len(ids) + max_tokens
    assert choice.finish_reason == "length"
    expected = scores(engine, prompt, 2)
    found = choice.logprobs.token_logprobs
    assert found[: len(ids)] == [None, *(entries[0].logprob for entries in expected[1:])]
    assert len(found) == len(ids) + max_tokens
    check_logprobs(choice.text, choice.logprobs, 2)
    for entries, top in zip(expected[1:], choice.logprobs.top_logprobs[1:], strict=False):
        assert set(top.values()) == {one.logprob for one in entries} or any("\ufffd" in text for text in top)


@pytest.mark.parametrize("prompt", [TEXT, IDS], ids=["text", "ids"])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 3}, {"max_tokens": 0}], ids=["text", "logprobs", "none"])
def test_a_stream_is_the_whole_answer(door: Door, prompt: Any, fields: dict[str, Any]) -> None:
    asked = {"prompt": prompt, "echo": True, "seed": 3, "temperature": 1.0, "max_tokens": 6, **fields}
    whole = complete(door, **asked)
    with door.client() as client:
        stream = client.completions.create(model=MODEL, stream=True, stream_options={"include_usage": True}, **asked)
        *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage == whole.usage
    assert {(chunk.id, chunk.created) for chunk in (*chunks, last)} == {(last.id, last.created)}
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert [part.finish_reason for part in parts if part.finish_reason] == [whole.choices[0].finish_reason]
    if "logprobs" not in fields:
        assert all(part.logprobs is None for part in parts)
        return
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for part in parts for value in getattr(part.logprobs, name)]
        assert joined == getattr(whole.choices[0].logprobs, name)


def test_several_prompts_are_choices_each(door: Door) -> None:
    """In the order of the prompts, and for each of them in that of its choices."""
    for prompts in (["Hello", "Hello there", "a"], [[5, 6, 7], [5, 6], [9]]):
        alone = [complete(door, prompt=prompt, echo=True, logprobs=1, max_tokens=2, n=2, seed=5) for prompt in prompts]
        together = complete(door, prompt=prompts, echo=True, logprobs=1, max_tokens=2, n=2, seed=5)
        assert [choice.index for choice in together.choices] == list(range(6))
        expected = [choice for one in alone for choice in one.choices]
        found = together.choices
        assert [(one.text, one.logprobs) for one in found] == [(one.text, one.logprobs) for one in expected]
        assert together.usage.total_tokens == sum(one.usage.total_tokens for one in alone)


def test_logprobs_of_an_answer_alone(door: Door) -> None:
    """Without echo: nothing of the prompt, and offsets in the answer."""
    (choice,) = complete(door, logprobs=2, max_tokens=5).choices
    assert choice.logprobs.text_offset[0] == 0
    assert len(choice.logprobs.tokens) == 5
    check_logprobs(choice.text, choice.logprobs, 2)
    (choice,) = complete(door, logprobs=0, max_tokens=5).choices
    assert [len(top) for top in choice.logprobs.top_logprobs] == [1] * 5


def vllm_form(engine: Engine, prompt: Any, count: int) -> list[Any]:
    return in_vllm_form(engine, scores(engine, prompt, count))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("count", [0, 3, 8])
def test_prompt_logprobs_of_a_completion(door: Door, engine: Engine, count: int, is_streamed: bool) -> None:
    asked: Any = {"model": MODEL, "prompt": IDS, "max_tokens": 3, "stream": is_streamed}
    with door.client() as client:
        answer = client.completions.create(**asked, extra_body={"prompt_logprobs": count})
        first, *rest = list(answer) if is_streamed else [answer]
    assert all("prompt_logprobs" not in chunk.choices[0].model_extra for chunk in rest)
    assert first.choices[0].prompt_logprobs == vllm_form(engine, IDS, count)
    assert first.choices[0].logprobs is None
    assert "nvext" not in first.model_extra


@pytest.mark.parametrize("is_streamed", [False, True])
def test_prompt_logprobs_of_a_chat(door: Door, engine: Engine, is_streamed: bool) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 4, "n": 2, "stream": is_streamed}
    ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with door.client() as client:
        plain = client.chat.completions.create(**{**asked, "stream": False})
        answer = client.chat.completions.create(
            **asked, extra_body={"prompt_logprobs": 1, "logits_processors": {"receipt": True}}
        )
        chunks = list(answer) if is_streamed else [answer]
    (found,) = [one.prompt_logprobs for one in chunks if "prompt_logprobs" in one.model_extra]
    assert found == vllm_form(engine, ids, 1)
    assert "prompt_logprobs" in chunks[0].model_extra
    assert "processors" in json.dumps(chunks[-1 if not is_streamed else -2].model_extra["nvext"])
    for index, choice in enumerate(plain.choices):
        if is_streamed:
            parts = [one for chunk in chunks for one in chunk.choices if one.index == index]
            assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        else:
            assert answer.choices[index].message.content == choice.message.content


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "logprobs": ({"logprobs": 6}, "logprobs"),
    "flag": ({"logprobs": True}, "logprobs"),
    "echo": ({"echo": "yes"}, "echo"),
    "count": ({"prompt_logprobs": 101}, "prompt_logprobs"),
    "prompts": ({"prompt": ["a", 5], "echo": True}, "prompt[1]"),
    "nothing": ({"prompt": [], "echo": True}, "prompt"),
    "usage": ({"echo": True, "stream_options": {"include_usage": True}}, "stream_options"),
    "unknown": ({"echo": True, "ehco": 1}, "ehco"),
    "suffix": ({"echo": True, "suffix": "x"}, "suffix"),
    "processor": ({"echo": True, "logits_processors": [{"name": "nix"}]}, "logits_processors[0].name"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_mistake_is_named(door: Door, name: str, is_streamed: bool) -> None:
    fields, param = REFUSED[name]
    if name == "usage" and is_streamed:
        param = "stream_options.continuous_usage_stats"
        fields = {"echo": True, "stream_options": {"continuous_usage_stats": True}}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "stream": is_streamed, **fields}
    status, text = http(f"{door.url}/v1/completions", body)
    assert (status, json.loads(text)["error"]["param"]) == (400, param)


def test_scored_prompts_are_what_they_are_in_a_crowd(door: Door) -> None:
    """Long prompts, many at a time, beside chats."""
    prompt = [5 + place * place % 900 for place in range(1500)]

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="unused", max_retries=0) as client:
            scored = [
                client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=5)
                for _ in range(4)
            ]
            plain = [client.completions.create(model=MODEL, prompt=prompt[:200], max_tokens=8) for _ in range(4)]
            return await asyncio.gather(*scored, *plain)

    answers = asyncio.run(ask())
    first = answers[0].choices[0]
    assert len(first.logprobs.tokens) == 1500
    assert all(answer.choices[0].logprobs == first.logprobs for answer in answers[:4])


def test_the_end_token_has_its_entry(door: Door, engine: Engine) -> None:
    """Harnesses leave the last entry out: it is a generated one, be it the end of the answer."""
    forced = {"logits_processors": [{"name": "forced_sequence", "args": {"token_ids": [40]}}]}
    for is_streamed in (False, True):
        with door.client() as client:
            asked: Any = {"model": MODEL, "prompt": IDS, "echo": True, "logprobs": 2, "stream": is_streamed}
            answer: Any = client.completions.create(**asked, max_tokens=9, extra_body=forced)
            parts = [chunk.choices[0] for chunk in answer] if is_streamed else [answer.choices[0]]
        text = "".join(part.text for part in parts)
        assert parts[-1].finish_reason == "stop"
        assert text == engine.tokenizer.decode([*IDS, 40])
        tokens = [token for part in parts for token in part.logprobs.tokens]
        offsets = [offset for part in parts for offset in part.logprobs.text_offset]
        assert len(tokens) == len(offsets) == len(IDS) + 2
        assert offsets[-1] == len(text)
        (end_id,) = [one for one in engine.info.eos_token_ids if engine.tokenizer.decode([one]) == tokens[-1]]
        end = parts[-1].logprobs
        expected = scores(engine, [*IDS, 40, end_id], 2)[-1]
        assert end.token_logprobs[-1] == expected[0].logprob
        assert set(end.top_logprobs[-1].values()) == {one.logprob for one in expected}
