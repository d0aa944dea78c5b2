"""The sampler, which looks at few tokens of a row, against `whole_rows`, which weighs all of them;
and logits that are on another device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from effort import examples
from engine_doubles import WIDTH
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_rows import sample_whole_rows

from adapters.chain import ProcessorChain
from adapters.contract import (
    SAMPLE,
    Allow,
    Ban,
    Context,
    Edit,
    Force,
    Reads,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    bitmask_of,
    uniform,
)
from adapters.vocabulary import Vocabulary
from worker.engines import TokenLogprob
from worker.engines.embedded.native import weights as native_weights
from worker.engines.embedded.plan import Edits, Plan, Request
from worker.engines.embedded.sampling import sampler, token_logprobs
from worker.engines.embedded.sampling.logprobs import weight_logprobs
from worker.engines.embedded.sampling.rows import controls_of
from worker.engines.embedded.sampling.sampler import Sampler
from worker.engines.embedded.sampling.truncation import Controls, group_rows, truncate_and_sample
from worker.engines.embedded.step import plan_edits
from worker.sampling import SamplingParams


def params_of(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 20, "ignore_eos": True, "seed": 11} | changes))


def request_of(number: int, params: SamplingParams) -> Request:
    tokens = [1] * (number + 3)
    return Request(str(number), number, params, tokens, len(tokens), 1000, frozenset(), seed=params.seed or 0)


asked = st.builds(
    params_of,
    temperature=st.sampled_from([None, 0.0, 1e-6, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([None, None, 1, 2, 20, 300, 5000, 10_000]),
    top_p=st.sampled_from([None, None, 0.0, 1e-9, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([None, None, 0.0001, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, None, 0, 3]),
    logprobs_mode=st.sampled_from(["raw", "processed"]),
)


def logits_of(seed: int, count: int, width: int, grain: float, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, width, generator=generator) * scale
    rows = (rows / grain).round() * grain if grain else rows
    rows[torch.rand(count, width, generator=generator) < 0.05] = -torch.inf
    rows[:, width // 2] = 0.5
    return rows


def by_whole_row(row: torch.Tensor, asked: Request) -> tuple[int, list[TokenLogprob] | None]:
    """Token and log probabilities of a row that nothing edits."""
    params, weights = asked.params, None
    if params.is_greedy:
        token = int(row.argmax())
    else:
        number = uniform(asked.seed, asked.choice, len(asked.tokens), SAMPLE)
        (token,), weights = sample_whole_rows(row[None], [controls_of(params)], [number])
    if params.logprobs is None:
        return token, None
    if weights is not None and params.logprobs_mode != "raw":
        return token, weight_logprobs(weights, [token], [params.logprobs])[0]
    return token, token_logprobs(row[None], [token], [params.logprobs])[0]


@pytest.mark.parametrize("has_kernels", [True, False])
@settings(max_examples=examples(150), deadline=None)
@given(
    wanted=st.lists(asked, min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    width=st.sampled_from([17, 700, 5003, 9000]),
    grain=st.sampled_from([0.0, 0.25, 2.0]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    spoilt=st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
    masked=st.booleans(),
)
def test_the_sampler_finds_what_whole_rows_hold(
    wanted: list[SamplingParams],
    seed: int,
    width: int,
    grain: float,
    scale: float,
    spoilt: float | None,
    masked: bool,
    has_kernels: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not has_kernels:
            patch.setattr(native_weights, "are_available", lambda: False)
        check_sampler(logits_of(seed, len(wanted), width, grain, scale), wanted, spoilt, masked)


def check_sampler(logits: torch.Tensor, wanted: list[SamplingParams], spoilt: float | None, masked: bool) -> None:
    """A sampler's tokens and log probabilities are those of `by_whole_row`."""
    width = logits.shape[1]
    if spoilt is not None:
        logits[0] = spoilt if spoilt == -math.inf else torch.where(torch.arange(width) == width // 3, spoilt, logits[0])
    never = (3, width - 1)
    bitmask = bitmask_of(range(0, width, 2), width).repeat(len(wanted), 1) if masked else None
    requests = tuple(request_of(number, one) for number, one in enumerate(wanted))
    samples = Sampler(width, never).sample(logits.clone(), Edits(), Plan(requests, (), requests), bitmask=bitmask)
    edited = logits.clone()
    edited[:, never] = -torch.inf
    if masked:
        edited[:, 1::2] = -torch.inf
    assert samples.errors.keys() == ({0} if spoilt is not None else set())
    for row, request in enumerate(requests):
        if row in samples.errors:
            continue
        token, shown = by_whole_row(edited[row], request)
        assert samples.token_ids[row] == token
        if request.params.logprobs_mode == "processed" or shown is None:
            assert samples.logprobs.get(row) == shown
        else:
            count = [request.params.logprobs or 0]
            assert samples.logprobs[row] == token_logprobs(logits[row][None], [token], count, torch.tensor(never))[0]


@given(power=st.integers(0, 9), part=st.data())
def test_both_agree_at_exact_boundaries(power: int, part: st.DataObject) -> None:
    """Equal weights, whose shares are exact: where a prefix ends exactly, and where a number is
    exactly between two.
    """
    size = 2**power
    count, place = part.draw(st.integers(1, size)), part.draw(st.integers(0, size - 1))
    logits = torch.full((3, size), 1.5)
    logits[2, size // 2] = 1.25
    controls = [Controls(top_p=count / size), Controls(top_k=count, min_p=1.0), Controls(min_p=1.0, top_p=count / size)]
    for given_, least in ((controls, None), ([Controls()] * 3, place)):
        numbers = [place / size] * 3
        groups = group_rows(dict(enumerate(given_)), size)
        ids, spread = truncate_and_sample(logits, groups, dict(enumerate(numbers)), wanted={0, 1, 2})
        tokens, weights = sample_whole_rows(logits, given_, numbers)
        assert [ids[row] for row in range(3)] == tokens
        assert torch.equal(torch.stack([spread[row] for row in range(3)]), weights)
        assert least is None or tokens[0] == least


class Steers(SteeringProcessor):
    name, stage, reads = "steers", Stage.MASK, Reads.NOTHING

    def __init__(self, edit: Edit) -> None:
        self.own = edit
        self.stage = Stage.FORCE if isinstance(edit, Force) else Stage.MASK  # type: ignore[misc]

    def edit(self) -> Edit:
        return self.own


class Halves(ShapingProcessor):
    """One that is batched."""

    name, stage, reads = "halves", Stage.TEMPERATURE, Reads.NOTHING

    def __init__(self) -> None:
        pass

    def shape(self, logits: torch.Tensor) -> None:
        logits.div_(2)

    @classmethod
    def shape_rows(cls, processors: Sequence[Any], logits: torch.Tensor) -> None:
        logits.div_(2)


def processed_requests() -> tuple[Request, ...]:
    """New ones, for a chain accepts a position once. In the order: forced, forced to what is never
    sampled, masked to three tokens, masked to what is never sampled, shaped."""
    chains: list[list[Any]] = [
        [Steers(Force(9))],
        [Steers(Force(3))],
        [Steers(Allow.of([3, 40, 41], WIDTH)), Steers(Ban.of([41]))],
        [Steers(Allow.of([3, 95], WIDTH))],
        [Halves()],
    ]
    params = params_of(temperature=1.0, top_p=0.9, logprobs=1, logprobs_mode="processed")
    requests = tuple(request_of(row, params) for row in range(len(chains)))
    for one, processors in zip(requests, chains, strict=True):
        one.chain = ProcessorChain(processors, Context(Vocabulary(WIDTH), frozenset({0})))
        one.chain.start(one.tokens)
    return requests


class OnDevice:
    """Logits on a device: nothing but a copy can be made of them here."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self.shape = logits.shape
        self.device = torch.device("cuda")

    def float(self) -> OnDevice:
        return self

    def cpu(self) -> torch.Tensor:
        return self._logits.clone()


Outcome = tuple[dict[int, tuple[int, list[TokenLogprob]]], dict[int, str], list[str]]


def outcome(logits: torch.Tensor | OnDevice) -> Outcome:
    """Token and log probabilities by row, errors, and the chains' failures."""
    requests = processed_requests()
    plan = Plan(requests, (), requests)
    samples = Sampler(WIDTH, (3, 95)).sample(cast(torch.Tensor, logits), plan_edits(plan), plan)
    rows = [row for row in range(len(requests)) if row not in samples.errors]
    shown = {row: (samples.token_ids[row], samples.logprobs[row]) for row in rows}
    return shown, samples.errors, [str(one.chain and one.chain.failure) for one in requests]


def test_logits_of_a_device_are_edited_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits, forced tokens, errors and log probabilities are those of logits that were there."""
    monkeypatch.setattr(sampler, "_on_cpu", lambda logits: logits.cpu())  # without memory that a device writes to
    logits = logits_of(8, 5, WIDTH, 0.0, 2.0)
    logits[2, 40] = 0.5
    found = outcome(OnDevice(logits))
    assert found == outcome(logits.clone())
    shown, errors, _ = found
    assert "forces token 3, which this model never samples" in errors[1]
    assert "no token is left" in errors[3]
    assert errors.keys() == {1, 3}
    assert shown[0] == (9, [TokenLogprob(9, 0.0, 1)] * 2)
    assert shown[2][0] == 40


@pytest.mark.parametrize("count", [1, 3, 9, 40])
def test_a_row_is_the_same_however_many_there_are(count: int) -> None:
    logits = logits_of(1, count, 3000, 0.0, 3.0)
    requests = tuple(request_of(i, params_of(temperature=1.0, top_p=0.95, seed=i)) for i in range(count))
    together = Sampler(3000, ()).sample(logits.clone(), Edits(), Plan(requests, (), requests)).token_ids
    for row, one in enumerate(requests):
        alone = Sampler(3000, ()).sample(logits[row : row + 1].clone(), Edits(), Plan((one,), (), (one,)))
        assert alone.token_ids == together[row : row + 1]
