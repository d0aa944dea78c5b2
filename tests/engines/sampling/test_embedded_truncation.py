"""Temperature, min-p, top-k and top-p against plain float64 Python, with exact boundaries and
ties.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adapters.sampling.weights import weight_bits
from worker.engines.embedded.sampling.truncation import Controls, Group, group_rows, truncate_and_sample

UNIT = 2.0**-44  # of the likeliest token's weight: to this weights are rounded
GRAIN = 0.5  # logits are multiples of it, so that ties are frequent and exact
CPU = torch.device("cpu")


def groups_of(controls: list[Controls], width: int, whole: bool = False) -> list[Group]:
    groups = group_rows(dict(enumerate(controls)), width)
    return [Group(group.controls, 0, width) for group in groups] if whole else groups


def log_weights(logits: torch.Tensor, controls: list[Controls], whole: bool = False) -> torch.Tensor:
    """``[B, V]``: 0 for the highest, -inf where a token cannot be drawn."""
    rows = range(len(controls))
    groups = groups_of(controls, logits.shape[1], whole)
    _, found = truncate_and_sample(logits, groups, dict.fromkeys(rows, 0.5), wanted=set(rows))
    units = torch.stack([found[row] for row in rows])
    return units.double().mul_(2.0 ** -weight_bits(logits.shape[1])).log_()


def tokens(logits: torch.Tensor, controls: list[Controls], uniforms: list[float], whole: bool = False) -> list[int]:
    groups = groups_of(controls, logits.shape[1], whole)
    found, _ = truncate_and_sample(logits, groups, dict(enumerate(uniforms)))
    return [found[row] for row in range(len(controls))]


def kept_ids(logits: list[float], **parameters: Any) -> list[int]:
    """By the few candidates and by the whole row."""
    kept, by_whole = (
        log_weights(torch.tensor([logits]), [Controls(**parameters)], whole)[0].isfinite().nonzero()[:, 0].tolist()
        for whole in (False, True)
    )
    assert kept == by_whole
    return [int(token) for token in kept]


def reference(logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float) -> dict[int, float]:
    """Probabilities of the kept tokens. Too close to a boundary to tell: not a case."""
    logits = (torch.tensor(logits) / torch.tensor([temperature])).tolist()  # in float32, as the processor divides
    highest = max(logits)
    mass = {token: math.exp(value - highest) for token, value in enumerate(logits) if value > -math.inf}
    assume(all(abs(value - min_p) > 1e-9 for value in mass.values()))
    mass = {token: value for token, value in mass.items() if value >= min_p}
    lowest = sorted((logits[token] for token in mass), reverse=True)[min(top_k, len(mass)) - 1]
    mass = {token: value for token, value in mass.items() if logits[token] >= lowest}
    total = sum(mass.values())
    prefix, kept = 0.0, {}
    for token in sorted(mass, key=lambda token: (-logits[token], token)):
        if top_p < 1:
            assume(abs(prefix - top_p) > 1e-9)
            if prefix > top_p:
                break
        kept[token] = mass[token] / total
        prefix += kept[token]
    return {token: value / prefix for token, value in kept.items()}


finite = st.integers(-20, 20).map(lambda steps: steps * GRAIN)
rows = st.lists(st.one_of(finite, finite, finite, st.just(-math.inf)), min_size=1, max_size=40).filter(
    lambda row: max(row) > -math.inf
)


@given(
    logits=rows,
    temperature=st.floats(0.1, 10),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    top_k=st.integers(0, 50),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    whole=st.booleans(),
)
def test_reference(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float, whole: bool
) -> None:
    expected = reference(logits, temperature, min_p, top_k or len(logits), top_p)
    assume(min(expected.values()) > 1e-12)
    weights = log_weights(torch.tensor([logits]), [Controls(temperature, min_p, top_k, top_p)], whole)[0]
    found = weights.softmax(-1).tolist()
    assert {token for token, value in enumerate(found) if value} == set(expected)
    for token, value in expected.items():
        assert found[token] == pytest.approx(value, rel=1e-9, abs=UNIT)


wide_rows = st.builds(
    lambda seed, width, scale, grain: wide_row(seed, width, scale, grain),
    seed=st.integers(0, 2**32),
    width=st.sampled_from([700, 4096, 5003]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    grain=st.sampled_from([0.0, 0.25, 2.0]),
)


def wide_row(seed: int, width: int, scale: float, grain: float) -> torch.Tensor:
    row = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) * scale
    return torch.round(row / grain) * grain if grain else row


@settings(max_examples=examples(60), deadline=None)
@given(
    logits=wide_rows,
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2]),
    top_k=st.sampled_from([0, 0, 2, 20, 50, 300, 600, 2000]),
    top_p=st.sampled_from([1.0, 0.3, 0.9, 0.999]),
)
def test_reference_on_rows_wider_than_the_candidates(
    logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    expected = reference(logits[0].tolist(), temperature, min_p, top_k or logits.shape[1], top_p)
    assume(min(expected.values()) > 1e-12)
    weights = log_weights(logits, [Controls(temperature, min_p, top_k, top_p)])[0]
    kept = weights.isfinite().nonzero()[:, 0].tolist()
    assert set(kept) == set(expected)
    wanted = torch.tensor([expected[token] for token in kept], dtype=torch.float64)
    torch.testing.assert_close(weights.softmax(-1)[kept], wanted, rtol=1e-9, atol=UNIT)


@given(power=st.integers(0, 6), part=st.data())
def test_top_p_at_the_exact_boundary_takes_the_shortest_prefix(power: int, part: st.DataObject) -> None:
    size = 2**power
    count = part.draw(st.integers(1, size))
    assert kept_ids([1.5] * size, top_p=count / size) == list(range(count))


def test_top_p_just_above_the_boundary_takes_one_more() -> None:
    assert kept_ids([0.0] * 4, top_p=0.5) == [0, 1]
    assert kept_ids([0.0] * 4, top_p=0.5 + 1e-12) == [0, 1, 2]
    assert kept_ids([0.0] * 4, top_p=1e-300) == [0]


def test_top_p_orders_equal_probabilities_by_id() -> None:
    assert kept_ids([0.0, 1.0, 0.0, 1.0, 0.0], top_p=0.4) == [1, 3]
    assert kept_ids([0.0, 1.0, 0.0, 1.0, 0.0], top_p=0.7) == [0, 1, 3]


def test_top_k_keeps_ties_with_the_kth() -> None:
    assert kept_ids([3.0, 1.0, 2.0, 2.0, 0.0], top_k=2) == [0, 2, 3]
    assert kept_ids([1.0] * 7, top_k=3) == list(range(7))


def test_top_k_beyond_the_finite_logits_keeps_them_all() -> None:
    assert kept_ids([-math.inf, 1.0, 0.0, -math.inf], top_k=3) == [1, 2]


def test_top_p_applies_to_what_top_k_leaves_renormalised() -> None:
    # alone, token 0 has 0.25 of the mass; of the top two it has 0.5
    assert kept_ids([0.0] * 2 + [-0.0001] * 2, top_k=2, top_p=0.5) == [0]
    assert kept_ids([0.0] * 2 + [-0.0001] * 2, top_p=0.5) == [0, 1]


def test_min_p_is_relative_to_the_likeliest_after_temperature() -> None:
    logits = [0.0, math.log(0.5), math.log(0.25)]
    assert kept_ids(logits, min_p=0.3) == [0, 1]
    assert kept_ids(logits, min_p=0.3, temperature=2.0) == [0, 1, 2]
    assert kept_ids([5.0, 5.0, 4.0], min_p=1.0) == [0, 1]


@given(highest=st.floats(-30, 30, width=32), min_p=st.floats(0.001, 0.9))
def test_min_p_is_exact_at_its_bound(highest: float, min_p: float) -> None:
    bound = highest + math.log(min_p)
    near = torch.tensor(bound)
    ends = [torch.nextafter(near, torch.tensor(end)) for end in (-math.inf, math.inf)]
    logits = torch.stack([torch.tensor(highest), ends[0], near, ends[1]]).tolist()
    assert kept_ids(logits, min_p=min_p) == [token for token, logit in enumerate(logits) if logit >= bound]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 9e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """The processor's rule: of equal logits the lowest id."""
    assert kept_ids([1.0, 3.0, 3.0, -5.0], temperature=temperature) == [1]
    assert kept_ids([1.0, 3.0, 3.0, -5.0], temperature=temperature, min_p=0.1, top_k=2, top_p=0.9) == [1]
    assert kept_ids([1.0, 3.0, 3.0, -5.0], temperature=1e-5) == [1, 2]


