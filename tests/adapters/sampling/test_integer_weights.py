"""Weights of tokens as integers: no result depends on how many are computed at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from adapters import row_kernels
from adapters.sampling.truncation import beyond_shares
from adapters.sampling.weights import (
    exponential_,
    point_in_one,
    points_in,
    share_of,
    share_of_one,
    weight_bits,
    weights_of,
    weights_of_probabilities,
)


@given(total=st.integers(1, 2**62), part=st.floats(0, 1))
@example(total=2**53 + 1, part=1.0)  # a float64 is less
def test_one_row_is_rounded_as_many_are(total: int, part: float) -> None:
    totals, parts = torch.tensor([total]), torch.tensor([part], dtype=torch.float64)
    assert share_of(totals, parts).tolist() == [share_of_one(total, part)]
    assert points_in(totals, parts).tolist() == [point_in_one(total, part)]
    assert 0 <= point_in_one(total, part) < total
    assert share_of_one(total, part) == total if part == 1 else 0 <= share_of_one(total, part) <= total


@given(seed=st.integers(0, 2**32), size=st.integers(1, 700), start=st.integers(0, 9))
def test_an_exponential_depends_on_its_own_value_alone(seed: int, size: int, start: int) -> None:
    """Not on its place, nor on how many are computed at once: a weight is the same among
    candidates and in a row.
    """
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 10 - 20
    part = values[start : start + size].clone()
    assert torch.equal(exponential_(part), exponential_(values)[start : start + size])


@pytest.mark.parametrize("vocab_size", [1, 32_000, 262_143, 262_144, 10**6])
def test_a_row_of_equal_weights_does_not_overflow(vocab_size: int) -> None:
    assert vocab_size << weight_bits(vocab_size) < 2**62


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_cannot_be_sampled_has_no_weight(odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no kernel's exponential makes 0 of NaN."""
    monkeypatch.setattr(row_kernels, "_kernels", None)
    rows = torch.tensor([[0.0, 1.0, -1.0], [odd, odd, odd], [odd, 0.0, 1.0]])
    found = weights_of(rows)
    alone = weights_of(rows[:1])
    assert torch.equal(found[:1], alone)
    assert not found[1].any()
    assert bool(found[2].any()) == (odd < 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_share_of_1_keeps_tokens_without_a_weight(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0, -60.0], [0.0, -60.0]], dtype=dtype)
    ((some, beyond),) = beyond_shares(rows, lambda some: weights_of(rows[some]), [1.0, 0.9])
    assert (some.start, beyond.tolist()) == (0, [[False, False], [False, True]])


@pytest.mark.parametrize("power", [0, -1, -1000, -1022, -1023, -1073])
def test_probabilities_of_any_size_have_the_same_weights(power: int) -> None:
    """Subnormal ones, too: the lowest of these is half of the highest."""
    rows = torch.tensor([[1.0, 0.0, 0.5]], dtype=torch.float64)
    assert torch.equal(weights_of_probabilities(rows * 2.0**power), weights_of_probabilities(rows))
