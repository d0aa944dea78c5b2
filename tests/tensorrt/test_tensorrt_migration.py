"""A migrated request goes on in TensorRT-LLM (the stand-in) as it would have."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from stand_in import collect, running

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors import BUILTINS
from adapters.vocabulary import Vocabulary
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams
from worker.tiny_model import write_tiny_model

PROMPT = [9, 30, 41, 77, 30, 41, 12, 9, 30, 500]
LENGTH = 14


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def params(**controls: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, ignore_eos=True, **controls)


def named(name: str, **args: Any) -> ProcessorChain:
    """A chain of one processor."""
    kind = next(kind for kind in BUILTINS if kind.name == name)
    context = Context(Vocabulary(1024), frozenset({2}), 7)
    chain = ProcessorChain(kind.build(kind.Args(**args), context), context)
    chain.start(PROMPT)
    return chain


CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    "seeded": {"temperature": 0.9, "seed": 5, "top_p": 0.9},
    "seeded with penalties": {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.8},
    "minimum length": {"min_tokens": 9, "stop_token_ids": list(range(3, 600))},
    "log probabilities": {"logprobs": 2, "frequency_penalty": 0.8},
}


async def test_an_answer_cut_anywhere_goes_on_as_it_would_have(model: Path) -> None:
    async with running(model) as engine:
        for name, controls in CONTROLS.items():
            whole = await collect(engine, PROMPT, params(**controls))
            cuts = range(1, len(whole.token_ids))
            rest = await asyncio.gather(
                *(
                    collect(engine, PROMPT, params(**controls), str(k), generated_token_ids=whole.token_ids[:k])
                    for k in cuts
                )
            )
            for k, found in zip(cuts, rest, strict=True):
                assert whole.token_ids[:k] + found.token_ids == whole.token_ids, (name, k)
                assert found.finish_reason == whole.finish_reason
        whole = await collect(engine, PROMPT, params(), chain=named("no_repeat_ngram", n=2))
        for k in range(1, LENGTH):
            given = {"chain": named("no_repeat_ngram", n=2), "generated_token_ids": whole.token_ids[:k]}
            found = await collect(engine, PROMPT, params(), **given)  # type: ignore[arg-type]
            assert whole.token_ids[:k] + found.token_ids == whole.token_ids
            assert found.receipt is not None
            assert found.receipt.as_json()["mode"] == f"migrated at {k}"
        with pytest.raises(InvalidRequest, match="mirostat cannot go on after a migration"):
            await collect(engine, PROMPT, params(temperature=1.0), chain=named("mirostat"), generated_token_ids=[5, 6])