def test_a_huge_temperature_flattens() -> None:
    weights = log_weights(torch.tensor([[1.0, -1e20, 3.0, 0.0]]), [Controls(temperature=1e300)])
    assert weights.tolist() == [[0.0] * 4]


def test_huge_logits() -> None:
    assert kept_ids([3e38, -3e38, 3e38]) == [0, 2]


@pytest.mark.parametrize("whole", [False, True])
@given(part=st.data())
def test_a_draw_falls_into_the_interval_of_its_token(whole: bool, part: st.DataObject) -> None:
    weights = part.draw(st.lists(st.integers(0, 5), min_size=1, max_size=200).filter(any))
    total = sum(weights)
    place = part.draw(st.integers(0, total - 1))
    cumulative, expected = 0, -1
    while cumulative <= place:
        expected += 1
        cumulative += weights[expected]
    uniform = (place + 0.5) / total
    logits = torch.tensor([weights]).double().log().float()
    assert tokens(logits, [Controls(min_p=0.001)], [uniform], whole) == [expected]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("width", [5, 64, 100, 3000])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(width: int, whole: bool) -> None:
    logits = torch.full((3, width), -torch.inf)
    logits[:, 1] = math.log(3)
    logits[:, 3] = math.log(5)
    assert tokens(logits, [Controls(top_p=0.99)] * 3, [0.0, 1 - 2.0**-53, 1.0], whole) == [1, 3, 3]
    assert tokens(logits, [Controls()] * 3, [0.0, 1 - 2.0**-53, 1.0]) == [1, 3, 3]


