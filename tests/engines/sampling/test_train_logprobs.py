"""``logprobs_mode="train"``: raw and processed log probabilities and the mass that was kept."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from engine_doubles import PADDING, WIDTH, ScriptedModel, run_alone
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from adapters.chain import ProcessorChain
from adapters.contract import Context, Scope
from adapters.processors.truncation import Temperature
from adapters.vocabulary import Vocabulary
from worker.engines import TokenLogprob
from worker.engines.embedded import Engine
from worker.engines.embedded.native import weights as native_weights
from worker.engines.embedded.offline.results import Result
from worker.engines.embedded.plan import Plan, Request
from worker.engines.embedded.sampling.sampler import Sampler
from worker.engines.embedded.sampling.truncation import Controls
from worker.engines.embedded.speculation import SpeculativeConfig, Speculator
from worker.engines.embedded.step import plan_edits
from worker.models import model_cache, prepare_default_model
from worker.sampling import SamplingParams
from worker.sampling.field_processors import with_field_processors

pytestmark = pytest.mark.usefixtures("one_thread")

USABLE = WIDTH - PADDING
FIELDS = frozenset(Controls.__dataclass_fields__)
PROMPT = [5, 6, 7]
Row = np.ndarray[Any, np.dtype[np.float64]]


def log_softmax(row: Row) -> Row:
    found: Row = row - row.max()
    found -= math.log(math.fsum(np.exp(found)))
    return found


def kept_by(row: Row, top_k: int | None, top_p: float | None, min_p: float | None) -> list[int]:
    """Tokens that truncation keeps of a row after masks and temperature, by the definitions."""
    order = sorted(np.flatnonzero(row > -np.inf).tolist(), key=lambda token: (-row[token], token))
    if min_p is not None:
        order = [token for token in order if row[token] >= row[order[0]] + math.log(min_p)]
    if top_k:
        order = [token for token in order if row[token] >= row[order[min(top_k, len(order)) - 1]]]
    if top_p is not None:
        weights = np.exp(row[order] - row[order[0]])
        reached = np.cumsum(weights) >= top_p * math.fsum(weights) * (1 - 1e-12)
        order = order[: int(np.argmax(reached)) + 1]
    return order


CONTROLS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([None, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([None, 3, 20]),
        "top_p": st.sampled_from([None, 0.4, 0.93]),
        "min_p": st.sampled_from([None, 0.02]),
    }
)


@pytest.mark.parametrize("has_kernels", [True, False])
@settings(max_examples=examples(150), deadline=None)
@given(
    controls=CONTROLS,
    step=st.sampled_from([None, 0.5, 4.0]),
    spread=st.sampled_from([0.3, 3.0, 12.0]),
    banned=st.sets(st.integers(0, USABLE - 1), max_size=30),
    penalty=st.sampled_from([None, 1.3]),
    seed=st.integers(0, 2**64 - 1),
)
def test_equal_to_the_formulas_in_float64(
    controls: dict[str, Any],
    step: float | None,
    spread: float,
    banned: set[int],
    penalty: float | None,
    seed: int,
    has_kernels: bool,
) -> None:
    """Logits on a grid of `step` have ties."""
    logits = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) * spread
    if step is not None:
        logits = (logits / step).round() * step
    params = SamplingParams(
        max_tokens=1,
        logprobs_mode="train",
        seed=seed,
        bad_token_ids=sorted(banned),
        repetition_penalty=penalty,
        ignore_eos=True,
        **controls,
    )
    model = ScriptedModel()
    model.by_position[:] = logits / 2
    model.by_token.zero_()
    with pytest.MonkeyPatch.context() as patch:
        if not has_kernels:
            patch.setattr(native_weights, "are_available", lambda: False)
        (entry,) = run(model, params)
    raw = logits.double().numpy()
    edited = raw.copy()
    edited[USABLE:] = -np.inf
    for token in PROMPT if penalty is not None else ():
        edited[token] = edited[token] / penalty if edited[token] > 0 else edited[token] * penalty
    edited[sorted(banned)] = -np.inf
    temperature = controls["temperature"] or 1.0
    truncation = {} if params.is_greedy else {name: controls[name] for name in ("top_k", "top_p", "min_p")}
    kept = kept_by(edited / temperature, **truncation) if truncation else np.flatnonzero(edited > -np.inf).tolist()
    only = np.full_like(edited, -np.inf)
    only[kept] = (edited / temperature)[kept]
    assert entry.processed is not None
    assert entry.log_mass is not None
    assert entry.logprob == pytest.approx(log_softmax(raw)[entry.token_id], abs=1e-6)
    assert entry.processed == pytest.approx(log_softmax(only)[entry.token_id], abs=1e-6)
    of_model = log_softmax(raw / temperature)
    assert entry.tempered == pytest.approx(of_model[entry.token_id], abs=1e-6)
    assert entry.tempered == entry.logprob or temperature != 1.0
    assert math.exp(entry.log_mass) == pytest.approx(math.fsum(np.exp(of_model[kept])), abs=1e-6)
    if penalty is None:  # the other convention of trainers
        assert entry.processed + entry.log_mass == pytest.approx(of_model[entry.token_id], abs=2e-6)


def run(model: ScriptedModel, params: SamplingParams) -> list[TokenLogprob]:
    """The log probabilities of the first token after the prompt."""
    answer = run_alone(model, PROMPT, params)
    assert answer.error is None
    assert answer.logprobs is not None
    return [answer.logprobs[0][0]]


PROMPTS = [[9, 30, 41, 77, 130, 41, 12], [7, 7, 8] * 40, [300, 5, 6, 7]]
GIVEN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50}
CHAIN = [{"name": "banned_tokens", "args": {"token_ids": [3]}}, {"name": "logit_bias", "args": {"bias": {"40": 3}}}]


def params(**changes: Any) -> SamplingParams:
    given = {"max_tokens": 24, "seed": 5, "ignore_eos": True, "logprobs_mode": "train", **GIVEN}
    return SamplingParams(**{**given, **changes})


def entries_of(result: Result) -> list[TokenLogprob]:
    """The log probabilities of the sampled tokens."""
    found = [position[0] for position in result.logprobs or [] if isinstance(position, list)]
    assert [entry.token_id for entry in found] == result.token_ids
    return found


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Engine:
    shape: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_blocks": 128}
    return Engine(checkpoints["llama"], dtype="float32", numerics="exact", **shape)


def check_against_transformers(engine: Engine, path: Path, tolerance: float) -> None:
    """Raw ones are those of a plain forward pass in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    results = engine.generate(PROMPTS, params(), progress=False, processors=CHAIN)
    for prompt, result in zip(PROMPTS, results, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([[*prompt, *result.token_ids]])).logits[0].double().log_softmax(-1)
        for place, entry in enumerate(entries_of(result)):
            expected = float(logprobs[len(prompt) + place - 1, entry.token_id])
            assert entry.logprob == pytest.approx(expected, abs=tolerance)


