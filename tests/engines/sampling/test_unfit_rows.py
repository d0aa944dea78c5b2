"""Rows of logits that hold no number to sample from, among others and alone, at any width."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from effort import examples
from engine_doubles import ScriptedModel, request
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain
from adapters.contract import Context, Edit, Force, Reads, Stage, SteeringProcessor
from adapters.vocabulary import Vocabulary
from worker.engines.embedded.native import weights
from worker.engines.embedded.plan import Edits, Plan
from worker.engines.embedded.sampling.row_errors import NOT_FINITE
from worker.engines.embedded.sampling.sampler import Sampler
from worker.engines.embedded.step import plan_edits
from worker.sampling import SamplingParams

PROMPT = [5, 6, 7]
WIDTHS = (96, 1000, 4096, 8191, 32_000, 49_152, 49_153)
CONTROLS = st.sampled_from(
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_k": 600},
        {"temperature": 1.3, "min_p": 0.05, "top_p": 0.99},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 2, "logprobs_mode": "processed"},
        {"temperature": 0.0, "logprobs": 1},
    ]
)
SPOIL = {
    "all NaN": lambda row: row.fill_(torch.nan),
    "one NaN": lambda row: row[3:4].fill_(torch.nan),
    "+inf": lambda row: row[-1:].fill_(torch.inf),
    "all -inf": lambda row: row.fill_(-torch.inf),
}
MODEL = ScriptedModel()


def sample(logits: torch.Tensor, params: list[SamplingParams]) -> tuple[list[int], dict[int, str]]:
    requests = tuple(request(MODEL, str(row), PROMPT, one) for row, one in enumerate(params))
    samples = Sampler(logits.shape[1], ()).sample(logits.clone(), Edits(), Plan(requests, (), requests))
    return samples.token_ids, samples.errors


@settings(max_examples=examples(60))
@given(
    width=st.sampled_from(WIDTHS),
    seed=st.integers(0, 2**32),
    rows=st.lists(st.tuples(CONTROLS, st.sampled_from([None, None, *SPOIL])), min_size=1, max_size=5),
)
def test_a_row_without_numbers_is_an_error_of_its_own(
    width: int, seed: int, rows: list[tuple[dict[str, float], str | None]]
) -> None:
    logits = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(seed))
    params = [SamplingParams(max_tokens=9, seed=row, **controls) for row, (controls, _) in enumerate(rows)]  # type: ignore[arg-type]
    alone = [sample(logits[row : row + 1], [one])[0] for row, one in enumerate(params)]
    spoilt = {row: how for row, (_, how) in enumerate(rows) if how is not None}
    for row, how in spoilt.items():
        SPOIL[how](logits[row])
    token_ids, errors = sample(logits, params)
    assert errors.keys() == spoilt.keys()
    for row, token_id in enumerate(token_ids):
        assert row in spoilt or [token_id] == alone[row]


@pytest.mark.parametrize("width", WIDTHS)
def test_nobody_is_left(width: int) -> None:
    """As where one request samples, and its chain leaves no token."""
    params = SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9)
    assert sample(torch.full((1, width), -torch.inf), [params])[1].keys() == {0}


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("controls", [{}, {"logprobs": 1}, {"logprobs_mode": "train"}, {"bad_token_ids": [3]}])
def test_a_masked_id_that_is_no_number_has_a_share_of_raw_ones(
    controls: dict[str, Any], value: float, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding is masked before the sampler looks, and is part of the model's whole distribution."""
    if not has_kernels:
        monkeypatch.setattr(weights, "are_available", lambda: False)
    wanted = SamplingParams(max_tokens=9, temperature=1.0, seed=1, **controls)
    other = SamplingParams(max_tokens=9, temperature=1.0, seed=2, logprobs_mode="train", logprobs=2)
    requests = tuple(request(MODEL, str(row), PROMPT, one) for row, one in enumerate((wanted, other)))
    logits = torch.randn(2, WIDTHS[0], generator=torch.Generator().manual_seed(3))
    logits[0, 90:] = value
    logits[0, 3] = value if wanted.bad_token_ids else 0.0
    plan = Plan(requests, (), requests)
    samples = Sampler(WIDTHS[0], MODEL.undecodable_ids).sample(logits.clone(), plan_edits(plan), plan)
    alone = Plan(requests[1:], (), requests[1:])
    assert samples.errors == ({0: NOT_FINITE} if wanted.logprobs is not None else {})
    assert (
        samples.logprobs[1] == Sampler(WIDTHS[0], MODEL.undecodable_ids).sample(logits[1:], Edits(), alone).logprobs[0]
    )


def test_a_forced_token_that_the_model_rules_out_has_no_mass() -> None:
    chain = ProcessorChain([Forces()], Context(Vocabulary(WIDTHS[0])))
    chain.start(PROMPT)
    one = request(MODEL, "one", PROMPT, SamplingParams(max_tokens=9, logprobs_mode="train"))
    logits = torch.zeros(1, WIDTHS[0])
    logits[0, 3] = -torch.inf
    samples = Sampler(WIDTHS[0], ()).sample(logits, Edits([(0, chain, chain.plan())]), Plan((one,), (), (one,)))
    (entry,) = samples.logprobs[0]
    assert not samples.errors
    assert (entry.logprob, entry.tempered, entry.log_mass, entry.processed) == (-math.inf, -math.inf, -math.inf, 0.0)


class Forces(SteeringProcessor):
    """The token is 3."""

    name, stage, reads = "forces", Stage.FORCE, Reads.NOTHING

    def __init__(self) -> None:
        pass

    def edit(self) -> Edit:
        return Force(3)


@pytest.mark.parametrize("controls", [{}, {"logprobs": 0}, {"logprobs": 0, "logprobs_mode": "processed"}])
@pytest.mark.parametrize("how", SPOIL)
def test_a_forced_row_needs_numbers_for_log_probabilities_alone(how: str, controls: dict[str, Any]) -> None:
    chain = ProcessorChain([Forces()], Context(Vocabulary(WIDTHS[0])))
    chain.start(PROMPT)
    wanted = [SamplingParams(max_tokens=9, **controls), SamplingParams(max_tokens=9)]
    requests = tuple(request(MODEL, str(row), PROMPT, one) for row, one in enumerate(wanted))
    logits = torch.zeros(2, WIDTHS[0])
    SPOIL[how](logits[0])
    edits = Edits([(0, chain, chain.plan())])
    samples = Sampler(WIDTHS[0], ()).sample(logits, edits, Plan(requests, (), requests))
    assert samples.errors.keys() == ({0} if controls else set())
    assert controls or samples.token_ids[0] == 3
