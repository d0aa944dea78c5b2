"""The usage that the front door makes of the answers of workers behind OpenEngine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import vocabulary_like

from worker.frontdoor.fields import CHAT, COMPLETIONS
from worker.frontdoor.openengine.answer import AnswerForm
from worker.frontdoor.openengine.body import AskedAnswer, read_body
from worker.frontdoor.openengine.exchange import _with_text
from worker.frontdoor.openengine.generation import _finished
from worker.frontdoor.openengine.thinking import PARSERS, ThinkingSplit, reasoning_tokens
from worker.runtimes.direct.request import DirectRequest, parse
from worker.runtimes.openengine import wire

VOCABULARY = vocabulary_like("qwen")
TOKENIZER: Any = VOCABULARY.tokenizer
THINKING = PARSERS["qwen3"]
PROMPT = [5, 6, 7]
WORDS = ("<think>", "</think>", " a", "stop", " st", "op it", "\n")
SIZES = st.lists(st.integers(1, 3), max_size=14)


@dataclass
class Generated:
    """Stands for a `Generation` whose worker ends the answer at its last token."""

    request: DirectRequest
    answer: Sequence[int]
    sizes: Sequence[int]
    token_ids: list[int] = field(default_factory=list)

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        for size in (*self.sizes, len(self.answer)):
            part = list(self.answer[len(self.token_ids) :][:size])
            self.token_ids += part
            yield {"token_ids": part, "index": 0}
        count = len(self.answer)
        usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
        yield {"token_ids": [], "index": 0, "finish_reason": "stop", "completion_usage": usage}


def asked(*, is_chat: bool = True, **options: Any) -> AskedAnswer:
    body = {"model": "m", "stream": True, "stream_options": options or None}
    prompt = {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": "a"}
    return read_body(CHAT if is_chat else COMPLETIONS, {**body, **prompt}, {}, thinks=is_chat)


def answered(wanted: AskedAnswer, answer: Sequence[int], sizes: Sequence[int]) -> tuple[list[Any], Any]:
    """The events of an answer that ends at the stop string, and its usage."""
    request = parse({"token_ids": PROMPT, "stop_conditions": {"stop": ["stop"]}}, TOKENIZER)
    split = ThinkingSplit(THINKING, is_inside=True)
    reasoning = reasoning_tokens(VOCABULARY, THINKING, is_inside=True)
    form = AnswerForm(wanted, "1", 0, lambda _: b"", split, reasoning, num_prompt_tokens=len(PROMPT))
    generation: Any = Generated(request, answer, sizes)

    async def events() -> list[Any]:
        return [event async for chunk in _with_text(generation, TOKENIZER, reasoning) for event in form.events(chunk)]

    return asyncio.run(events()), form.usage_event()["usage"]


def up_to_stop(words: Sequence[str]) -> list[int]:
    """Tokens of an answer up to the one that completes the stop string, as a worker ends it."""
    ids = [token_id for word in words for token_id in VOCABULARY.encode(word)]
    for count in range(1, len(ids) + 1):
        if "stop" in TOKENIZER.decode(ids[:count]):
            return ids[:count]
    return ids


@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=8), sizes=SIZES)
@example(words=[" a", "stop"], sizes=[])
@example(words=[" a", " st", "op it"], sizes=[1])
@settings(max_examples=examples(100), deadline=None)
def test_thinking_counts_the_tokens_of_a_stop_string(words: list[str], sizes: list[int]) -> None:
    """``completion_tokens`` count them, too, though none of them is shown."""
    answer = up_to_stop(words)
    counter = reasoning_tokens(VOCABULARY, THINKING, is_inside=True)
    counter.feed(answer)
    _, usage = answered(asked(), answer, sizes)
    assert usage["completion_tokens"] == len(answer)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": counter.count}


@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=8), sizes=SIZES, is_chat=st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_each_event_has_the_usage_so_far(words: list[str], sizes: list[int], is_chat: bool) -> None:
    wanted = asked(is_chat=is_chat, include_usage=True, continuous_usage_stats=True)
    answer = up_to_stop(words)
    events, usage = answered(wanted, answer, sizes)
    told = [event["usage"] for event in events]
    assert {each["prompt_tokens"] for each in told} == {len(PROMPT)}
    counts = [each["completion_tokens"] for each in told]
    assert counts == sorted(counts)
    assert told[-1] == usage
    assert all(each["total_tokens"] == len(PROMPT) + each["completion_tokens"] for each in told)


def test_without_it_no_event_has_the_usage_so_far() -> None:
    for options in ({"include_usage": True}, {"include_usage": False, "continuous_usage_stats": True}):
        events, _ = answered(asked(**options), up_to_stop([" a", " a"]), [1])
        assert not any(event.get("usage") for event in events)


def test_a_worker_s_count_of_thinking_is_told() -> None:
    """Where no parser splits the text, the worker alone counts."""
    usage = wire.Usage(prompt_tokens=3, completion_tokens=4, total_tokens=7, reasoning_tokens=2)
    finished = wire.GenerationFinished(reason=wire.FINISH_REASON_STOP)
    chunk = _finished(wire.GenerateResponse(finished=finished, usage=usage))
    form = AnswerForm(asked(), "1", 0, lambda _: b"")
    assert form.whole([chunk])["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