def test_raw_ones_are_those_of_a_plain_forward_pass(engine: Engine, checkpoints: dict[str, Path]) -> None:
    check_against_transformers(engine, checkpoints["llama"], 1e-5)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_raw_ones_are_those_of_the_default_model() -> None:
    path = prepare_default_model(model_cache(os.environ), print)
    engine = Engine(path, dtype="float32", numerics="exact", max_num_seqs=4)
    check_against_transformers(engine, path, 5e-5)  # 30 layers; its own float32 is 1.3e-5 from float64


@pytest.mark.parametrize("processors", [None, CHAIN], ids=["no chain", "chain"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "speculated"])
def test_raw_ones_are_our_forward_pass_bit_for_bit(engine: Engine, processors: Any, drafts: bool) -> None:
    """Whatever made them: batch, chunks, prefix hit or draft; and so are the others."""
    stepper = engine.session.stepper
    before = stepper.speculator
    if drafts:
        stepper.speculator = Speculator(SpeculativeConfig(method="ngram", prompt_lookup_min=1), clock=lambda: 0.0)
    try:
        together = engine.generate(PROMPTS, params(), progress=False, processors=processors)
        again = [engine.generate([one], params(), progress=False, processors=processors)[0] for one in PROMPTS]
    finally:
        stepper.speculator = before
    for prompt, result, alone in zip(PROMPTS, together, again, strict=True):
        assert (alone.token_ids, alone.logprobs) == (result.token_ids, result.logprobs)
        whole = [*prompt, *result.token_ids]
        (scored,) = engine.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
        scores = [position[0] for position in scored.prompt_logprobs or [] if isinstance(position, list)]
        expected = [entry.logprob for entry in scores[len(prompt) - 1 :]]
        assert [entry.logprob for entry in entries_of(result)] == expected


