"""The top-n log probabilities of a row, whatever ties and whatever is masked."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretend_gpu import PretendGpu

from worker.engines import TokenLogprob
from worker.engines.embedded.native import scoring
from worker.engines.embedded.sampling import token_logprobs

LOGITS = st.sampled_from([-math.inf, -math.inf, -1.5, 0.0, 0.0, 2.0])


@pytest.fixture(scope="module", params=["native kernels", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those that compute."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "torch":
            patched.setattr(scoring, "can_score", lambda logits: False)
        yield


def places(entries: list[TokenLogprob]) -> list[tuple[int, int]]:
    return [(one.token_id, one.rank) for one in entries]


def values(entries: list[TokenLogprob]) -> list[float]:
    return [one.logprob for one in entries]


def top_of(row: torch.Tensor, count: int) -> list[TokenLogprob]:
    """All of a row sorted: by falling log probability, ties by rising id."""
    logprobs = row.double().log_softmax(-1).tolist()
    ranked = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))
    found = [token for token in ranked[:count] if logprobs[token] > -math.inf]
    return [TokenLogprob(token, logprobs[token], rank) for rank, token in enumerate(found, start=1)]


@given(
    st.lists(st.tuples(st.lists(LOGITS, min_size=9, max_size=9), st.integers(0, 12)), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_the_top_n_is_the_beginning_of_the_sorted_row(wanted: list[tuple[list[float], int]], token: int) -> None:
    rows = torch.tensor([row for row, _ in wanted])
    rows[:, token] = 0.0  # the sampled one can be sampled
    counts = [count for _, count in wanted]
    found = token_logprobs(rows, [token] * len(rows), counts)
    for entries, row, count in zip(found, rows, counts, strict=True):
        expected = top_of(row, count)
        assert places(entries[1:]) == places(expected)
        assert values(entries[1:]) == pytest.approx(values(expected), abs=1e-12)


@pytest.mark.parametrize("value", [-math.inf, 0.0])
def test_a_wide_tie_is_not_listed(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few tokens are left of a row the masked ones tie: listing them takes tenths of a second
    with a large vocabulary, in each step.
    """
    row = torch.full((1, 4096), value)
    row[0, 7] = 3.0
    listed, tolist = [], torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> object:
        listed.append(tensor.numel())
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    (entries,) = token_logprobs(row, [7], [20])
    assert [one.token_id for one in entries[:3]] == [7, 7, 0][: len(entries)]
    assert max(listed) <= 21


def test_rows_on_a_device_are_ranked_there() -> None:
    """A prompt's log probabilities in float64 are gigabytes."""
    rows = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    expected = token_logprobs(rows, [3, 2], [3, 0])
    with PretendGpu() as gpu:
        found = token_logprobs(rows.to("cuda"), [3, 2], [3, 0])
    for there, here in zip(found, expected, strict=True):
        assert places(there) == places(here)
        assert values(there) == pytest.approx(values(here), abs=1e-12)
    assert [entries[0].rank for entries in found] == [2, 3]
    assert not gpu.computed & {"cpu", "numpy"}
