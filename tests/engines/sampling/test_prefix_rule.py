"""One rule for what a share of probability keeps: processors, pipes and samplers, by plain Python.

A control does the same as a field, as a processor by name, in a pipe and in the sampler, whichever
way finds what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain
from adapters.contract import SAMPLE, Context, Processor, uniform
from adapters.pipe import LogitsPipe, Sample, TensorType
from adapters.pipe import Temperature as TemperatureOp
from adapters.pipe import TopK as TopKOp
from adapters.pipe import TopP as TopPOp
from adapters.processors.seeded_sampler import SeededSampler
from adapters.processors.stochastic import Xtc
from adapters.processors.truncation import (
    DynamicTemperature,
    EpsilonCutoff,
    EtaCutoff,
    MinP,
    Temperature,
    TopA,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
)
from adapters.sampling.prefixes import beyond_prefix, prefix_of_mass, prefix_of_ordered
from adapters.sampling.truncation import keep_top_p
from adapters.sampling.weights import share_of_one, weigh, weight_bits, weights_of
from adapters.sampling.whole_row import TorchRow
from adapters.vocabulary import Vocabulary
from worker.engines.embedded import native
from worker.engines.embedded.native import weights as native_weights
from worker.engines.embedded.native.weights import NativeRow
from worker.engines.embedded.plan import Plan, Request, Samples
from worker.engines.embedded.sampling.sampler import Sampler
from worker.engines.embedded.sampling.truncation import Controls, Group, group_rows, truncate_and_sample
from worker.engines.embedded.step import plan_edits
from worker.sampling import SamplingParams
from worker.sampling.field_processors import with_field_processors

PATHS = [path for path in native.PATHS if native.unavailable(torch.float32, path) is None]
FIELDS = frozenset(Controls.__dataclass_fields__)


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def has_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the native kernels, where they were built, and without."""
    if not request.param:
        monkeypatch.setattr(native_weights, "are_available", lambda: False)
    return bool(request.param)


