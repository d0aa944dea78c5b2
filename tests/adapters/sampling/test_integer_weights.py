"""Weights of tokens as integers: no result depends on how many are computed at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.sampling.weights import exponential_, point_in_one, points_in, share_of, share_of_one, weight_bits


@given(total=st.integers(1, 2**62), part=st.floats(0, 1))
def test_one_row_is_rounded_as_many_are(total: int, part: float) -> None:
    totals, parts = torch.tensor([total]), torch.tensor([part], dtype=torch.float64)
    assert share_of(totals, parts).tolist() == [share_of_one(total, part)]
    assert points_in(totals, parts).tolist() == [point_in_one(total, part)]
    assert 0 <= point_in_one(total, part) < total
    assert 0 <= share_of_one(total, part) <= total


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
