"""What processors do with a prompt when a request is admitted: counted, so that it never depends
on the machine.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from vocab_for_tests import context

from adapters.catalog import MAX_PROCESSORS, Catalog, Requested, Selection, SelectionError
from adapters.chain import ProcessorChain

CATALOG = Catalog.default()
CONTEXT = context(watermark_keys={"house": bytes(32)})
NUM_TOKENS = CONTEXT.vocabulary.num_tokens
LONG = 32_768
PROMPTS: dict[str, Callable[[int], list[int]]] = {
    "one token": lambda length: [65] * length,
    "a period": lambda length: [3 + i % 97 for i in range(length)],
    "scattered": lambda length: [3 + (i * i * 7919 + i // 3) % 101 for i in range(length)],
}
prompts = pytest.mark.parametrize("kind", list(PROMPTS))


def selection(*entries: tuple[str, dict[str, Any]]) -> Selection:
    return Selection(tuple(Requested(name, args, path=f"processors[{i}]") for i, (name, args) in enumerate(entries)))


def admit(chosen: Selection, prompt: list[int]) -> ProcessorChain:
    chain = CATALOG.build_chain(chosen, CONTEXT, step_budget_s=60)
    chain.start(prompt)
    return chain


def peak_bytes(chosen: Selection, prompt: list[int]) -> int:
    admit(chosen, prompt)  # what is derived once for a vocabulary
    gc.collect()
    tracemalloc.start()
    try:
        admit(chosen, prompt)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def num_lines(chosen: Selection, prompt: list[int]) -> int:
    """Lines of Python that run."""
    admit(chosen, prompt)
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        admit(chosen, prompt)
    finally:
        sys.settrace(before)
    return count


@prompts
def test_many_long_ngrams_of_a_long_prompt_take_little_memory(kind: str) -> None:
    prompt = PROMPTS[kind](LONG)
    same = selection(*[("no_repeat_ngram", {"n": 256})] * MAX_PROCESSORS)
    assert peak_bytes(same, prompt) < 10e6
    different = selection(*[("no_repeat_ngram", {"n": 256 - i}) for i in range(MAX_PROCESSORS)])
    assert peak_bytes(different, prompt) < 20e6


def test_long_ngrams_of_a_long_answer_take_little_memory() -> None:
    chain = admit(selection(("no_repeat_ngram", {"n": 256})), [65])
    tracemalloc.start()
    try:
        for i in range(4096):
            chain.accept(3 + i * i % 101, chain.position)
            if i % 64 == 0:
                chain.plan()
        assert tracemalloc.get_traced_memory()[0] < 4096 * 1024  # its 256-tuples alone would be 8 MB
    finally:
        tracemalloc.stop()


WORST: dict[str, dict[str, Any]] = {
    "cfg": {"scale": 2.0},
    "contrastive": {},
    "no_repeat_ngram": {"n": 256},
    "dry": {"range": 2**31 - 1, "base": 1.1, "allowed_length": 512},
    "cite_from_prompt": {"boost": 1.0, "conditional_boost": 1.0},
    "repetition_penalty": {"penalty": 1.1},
    "multiple_choice": {"choices": ["a" * i for i in range(1, 64)], "boost": 1.0},
    "loop_stop": {"max_period": 1024},
    "watermark": {"key_id": "house", "context": 64},
    "synthid": {"key_id": "house", "context": 64, "depth": 64},
    "sequence_bias": {"sequences": [{"token_ids": [65] * 32, "bias": 1.0}, {"token_ids": [66, 65], "bias": -1.0}]},
    "thinking_budget": {"tokens": 5, "start": "<<", "end": ">>"},
    "ban_scripts": {"scripts": ["Han"]},
    "trigger_phrase": {"text": "so", "after_tokens": 5},
    "bad_words": {"words": ["ab", "cd"]},
    "mirostat": {},
    "frequency_penalty": {"penalty": 1.0},
}
NO_LOOP = 900
"""Lines of an admission that looks at no token of the prompt by itself."""


@prompts
@pytest.mark.parametrize("name", list(WORST))
def test_an_admission_runs_few_lines_per_token_of_the_prompt(name: str, kind: str) -> None:
    prompt = PROMPTS[kind](4096)
    lines = num_lines(selection((name, WORST[name])), prompt)
    assert lines < 64 * len(prompt) + NO_LOOP


@prompts
@pytest.mark.parametrize(
    "name", ["no_repeat_ngram", "cite_from_prompt", "repetition_penalty", "watermark", "loop_stop"]
)
def test_most_look_at_the_prompt_as_a_whole(name: str, kind: str) -> None:
    # 128 runs of the longest n-gram that are compared, 12 lines each; nothing that grows with the
    # prompt's tokens
    assert num_lines(selection((name, WORST[name])), PROMPTS[kind](4096)) < NO_LOOP


def test_every_built_in_that_reads_the_prompt_is_here() -> None:
    reads = {entry.name for entry in CATALOG.entries if entry.processor.reads.value == "prompt and generated"}
    assert reads <= set(WORST)


@pytest.mark.parametrize("name", ["dry", "multiple_choice"])
def test_what_costs_most_is_named_once(name: str) -> None:
    args = dict(WORST[name])
    other = {"dry": {}, "multiple_choice": {"choices": ["x", "y"]}}[name]
    with pytest.raises(SelectionError, match=rf"^processors\[1\]: {name} may be named once with scope all") as caught:
        admit(selection((name, args), (name, other)), [65])
    assert caught.value.path == "processors[1]"


def test_scopes_are_named_apart() -> None:
    thinking = context(think_start=(1,), think_end=(2,))
    chosen = Selection(tuple(Requested("dry", {}, scope, f"processors[{scope}]") for scope in ("thinking", "answer")))
    assert len(CATALOG.build_chain(chosen, thinking).members) == 2


LONG_TEXTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "thinking_budget": lambda text: {"tokens": 5, "start": text, "end": text},
    "trigger_phrase": lambda text: {"text": text, "trigger": text},
    "forced_sequence": lambda text: {"text": text},
    "force_last_phrase": lambda text: {"text": text},
    "bad_words": lambda text: {"words": [text]},
}


@pytest.mark.parametrize("name", list(LONG_TEXTS))
def test_a_text_of_twice_the_length_is_about_twice_the_work(name: str) -> None:
    short, long = (
        num_lines(selection((name, LONG_TEXTS[name](("the hello " * 26)[:length]))), [65]) for length in (128, 256)
    )
    assert long < 2.5 * short
