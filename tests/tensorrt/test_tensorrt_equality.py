"""Whatever a request asks for, TensorRT-LLM's tokens are the embedded engine's: fp32, greedy or
seeded.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from stand_in import collect

from adapters.catalog import BUILT_IN, Catalog, Requested, Selection
from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.testing.kit_model import KEY_ID
from adapters.vocabulary import Vocabulary
from worker.engines.embedded import EmbeddedEngine
from worker.engines.trtllm import TrtllmEngine
from worker.sampling import SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[1] / "adapters" / "conformance"))
from builtin_examples import EMBEDDED_ONLY, EXAMPLES

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 30, 41, 77, 30, 41, 12, 9, 30]
CATALOG = Catalog.default()
CASES = [(name, args) for name, rows in EXAMPLES.items() if name not in EMBEDDED_ONLY for args in rows]
BUILT_INS = {entry.name for entry in CATALOG.entries if entry.source == BUILT_IN}


async def test_every_built_in_is_here() -> None:
    assert set(EXAMPLES) == BUILT_INS


def chain_of(model: Path, name: str, args: dict[str, Any], prompt: list[int], max_tokens: int) -> ProcessorChain:
    vocabulary = Vocabulary.from_pretrained(str(model), 1024, (4, 1))
    think = [vocabulary.encode(tag) for tag in ("<think>", "</think>")]
    context = Context(
        vocabulary,
        frozenset({4, 1}),
        seed=11,
        max_tokens=max_tokens,
        watermark_keys={KEY_ID: bytes(range(32))},
        think_start=tuple(think[0]),
        think_end=tuple(think[1]),
    )
    chain = CATALOG.build_chain(Selection((Requested(name, args, "all", "processors[0]"),)), context, step_budget_s=60)
    chain.wants_receipt = True
    chain.start(prompt)
    return chain


def comparable(engine_data: Any) -> Any:
    """A receipt, less what only one of the engines says: who draws, and whether bits depend on
    the batch.
    """
    receipt = dict(engine_data["logits_processors"])
    receipt["processors"] = [each for each in receipt["processors"] if each["name"] != "seeded_sampler"]
    del receipt["numerics"]
    return receipt


@pytest.mark.parametrize(("name", "args"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
async def test_every_built_in(
    name: str, args: dict[str, Any], model: Path, served: TrtllmEngine, reference: EmbeddedEngine
) -> None:
    answers = []
    for engine in (served, reference):
        made = chain_of(model, name, args, PROMPT, 24)
        params = SamplingParams(max_tokens=24, seed=11, stop_token_ids=[1, 4])
        answers.append(await collect(engine, PROMPT, params, name, chain=made))
    ours, theirs = answers
    assert (ours.token_ids, ours.finish_reason, ours.stop_reason, ours.error) == (
        theirs.token_ids,
        theirs.finish_reason,
        theirs.stop_reason,
        theirs.error,
    )
    if theirs.finish_reason != "error":
        assert comparable(ours.engine_data) == comparable(theirs.engine_data)


async def test_an_order_of_temperature_and_truncation(
    model: Path, served: TrtllmEngine, reference: EmbeddedEngine
) -> None:
    """On both engines, and it makes a difference."""
    texts = set()
    for order in ((), ("min_p", "top_k", "temperature"), ("temperature", "top_k", "min_p")):
        answers = []
        for engine in (served, reference):
            context = Context(Vocabulary.from_pretrained(str(model), 1024, (4, 1)), frozenset({4, 1}), seed=3)
            chain = CATALOG.build_chain(Selection(order=order), context)
            chain.start(PROMPT)
            params = SamplingParams(
                max_tokens=24,
                seed=3,
                stop_token_ids=[1, 4],
                temperature=3.0,
                min_p=0.5,
                top_k=30,
            )
            answers.append(await collect(engine, PROMPT, params, "order", chain=chain))
        ours, theirs = answers
        assert ours.error is None
        assert ours.token_ids == theirs.token_ids
        texts.add(tuple(theirs.token_ids))
    assert len(texts) > 1


CONTROLS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.5, "seed": 2**64 - 1, "top_p": 0.7},
    {"temperature": 0.9, "seed": 6, "top_k": 8, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"bad_token_ids": [858, 62]},
    {"min_tokens": 12, "stop_token_ids": list(range(0, 1000, 3))},
    {"stop_token_ids": list(range(0, 1000, 7))},
    {"stop_token_ids": list(range(0, 1000, 7)), "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(0, 1000, 7)), "ignore_eos": True},
    {"ignore_eos": True, "no_repeat_ngram_size": 2},
    {"embedding_bias": [0.0] * 600 + [9.0] * 4 + [0.0] * 420},
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 0.7, "seed": 3},
    {"logprobs": 2, "repetition_penalty": 1.3, "min_tokens": 5},
    {"logprobs": 2, "stop_token_ids": list(range(0, 1000, 7)), "include_stop_str_in_output": True},
    {"temperature": 0.0, "top_p": 0.5},
    {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.2, "logprobs": 1, "max_tokens": 1},
]


@pytest.mark.parametrize("controls", CONTROLS, ids=range(len(CONTROLS)))
async def test_every_control(controls: dict[str, Any], served: TrtllmEngine, reference: EmbeddedEngine) -> None:
    asked = {"max_tokens": 20, **controls}
    ours = await collect(served, PROMPT, SamplingParams(**asked))
    theirs = await collect(reference, PROMPT, SamplingParams(**asked))
    assert (ours.token_ids, ours.finish_reason, ours.stop_reason) == (
        theirs.token_ids,
        theirs.finish_reason,
        theirs.stop_reason,
    )
    assert (ours.logprobs is None) is (theirs.logprobs is None)
    for mine, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
        assert [(e.token_id, e.rank) for e in mine] == [(e.token_id, e.rank) for e in other]
        shares = [one.logprob - two.logprob for one, two in zip(mine, other, strict=True)]
        assert shares == pytest.approx(shares[:1] * len(shares), abs=1e-5)
        assert 0 <= shares[0] < 0.1  # of ids that the tokenizer lacks, which TensorRT-LLM is told to leave out


async def test_a_hidden_end_has_its_log_probabilities(served: TrtllmEngine, reference: EmbeddedEngine) -> None:
    """From the chain, as from the embedded engine."""
    params = SamplingParams(max_tokens=20, logprobs=2, repetition_penalty=1.3, stop_token_ids=list(range(0, 1000, 7)))
    ours, theirs = [await collect(each, PROMPT, params, "end") for each in (served, reference)]
    found, expected = ([(e.token_id, e.rank) for e in each.end_logprobs or ()] for each in (ours, theirs))
    assert ours.finish_reason == "stop"
    assert found == expected
    assert found[0][0] == ours.stop_reason


async def test_every_choice_draws_its_own_random_numbers(served: TrtllmEngine, reference: EmbeddedEngine) -> None:
    """Those that the embedded engine gives to the choice of the same index."""
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=5, ignore_eos=True)
    texts = []
    for choice in range(3):
        ours = await collect(served, PROMPT, params, f"{choice}", choice=choice)
        theirs = await collect(reference, PROMPT, params, f"{choice}", choice=choice)
        assert ours.token_ids == theirs.token_ids
        texts.append(tuple(ours.token_ids))
    assert len(set(texts)) == 3


async def test_requests_without_a_seed_have_the_workers(served: TrtllmEngine, reference: EmbeddedEngine) -> None:
    """Where the chain samples: two requests do not draw the same."""
    controls: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "min_tokens": 12, "logprobs": 1}
    texts = []
    for seed in (7, 8):
        ours = await collect(served, PROMPT, SamplingParams(**controls), f"{seed}", seed=seed)
        theirs = await collect(reference, PROMPT, SamplingParams(**controls, seed=seed), f"{seed}")
        assert ours.token_ids == theirs.token_ids
        texts.append(ours.token_ids)
    assert texts[0] != texts[1]


async def test_a_prompt_of_several_chunks(model: Path, served: TrtllmEngine, reference: EmbeddedEngine) -> None:
    prompt = [(7 * i) % 900 + 20 for i in range(300)]  # the processor is called five times before the first token
    answers = []
    for engine in (served, reference):
        made = chain_of(model, "forced_prefix", {"text": "Yes, the fox"}, prompt, 16)
        params = SamplingParams(max_tokens=16, stop_token_ids=[1, 4])
        answers.append((await collect(engine, prompt, params, chain=made)).token_ids)
    assert answers[0] == answers[1]


async def test_strangers_in_one_batch_do_not_meet(model: Path, served: TrtllmEngine, reference: EmbeddedEngine) -> None:
    names = ["banned_tokens", "repetition_penalty", "regex", "temperature", "min_tokens"]

    async def together(engine: TrtllmEngine | EmbeddedEngine) -> list[list[int]]:
        made = [chain_of(model, name, EXAMPLES[name][0], PROMPT, 16) for name in names]
        params = SamplingParams(max_tokens=16, stop_token_ids=[1, 4], seed=1)
        found = await asyncio.gather(
            *(collect(engine, PROMPT, params, name, chain=each) for name, each in zip(names, made, strict=True))
        )
        return [delta.token_ids for delta in found]

    assert await together(served) == await together(reference)
