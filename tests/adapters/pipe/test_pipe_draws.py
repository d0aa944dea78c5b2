"""Draws: frequencies, shared rows, generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import grid
from torch.utils._python_dispatch import TorchDispatchMode

from adapters.pipe import LogitsPipe, LogitsProcessor, MinP, Sample, Softmax, Temperature, TensorType, TopK, TopP

DRAWS = 5_000_000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_frequencies(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Nothing outside the support; chi-square of the bins that expect 20 or more, against 6
    standard deviations.
    """
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    assert int(counts[expected == 0].sum()) == 0, "a masked token was drawn"
    mean = expected.double() * len(tokens)
    bins = mean >= 20
    rest_mean, rest = float(mean[~bins].sum()), float(counts[~bins].sum())
    assert abs(rest - rest_mean) <= 6 * rest_mean**0.5 + 1
    chi_square = float(((counts - mean)[bins] ** 2 / mean[bins]).sum())
    num_bins = int(bins.sum())
    assert chi_square <= num_bins + 6 * (2 * num_bins) ** 0.5 + 10


CHAINS: dict[str, list[LogitsProcessor]] = {
    "plain": [],
    "top-k": [TopK(top_k=100)],
    "top-p": [TopP(top_p=0.7)],
    "min-p": [MinP(min_p=0.1)],
    "sequential": [TopK(top_k=100), TopP(top_p=0.5)],
}


@pytest.mark.parametrize("case", grid(CHAINS, fast=3))
def test_five_million_draws_follow_the_probabilities(case: str) -> None:
    logits = torch.randn(1, 32000, generator=seeded(1)) * 2
    filters = [Temperature(temperature=0.8), Softmax(), *CHAINS[case]]
    expected = LogitsPipe(filters)(logits)[0]
    rows = torch.zeros(DRAWS, dtype=torch.int32)
    tokens = LogitsPipe([*filters, Sample()])(logits, indices=rows, generator=seeded(2))
    assert tokens.dtype == torch.int32
    assert_frequencies(tokens, expected)


def test_five_million_joint_draws() -> None:
    probs = (torch.randn(1, 32000, generator=seeded(3)) * 2).softmax(-1)
    in_k = probs >= probs.topk(100).values[:, -1:]
    in_p = LogitsPipe([TopP(top_p=0.3)])(probs) > 0
    expected = torch.where(in_k & in_p, probs, 0.0)[0].double()
    chain = [TopK(joint_topk_topp=True, top_k=100), TopP(top_p=0.3), Sample()]
    pipe = LogitsPipe(chain, input_type=TensorType.PROBS)
    tokens = pipe(probs, indices=torch.zeros(DRAWS, dtype=torch.int64), generator=seeded(4))
    assert_frequencies(tokens, expected / expected.sum())


def test_five_million_draws_from_logits() -> None:
    logits = torch.randn(1, 111, generator=seeded(5)) * 2
    pipe = LogitsPipe([TopK(top_k=10), Sample()], input_type=TensorType.LOGITS)
    tokens = pipe(logits, indices=torch.zeros(DRAWS, dtype=torch.int32), generator=seeded(6))
    kept = LogitsPipe([TopK(top_k=10)], input_type=TensorType.LOGITS)(logits)
    assert_frequencies(tokens, kept.double().softmax(-1)[0])


@pytest.mark.campaign
@pytest.mark.parametrize("width", [111, 32000, 128256])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("case", CHAINS)
def test_draws_over_many_shapes(case: str, width: int, scale: float) -> None:
    logits = torch.randn(1, width, generator=seeded(7)) * scale
    filters = [Softmax(), *CHAINS[case]]
    expected = LogitsPipe(filters)(logits)[0]
    for seed in range(4):
        rows = torch.zeros(DRAWS, dtype=torch.int32)
        assert_frequencies(LogitsPipe([*filters, Sample()])(logits, indices=rows, generator=seeded(seed)), expected)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_generator_decides(deterministic: bool) -> None:
    logits = torch.randn(50, 1000, generator=seeded(8))
    pipe = LogitsPipe([Softmax(), TopK(top_k=200), Sample(deterministic=deterministic)])
    first, again, other = (pipe(logits, generator=seeded(seed)) for seed in (9, 9, 10))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    generator = seeded(9)
    assert torch.equal(pipe(logits, generator=generator), first)
    assert not torch.equal(pipe(logits, generator=generator), first), "the generator has moved on"


