"""One attention call over a part of the keys: its result and the log-sum-exp by which parts are
put together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch.nn import functional

_ATEN = torch.ops.aten
_LENGTH_STEP = 32
_FEW_MATRICES = 32
"""Below this number of entries x key heads x query tokens, one fused call is faster than two
batched products.
"""


class Kernel(Enum):
    """What computes a call; native kernels compute a whole step as one."""

    FLASH = "flash"
    PRODUCTS = "products"
    NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Shapes:
    """How the calls of a step may be shaped.

    Attributes:
        kernel: The one for every call; None means whichever is faster.
        tokens: Query tokens per entry when several share their keys; None means all of them.
        whole_pages: Whether every call reads whole pages; otherwise no more than it needs, in
            steps of 32 keys, but for products of several entries: they would copy a part of each
            page.
        query_multiple: The queries of an entry are padded to a multiple of this.
    """

    kernel: Kernel | None = None
    tokens: int | None = None
    whole_pages: bool = False
    query_multiple: int = 1

    def kernel_for(self, entries: int, tokens: int, kv_heads: int, dtype: torch.dtype) -> Kernel:
        """The kernel of a call on a CPU."""
        if self.kernel is not None:
            return self.kernel
        batched = dtype == torch.bfloat16 and entries * kv_heads * tokens >= _FEW_MATRICES
        return Kernel.PRODUCTS if batched else Kernel.FLASH

    def length(self, kernel: Kernel, entries: int, tokens: int, needed: int, size: int) -> int:
        """Keys to read of pages of `size` tokens of which `needed` are seen."""
        copies = kernel is Kernel.PRODUCTS and (entries > 1 or tokens < _FEW_MATRICES)
        if self.whole_pages or copies:
            return size
        return min(size, -(-needed // _LENGTH_STEP) * _LENGTH_STEP)


def partial_softmax(
    kernel: Kernel,
    query: torch.Tensor,
    tokens: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    query_multiple: int = 1,
    wants_sums: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with ``query [entries * tokens, H, D]`` to ``keys, values [entries, Hkv, L, D]``.

    Args:
        kernel: ``FLASH`` only on a CPU and without `softcap`.
        query: The queries of an entry, one token after another.
        tokens: Query tokens per entry.
        keys: May be a strided view.
        values: Likewise.
        mask: Additive, ``[entries, 1, tokens * H / Hkv, L]``, float32 for ``PRODUCTS``, else of the
            queries' dtype; every query must see at least one key.
        scale: Factor of the scores.
        softcap: Bound of the scores, ``softcap * tanh(score / softcap)``.
        query_multiple: The queries of an entry are padded to a multiple of this.
        wants_sums: Whether the second result is needed.

    Returns:
        Outputs ``[entries * tokens, H, D]`` and float32 log-sum-exps of the scores ``[entries *
        tokens, H]``.
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
    if kernel is Kernel.FLASH:
        output, sums = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            grouped, keys, values, attn_mask=mask, scale=scale
        )
    else:
        output, sums = _by_products(grouped, keys, values, mask, scale, softcap, wants_sums)
    if padding:
        output = output[:, :, :queries]
    by_token = (entries, kv_heads, tokens, heads // kv_heads)
    output = output.reshape(*by_token, width).transpose(1, 2).reshape(count, heads, width)
    if sums is None or not wants_sums:
        return output, None
    return output, sums[:, :, :queries].reshape(by_token).transpose(1, 2).reshape(count, heads)


def _by_products(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    wants_sums: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Two batched products with float32 between them; in bfloat16 the products are rounded, as
    transformers' are.

    torch's softmax is much faster than its powers one by one. Where a score is highest, the weight
    is one by the sum.
    """
    shape = (*query.shape[:3], keys.shape[2])
    scores = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)).view(shape)
    if softcap is not None:
        scores = scores.float().mul_(scale / softcap).tanh_().mul_(softcap)
        scale = 1.0
    scores = scores.float().mul_(scale) if mask is None else torch.add(mask, scores, alpha=scale)
    weights = torch.softmax(scores, -1)
    output = torch.bmm(weights.to(values.dtype).flatten(0, 1), values.flatten(0, 1)).view(query.shape)
    return output, scores.amax(-1).sub_(weights.amax(-1).log_()) if wants_sums else None