def test_a_level_row_is_drawn_from_end_to_end() -> None:
    ends = tokens(torch.zeros(3, 300_000), [Controls()] * 3, [0.0, 0.5, 1.0])
    assert ends == [0, 150_000, 299_999]


@pytest.mark.parametrize(
    "controls", [Controls(), Controls(top_k=40), Controls(top_p=0.8), Controls(0.7, 0.01, 100, 0.9)]
)
def test_frequencies_of_five_million_draws(controls: Controls) -> None:
    """Evenly spread numbers instead of random ones: each token's share is exact to one part in
    the count.
    """
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(3)) * 2
    share = log_weights(logits, [controls])[0].softmax(-1)
    count = 5_000_000
    edges = torch.cat((torch.zeros(1, dtype=torch.float64), share.cumsum(0)))
    for token in share.nonzero()[:, 0].tolist():
        inside = [(edges[token] * count).ceil() + 0.5, (edges[token + 1] * count).floor() - 0.5]
        if inside[0] <= inside[1]:  # a token too unlikely to be hit has no number of its own
            numbers = [float(place) / count for place in inside]
            assert tokens(logits.expand(2, -1), [controls] * 2, numbers) == [token, token]


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), width=st.sampled_from([5, 64, 1000, 4097]), count=st.integers(2, 6))
def test_a_row_is_bitwise_the_same_in_any_batch(seed: int, width: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, width, generator=generator) * 3

    def number(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))

    def one_of(*values: float) -> float:
        return values[int(torch.randint(len(values), (), generator=generator))]

    controls = [
        Controls(
            number(0.2, 2),
            one_of(0.0, number(0, 0.1)),
            int(one_of(0, 2, number(1, 60), number(1, width))),
            one_of(1.0, number(0.2, 1)),
        )
        for _ in range(count)
    ]
    numbers = [number(0, 1) for _ in range(count)]
    together = log_weights(logits, controls)
    drawn = tokens(logits, controls, numbers)
    for row in range(count):
        one = slice(row, row + 1)
        assert torch.equal(log_weights(logits[one], controls[one])[0], together[row])
        assert tokens(logits[one], controls[one], numbers[one]) == drawn[one]


@given(seed=st.integers(0, 2**32))
def test_controls_that_are_off_ignore_a_batch_mates_parameters(seed: int) -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(seed))
    for controls in (Controls(0.7), Controls(0.7, top_k=30)):
        plain = log_weights(logits[:1], [controls])
        beside = log_weights(logits, [controls, Controls(1.0, 0.1, 25, 0.5)])
        assert torch.equal(plain[0], beside[0])


def test_a_group_less_some_rows_draws_the_same() -> None:
    logits = torch.randn(3, 900, generator=torch.Generator().manual_seed(5))
    controls = dict(enumerate([Controls(1.0, 0.0, 20, 0.9), Controls(0.5, 0.1, 30), Controls(2.0, 0.0, 40, 0.5)]))
    groups = group_rows(controls, 900)
    numbers = dict.fromkeys(controls, 0.4)
    every, _ = truncate_and_sample(logits, groups, numbers)
    rest, _ = truncate_and_sample(logits, [group.without({1}) for group in groups], numbers)
    assert rest == {row: token for row, token in every.items() if row != 1}


def test_a_group_draws_the_same_whatever_it_drew_before() -> None:
    """Whether it looks for candidates first depends on that; what it finds does not."""
    wide = torch.randn(2, 4000, generator=torch.Generator().manual_seed(6))
    peaked = wide.clone()
    peaked[:, 5:40] += 15
    controls = [Controls(top_p=0.9), Controls(top_p=0.8, temperature=0.9)]
    (group,) = groups_of(controls, 4000)
    seen = []
    for logits in (wide, wide, peaked, peaked, wide):
        found, _ = truncate_and_sample(logits, [group], {0: 0.3, 1: 0.7})
        assert [found[0], found[1]] == tokens(logits, controls, [0.3, 0.7])
        seen.append(group.is_wide)
    assert seen == [True, True, False, False, True]
