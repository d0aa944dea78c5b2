"""One attention call over a part of the keys: its result and the log-sum-exp by which parts are put together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

_ATEN = torch.ops.aten
_MIN_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Shapes:
    """How the calls of a step may be shaped.

    Attributes:
        tokens: Query tokens per entry when a row has several; None means all of them.
        whole_segments: Whether every call reads whole segments; otherwise no more than it needs, in steps of 32 keys.
        query_multiple: The queries of an entry are padded to a multiple of this.
    """

    tokens: int | None = None
    whole_segments: bool = False
    query_multiple: int = 1

    def length(self, needed: int, size: int) -> int:
        """Keys to read of a segment of `size` tokens of which `needed` are seen."""
        return size if self.whole_segments else min(size, -(-needed // _MIN_LENGTH) * _MIN_LENGTH)


def partial_softmax(
    query: torch.Tensor,
    tokens: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    query_multiple: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with ``query [entries * tokens, H, D]`` to ``keys, values [entries, Hkv, L, D]``.

    Args:
        query: The queries of an entry, one token after another.
        tokens: Query tokens per entry.
        keys: May be a strided view.
        values: Likewise.
        mask: Additive, ``[entries, 1, tokens * H / Hkv, L]``; every query must see at least one key.
        scale: Factor of the scores.
        softcap: Bound of the scores, ``softcap * tanh(score / softcap)``.
        query_multiple: The queries of an entry are padded to a multiple of this.

    Returns:
        Outputs ``[entries * tokens, H, D]`` and float32 log-sum-exps of the scores ``[entries * tokens, H]``.
    """
    count, heads, width = query.shape
    entries, kv_heads = keys.shape[:2]
    # the heads that share keys ride along as queries, so that no key is copied
    grouped = query.reshape(entries, tokens, kv_heads, -1, width).transpose(1, 2).flatten(2, 3)
    queries = grouped.shape[2]
    padding = -queries % query_multiple
    if padding:
        grouped = functional.pad(grouped, (0, 0, 0, padding))
        mask = functional.pad(mask, (0, 0, 0, padding)) if mask is not None else None
    if softcap is None and query.device.type == "cpu":
        output, sums = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            grouped, keys, values, attn_mask=mask, scale=scale
        )
    else:
        output, sums = _by_products(grouped, keys, values, mask, scale, softcap)
    by_token = (entries, kv_heads, tokens, heads // kv_heads)
    if padding:
        output, sums = output[:, :, :queries], sums[:, :, :queries]
    output = output.reshape(*by_token, width).transpose(1, 2).reshape(count, heads, width)
    return output, sums.reshape(by_token).transpose(1, 2).reshape(count, heads)


def _by_products(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(query, keys.transpose(2, 3)).float().mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    sums = scores.logsumexp(-1)
    weights = scores.sub_(sums[..., None]).exp_().to(values.dtype)
    return torch.matmul(weights, values), sums