def row_of(seed: int, width: int, grain: float, scale: float, masked: float, tail: float) -> torch.Tensor:
    """Normal logits, of which those below the middle may be far below, float32 ``[width]``."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(width, generator=generator) * scale
    row = (row / grain).round() * grain if grain else row
    row[width // 2 :] -= tail
    row[torch.rand(width, generator=generator) < masked] = -torch.inf
    row[width // 3] = 0.5
    row[width // 4] = -0.0
    return row


rows = st.builds(
    row_of,
    st.integers(0, 2**32),
    st.sampled_from([4, 65, 700, 9001]),
    grain=st.sampled_from([0.0, 0.5, 8.0]),
    scale=st.sampled_from([1e-4, 1.0, 4.0]),
    masked=st.sampled_from([0.0, 0.1, 0.99]),
    tail=st.sampled_from([0.0, 30.0]),
)
shares = st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.999, 1 - 2.0**-53]) | st.floats(0, 1, exclude_max=True)


def prefix(keys: list[float], weights: list[int], target: int) -> set[int]:
    """The rule, in plain Python: ids that have a weight."""
    kept, mass = set(), 0
    for token in sorted(range(len(keys)), key=lambda token: (-keys[token], token)):
        if mass >= target:
            break
        kept.add(token)
        mass += weights[token]
    return {token for token in kept if weights[token]}


def ids(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


def by_row(found: tuple[torch.Tensor | None, torch.Tensor]) -> set[int]:
    reaching, weights = found
    return ids(weights > 0) if reaching is None else set(reaching[weights > 0].tolist())


def ways(row: torch.Tensor, share: float) -> Iterator[tuple[str, set[int]]]:
    """Tokens of a row that each way keeps, of those that have a weight."""
    width = len(row)
    weights = weights_of(row[None])[0]
    total = int(weights.sum())
    target = share_of_one(total, share)
    column = torch.tensor([[target]])
    yield "beyond_prefix", ids(~beyond_prefix(row[None], weights[None], column)[0] & (weights > 0))
    order = row.sort(descending=True, stable=True).indices
    kept = prefix_of_ordered(weights[order][None], column)[0]
    yield "prefix_of_ordered", set(order[kept > 0].tolist())
    yield "prefix_of_mass", by_row(prefix_of_mass(row, weights, total, target))
    for name, weigher in [("torch", TorchRow(width)), *((path, NativeRow(width)) for path in PATHS[:1])]:
        assert weigher.weigh(row, float(row.max())) == pytest.approx(total)
        if weigher.total == total:  # torch's exp may differ in its last bits
            yield f"{name} row", by_row(weigher.prefix(target))
    for dtype in (torch.float32, torch.float64):
        one = row[None].clone().to(dtype)
        keep_top_p(one, [share])
        yield f"processor, {dtype}", ids((one[0] > -torch.inf) & (weights > 0))
    controls = Controls(top_p=max(share, 5e-324))
    for group_width in (None, 0):
        groups = group_rows({0: controls}, width)
        groups = groups if group_width is None else [Group({0: controls}, 0, width)]
        _, found = truncate_and_sample(row[None], groups, {0: 0.5}, wanted={0})
        yield f"sampler, {group_width}", ids(found[0] > 0)


@settings(max_examples=examples(150), deadline=None)
@given(row=rows, share=shares)
def test_every_way_finds_the_same_prefix(row: torch.Tensor, share: float) -> None:
    for available in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not available:
                patch.setattr(native_weights, "are_available", lambda: False)
            weights = weights_of(row[None])[0].tolist()
            expected = prefix(row.tolist(), weights, share_of_one(sum(weights), share))
            for name, kept in ways(row, share):
                assert kept == expected, name


def test_a_tail_makes_half_of_four_equal_tokens_less_than_half() -> None:
    """The rule is exact: two of four have half of the mass, and less beside a tail of 1e-13."""
    level, with_tail = [0.0] * 4, [0.0] * 4 + [-29.0]
    for logits, count in ((level, 2), (with_tail, 3)):
        row = torch.tensor(logits)
        assert {name: len(kept) for name, kept in ways(row, 0.5)} == {name: count for name, _ in ways(row, 0.5)}


@pytest.mark.parametrize("width", [262_143, 262_144, 600_000])
def test_a_prefix_is_the_same_where_weights_have_fewer_bits(has_kernels: bool, width: int) -> None:
    """From 262,144 tokens on the unit is coarser, also of the few that are looked at first."""
    logits, shares = torch.randn(3, width, generator=torch.Generator().manual_seed(width)) * 3, [0.3, 0.75, 0.999]
    kept, weights = logits.clone(), weights_of(logits)
    keep_top_p(kept, shares)
    controls = {row: Controls(top_p=share) for row, share in enumerate(shares)}
    _, found = truncate_and_sample(logits, group_rows(controls, width), dict.fromkeys(controls, 0.5), wanted={0, 1, 2})
    targets = torch.tensor([[share_of_one(int(row.sum()), share)] for row, share in zip(weights, shares, strict=True)])
    expected = ~beyond_prefix(logits, weights, targets) & (weights > 0)
    assert torch.equal((kept > -torch.inf) & (weights > 0), expected)
    assert torch.equal(torch.stack([found[row] for row in controls]) > 0, expected)


def test_rows_of_a_real_width(has_kernels: bool) -> None:
    """Normal logits of deviation 2: of 600 rows float32 sums kept another prefix of 4."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(24, 32_000, generator=generator) * 2
    kept = logits.clone()
    keep_top_p(kept, [0.9] * len(logits))
    controls = dict.fromkeys(range(len(logits)), Controls(top_p=0.9))
    groups = group_rows(controls, 32_000)
    _, found = truncate_and_sample(logits, groups, dict.fromkeys(controls, 0.5), wanted=set(controls))
    for row in controls:
        assert torch.equal(kept[row] > -torch.inf, found[row] > 0)


# Fields and processors


