"""Partial attention over a split of the keys, and the LSE merge of the splits' results.

The online softmax of FlashAttention (Dao et al., 2022; Milakov and Gimelshein, 2018), with the
splits merged by their log-sum-exps (LSEs) as in Flash-Decoding.
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
batched GEMMs.
"""


class TorchKernel(Enum):
    """Kernel of a call: torch's fused attention, or two batched GEMMs (``torch.bmm``)."""

    FLASH = "flash"
    BMM = "bmm"


@dataclass(frozen=True, slots=True)
class CallShapes:
    """Shapes that the calls of a step may have.

    Attributes:
        kernel: The one for every call; None for the faster one.
        tokens: Query tokens per entry when several share their keys; None for all of them.
        whole_pages: Whether every call reads whole pages; otherwise no more than it needs, in
            steps of 32 keys, but for GEMMs of several entries: they would copy a part of each
            page.
        query_multiple: The queries of an entry are padded to a multiple of this.
    """

    kernel: TorchKernel | None = None
    tokens: int | None = None
    whole_pages: bool = False
    query_multiple: int = 1

    def kernel_for(self, entries: int, tokens: int, kv_heads: int, dtype: torch.dtype) -> TorchKernel:
        """The kernel of a call on a CPU."""
        if self.kernel is not None:
            return self.kernel
        batched = dtype == torch.bfloat16 and entries * kv_heads * tokens >= _FEW_MATRICES
        return TorchKernel.BMM if batched else TorchKernel.FLASH

    def length(self, kernel: TorchKernel, entries: int, tokens: int, needed: int, size: int) -> int:
        """Keys to read of pages of `size` tokens of which the first `needed` are attended to."""
        copies = kernel is TorchKernel.BMM and (entries > 1 or tokens < _FEW_MATRICES)
        if self.whole_pages or copies:
            return size
        return min(size, -(-needed // _LENGTH_STEP) * _LENGTH_STEP)


def partial_attention(
    kernel: TorchKernel,
    query: torch.Tensor,
    tokens: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    query_multiple: int = 1,
    wants_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with ``query [entries * tokens, H, D]`` to ``keys, values [entries, Hkv, L, D]``.

    Args:
        kernel: ``FLASH`` only on a CPU and without `softcap`.
        query: The queries of an entry, one token after another.
        tokens: Query tokens per entry.
        keys: May be a strided view.
        values: Values, shaped like `keys`.
        mask: Additive, ``[entries, 1, tokens * H / Hkv, L]``, float32 for ``BMM``, else of the
            queries' dtype; every query must attend to at least one key.
        scale: Factor of the scores.
        softcap: Bound of the scores, ``softcap * tanh(score / softcap)``.
        query_multiple: The queries of an entry are padded to a multiple of this.
        wants_lse: Whether the second result is needed.

    Returns:
        Outputs ``[entries * tokens, H, D]`` and the scores' LSEs, float32 ``[entries * tokens,
        H]``.
    """
    count, heads, head_dim = query.shape
    entries, kv_heads = keys.shape[:2]
    # grouped-query attention: the heads that share keys are queries of one entry, so that no key is
    # copied
    grouped = query.reshape(entries, tokens, kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    queries = grouped.shape[2]
    padding = -queries % query_multiple
    if padding:
        grouped = functional.pad(grouped, (0, 0, 0, padding))
        mask = functional.pad(mask, (0, 0, 0, padding)) if mask is not None else None
    if kernel is TorchKernel.FLASH:
        output, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            grouped, keys, values, attn_mask=mask, scale=scale
        )
    else:
        output, lse = _by_gemms(grouped, keys, values, mask, scale, softcap, wants_lse)
    if padding:
        output = output[:, :, :queries]
    by_token = (entries, kv_heads, tokens, heads // kv_heads)
    output = output.reshape(*by_token, head_dim).transpose(1, 2).reshape(count, heads, head_dim)
    if lse is None or not wants_lse:
        return output, None
    return output, lse[:, :, :queries].reshape(by_token).transpose(1, 2).reshape(count, heads)


def _by_gemms(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Two batched GEMMs, a float32 softmax between them; in bfloat16 the GEMMs round, as
    transformers' do.

    torch's softmax is much faster than exponentials one by one. The weight of the highest score is
    1 / sum, which gives the LSE.
    """
    shape = (*query.shape[:3], keys.shape[2])
    scores = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)).view(shape)
    if softcap is not None:
        scores = scores.float().mul_(scale / softcap).tanh_().mul_(softcap)
        scale = 1.0
    scores = scores.float().mul_(scale) if mask is None else torch.add(mask, scores, alpha=scale)
    weights = torch.softmax(scores, -1)
    output = torch.bmm(weights.to(values.dtype).flatten(0, 1), values.flatten(0, 1)).view(query.shape)
    return output, scores.amax(-1).sub_(weights.amax(-1).log_()) if wants_lse else None


def lse_merge(
    output: torch.Tensor, lse: torch.Tensor, splits: torch.Tensor, absent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the partial results of each token's splits, weighted by their LSEs.

    Args:
        output: Partial results ``[r, H, D]``.
        lse: LSEs of the results, float32 ``[r, H]``.
        splits: Indices of a token's partial results, in ascending order of its keys, ``[n, S]``;
            any index where it has fewer than S.
        absent: 0, or -inf where a token has no such split, ``[n, S, 1]``.

    Returns:
        ``[n, H, D]``, of the dtype of `output`, and the LSEs of all splits together ``[n, H]``.
    """
    count, depth = splits.shape
    weights = lse.index_select(0, splits.view(-1)).view(count, depth, -1) + absent
    highest = weights.amax(1, keepdim=True)
    weights = weights.sub_(highest).exp_()[..., None]
    # one after another, so that absent splits, which weigh 0, change no bits
    total = weights[:, 0].clone()
    merged = weights[:, 0] * output.index_select(0, splits[:, 0])
    for split in range(1, depth):
        total += weights[:, split]
        merged.addcmul_(weights[:, split], output.index_select(0, splits[:, split]).float())
    return merged.div_(total).to(output.dtype), highest[:, 0] + total[..., 0].log()


def with_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Results ``[T, H, D]`` of attention whose scores have these LSEs ``[T, H]``, with a score more
    for each query head that has no value behind it, `sinks` ``[H]``.
    """
    share = 1.0 / ((sinks.float() - lse).exp() + 1.0)
    return (output.float() * share[..., None]).to(output.dtype)