def test_a_compile_time_generator_and_the_default_generator() -> None:
    logits = torch.zeros(64, 1000)
    pipe = LogitsPipe([Softmax(), Sample(generator=seeded(11))])
    assert torch.equal(pipe(logits), LogitsPipe([Softmax(), Sample()])(logits, generator=seeded(11)))
    state = torch.get_rng_state()
    first = LogitsPipe([Softmax(), Sample()])(logits)
    torch.set_rng_state(state)
    assert torch.equal(LogitsPipe([Softmax(), Sample()])(logits), first)
    assert first.unique().numel() > 1


def test_rows_are_drawn_by_their_place_alone() -> None:
    """Draw i takes the i-th number: the batch may be cut behind it, and other rows may change."""
    logits = torch.randn(200, 300, generator=seeded(12))
    pipe = LogitsPipe([Softmax(), TopP(top_p=0.9), Sample()])
    whole = pipe(logits, generator=seeded(13))
    assert torch.equal(pipe(logits[:70], generator=seeded(13)), whole[:70])
    changed = logits.clone()
    changed[0] = 0.0
    assert torch.equal(pipe(changed, generator=seeded(13))[1:], whole[1:])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_choose_the_rows(dtype: torch.dtype) -> None:
    probs = torch.zeros(3, 8)
    probs[0, 5] = probs[1, 2] = probs[2, 7] = 1.0
    pipe = LogitsPipe([Sample()], input_type=TensorType.PROBS)
    tokens = pipe(probs, indices=torch.tensor([2, 0, 0, 1, 2], dtype=dtype))
    assert tokens.tolist() == [7, 5, 5, 2, 7]
    assert tokens.dtype == dtype


def test_indices_of_every_row_are_no_indices() -> None:
    probs = torch.randn(100, 64, generator=seeded(14)).softmax(-1)
    pipe = LogitsPipe([TopK(top_k=20), Sample()], input_type=TensorType.PROBS)
    rows = torch.arange(100, dtype=torch.int32)
    assert torch.equal(pipe(probs, indices=rows, generator=seeded(15)), pipe(probs, generator=seeded(15)))


def test_parameters_per_row_belong_to_the_rows_not_to_the_draws() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.3], [0.3, 0.4, 0.3]])
    rows = torch.tensor([1, 0, 1] * 50)
    for compile_ in (True, False):
        pipe = LogitsPipe([TopK(), Sample()], compile=compile_, input_type=TensorType.PROBS)
        tokens = pipe(probs, indices=rows, top_k=torch.tensor([1, 3]), generator=seeded(16))
        assert set(tokens[rows == 0].tolist()) == {0}
        assert set(tokens[rows == 1].tolist()) == {0, 1, 2}


def test_top_k_1_of_equal_most_likely_tokens_gives_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0]] * 40)
    assert set(LogitsPipe([Softmax(), TopK(top_k=1), Sample()])(logits).tolist()) == {1}


class _Made(TorchDispatchMode):
    """Counts the elements of the tensors that operations make."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not any(result is each for each in args):
            self.count += result.numel()
        return result


def test_samples_of_many_rows_cost_what_they_are() -> None:
    """Twice the rows with twice the samples are twice the work."""

    def work(num_rows: int) -> int:
        rows = torch.arange(num_rows).repeat(8)
        pipe, probs = LogitsPipe([Sample()], input_type=TensorType.PROBS), torch.ones(num_rows, 4)
        with _Made() as counted:
            pipe(probs, indices=rows, generator=seeded(17))
        return counted.count

    assert work(400) < 3 * work(200)


@pytest.mark.parametrize("exponent", [-1074, -1040, -1000, 1000])
def test_a_power_of_two_changes_no_draw(exponent: int) -> None:
    """Also where the probabilities are subnormal: they need not sum to 1."""
    ratios = torch.tensor([[0.0, 1.0, 3.0, 2.0]], dtype=torch.float64)
    rows = torch.zeros(1000, dtype=torch.int64)
    sample = LogitsPipe([Sample()], input_type=TensorType.PROBS)
    expected = sample(ratios, indices=rows, generator=seeded(5))
    scaled = torch.tensor([[value * 2.0**exponent for value in ratios[0].tolist()]], dtype=torch.float64)
    assert torch.equal(sample(scaled, indices=rows, generator=seeded(5)), expected)
    assert set(expected.tolist()) == {1, 2, 3}
