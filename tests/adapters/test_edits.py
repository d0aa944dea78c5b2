"""Edits over many rows equal the formula, row by row, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import (
    Allow,
    Ban,
    Bias,
    Scale,
    apply_bitmask,
    apply_sparse,
    bitmask_of,
    count_allowed,
    is_allowed,
)

VOCAB = 70

ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8, unique=True)


@st.composite
def sparse_edits(draw):
    token_ids = draw(ids)
    kind = draw(st.sampled_from(["bias", "scale", "ban"]))
    if kind == "ban":
        return Ban.of(token_ids)
    if kind == "bias":
        values = draw(st.lists(st.floats(-100, 100, width=32), min_size=len(token_ids), max_size=len(token_ids)))
        return Bias.of(token_ids, values)
    factors = draw(st.lists(st.floats(0.5, 2, width=32), min_size=len(token_ids), max_size=len(token_ids)))
    return Scale.of(token_ids, factors)


def reference(row: np.ndarray, edit) -> None:
    for i, token in enumerate(edit.token_ids.tolist()):
        if isinstance(edit, Ban):
            row[token] = -np.inf
        elif isinstance(edit, Bias):
            row[token] += float(edit.values[i])
        else:
            factor = float(edit.factors[i])
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor


@settings(max_examples=examples(100), deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 3), sparse_edits()), max_size=12), seed=st.integers(0, 999))
def test_sparse_edits_keep_each_rows_order(edits, seed) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = logits.double().numpy().copy()
    for row, edit in edits:
        reference(expected[row], edit)
    apply_sparse(logits, edits)
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=examples(50), deadline=None)
@given(edits=st.lists(sparse_edits(), min_size=1, max_size=4), seed=st.integers(0, 999))
def test_a_row_does_not_depend_on_its_batch_mates(edits, seed) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed))
    alone = logits[1:2].clone()
    apply_sparse(logits, [(row, edit) for edit in edits for row in (2, 1, 0)])
    apply_sparse(alone, [(0, edit) for edit in edits])
    assert torch.equal(logits[1], alone[0])


@settings(max_examples=examples(50), deadline=None)
@given(masks=st.lists(st.sets(st.integers(0, VOCAB - 1)), min_size=1, max_size=4), width=st.integers(1, 130))
def test_bitmasks_narrower_equal_and_wider_than_the_row(masks, width) -> None:
    logits = torch.zeros(len(masks), width)
    apply_bitmask(logits, torch.stack([bitmask_of(mask, VOCAB) for mask in masks]))
    for row, mask in zip(logits, masks, strict=True):
        assert set(row.isfinite().nonzero().flatten().tolist()) == {i for i in mask if i < width}


@settings(max_examples=examples(50), deadline=None)
@given(
    words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=8, max_size=8),
    width=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 999),
)
def test_what_a_bitmask_keeps_is_untouched(words, width, dtype, seed) -> None:
    bitmask = torch.tensor(words, dtype=torch.int32).view(2, 4)
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = logits.clone()
    for i, row in enumerate([2, 0]):
        for token in range(width):
            if not is_allowed(bitmask[i], token):
                expected[row, token] = -torch.inf
    apply_bitmask(logits, bitmask, rows=[2, 0])
    assert torch.equal(logits, expected)


@settings(max_examples=examples(50), deadline=None)
@given(masked=st.sets(st.integers(0, 1999), max_size=5), width=st.integers(1, 2100), seed=st.integers(0, 999))
def test_a_bitmask_with_few_bits_clear(masked, width, seed) -> None:
    bitmask = bitmask_of(set(range(2000)) - masked, 2000)
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    expected[1, [token for token in masked if token < width]] = -torch.inf
    expected[1, 2000:] = -torch.inf
    apply_bitmask(logits, bitmask[None], rows=[1])
    assert torch.equal(logits, expected)


@settings(max_examples=examples(50), deadline=None)
@given(allowed=st.sets(st.integers(0, 1999), max_size=5), width=st.integers(1, 2100), seed=st.integers(0, 999))
def test_a_bitmask_with_few_bits_set(allowed, width, seed) -> None:
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    expected[1] = -torch.inf
    kept = [token for token in allowed if token < width]
    expected[1, kept] = logits[1, kept]
    apply_bitmask(logits, bitmask_of(allowed, 2000)[None], rows=[1])
    assert torch.equal(logits, expected)


def test_a_bitmask_with_few_bits_set_does_not_hide_a_broken_row() -> None:
    logits = torch.zeros(2, 2000)
    logits[0, 7], logits[1, 7] = torch.nan, torch.inf
    apply_bitmask(logits, torch.stack([bitmask_of({3}, 2000)] * 2))
    assert logits.isnan().any(-1).tolist() == [True, True]


def test_a_bitmask_does_not_hide_what_is_wrong_with_a_row() -> None:
    for width in (4, 2000):  # few bits clear in the second
        logits = torch.zeros(1, width)
        logits[0, :4] = torch.tensor([torch.nan, torch.inf, torch.nan, torch.inf])
        apply_bitmask(logits, bitmask_of(set(range(width)) - {2, 3}, width)[None])
        assert logits[0, :4].isnan().tolist() == [True, False, True, True]
        assert logits[0, 1] == torch.inf


def test_a_bitmask_touches_only_the_rows_named() -> None:
    logits = torch.ones(3, VOCAB)
    apply_bitmask(logits, bitmask_of([1], VOCAB)[None], rows=[1])
    assert (logits[[0, 2]] == 1).all()
    assert logits[1].isfinite().nonzero().flatten().tolist() == [1]


def test_a_mask_leaves_what_was_masked_before() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0]])
    apply_bitmask(logits, bitmask_of([0, 1], 3)[None])
    assert logits.tolist() == [[-torch.inf, 1.0, -torch.inf]]


@settings(max_examples=examples(50), deadline=None)
@given(mask=st.sets(st.integers(0, VOCAB - 1)), num_tokens=st.integers(0, VOCAB + 40))
def test_bits(mask, num_tokens) -> None:
    bitmask = Allow.of(mask, VOCAB).bitmask
    assert bitmask.dtype == torch.int32
    assert count_allowed(bitmask, num_tokens) == sum(token_id < num_tokens for token_id in mask)
    assert {i for i in range(200) if is_allowed(bitmask, i)} == mask


@settings(max_examples=examples(50), deadline=None)
@given(st.data(), st.integers(1, 400), st.integers(1, 3))
def test_bits_of_any_width_are_counted(data, width, stride) -> None:
    """Also where the bitmask is a column of a larger tensor, or is narrower than the tokens."""
    mask = data.draw(st.sets(st.integers(0, width - 1)))
    num_tokens = data.draw(st.integers(0, width + 100))
    whole = bitmask_of(mask, width)
    bitmask = torch.full((len(whole), stride), -1, dtype=torch.int32)
    bitmask[:, 0] = whole
    assert count_allowed(bitmask[:, 0], num_tokens) == sum(token_id < num_tokens for token_id in mask)


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_an_id_outside_the_vocabulary_has_no_bit(token_id) -> None:
    with pytest.raises(ValueError, match="between 0 and 69"):
        bitmask_of([1, token_id], VOCAB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_rows(dtype) -> None:
    logits = torch.ones(2, VOCAB, dtype=dtype)
    apply_sparse(logits, [(0, Bias.of([3], [2.0])), (1, Scale.of([4], [2.0])), (1, Ban.of([5]))])
    assert logits[0, 3] == 3
    assert logits[1, 4] == 0.5
    assert logits[1, 5] == -torch.inf
