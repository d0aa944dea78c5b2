"""Rows of logits that hold no number to sample from, among others and alone, at any width."""

from __future__ import annotations

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
from worker.engines.embedded.plan import Edits, Plan
from worker.engines.embedded.sampling.sampler import Sampler
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
