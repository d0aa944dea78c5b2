"""The kernels that find the likeliest tokens, against torch's own and plain Python."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.sampling.candidates import block_maxima, highest_ids, sort_ids, top, top_in_order
from adapters.sampling.prefixes import prefix_of_mass

WIDTHS = [1, 5, 63, 64, 65, 700, 4096, 9000, 20_003]


def rows_of(seed: int, count: int, width: int, grain: float) -> torch.Tensor:
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3
    return torch.round(rows / grain) * grain if grain else rows


seeds = st.integers(0, 2**32)
grains = st.sampled_from([0.0, 0.5, 8.0])


@settings(max_examples=examples(80), deadline=None)
@given(seed=seeds, width=st.sampled_from(WIDTHS), count=st.integers(1, 150), grain=grains, part=st.booleans())
def test_top_finds_what_torch_finds(seed: int, width: int, count: int, grain: float, part: bool) -> None:
    values = rows_of(seed, 3, width, grain)
    values[1, width // 2 :] = -torch.inf
    rows = torch.tensor([2, 1]) if part else None
    chosen = values if rows is None else values[rows]
    count = min(count, width)
    found, ids = top(values, count, block_maxima(chosen), rows)
    assert torch.equal(found, chosen.topk(count, dim=-1).values)
    assert torch.equal(chosen.gather(1, ids), found)
    assert all(len(set(row)) == count for row in ids.tolist())


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=seeds,
    width=st.sampled_from(WIDTHS),
    count=st.integers(1, 150),
    grain=grains,
    part=st.booleans(),
    divisor=st.sampled_from([None, 0.7, 3e30]),
)
def test_top_in_order(seed: int, width: int, count: int, grain: float, part: bool, divisor: float | None) -> None:
    """The last divisor makes many values tie."""
    values = rows_of(seed, 3, width, grain)
    values[1, width // 2 :] = -torch.inf
    values[2, ::7] = -0.0
    rows = torch.tensor([2, 1]) if part else None
    chosen = values if rows is None else values[rows]
    count = min(count, width)
    if divisor is None:
        found, ids = top_in_order(values, count, None, rows)
    else:
        divisors = torch.tensor([1.0, divisor, divisor])[: len(chosen), None]
        scale = 1e-15 if divisor > 1 else 1.0
        chosen, values = chosen * scale, values * scale
        found, ids = top_in_order(values, count, None, rows, divisors)
        chosen = chosen / divisors
    assert torch.equal(found, chosen.topk(count, dim=-1).values)
    assert torch.equal(chosen.gather(1, ids), found)
    for row, places in zip(chosen.tolist(), ids.tolist(), strict=True):
        assert places == sorted(set(places), key=lambda place: (-row[place], place))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("most", [1, 5, 40])
def test_no_rows_have_no_candidates(width: int, most: int) -> None:
    count = min(most, width)
    for rows in (None, torch.empty(0, dtype=torch.long)):
        values = torch.empty(0 if rows is None else 2, width)
        for found in (*top(values, count, rows=rows), *top_in_order(values, count, rows=rows)):
            assert found.shape == (0, count)


def test_top_in_order_beside_rows_that_are_flat() -> None:
    values = torch.randn(3, 20_003, generator=torch.Generator().manual_seed(1))
    alone = top_in_order(values[1:2].clone(), 100)
    values[0] = 0.0
    values[2, 700:] = 0.0
    found, ids = top_in_order(values, 100)
    assert torch.equal(ids[1:2], alone[1])
    for row, chosen, places in zip(values, found, ids, strict=True):
        assert torch.equal(chosen, row.topk(100).values)
        assert torch.equal(chosen, row[places])


@pytest.mark.parametrize("width", [20_000, 20_003])
def test_the_highest_of_chosen_rows_with_many_of_one_value(width: int) -> None:
    """In all blocks of a row, or in few whose last values are the highest."""
    values = torch.randn(4, width, generator=torch.Generator().manual_seed(1))
    values[2] = 0.5
    values[1] = -1.0
    values[1, : 20 * 64] = 1.0
    values[1, 19 * 64 + 50 : 20 * 64] = 2.0
    values[:, -1] = 9.0
    rows, divisors = torch.tensor([3, 2, 1]), torch.tensor([[0.7], [1.0], [2.0]])
    found, ids = top_in_order(values, 15, None, rows, divisors)
    for row, divisor, chosen, places in zip(rows, divisors, found, ids, strict=True):
        divided = values[row] / divisor
        assert torch.equal(chosen, divided.topk(15).values)
        assert torch.equal(chosen, divided[places])
        assert places.tolist() == sorted(set(places.tolist()), key=lambda place: (-float(divided[place]), place))


def test_sorted_ids() -> None:
    ids = torch.tensor([[2**31 - 1, 0, 5], [7, 6, 1]])
    found, order = sort_ids(ids)
    assert torch.equal(found, ids.sort(-1).values)
    assert torch.equal(ids.gather(1, order), found)


@settings(max_examples=examples(80), deadline=None)
@given(seed=seeds, width=st.sampled_from(WIDTHS), grain=grains, part=st.booleans())
def test_the_highest_of_equals_is_the_lowest_id(seed: int, width: int, grain: float, part: bool) -> None:
    values = rows_of(seed, 3, width, grain)
    rows = torch.tensor([2, 0]) if part else None
    chosen = values if rows is None else values[rows]
    expected = [row.index(max(row)) for row in chosen.tolist()]
    assert highest_ids(values, block_maxima(chosen), rows).tolist() == expected


@pytest.mark.parametrize("width", WIDTHS)
def test_nan_anywhere_shows_in_the_maxima(width: int) -> None:
    values = torch.zeros(2, width)
    values[1, width - 1] = torch.nan
    assert block_maxima(values).amax(-1).isnan().tolist() == [False, True]


def test_a_view_of_a_larger_tensor() -> None:
    values = torch.arange(20_000.0).remainder(997).view(2, 10_000)[:, 100:9_828]
    found, ids = top(values, 60)
    assert torch.equal(found, values.topk(60).values)
    assert torch.equal(values.gather(1, ids), found)


def prefix_ids(keys: torch.Tensor, masses: torch.Tensor, target: int, zero: int = 0) -> list[int]:
    """Those of its tokens that have a mass."""
    ids, found = prefix_of_mass(keys, masses + zero, int(masses.sum()), target, zero)
    ids = torch.arange(len(keys)) if ids is None else ids
    kept = ids[found > 0]
    assert torch.equal(found[found > 0], masses[kept])
    assert bool((ids.diff() > 0).all())
    return [int(one) for one in kept]


@settings(max_examples=examples(80), deadline=None)
@given(
    seed=seeds,
    width=st.sampled_from([1, 40, 4097, 30_000]),
    grain=grains,
    scale=st.sampled_from([1e-40, 1.0, 1e30]),
    share=st.floats(0.001, 1.0),
    zero=st.sampled_from([0, 2**62 + 5]),
    steep=st.booleans(),
)
def test_prefixes_of_masses(
    seed: int, width: int, grain: float, scale: float, share: float, zero: int, steep: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = rows_of(seed, 1, width, grain)[0]
    masses = torch.randint(0, 50, (width,), generator=generator)
    if steep:  # as weights are
        masses = ((keys.double() - float(keys.max())).exp() * 2.0**40).long()
    keys = keys.mul_(scale)
    masses[int(keys.argmax())] = 1
    target = max(1, int(int(masses.sum()) * share))
    inside, total = [], 0
    for token in sorted(range(width), key=lambda token: (-float(keys[token]), token)):
        inside.append(token)
        total += int(masses[token])
        if total >= target:
            break
    assert prefix_ids(keys, masses, target, zero) == [one for one in sorted(inside) if masses[one]]


@pytest.mark.parametrize("width", [50, 10_000])
def test_a_prefix_of_a_row_with_masked_and_with_extreme_keys(width: int) -> None:
    keys = torch.full((width,), -torch.inf)
    keys[[3, 7, 9]] = torch.tensor([3e38, -3e38, 3e38])
    masses = keys.isfinite().long()
    assert prefix_ids(keys, masses, 2) == [3, 9]
    assert prefix_ids(keys, masses, 1) == [3]
    assert prefix_ids(keys, masses, 3) == [3, 7, 9]


@pytest.mark.parametrize("rising", [False, True])
def test_a_prefix_of_a_row_that_a_sample_misleads_about(rising: bool) -> None:
    keys = torch.zeros(20_000)
    keys[::9] = 1.0  # the sample is every ninth
    if rising:
        keys += torch.arange(20_000) / 1e6
    masses = torch.ones(20_000, dtype=torch.int64)
    ordered = keys.sort(descending=True, stable=True).indices
    for target in (1, 100, 2222, 2223, 2224, 10_000, 19_999, 20_000):
        assert prefix_ids(keys, masses, target) == sorted(ordered[:target].tolist())


def test_masses_that_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="the masses do not add up to 50"):
        prefix_of_mass(torch.zeros(3), torch.ones(3, dtype=torch.int64), 50, 40)
