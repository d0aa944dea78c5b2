"""The native kernels that weigh tokens: against their formulas, and the same bits in all paths."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from chosen_paths import plain_c
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_rows import sample_whole_rows

from adapters.contract import Allow, apply_allows, bitmask_of
from adapters.contract.bitmasks import apply_unpacked, unpacked
from adapters.row_kernels import WholeRow, kernels_for, native_kernels
from adapters.sampling import candidates
from adapters.sampling.truncation import log_of
from adapters.sampling.weights import as_units, share_of_one, weight_bits
from adapters.sampling.whole_row import TorchRow
from worker.engines.embedded.native import weights as native_weights
from worker.engines.embedded.native.drawing import ControlColumns, Drawer
from worker.engines.embedded.native.weights import NativeRow, exponential_
from worker.engines.embedded.sampling.truncation import Controls, Group, group_rows, truncate_and_sample

CPU = torch.device("cpu")
WIDTHS = [1, 5, 63, 64, 65, 700, 3000, 9001, 40_003]

pytestmark = pytest.mark.native


def in_plain_c(values: torch.Tensor) -> torch.Tensor:
    with plain_c(torch.float32):
        return exponential_(values.clone())


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 3),
    width=st.sampled_from(WIDTHS),
    odd=st.sampled_from([0.0, -math.inf, math.inf, math.nan]),
    layout=st.sampled_from(["rows", "columns", "part"]),
)
def test_maxima_of_blocks(path: str, seed: int, count: int, width: int, odd: float, layout: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, width + 9, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.02] = odd
    logits = logits.t().contiguous().t() if layout == "columns" else logits
    logits = logits[:, 5 : 5 + width]
    logits = logits.contiguous() if layout == "rows" else logits
    found = native_weights.block_maxima(logits)
    torch.testing.assert_close(found, candidates.block_maxima(logits), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    width=st.sampled_from(WIDTHS),
    odd=st.sampled_from([0.0, -math.inf, math.inf, math.nan]),
    part=st.sampled_from([0.0, 0.02, 1.0]),
    layout=st.sampled_from(["rows", "columns", "part"]),
)
def test_the_first_of_the_highest(path: str, seed: int, width: int, odd: float, part: float, layout: str) -> None:
    """Many tie."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-9, 9, (3, width + 9), generator=generator).float()
    logits[torch.rand(logits.shape, generator=generator) < part] = odd
    logits = logits.t().contiguous().t() if layout == "columns" else logits
    logits = logits[:, 5 : 5 + width]
    logits = logits.contiguous() if layout == "rows" else logits
    ids, values = native_weights.highest_ids(logits)
    for row, token_id, value in zip(logits.tolist(), ids, values, strict=True):
        if any(map(math.isnan, row)):
            assert math.isnan(value)
        else:
            assert (value, token_id) == (max(row), row.index(max(row)))


