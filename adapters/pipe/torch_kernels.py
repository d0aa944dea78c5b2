"""The ops' mathematics in torch, for any device, on checked rows ``[B, V]``.

Truncation is that of `adapters.processors.truncation`: ties with the k-th value are kept, except
with k = 1, where the lowest id is kept; top-p keeps the shortest prefix whose mass is at least p,
ties by rising id. Batch-invariant: a row's result does not depend on the other rows, bit for bit.
"""

from __future__ import annotations

import torch

from adapters.pipe.parameters import PerRow
from adapters.pipe.rows import check_highest
from adapters.pipe.types import TensorType
from adapters.processors.truncation import keep_top_k, keep_top_p, row_sums

_UNIT = 2.0**53
_ROWS_AT_ONCE = 64


def scale(logits: torch.Tensor, temperature: PerRow) -> torch.Tensor:
    """z / T.

    Raises:
        ValueError: a quotient is beyond the range of the dtype.
    """
    scaled = logits / temperature.column(logits)
    if min(temperature.values, default=1.0) < 1.0:
        check_highest(scaled, TensorType.LOGITS)
    return scaled


def softmax(logits: torch.Tensor, temperature: PerRow | None, enable_pdl: bool | None) -> torch.Tensor:
    """Probabilities of ``logits / temperature``; ``enable_pdl``, a launch option, has no effect."""
    return (logits if temperature is None else scale(logits, temperature)).softmax(-1)


def top_k_mask(logits: torch.Tensor, top_k: PerRow) -> torch.Tensor:
    """Logits with all but the k highest at -inf."""
    kept = logits.clone()
    keep_top_k(kept, [int(k) for k in top_k.values])
    return kept


def top_k_renorm(probs: torch.Tensor, top_k: PerRow) -> torch.Tensor:
    """The k highest probabilities, renormalised."""
    return _normalised(_top_k(probs, top_k))


def top_p_renorm(probs: torch.Tensor, top_p: PerRow, is_deterministic: bool) -> torch.Tensor:
    """The shortest prefix of mass p, renormalised; the mass is relative to the row's sum."""
    return _normalised(_top_p(probs, top_p))


def min_p_renorm(probs: torch.Tensor, min_p: PerRow) -> torch.Tensor:
    """The probabilities of at least min_p times the highest, renormalised."""
    cuts = min_p.column(probs) * probs.amax(-1, keepdim=True)
    return _normalised(probs.masked_fill(probs < cuts, 0.0))


def top_k_sample(
    probs: torch.Tensor,
    top_k: PerRow,
    indices: torch.Tensor | None,
    deterministic: bool,
    generator: torch.Generator | None,
) -> torch.Tensor:
    return sample_probs(top_k_renorm(probs, top_k), indices, deterministic, generator)


def top_p_sample(
    probs: torch.Tensor,
    top_p: PerRow,
    indices: torch.Tensor | None,
    deterministic: bool,
    generator: torch.Generator | None,
) -> torch.Tensor:
    return sample_probs(top_p_renorm(probs, top_p, deterministic), indices, deterministic, generator)


def min_p_sample(
    probs: torch.Tensor,
    min_p: PerRow,
    indices: torch.Tensor | None,
    deterministic: bool,
    generator: torch.Generator | None,
) -> torch.Tensor:
    return sample_probs(min_p_renorm(probs, min_p), indices, deterministic, generator)


def top_k_top_p_sample(
    probs: torch.Tensor,
    top_k: PerRow,
    top_p: PerRow,
    indices: torch.Tensor | None,
    deterministic: bool,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Tokens that pass both tests, each made on ``probs`` as they are."""
    kept = torch.minimum(_top_k(probs, top_k), _top_p(probs, top_p))
    return sample_probs(_normalised(kept), indices, deterministic, generator)


def sample_logits(
    logits: torch.Tensor, indices: torch.Tensor | None, deterministic: bool, generator: torch.Generator | None
) -> torch.Tensor:
    return sample_probs(logits.softmax(-1), indices, deterministic, generator)


def sample_probs(
    probs: torch.Tensor, indices: torch.Tensor | None, deterministic: bool, generator: torch.Generator | None
) -> torch.Tensor:
    """One token per row, or per entry of ``indices``, by inverse transform sampling.

    Sample i takes the i-th number of the generator, and masses are summed as integer multiples of
    2^-53, so that tokens are reproducible on every device whether ``deterministic`` or not, and a
    row's token depends on its probabilities and its random number alone.

    Returns:
        ``[B]`` int32, or ``[n]`` with the dtype of ``indices``.
    """
    num_samples = len(probs) if indices is None else len(indices)
    source = probs.device if generator is None else generator.device
    uniforms = torch.rand(num_samples, dtype=torch.float64, device=source, generator=generator).to(probs.device)
    if indices is None:
        return _one_each(probs, uniforms)
    return _from_rows(probs, uniforms, indices.to(probs.device))


def _one_each(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    tokens = torch.empty(len(probs), dtype=torch.int32, device=probs.device)
    for start in range(0, len(probs), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        tokens[part] = _search(_bounds(probs[part]), uniforms[part].unsqueeze(1)).squeeze(1)
    return tokens


def _from_rows(probs: torch.Tensor, uniforms: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Group samples by row, so that millions of samples from one row do not copy it."""
    tokens = torch.empty_like(indices)
    for row in torch.unique(indices).tolist():
        mine = indices == row
        found = _search(_bounds(probs[row : row + 1]), uniforms[mine].unsqueeze(0))
        tokens[mine] = found.squeeze(0).to(tokens.dtype)
    return tokens


def _bounds(probs: torch.Tensor) -> torch.Tensor:
    """Cumulative distribution functions, int64 ``[R, V]``."""
    shares = probs.double().div_(row_sums(probs).double()).mul_(_UNIT)
    return shares.long().cumsum(-1)


def _search(bounds: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token of each random number in [0, 1), ``[R, n]``."""
    totals = bounds[:, -1:]
    targets = torch.minimum((uniforms * totals).long(), totals - 1)
    return torch.searchsorted(bounds, targets, right=True)


def _top_k(probs: torch.Tensor, top_k: PerRow) -> torch.Tensor:
    """``probs`` with 0 for dropped tokens."""
    return top_k_mask(probs, top_k).clamp_min_(0.0)


def _top_p(probs: torch.Tensor, top_p: PerRow) -> torch.Tensor:
    kept = probs.clone()
    keep_top_p(kept, top_p.values, _normalised)
    return kept.clamp_min_(0.0)


def _normalised(probs: torch.Tensor) -> torch.Tensor:
    return probs / row_sums(probs) if len(probs) else probs
