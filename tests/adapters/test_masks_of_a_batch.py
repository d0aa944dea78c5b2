"""Packed masks of a batch: a row has the same bits alone and beside others, whatever its values."""

from __future__ import annotations

import numpy as np
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain, apply_edits, plan_rows
from adapters.contract import (
    Allow,
    Ban,
    Bias,
    Context,
    Edit,
    Processor,
    Scale,
    Stage,
    SteeringProcessor,
    apply_allows,
    apply_bitmask,
    bitmask_of,
    highest_values,
    is_allowed,
    mask_rows,
)
from adapters.vocabulary import Vocabulary

V = 700
"""Wide enough for masks of few tokens, of all but few, and of many."""

ids = st.integers(0, V - 1)
some_ids = st.sets(ids, max_size=6)
values = st.sampled_from([0.0, -0.0, 1.5, -2.25, 3e38, -torch.inf, torch.inf, torch.nan])


@st.composite
def masks(draw: st.DrawFn) -> Allow:
    """A mask that keeps few tokens, all but few, or many; of the row's width, narrower or wider."""
    few = draw(some_ids)
    width = draw(st.sampled_from([V, V - 33, V + 40]))
    every, third = set(range(min(width, V))), set(range(0, min(width, V), 3))
    kept = draw(st.sampled_from([few, every - few, third ^ few]))
    return Allow(bitmask_of({token_id for token_id in kept if token_id < width}, width))


@st.composite
def rows_of_logits(draw: st.DrawFn, count: int) -> torch.Tensor:
    """Float32 ``[count, V]`` with some special values."""
    logits = torch.randn(count, V, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    for row, column, value in draw(st.lists(st.tuples(st.integers(0, count - 1), ids, values), max_size=6)):
        logits[row, column] = value
    return logits


def bits(logits: torch.Tensor) -> torch.Tensor:
    """Numbers that are equal where the bits are, NaN included."""
    return logits.view(torch.int32)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_masks_together_equal_masks_alone(data: st.DataObject, dtype: torch.dtype) -> None:
    shared = data.draw(masks())
    chosen = data.draw(st.lists(st.one_of(st.just(shared), masks()), min_size=1, max_size=5))
    logits = data.draw(rows_of_logits(len(chosen) + 1)).to(dtype)
    order = data.draw(st.permutations(range(len(chosen))))
    alone = [logits[row : row + 1].clone() for row in range(len(chosen))]
    untouched = logits[-1].clone()
    before = logits.clone()
    apply_allows(logits, [(row, chosen[row]) for row in order])
    for row, mask in enumerate(chosen):
        apply_bitmask(alone[row], mask.bitmask[None])
        assert torch.equal(alone[row][0].view(torch.uint8), logits[row].view(torch.uint8))
        _check_masked(before[row], logits[row], mask)
    assert torch.equal(untouched.view(torch.uint8), logits[-1].view(torch.uint8))


def _check_masked(before: torch.Tensor, after: torch.Tensor, mask: Allow) -> None:
    allowed = torch.tensor([is_allowed(mask.bitmask, token_id) for token_id in range(V)])
    assert torch.equal(after[allowed].nan_to_num(7.0), before[allowed].nan_to_num(7.0))
    broken = before.isnan() | (before == torch.inf)
    assert (after[~allowed & ~broken] == -torch.inf).all()
    assert after[~allowed & broken].isnan().all()


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), count=st.integers(1, 5))
def test_the_highest_value_shows_a_broken_row(data: st.DataObject, count: int) -> None:
    logits = data.draw(rows_of_logits(count))
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
    expected = [float(np.max(logits[row].numpy())) for row in chosen]
    np.testing.assert_array_equal(highest_values(logits, chosen), expected)


def test_rows_are_masked_whole() -> None:
    logits = torch.ones(3, V)
    mask_rows(logits, [2, 0])
    assert logits.amax(-1).tolist() == [-torch.inf, 1.0, -torch.inf]


class _Returns(SteeringProcessor):
    name = "returns"

    def __init__(self, edit: Edit, stage: Stage) -> None:
        self._edit, self.stage = edit, stage  # type: ignore[misc]

    def edit(self) -> Edit:
        return self._edit


@st.composite
def processors(draw: st.DrawFn) -> Processor:
    """A processor with a mask or a sparse edit."""
    kind = draw(st.sampled_from(["allow", "ban", "bias", "scale"]))
    if kind == "allow":
        return _Returns(draw(masks().filter(lambda mask: len(mask.bitmask) <= -(-V // 32))), Stage.MASK)
    token_ids = sorted(draw(some_ids))
    if kind == "ban":
        return _Returns(Ban.of(token_ids), Stage.MASK)
    numbers = draw(st.lists(st.floats(0.5, 4, width=32), min_size=len(token_ids), max_size=len(token_ids)))
    return _Returns((Bias if kind == "bias" else Scale).of(token_ids, numbers), Stage.PENALTY)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), chosen=st.lists(st.lists(processors(), max_size=5), min_size=1, max_size=4))
def test_chains_together_equal_chains_alone(data: st.DataObject, chosen: list[list[Processor]]) -> None:
    logits = data.draw(rows_of_logits(len(chosen)))
    alone = logits.clone()
    context = Context(Vocabulary(V), end_token_ids=frozenset({1}))
    chains = [(row, ProcessorChain(members, context)) for row, members in enumerate(chosen)]
    for _, chain in chains:
        chain.start([3])
    apply_edits(logits, plan_rows(chains)[0])
    for row, chain in chains:
        apply_edits(alone[row : row + 1], plan_rows([(0, chain)])[0])
    assert torch.equal(bits(logits), bits(alone))


class _Rewrites(SteeringProcessor):
    """Returns one edit for ever, and writes another token into its bitmask at each step."""

    name = "rewrites"
    stage = Stage.MASK

    def __init__(self) -> None:
        self._allow = Allow.of([], V)

    def edit(self) -> Edit:
        self._allow.bitmask[:] = bitmask_of([self.num_generated], V)
        return self._allow


def test_a_third_party_may_write_into_its_mask() -> None:
    chain = ProcessorChain([_Rewrites()], Context(Vocabulary(V), end_token_ids=frozenset({1})))
    chain.start([3])
    for step in range(3):
        logits = torch.zeros(1, V)
        planned, _ = plan_rows([(0, chain)])
        apply_edits(logits, planned)
        assert logits[0].isfinite().nonzero().flatten().tolist() == [step]
        chain.accept(step, chain.position)
