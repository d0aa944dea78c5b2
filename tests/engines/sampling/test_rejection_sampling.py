"""Rejection sampling: whatever a draft's distribution is, tokens have the target's."""

from __future__ import annotations

import pytest
import torch

from worker.engines.embedded.sampling import rejection_sample, residual

WIDTH = 6
SAMPLES = 4000
CHI_SQUARE = 20.5
"""99.9 % quantile of 5 degrees of freedom."""


def distributions(rows: int, seed: int, sharpness: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)).softmax(-1)


def run(draft: torch.Tensor, target: torch.Tensor, seed: int) -> list[list[int]]:
    """Many samples, each of its own draft."""
    generator = torch.Generator().manual_seed(seed)
    count = len(draft)
    drafted = draft.multinomial(SAMPLES, replacement=True, generator=generator).T
    coins = torch.rand(SAMPLES, count, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(SAMPLES, count + 1, generator=generator, dtype=torch.float64)
    return [rejection_sample(drafted[i], draft, target, coins[i], uniforms[i]) for i in range(SAMPLES)]


def chi_square(tokens: list[int], expected: torch.Tensor) -> float:
    found = torch.bincount(torch.tensor(tokens), minlength=WIDTH).double()
    wanted = expected * len(tokens)
    return float(((found - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize("seed", [0, 1])
def test_each_position_has_the_targets_distribution(seed: int) -> None:
    draft, target = distributions(2, seed), distributions(3, seed + 100)
    samples = run(draft, target, seed)
    for position in range(3):
        tokens = [one[position] for one in samples if len(one) > position]
        assert chi_square(tokens, target[position]) < CHI_SQUARE
    assert {len(one) for one in samples} == {1, 2, 3}


def test_a_draft_of_the_targets_distribution_is_always_accepted() -> None:
    target = distributions(3, 7)
    assert {len(one) for one in run(target[:2], target, 1)} == {3}


def test_what_the_target_never_samples_is_never_accepted() -> None:
    target = torch.tensor([[0.5, 0.5, 0, 0, 0, 0]] * 2, dtype=torch.float64)
    draft = torch.tensor([[0.0, 0, 0.5, 0.5, 0, 0]], dtype=torch.float64)
    samples = run(draft, target, 3)
    assert {len(one) for one in samples} == {1}
    assert {one[0] for one in samples} == {0, 1}


def test_the_end_of_the_range_of_a_random_number_samples_a_token() -> None:
    target = torch.tensor([[0.25, 0.75, 0, 0, 0, 0]], dtype=torch.float64)
    empty = torch.empty(0, dtype=torch.float64)
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert rejection_sample(torch.empty(0, dtype=torch.int64), target[:0], target, empty, last) == [1]


def test_residual() -> None:
    target = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    draft = torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64)
    assert residual(target, draft).tolist() == [1.0, 0.0, 0.0]
    assert residual(target, target).tolist() == target.tolist()


def test_shapes_that_do_not_fit_are_errors() -> None:
    draft, target = distributions(2, 0), distributions(2, 1)
    with pytest.raises(ValueError, match=r"2 drafted tokens need draft \[2, V\] and target \[3, V\]"):
        rejection_sample(torch.tensor([0, 1]), draft, target, torch.rand(2), torch.rand(3))
    with pytest.raises(ValueError, match="expected 2 coins and 3 uniforms, got 1 and 3"):
        rejection_sample(torch.tensor([0, 1]), draft, distributions(3, 1), torch.rand(1), torch.rand(3))
