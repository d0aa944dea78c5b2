"""The native kernel of log probabilities: against its definition, the same bits in all paths."""

from __future__ import annotations

import math

import pytest
import torch
from chosen_paths import plain_c
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.embedded.native.scoring import can_score, score

WIDTHS = [1, 2, 63, 64, 65, 129, 700, 3000]

pytestmark = pytest.mark.native


@st.composite
def rows_of_logits(draw: st.DrawFn) -> torch.Tensor:
    """Rows ``[R, V]`` of which some tie and some are masked, and each has a finite logit."""
    width, count = draw(st.sampled_from(WIDTHS)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows = torch.randn(count, width + 9, generator=generator) * draw(st.sampled_from([0.1, 3.0, 300.0]))
    if draw(st.booleans()):
        rows = rows.round()
    rows[torch.rand(rows.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.99]))] = -math.inf
    layout = draw(st.sampled_from(["rows", "columns", "part"]))
    rows = rows.t().contiguous().t() if layout == "columns" else rows
    rows = rows[:, 5 : 5 + width]
    rows = rows.contiguous() if layout == "rows" else rows
    rows[:, draw(st.integers(0, width - 1))] = 0.5
    return rows.double() / 3 if draw(st.booleans()) else rows


def unranked(width: int) -> st.SearchStrategy[slice | torch.Tensor | None]:
    some = st.sets(st.integers(0, width - 1), max_size=9).map(lambda ids: torch.tensor(sorted(ids), dtype=torch.int64))
    return st.none() | st.integers(0, width).map(lambda first: slice(first, width)) | some


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_log_probabilities_ranks_and_the_highest(path: str, data: st.DataObject) -> None:
    rows = data.draw(rows_of_logits())
    count, width = rows.shape
    tokens = data.draw(st.lists(st.integers(0, width - 1), min_size=count, max_size=count))
    wanted = data.draw(st.lists(st.sampled_from([0, 1, 5, 20, width, 2 * width]), min_size=count, max_size=count))
    never = data.draw(unranked(width))
    divisors = data.draw(st.none() | st.just(torch.linspace(0.3, 2.0, count, dtype=torch.float64)))
    found = score(rows, tokens, wanted, never, divisors)

    expected = (rows.double() / (1.0 if divisors is None else divisors[:, None])).log_softmax(-1)
    is_ranked = torch.ones(width, dtype=torch.bool)
    if never is not None:
        is_ranked[never] = False
    for row, (token, (value, rank, top)) in enumerate(zip(tokens, found, strict=True)):
        assert value == pytest.approx(float(expected[row, token]), abs=1e-12, rel=1e-14)
        logits = rows[row].tolist()
        ahead = [i for i in range(width) if is_ranked[i] and (-logits[i], i) < (-logits[token], token)]
        assert rank == 1 + len(ahead)
        best = sorted((i for i in range(width) if is_ranked[i]), key=lambda i: (-logits[i], i))[: wanted[row]]
        best = [i for i in best if logits[i] > -math.inf]
        assert [token_id for token_id, _ in top] == best
        assert [value for _, value in top] == pytest.approx(expected[row, best].tolist(), abs=1e-12, rel=1e-14)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_a_row_has_the_same_bits_alone_and_in_plain_c(path: str, data: st.DataObject) -> None:
    """And a token's value is that which it has among the highest."""
    rows = data.draw(rows_of_logits())
    tokens = rows.argmax(-1).tolist()
    found = score(rows, tokens, [3] * len(rows))
    alone = [score(rows[i : i + 1].clone(), [token], [3]) for i, token in enumerate(tokens)]
    assert found == [one for (one,) in alone]
    assert [one.top[0] for one in found] == [(token, one.logprob) for token, one in zip(tokens, found, strict=True)]
    with plain_c(torch.float32):
        assert score(rows, tokens, [3] * len(rows)) == found
    assert score(rows.double(), tokens, [3] * len(rows)) == found
    assert score(rows, tokens, [3] * len(rows), divisors=torch.ones(len(rows), dtype=torch.float64)) == found


def test_several_threads_score_large_rows(path: str) -> None:
    logits = torch.randn(7, 70_003, generator=torch.Generator().manual_seed(2))
    tokens = [0, 1, 64, 70_002, 35_000, 9, 70_001]
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(score(logits, tokens, [4] * 7, slice(70_000, None)))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
    assert [one.logprob for one in found[0]] == pytest.approx(
        logits.double().log_softmax(-1)[range(7), tokens].tolist(), abs=1e-12
    )


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_whose_highest_logit_is_not_finite_has_none(path: str, odd: float) -> None:
    rows = torch.zeros(2, 100)
    rows[0, 70] = odd
    if odd == -math.inf:
        rows[0] = odd
    bad, good = score(rows, [3, 3], [2, 2])
    assert math.isnan(bad.logprob)
    assert bad[1:] == (1, [])
    assert good.logprob == pytest.approx(-math.log(100))
    assert good.rank == 4
    assert [token for token, _ in good.top] == [0, 1]


def test_a_tie_without_a_rank_is_not_ahead(path: str) -> None:
    (found,) = score(torch.zeros(1, 8), [5], [3], torch.tensor([2, 6]))
    assert found.rank == 5
    assert [token for token, _ in found.top] == [0, 1, 3]


def test_what_lies_behind_a_row_has_no_rank(path: str) -> None:
    """A caller may know a wider vocabulary than the rows have."""
    memory = torch.full((2, 16), 50.0)
    rows = memory[:, :8].zero_()
    assert score(rows, [0, 1], [12, 3], slice(12, None)) == score(rows.clone(), [0, 1], [8, 3])
    assert score(rows, [0, 1], [8, 8], torch.tensor([5, 2])) == score(rows, [0, 1], [8, 8], torch.tensor([2, 5]))


def test_arguments(path: str) -> None:
    rows = torch.zeros(2, 8)
    for tokens in ([0, 8], [-1, 0]):
        with pytest.raises(IndexError, match="tokens must be from 0 to 7"):
            score(rows, tokens, [0, 0])
    for never in (torch.tensor([2, 8]), torch.tensor([-1])):
        with pytest.raises(IndexError, match="never must be from 0 to 7"):
            score(rows, [0, 1], [0, 0], never)
    for tokens, counts in (([0], [0, 0]), ([0, 1], [0]), ([0, 1, 2], [0, 0])):
        with pytest.raises(ValueError, match="2 rows need as many tokens and counts"):
            score(rows, tokens, counts)
    assert score(rows[:0], [], []) == []
    assert can_score(rows)
    assert not can_score(rows.bfloat16())
    assert not can_score(rows.requires_grad_())
