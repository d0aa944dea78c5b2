"""Temperature, min-p, top-k and top-p against plain float64 Python, with exact boundaries and ties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from worker.engines.embedded.truncation import WEIGHT_SCALE, Truncation, draw, weigh

GRAIN = 0.5  # logits are multiples of it, so that ties are frequent and exact


def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


def truncation(
    temperature: float = 1.0, min_p: float | None = None, top_k: int | None = None, top_p: float | None = None
) -> Truncation:
    return Truncation(
        column([temperature], torch.float64),
        None if min_p is None else column([min_p], torch.float64),
        None if top_k is None else column([top_k], torch.int64),
        None if top_p is None else column([top_p], torch.float64),
    )


def kept_ids(logits: list[float], **parameters: Any) -> list[int]:
    adjusted, weights = weigh(torch.tensor([logits]), truncation(**parameters))
    kept = weights[0].nonzero()[:, 0].tolist()
    assert adjusted[0].isfinite().nonzero()[:, 0].tolist() == kept
    return [int(token) for token in kept]


def reference(logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float) -> dict[int, float]:
    """Probabilities of the kept tokens. Too close to a boundary to tell: not a case."""
    highest = max(logits)
    mass = {token: math.exp((value - highest) / temperature) for token, value in enumerate(logits) if value > -math.inf}
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
    top_k=st.integers(1, 50),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
)
def test_reference(logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float) -> None:
    expected = reference(logits, temperature, min_p, top_k, top_p)
    assume(min(expected.values()) > 1e-12)
    _, weights = weigh(torch.tensor([logits]), truncation(temperature, min_p, min(top_k, len(logits)), top_p))
    found = (weights[0].double() / weights[0].sum()).tolist()
    assert {token for token, value in enumerate(found) if value} == set(expected)
    for token, value in expected.items():
        assert found[token] == pytest.approx(value, rel=1e-9, abs=1e-14)


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


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
def test_a_tiny_temperature_leaves_the_highest_and_its_ties(temperature: float) -> None:
    assert kept_ids([1.0, 3.0, 3.0, -5.0], temperature=temperature) == [1, 2]


def test_a_huge_temperature_flattens() -> None:
    _, weights = weigh(torch.tensor([[1.0, -1e30, 3.0, 0.0]]), truncation(temperature=1e300))
    assert len(set(weights[0].tolist())) == 1


def test_huge_logits() -> None:
    assert kept_ids([3e38, -3e38, 3e38]) == [0, 2]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30).filter(any), st.data())
def test_a_draw_falls_into_the_interval_of_its_token(weights: list[int], data: st.DataObject) -> None:
    total = sum(weights)
    place = data.draw(st.integers(0, total - 1))
    cumulative, expected = 0, -1
    while cumulative <= place:
        expected += 1
        cumulative += weights[expected]
    uniform = (place + 0.5) / total
    assert draw(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)).tolist() == [expected]


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    weights = torch.tensor([[0, 3, 0, 5, 0]] * 3)
    ends = torch.tensor([0.0, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    assert draw(weights, ends).tolist() == [1, 3, 3]


def test_weights_do_not_overflow() -> None:
    _, weights = weigh(torch.zeros(1, 300_000), truncation())
    assert 0.99 * WEIGHT_SCALE < int(weights.sum()) <= WEIGHT_SCALE
    assert draw(weights, torch.tensor([1.0], dtype=torch.float64)).tolist() == [299_999]


@given(seed=st.integers(0, 2**32), width=st.sampled_from([5, 64, 1000, 4097]), count=st.integers(2, 6))
def test_a_row_is_bitwise_the_same_in_any_batch(seed: int, width: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def uniforms(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator, dtype=torch.float64)

    logits = torch.randn(count, width, generator=generator) * 3
    temperature, min_p, top_p = uniforms(0.2, 2), uniforms(0, 0.1), uniforms(0.2, 1)
    top_k = torch.randint(1, width + 1, (count, 1), generator=generator)
    numbers = uniforms(0, 1)[:, 0]
    adjusted, weights = weigh(logits, Truncation(temperature, min_p, top_k, top_p))
    tokens = draw(weights, numbers)
    for row in range(count):
        one = slice(row, row + 1)
        alone = Truncation(temperature[one], min_p[one], top_k[one], top_p[one])
        adjusted_alone, weights_alone = weigh(logits[one], alone)
        assert torch.equal(adjusted_alone[0], adjusted[row])
        assert torch.equal(weights_alone[0], weights[row])
        assert torch.equal(draw(weights_alone, numbers[one]), tokens[one])


@given(seed=st.integers(0, 2**32))
def test_a_batch_mates_parameters_do_not_matter_where_they_are_off(seed: int) -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(seed))
    _, plain = weigh(logits[:1], truncation(0.7))
    both = Truncation(
        column([0.7, 1.0], torch.float64),
        column([0.0, 0.1], torch.float64),
        column([500, 3], torch.int64),
        column([1.0, 0.5], torch.float64),
    )
    _, beside = weigh(logits, both)
    assert torch.equal(plain[0], beside[0])
