"""Rejection sampling of drafts that were themselves sampled: the target's distribution, exactly.

The engine does not need it to verify its drafts: it samples every position from the target with the
position's own random number and compares, which keeps the tokens and not only their distribution.
A draft that was sampled from a known distribution is accepted more often this way.
"""

from __future__ import annotations

import torch


def residual(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Distribution of the token that replaces a rejected one: ``max(p - q, 0)``, normalised.

    Args:
        target: Probabilities p, float64 ``[..., V]``.
        draft: Probabilities q, float64 ``[..., V]``. Where they equal p nothing is ever rejected;
            the result is then p.
    """
    left = (target - draft).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.where(total > 0, torch.ones_like(total)), target)


def rejection_sample(
    drafted: torch.Tensor,
    draft: torch.Tensor,
    target: torch.Tensor,
    coins: torch.Tensor,
    uniforms: torch.Tensor,
) -> list[int]:
    """The accepted tokens of a draft, and one more: each distributed as if sampled from the target.

    Source: Leviathan et al. 2023, algorithm 1. A drafted token x is accepted with probability
    ``min(1, p(x) / q(x))``. The first one that is not is replaced by a sample of the `residual`,
    and ends the draft; if all are accepted, a sample of the target follows.

    Args:
        drafted: Drafted ids, int64 ``[K]``, sampled from `draft`.
        draft: Probabilities q that they were sampled from, float64 ``[K, V]``.
        target: Probabilities p of the target at their positions and the next, float64
            ``[K + 1, V]``.
        coins: Random numbers in [0, 1) that decide on acceptance, float64 ``[K]``.
        uniforms: Random numbers in [0, 1) for the token that is not drafted, float64 ``[K + 1]``;
            independent of `coins` and of those that the draft was sampled with.

    Returns:
        1 to K + 1 ids.

    Raises:
        ValueError: the shapes do not fit.
    """
    count = len(drafted)
    if draft.shape[:1] != (count,) or target.shape != (count + 1, *draft.shape[1:]):
        raise ValueError(
            f"{count} drafted tokens need draft [{count}, V] and target [{count + 1}, V], "
            f"got {list(draft.shape)} and {list(target.shape)}"
        )
    if len(coins) != count or len(uniforms) != count + 1:
        raise ValueError(f"expected {count} coins and {count + 1} uniforms, got {len(coins)} and {len(uniforms)}")
    index = drafted[:, None]
    accepted = coins * draft.gather(1, index)[:, 0] < target[:count].gather(1, index)[:, 0]
    number = int(accepted.long().cumprod(0).sum())
    row = target[number] if number == count else residual(target[number], draft[number])
    return [*drafted[:number].tolist(), _sample(row, float(uniforms[number]))]


def _sample(probabilities: torch.Tensor, uniform: float) -> int:
    """Inverse transform sampling, in the order of ids; never an id of probability 0."""
    cumulative = probabilities.cumsum(0)
    point = uniform * float(cumulative[-1])
    found = int(torch.searchsorted(cumulative, torch.tensor([point], dtype=cumulative.dtype), right=True))
    last = int(probabilities.nonzero()[-1])  # rounding may put the point at the end
    return min(found, last)