def test_a_forced_token_has_the_mass_that_the_model_gives_it(engine: Engine) -> None:
    forced = [{"name": "forced_prefix", "args": {"token_ids": [30, 41]}}]
    (result,) = engine.generate([PROMPTS[0]], params(max_tokens=2), progress=False, processors=forced)
    assert result.token_ids == [30, 41]
    for entry in entries_of(result):
        assert entry.processed == 0.0
        assert entry.log_mass is not None
        assert entry.log_mass < -1.0


LATE = {
    "field": (GIVEN["temperature"], None),
    "processor": (None, [{"name": "temperature", "args": {"value": GIVEN["temperature"]}}]),
    "field that becomes a processor": (
        GIVEN["temperature"],
        [{"name": "xtc", "args": {"threshold": 0.1, "probability": 0.0}}],
    ),
}


def test_the_temperature_counts_wherever_it_is_applied(engine: Engine) -> None:
    found = []
    for temperature, late in LATE.values():
        wanted = params(temperature=temperature, top_k=None, top_p=None)
        (result,) = engine.generate([PROMPTS[0]], wanted, progress=False, processors=late)
        found.append([(entry.token_id, entry.log_mass) for entry in entries_of(result)])
    assert found[0] == found[1] == found[2]
    (cold,) = engine.generate([PROMPTS[0]], params(temperature=0.2, top_k=None, top_p=None), progress=False)
    assert entries_of(cold)[0].log_mass != found[0][0][1]


@settings(max_examples=examples(60), deadline=None)
@given(
    named=st.lists(
        st.tuples(st.sampled_from([0.3, 0.8, 1.0, 2.5]), st.sampled_from(["all", "thinking", "answer"])),
        min_size=1,
        max_size=3,
    ),
    field=st.sampled_from([None, 1.0]),
    thinks=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_temperature_is_the_one_that_acts(
    named: list[tuple[float, Scope]], field: float | None, thinks: bool, seed: int
) -> None:
    """Of processors in a scope, of several, and beside a field that asks for nothing."""
    think, answer = WIDTH - 1, WIDTH - 2
    context = Context(Vocabulary(WIDTH), seed=seed, think_start=(think,), think_end=(answer,))
    prompt = [5, think, 6, *([] if thinks else [answer])]
    processors = [Temperature(Temperature.Args(value=value), context) for value, _ in named]
    given_chain = ProcessorChain(processors, context, scopes=[scope for _, scope in named])
    given_chain.start(prompt)
    asked = SamplingParams(max_tokens=1, logprobs_mode="train", temperature=field)
    left, chain = with_field_processors(asked, given_chain, prompt, context, by_sampler=FIELDS)
    request = Request("one", 0, left, prompt, len(prompt), 64, frozenset(), seed=seed, chain=chain)
    plan = Plan((request,), (), (request,))
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3
    entry = Sampler(WIDTH, ()).sample(logits.clone(), plan_edits(plan), plan).logprobs[0][0]
    temperature = math.prod(value for value, scope in named if scope in ("all", "thinking" if thinks else "answer"))
    expected = log_softmax(logits[0].double().numpy() / temperature)[entry.token_id]
    assert entry.tempered == pytest.approx(expected, abs=1e-5)
    assert entry.processed == pytest.approx(entry.tempered, abs=1e-5)
    assert entry.log_mass == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("greedy", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_a_greedy_answer_is_at_the_temperature_1(greedy: dict[str, Any]) -> None:
    """Also beside a processor of another temperature, which changes nothing of it."""
    context, prompt = Context(Vocabulary(WIDTH), seed=1), [5, 6]
    named = ProcessorChain([Temperature(Temperature.Args(value=0.5), context)], context)
    named.start(prompt)
    asked = SamplingParams(max_tokens=1, logprobs_mode="train", **greedy)
    left, chain = with_field_processors(asked, named, prompt, context, by_sampler=FIELDS)
    request = Request("one", 0, left, prompt, len(prompt), 64, frozenset(), seed=1, chain=chain)
    plan = Plan((request,), (), (request,))
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    entry = Sampler(WIDTH, ()).sample(logits.clone(), plan_edits(plan), plan).logprobs[0][0]
    assert entry.token_id == int(logits[0].argmax())
    assert entry.tempered == pytest.approx(log_softmax(logits[0].double().numpy())[entry.token_id], abs=1e-5)