def request_of(logits: torch.Tensor, params: SamplingParams, *named: Processor, late: bool) -> Request:
    """A request whose late fields are processors if ``late`` or if a late processor is named."""
    width, prompt = logits.shape[1], [1, 2, 3]
    context = Context(Vocabulary(width), frozenset(), seed=params.seed)
    chain = None
    if named:
        chain = ProcessorChain(list(named), context)
        chain.start(prompt)
    left, chain = with_field_processors(params, chain, prompt, context, by_sampler=FIELDS, late=late)
    request = Request("one", 0, left, prompt, len(prompt), 64, frozenset(), seed=params.seed or 0)
    request.chain = chain
    return request


def sampled(logits: torch.Tensor, request: Request) -> Samples:
    plan = Plan((request,), (), (request,))
    return Sampler(logits.shape[1], ()).sample(logits.clone(), plan_edits(plan), plan)


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0, 9e-6, 1e-5, 0.3, 0.7, 1.3, 100.0]) | st.floats(0.05, 5),
    min_p=st.sampled_from([None, 0.0, 0.05, 0.5, 1.0]) | st.floats(0, 1),
    top_k=st.sampled_from([None, 0, 1, 2, 50, 600]),
    top_p=st.sampled_from([None, 0.0, 0.5, 0.9, 1.0]) | st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.just(3),
    logprobs_mode=st.just("processed"),
)

NEUTRAL: list[tuple[type[Processor], dict[str, Any]]] = [
    (DynamicTemperature, {"low": 1.0, "high": 1.0}),
    (TopA, {"a": 0.0}),
    (TypicalP, {"p": 1.0}),
    (EpsilonCutoff, {"epsilon": 0.0}),
    (EtaCutoff, {"epsilon": 0.0}),
    (Xtc, {"probability": 0.0}),
    (TopNSigma, {"n": 100.0}),
]
"""Late processors with arguments that ask for nothing; the last one only where logits are near."""


def outcome(samples: Samples, greedy: bool) -> tuple[list[int], dict[int, str], object]:
    """A greedy row's processed log probabilities are those before the argmax, which is a processor
    in a chain.
    """
    return samples.token_ids, samples.errors, None if greedy else samples.logprobs


@settings(max_examples=examples(200), deadline=None)
@given(row=rows, asked=params, which=st.sampled_from(NEUTRAL))
def test_a_neutral_late_processor_changes_no_token(
    row: torch.Tensor, asked: SamplingParams, which: tuple[type[Processor], dict[str, Any]]
) -> None:
    """Nor a log probability: fields are processors then, and do what the sampler does with them."""
    logits = row[None]
    kind, args = which
    alone = request_of(logits, asked, late=False)
    assert alone.chain is None
    expected = outcome(sampled(logits, alone), asked.is_greedy)
    named = kind(kind.Args(**args), Context(Vocabulary(len(row)), seed=asked.seed))
    beside = request_of(logits, asked, named, late=False)
    assert beside.chain is not None
    assert outcome(sampled(logits, beside), asked.is_greedy) == expected
    moved = request_of(logits, asked, late=True)
    assert outcome(sampled(logits, moved), asked.is_greedy) == expected


BY_NAME: dict[str, tuple[type[Processor], str]] = {
    "temperature": (Temperature, "value"),
    "min_p": (MinP, "p"),
    "top_k": (TopK, "k"),
    "top_p": (TopP, "p"),
}


@settings(max_examples=examples(150), deadline=None)
@given(row=rows, asked=params, name=st.sampled_from(sorted(BY_NAME)))
def test_a_processor_by_name_is_its_field(row: torch.Tensor, asked: SamplingParams, name: str) -> None:
    """Also with the values that are greedy."""
    value = getattr(asked, name)
    if value is None:
        return
    field = SamplingParams(**{"temperature": 1.0, name: value, "seed": asked.seed})
    kind, argument = BY_NAME[name]
    processor = kind(kind.Args(**{argument: value}), Context(Vocabulary(len(row))))
    others = {} if name == "temperature" else {"temperature": 1.0}
    named = SamplingParams(**others, top_p=1.0 if name == "temperature" else None, seed=asked.seed)
    logits = row[None]
    expected = sampled(logits, request_of(logits, field, late=False))
    found = sampled(logits, request_of(logits, named, processor, late=False))
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("value", "temperature"), [(3e38, 0.5), (-3e38, 0.5), (3.41e33, 1e-5)])
def test_a_temperature_that_leaves_float32_is_an_error(value: float, temperature: float, late: bool) -> None:
    logits = torch.full((1, 100), value)
    request = request_of(logits, SamplingParams(temperature=temperature, top_p=0.9, seed=1), late=late)
    assert set(sampled(logits, request).errors) == {0}


