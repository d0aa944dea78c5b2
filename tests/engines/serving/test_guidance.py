"""Classifier-free guidance: two rows of logits for each token, wherever and however they come about."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from adapters.catalog import Catalog, Requested, Selection, model_context
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.chain_builder import ChainBuilder
from worker.engines.embedded import EmbeddedConfig, Engine
from worker.engines.embedded.admission import admit
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.plan import Request
from worker.engines.embedded.speculation import SpeculativeConfig, Speculator
from worker.engines.embedded.step import Stepper, make_stepper
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

NEW_TOKENS = 12
CONTEXT = 256
PROMPT = [9, 30, 41, 77, 30, 41, 12, 9, 30, *range(100, 160)]
NEGATIVE = [5, 66, 7, 8, *range(200, 245)]


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> HfModel:
    found = load_model(EmbeddedConfig(model_path=checkpoints["llama"], dtype="float32", numerics="exact"))
    assert isinstance(found, HfModel)
    return found


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Engine:
    return Engine(checkpoints["llama"], max_num_seqs=4, dtype="float32", numerics="exact")


def cfg(scale: float = 2.5, **arguments: Any) -> dict[str, Any]:
    return {"name": "cfg", "args": {"scale": scale, **arguments}}


def stepper_of(model: HfModel, *, rows: int = 8, budget: int = 512, blocks: int = 96, mixed: int | None = None) -> Stepper:
    config = EmbeddedConfig(
        model_path="", max_num_seqs=rows, max_num_batched_tokens=budget, context_length=CONTEXT, max_mixed_chunk=mixed
    )
    return make_stepper(config, model, blocks)


def request_of(
    model: HfModel,
    name: str,
    prompt: Sequence[int],
    *processors: dict[str, Any],
    generated: Sequence[int] = (),
    **changes: Any,
) -> Request:
    params = SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": 3, **changes})
    asked = EngineRequest(name, prompt, params, seed=3, generated_token_ids=list(generated))
    builder = ChainBuilder(Catalog.default(), model_context(Vocabulary(model.vocab_size)))
    selection = Selection(tuple(Requested(one["name"], one["args"]) for one in processors))
    if processors:
        asked = builder.prepare(asked, selection, builder.context(frozenset(), 3, NEW_TOKENS))
    return admit(asked, 0, model, CONTEXT)


def decode(stepper: Stepper, requests: Sequence[Request]) -> list[list[int]]:
    """The answers to requests, each of which joins as soon as it may."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        stepper.check(request)
        stepper.add(request)
    while not stepper.scheduler.is_idle:
        for output in stepper.step():
            assert output.error is None
            tokens[output.request_id] += [] if output.token_id is None else [output.token_id]
        stepper.scheduler.check_integrity()
    assert stepper.scheduler.cache.num_available == stepper.scheduler.cache.num_pages  # none has leaked
    return list(tokens.values())


@pytest.mark.parametrize("negative", [None, NEGATIVE])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_greedy_tokens_are_those_of_transformers(
    arch: str, negative: list[int] | None, checkpoints: dict[str, Path]
) -> None:
    engine = Engine(checkpoints[arch], dtype="float32", numerics="exact", max_num_seqs=4)
    network: Any = AutoModelForCausalLM.from_pretrained(checkpoints[arch], dtype=torch.float32)
    given = {} if negative is None else {"negative_prompt_ids": torch.tensor([negative])}
    expected = network.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        guidance_scale=2.5,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=list(engine.session.stepper.model.undecodable_ids),
        **given,
    )[0, len(PROMPT) :].tolist()
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    own = {} if negative is None else {"negative_token_ids": negative}
    guided, plain = engine.generate([PROMPT, PROMPT], params, processors=[[cfg(**own)], []])
    assert guided.token_ids == expected
    assert guided.token_ids != plain.token_ids