def test_several_threads_search_many_rows(path: str) -> None:
    logits = torch.randint(-9, 9, (12, 400_000), generator=torch.Generator().manual_seed(1)).float()
    logits[3, 700] = math.nan
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        maxima, (ids, values) = native_weights.block_maxima(logits), native_weights.highest_ids(logits)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(maxima, candidates.block_maxima(logits), rtol=0, atol=0, equal_nan=True)
    assert math.isnan(values[3])
    whole = [row for row in range(12) if row != 3]
    assert [ids[row] for row in whole] == logits[whole].argmax(-1).tolist()


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    width=st.sampled_from([*WIDTHS, 70_000]),
    covered=st.sampled_from([0.0, 0.4, 1.0, 1.0, 1.3]),
    kept=st.sampled_from([0.0, 0.001, 0.5, 0.999, 1.0]),
    odd=st.sampled_from([-0.0, -math.inf, math.inf, math.nan]),
    rows=st.permutations(range(9)).map(lambda rows: rows[:5]),
    threads=st.sampled_from([1, 3]),
    is_strided=st.booleans(),
)
def test_masks_are_applied_as_without_kernels(
    path: str,
    seed: int,
    width: int,
    covered: float,
    kept: float,
    odd: float,
    rows: list[int],
    threads: int,
    is_strided: bool,
) -> None:
    """Masks of 9 rows' middle columns: what lies beside them, and other rows, stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.randn(9, width + 7, generator=generator)
    every[torch.rand(every.shape, generator=generator) < 0.02] = odd
    words = math.ceil(width * covered / 32)
    bits = torch.rand(5, words * 32, generator=generator) < kept
    masks = [bitmask_of(row.nonzero()[:, 0].tolist(), words * 32) for row in bits]
    expected = every.clone()
    inner = expected[:, 3 : 3 + width].contiguous()
    apply_unpacked(inner, [(row, unpacked(mask, width)) for row, mask in zip(rows, masks, strict=True)])
    expected[:, 3 : 3 + width] = inner
    if is_strided:
        masks = [torch.stack((mask, ~mask), 1)[:, 0] for mask in masks]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        native_weights.apply_masks(every[:, 3 : 3 + width], rows, masks)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(every, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("row", "dtype", "message"),
    [(-1, torch.int32, "rows must be from 0 to 1"), (2, torch.int32, "got 2"), (0, torch.bool, "must be int32")],
)
def test_no_memory_beyond_rows_and_masks_is_touched(path: str, row: int, dtype: torch.dtype, message: str) -> None:
    every, mask = torch.zeros(4, 64), torch.zeros(2, dtype=dtype)
    with pytest.raises((IndexError, ValueError), match=message):
        native_weights.apply_masks(every[1:3], [1, row], [mask, mask])
    assert not every.any()


@pytest.mark.parametrize("rows", [[0], [0, 1, 1]])
def test_each_row_has_a_mask_of_its_own(path: str, rows: list[int]) -> None:
    logits, mask = torch.zeros(2, 64), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="zip"):
        native_weights.apply_masks(logits, rows, [mask, mask])
    assert not logits.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_strided", [False, True])
def test_rows_of_any_type_and_layout_are_masked(path: str, dtype: torch.dtype, is_strided: bool) -> None:
    masks = [Allow(bitmask_of(range(first, 70, 3), 70)) for first in range(3)]
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.full_like(logits, -math.inf)
    for row in range(3):
        expected[row, row::3] = logits[row, row::3]
    if is_strided:
        logits = logits.t().contiguous().t()
    apply_allows(logits, [*enumerate(masks)])
    assert torch.equal(logits, expected)


def test_masks_of_many_rows_by_several_threads(path: str) -> None:
    logits = torch.randn(40, 40_003, generator=torch.Generator().manual_seed(1))
    masks = [bitmask_of(range(row, 40_003, 7), 40_003) for row in range(40)]
    expected = torch.full_like(logits, -math.inf)
    for row in range(40):
        expected[row, row::7] = logits[row, row::7]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        native_weights.apply_masks(logits, range(40), masks)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits, expected)


def test_kernels_are_for_rows_that_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.empty(4, 8)
    assert kernels_for(rows) is kernels_for(rows[:, 2:]) is native_kernels() is not None
    others = (rows.t(), rows.double(), rows.bfloat16(), rows.to("meta"))
    assert [kernels_for(each) for each in others] == [None] * 4
    monkeypatch.setattr(native_weights, "are_available", lambda: False)
    assert kernels_for(rows) is native_kernels() is None


exponents = st.floats(-708, 700) | st.floats(-32, 0) | st.floats(-1e-3, 0)


@settings(max_examples=examples(300), deadline=None)
@given(values=st.lists(exponents, min_size=1, max_size=70))
def test_exponentials_err_by_less_than_a_unit_in_the_last_place(path: str, values: list[float]) -> None:
    found = exponential_(torch.tensor(values, dtype=torch.float64)).tolist()
    with localcontext() as context:
        context.prec = 40
        for value, one in zip(values, found, strict=True):
            assert abs(Decimal(one) - Decimal(value).exp()) < Decimal(math.ulp(one))


def test_exponentials_of_special_numbers(path: str) -> None:
    lowest = -708.0
    below = math.nextafter(lowest, -math.inf)
    values = [0.0, -0.0, -5e-324, 5e-324, lowest, below, -745.0, -1e6, -1.8e308, -math.inf, math.nan]
    found = exponential_(torch.tensor(values, dtype=torch.float64)).tolist()
    assert found[:4] == [1.0] * 4
    assert found[4] == pytest.approx(math.exp(lowest), rel=1e-15)
    assert found[4] >= 2.0**-1022  # not subnormal
    assert [math.copysign(1.0, one) * (one == 0) for one in found[5:]] == [1.0] * 6


@given(seed=st.integers(0, 2**32), size=st.integers(1, 300), scale=st.sampled_from([1e-9, 1.0, 30.0, 400.0]))
def test_exponentials_have_the_bits_of_plain_c(path: str, seed: int, size: int, scale: float) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    values.clamp_(max=700)
    assert torch.equal(in_plain_c(values), exponential_(values))


def row_of(seed: int, width: int, grain: float, scale: float, masked: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(width, generator=generator) * 3
    row = (row / grain).round() * grain if grain else row
    row *= scale
    row[torch.rand(width, generator=generator) < masked] = -torch.inf
    row[width // 2] = 0.5  # at least one is finite
    row[width // 3] = -0.0
    return row


rows = st.builds(
    row_of,
    st.integers(0, 2**32),
    st.sampled_from(WIDTHS),
    grain=st.sampled_from([0.0, 0.0, 0.25, 8.0]),
    scale=st.sampled_from([1e-40, 0.01, 1.0, 5.0, 1e30]),
    masked=st.sampled_from([0.0, 0.05, 0.99]),
)
ranks = st.sampled_from([None, None, 0, 20, 10_000])


def lowest_of(row: torch.Tensor, rank: int | None) -> float:
    """The logit of a rank; -inf for None."""
    return -math.inf if rank is None else float(row.sort(descending=True).values[min(rank, len(row) - 1)])


def by_formula(row: torch.Tensor, lowest: float) -> torch.Tensor:
    weights = as_units(exponential_(row.double() - float(row.max())), weight_bits(len(row)))
    return weights * (row >= lowest)


@settings(max_examples=examples(200), deadline=None)
@given(row=rows, rank=ranks)
def test_weights_of_a_row_are_those_of_the_formula(path: str, row: torch.Tensor, rank: int | None) -> None:
    lowest = lowest_of(row, rank)
    expected = by_formula(row, lowest)
    found = NativeRow(len(row))
    assert found.weigh(row, float(row.max()), lowest) == int(expected.sum()) == found.total
    assert torch.equal(found.part(0, len(row)), expected)
    assert torch.equal(found.part(64, 64), expected[64:128])
    assert found.sums.tolist() == [int(block.sum()) for block in expected.split(64)]


def prefix_of(row: torch.Tensor, weights: torch.Tensor, target: int) -> torch.Tensor:
    """The weights of the prefix, 0 outside."""
    order = torch.sort(row, descending=True, stable=True).indices
    reached = weights[order].cumsum(0)
    last = int(torch.searchsorted(reached, target))
    kept = torch.zeros_like(weights)
    kept[order[: last + 1]] = weights[order[: last + 1]]
    return kept


@settings(max_examples=examples(200), deadline=None)
@given(
    row=rows,
    rank=ranks,
    shares=st.lists(st.sampled_from([0.0, 0.5, 0.9, 0.999, 1.0]) | st.floats(0, 1), min_size=2, max_size=3),
)
def test_prefixes_are_those_of_a_sorted_row(
    path: str, row: torch.Tensor, rank: int | None, shares: list[float]
) -> None:
    lowest = lowest_of(row, rank)
    found = NativeRow(len(row))
    total = found.weigh(row, float(row.max()), lowest)
    for share in shares:
        target = share_of_one(total, share)
        ids, weights = found.prefix(target)
        assert bool((ids.diff() > 0).all())
        assert bool((weights > 0).all())
        kept = torch.zeros(len(row), dtype=torch.int64).scatter_(0, ids, weights)
        assert torch.equal(kept, prefix_of(row, by_formula(row, lowest), target))


@pytest.mark.parametrize("above", [True, False])
def test_prefixes_of_a_row_that_its_sample_misleads_about(path: str, above: bool) -> None:
    """It is every sixth piece of 16: they are the likeliest tokens, or the least likely."""
    width = 20_003
    sampled = torch.arange(width) // 16 % 6 == 0
    row = row_of(1, width, 0.0, 0.01, 0.0) + (sampled == above) * 0.5
    found = NativeRow(width)
    total = found.weigh(row, float(row.max()))
    expected = by_formula(row, -math.inf)
    for share in (0.001, 0.2, 0.5, 0.8, 0.9, 0.95, 0.97, 0.99, 0.9999, 1.0):
        target = share_of_one(total, share)
        ids, weights = found.prefix(target)
        kept = torch.zeros(width, dtype=torch.int64).scatter_(0, ids, weights)
        assert torch.equal(kept, prefix_of(row, expected, target))


@pytest.mark.parametrize("target", [-1, 0, 1 << 44, 2**62])
def test_a_target_that_no_prefix_has(path: str, target: int) -> None:
    row = NativeRow(3)
    total = row.weigh(torch.tensor([0.0, -40.0, -50.0]), 0.0)
    assert total == 1 << 44
    if target == total:
        assert row.prefix(target)[0].tolist() == [0]
        return
    with pytest.raises(ValueError, match=rf"the target must be from 1 to the total {total}, got {target}"):
        row.prefix(target)


@settings(max_examples=examples(150), deadline=None)
@given(
    row=rows,
    rank=ranks,
    parts=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    is_strided=st.booleans(),
)
def test_a_row_is_the_same_with_torch_where_exp_is(
    path: str,
    row: torch.Tensor,
    rank: int | None,
    parts: list[float],
    is_strided: bool,
) -> None:
    lowest, highest = lowest_of(row, rank), float(row.max())
    width = len(row)
    if is_strided:
        row = torch.stack((row, torch.full_like(row, math.nan)), 1)[:, 0]
    both: list[WholeRow] = [NativeRow(width), TorchRow(width)]
    totals = {each.weigh(row, highest, lowest) for each in both}
    [total] = totals | {each.total for each in both}
    assert torch.equal(*(each.weights() for each in both))
    for part in parts:
        point = min(int(total * part), total - 1)
        assert both[0].token_at(point) == both[1].token_at(point)
        kept = []
        for each in both:
            ids, weights = each.prefix(point + 1)
            ids = torch.arange(width) if ids is None else ids
            kept.append(torch.zeros(width, dtype=torch.int64).scatter_(0, ids, weights))
        assert torch.equal(*kept)


some_controls = st.builds(
    Controls,
    temperature=st.sampled_from([9e-6, 1e-5, 0.3, 1.0, 1.0, 2.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.05]),
    top_k=st.sampled_from([0, 0, 1, 20, 700, 2000]),
    top_p=st.sampled_from([1.0, 0.5, 0.9, 0.999]),
)


def sampled(logits: torch.Tensor, controls: list[Controls], uniforms: list[float], whole: bool) -> list[int]:
    groups = group_rows(dict(enumerate(controls)), logits.shape[1])
    if whole:
        groups = [Group(group.controls, 0, logits.shape[1]) for group in groups]
    found, _ = truncate_and_sample(logits, groups, dict(enumerate(uniforms)))
    return [found[row] for row in range(len(controls))]


@pytest.mark.parametrize("has_kernels", [True, False])
@settings(max_examples=examples(60), deadline=None)
@given(
    asked=st.lists(st.tuples(some_controls, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    width=st.sampled_from([65, 700, 9001]),
    grain=st.sampled_from([0.0, 0.0, 0.25]),
    is_strided=st.booleans(),
)
def test_all_ways_to_a_token_agree(
    path: str,
    has_kernels: bool,
    asked: list[tuple[Controls, float]],
    seed: int,
    width: int,
    grain: float,
    is_strided: bool,
) -> None:
    """By candidates, by whole rows and by the rules alone; and where the kernels were not built."""
    logits = torch.stack([row_of(seed + each, width, grain, 1.0, 0.05) for each in range(len(asked))])
    if is_strided:
        logits = logits.t().contiguous().t()
    controls, uniforms = [one for one, _ in asked], [uniform for _, uniform in asked]
    with pytest.MonkeyPatch.context() as patch:
        if not has_kernels:
            patch.setattr(native_weights, "are_available", lambda: False)
        expected, _ = sample_whole_rows(logits, controls, uniforms)
        assert sampled(logits, controls, uniforms, whole=False) == expected
        assert sampled(logits, controls, uniforms, whole=True) == expected


def columns_of(controls: list[Controls]) -> ControlColumns:
    return ControlColumns(
        torch.tensor([one.divisor for one in controls], dtype=torch.float32),
        torch.tensor([log_of(one.min_p) for one in controls], dtype=torch.float64),
        torch.tensor([one.top_k for one in controls], dtype=torch.int64),
        torch.tensor([one.share for one in controls], dtype=torch.float64),
    )


drawn_controls = st.builds(
    Controls,
    temperature=st.sampled_from([0.0, 9e-6, 1e-5, 0.3, 1.0, 1.0, 2.5, 1e30]),
    min_p=st.sampled_from([0.0, 0.0, 1e-300, 0.001, 0.05, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 20, 140, 700, 2000, 100_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 1e-9, 0.5, 0.9, 0.999]),
)


@settings(max_examples=examples(300), deadline=None)
@given(
    asked=st.lists(st.tuples(drawn_controls, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=7),
    seed=st.integers(0, 2**32),
    width=st.sampled_from(WIDTHS),
    grain=st.sampled_from([0.0, 0.0, 0.25, 8.0]),
    scale=st.sampled_from([0.01, 1.0, 8.0, 1e36]),
    masked=st.sampled_from([0.0, 0.05, 0.99, 0.9995]),
    odd=st.dictionaries(st.integers(0, 6), st.sampled_from([math.nan, math.inf, -math.inf]), max_size=2),
    threads=st.sampled_from([1, 3]),
    layout=st.sampled_from(["rows", "columns", "part"]),
)
def test_draws_are_those_of_whole_rows(
    path: str,
    asked: list[tuple[Controls, float]],
    seed: int,
    width: int,
    grain: float,
    scale: float,
    masked: float,
    odd: dict[int, float],
    threads: int,
    layout: str,
) -> None:
    logits = torch.stack([row_of(seed + each, width, grain, scale, masked) for each in range(len(asked))])
    for row, value in odd.items():
        if row < len(logits):
            logits[row] = torch.where(torch.arange(width) % 3 == 0, value, value if value == -math.inf else logits[row])
    if layout == "columns":
        logits = logits.t().contiguous().t()
    elif layout == "part":
        logits = torch.cat((logits, torch.full((len(logits), 9), math.nan)), 1)[:, :width]
    controls, uniforms = [one for one, _ in asked], [uniform for _, uniform in asked]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        drawn = Drawer(width).draw(logits, columns_of(controls), uniforms)
        ids, highest = drawn.ids, drawn.highest
    finally:
        torch.set_num_threads(before)
    assert highest == pytest.approx(logits.amax(-1).tolist(), rel=0, abs=0, nan_ok=True)
    for row, (one, uniform) in enumerate(asked):
        if math.isfinite(float(torch.tensor(highest[row]) / one.divisor)):
            assert ids[row] == sample_whole_rows(logits[row : row + 1], [one], [uniform])[0][0]
        else:
            assert ids[row] == 0


@given(highest=st.floats(-30, 30, width=32), min_p=st.floats(0.05, 0.9))
def test_min_p_is_exact_at_its_bound(path: str, highest: float, min_p: float) -> None:
    bound = highest + math.log(min_p)
    near = torch.tensor(bound)
    ends = [torch.nextafter(near, torch.tensor(end)) for end in (-math.inf, math.inf)]
    row = torch.stack([torch.tensor(highest), ends[0], near, ends[1]])
    count = 40
    uniforms = [(number + 0.5) / count for number in range(count)]
    drawn = Drawer(4).draw(row.expand(count, -1).contiguous(), columns_of([Controls(min_p=min_p)] * count), uniforms)
    assert set(drawn.ids) == {token for token, logit in enumerate(row.tolist()) if logit >= bound}


def test_what_top_k_keeps_without_a_weight_cannot_be_drawn(path: str) -> None:
    logits = torch.tensor([[-60.0, 0.0, -50.0, -70.0]])
    drawn = Drawer(4).draw(logits, columns_of([Controls(top_k=3)]), [0.5], [3], keeps=True)
    assert drawn.kept is not None
    assert drawn.kept.tolist() == [[0b10]]
    assert drawn.scores == [(0.0, 1, [(1, 0.0)])]


def test_draws_of_many_rows_by_several_threads(path: str) -> None:
    """Rows, here parts of longer ones, are taken by whichever thread is free, and each thread's
    memory is its own.
    """
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(40, 9010, generator=generator) * 3)[:, 5:9006]
    controls = [Controls(0.7, 0.0, 40 * (row % 2), 0.9 if row % 3 else 1.0) for row in range(40)]
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64).tolist()
    expected, _ = sample_whole_rows(logits, controls, uniforms)
    drawer, before = Drawer(9001), torch.get_num_threads()
    for threads in (4, 1, 7):
        torch.set_num_threads(threads)
        try:
            assert drawer.draw(logits, columns_of(controls), uniforms).ids == expected
        finally:
            torch.set_num_threads(before)


def test_top_p_keeps_its_share(path: str) -> None:
    row = row_of(3, 40_003, 0.0, 1.0, 0.0)
    found = NativeRow(len(row))
    total = found.weigh(row, float(row.max()))
    target = share_of_one(total, 0.9)
    ids, weights = found.prefix(target)
    lowest = int(weights[row[ids].argmin()])
    assert target <= int(weights.sum()) < target + lowest