# The pipe, and the sampler of the other engine


@settings(max_examples=examples(100), deadline=None)
@given(
    row=rows,
    temperature=st.sampled_from([1.0]) | st.floats(0.05, 5),
    top_k=st.sampled_from([1, 2, 50, 600]),
    seed=st.integers(0, 2**32),
)
def test_a_pipe_samples_what_the_engine_samples(row: torch.Tensor, temperature: float, top_k: int, seed: int) -> None:
    number = float(torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    chain = [TemperatureOp(temperature=temperature), TopKOp(top_k=top_k), Sample()]
    found = LogitsPipe(chain, input_type=TensorType.LOGITS)(row[None], generator=torch.Generator().manual_seed(seed))
    if top_k == 1:
        assert found.tolist() == [int((row / temperature).argmax())]
        return
    groups = group_rows({0: Controls(temperature, top_k=top_k)}, len(row))
    tokens, _ = truncate_and_sample(row[None], groups, {0: number})
    assert found.tolist() == [tokens[0]]


@settings(max_examples=examples(100), deadline=None)
@given(row=rows, share=shares, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_top_p_of_probabilities_is_the_prefix_of_their_weights(
    row: torch.Tensor, share: float, dtype: torch.dtype
) -> None:
    probabilities = row.to(dtype).softmax(-1)
    _, exponent = math.frexp(float(probabilities.max()))
    scaled = probabilities.double() * 2.0 ** (weight_bits(len(row)) - exponent)
    weights = [round(value) for value in scaled.tolist()]
    top_p = max(share, 1e-300)
    expected = prefix(probabilities.tolist(), weights, share_of_one(sum(weights), top_p))
    kept = LogitsPipe([TopPOp(top_p=top_p)], input_type=TensorType.PROBS)(probabilities[None])[0]
    assert {token for token in ids(kept > 0) if weights[token]} == expected


@settings(max_examples=examples(100), deadline=None)
@given(row=rows, seed=st.integers(0, 2**64 - 1), position=st.integers(0, 9))
def test_the_seeded_sampler_is_the_engines(row: torch.Tensor, seed: int, position: int) -> None:
    sampler = SeededSampler(seed)
    sampler.start([1] * position)
    shaped = row.clone()
    sampler.shape(shaped)
    number = uniform(seed, 0, position, SAMPLE)
    tokens, _ = truncate_and_sample(row[None], group_rows({0: Controls()}, len(row)), {0: number})
    assert ids(shaped > -torch.inf) == {tokens[0]}


# Bounds: min-p, top-a, epsilon, eta and XTC


def shaped(row: torch.Tensor, kind: type[Processor], **args: float) -> set[int]:
    processor: Any = kind(kind.Args(**args), Context(Vocabulary(len(row))))
    processor.start([1, 2])
    result = row.clone()
    processor.shape(result)
    return ids(result > -torch.inf)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 1024])
def test_shares_are_exact_at_their_boundary(count: int, has_kernels: bool) -> None:
    """Each of ``count`` equal tokens has a share of exactly 1 / count."""
    row = torch.full((count + 700,), -torch.inf)
    row[5 : 5 + count] = 1.25
    every = set(range(5, 5 + count))
    above = math.nextafter(1 / count, 1)
    for found in (
        shaped(row, TopA, a=1.0),
        shaped(row, MinP, p=math.nextafter(1, 0)),
        shaped(row, TypicalP, p=1 / count),
        shaped(row, EpsilonCutoff, epsilon=min(above, math.nextafter(1, 0))),  # the most likely are kept
        shaped(row, EtaCutoff, epsilon=0.999),
    ):
        assert found == every
    less = torch.cat((row, torch.tensor([1.0])))
    share = math.exp(-0.25) / (count + math.exp(-0.25))
    last = {count + 700}
    for kind, args in ((EpsilonCutoff, {"epsilon": share}), (TopA, {"a": share * (count + math.exp(-0.25)) ** 2})):
        (name, value), *_ = args.items()
        if value * (1 + 1e-12) <= 1:
            assert shaped(less, kind, **{name: value * (1 - 1e-12)}) == every | last
            assert shaped(less, kind, **{name: value * (1 + 1e-12)}) == every


@settings(max_examples=examples(100), deadline=None)
@given(row=rows, share=st.floats(1e-6, 1), kind=st.sampled_from([EpsilonCutoff, TopA, Xtc, MinP]))
def test_bounds_are_those_of_exact_probabilities(row: torch.Tensor, share: float, kind: type[Processor]) -> None:
    """In float64, but where a token is within 1e-11 of the bound."""
    p = row.double().softmax(-1)
    top = float(p.max())
    least = {EpsilonCutoff: share, TopA: share * top**2, Xtc: share, MinP: share * top}[kind]
    near = ids((p - least).abs() < least * 1e-11)
    enough = ids((p >= least) & (row > -torch.inf))
    most_likely = ids(row == row.max())
    if kind is Xtc:
        found = shaped(row, Xtc, threshold=share, probability=1.0)
        chosen = sorted(enough, key=lambda token: float(row[token]))
        lowest = float(row[chosen[0]]) if chosen else -math.inf
        expected = {token for token in ids(row > -torch.inf) if token not in enough or float(row[token]) <= lowest}
        assert near or found == expected
        return
    (argument,) = kind.Args.model_fields
    if kind is EpsilonCutoff and share == 1:
        return
    found = shaped(row, kind, **{argument: share})
    if kind is MinP and share == 1:
        most_likely = {min(most_likely)}
        enough = most_likely
    assert found - near == (enough | most_likely) - near


@pytest.mark.parametrize("kind", [DynamicTemperature, TypicalP, TopNSigma, EtaCutoff])
def test_sums_of_floats_are_the_same_in_any_number_of_threads(kind: type[Processor]) -> None:
    args = {
        DynamicTemperature: {"low": 0.5, "high": 1.5},
        TypicalP: {"p": 0.9},
        TopNSigma: {"n": 1.0},
        EtaCutoff: {"epsilon": 3e-4},
    }[kind]
    logits = torch.randn(3, 151_937, generator=torch.Generator().manual_seed(2)) * 3
    members: list[Any] = [kind(kind.Args(**args), Context(Vocabulary(logits.shape[1])))] * 3
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            together, alone = logits.clone(), logits.clone()
            members[0].shape_rows(members, together)
            for row in range(3):
                members[0].shape_rows(members[:1], alone[row : row + 1])
            found += [together, alone]
    finally:
        torch.set_num_threads(before)
    for one in found[1:]:
        assert torch.equal(one, found[0])


def test_weights_are_undefined_nowhere() -> None:
    """Rows that cannot be sampled have none, and no processor touches them."""
    for odd in (math.nan, math.inf, -math.inf):
        row = torch.full((1, 300), odd)
        row[0, :5] = 1.0 if odd > 0 or odd != odd else -math.inf
        assert int(weights_of(row).sum()) == 0
        for dtype in (torch.float32, torch.float64):
            one = row.to(dtype)
            kept = one.clone()
            keep_top_p(kept, [0.5])
            assert torch.equal(kept.isnan(), one.isnan())
            assert torch.equal(kept.nan_to_num(7), one.nan_to_num(7))
    finite = torch.tensor([[0.0, -1.0, -math.inf]])
    assert torch.equal(weigh(finite, finite[:, :1], 3), weights_of(finite))
