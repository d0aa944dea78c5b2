"""The ops' mathematics in torch, for any device, on checked rows ``[B, V]``.

Truncation is that of `adapters.sampling`, as in processors and samplers: ties with the k-th value
are kept, except with k = 1, where the lowest id is kept; top-p keeps the shortest prefix whose mass
in integer weights is at least p, ties by rising id. Batch-invariant: a row's result does not depend
on the other rows, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from adapters.pipe.parameters import PerRow
from adapters.pipe.rows import check_highest
from adapters.pipe.types import TensorType
from adapters.processors.truncation import row_sums
from adapters.sampling.truncation import beyond_shares, column, keep_top_k, rounded_up
from adapters.sampling.weights import points_in, weights_of, weights_of_probabilities

_ROWS_AT_ONCE = 64

_Weigh = Callable[[torch.Tensor], torch.Tensor]
"""Function of rows that returns their integer weights."""


def scale(logits: torch.Tensor, temperature: PerRow) -> torch.Tensor:
    """z / T.

    Raises:
        ValueError: a quotient is beyond the range of the dtype.
    """
    highest = torch.finfo(logits.dtype).max  # a higher one would be infinite here, and -inf / inf is NaN
    scaled = logits / temperature.column(logits).clamp_(max=highest)
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
    least = column(min_p.values, probs, torch.float64) * probs.amax(-1, keepdim=True).double()
    return _normalised(probs.masked_fill(probs < rounded_up(least, probs.dtype), 0.0))


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
    return _sample(logits, weights_of, indices, generator)


def sample_probs(
    probs: torch.Tensor, indices: torch.Tensor | None, deterministic: bool, generator: torch.Generator | None
) -> torch.Tensor:
    """One token per row, or per entry of ``indices``, by inverse transform sampling.

    Sample i takes the i-th number of the generator, and masses are sums of integer weights, so that
    tokens are reproducible on every device whether ``deterministic`` or not, and a row's token
    depends on its probabilities and its random number alone.

    Returns:
        ``[B]`` int32, or ``[n]`` with the dtype of ``indices``.
    """
    return _sample(probs, weights_of_probabilities, indices, generator)


def _sample(
    rows: torch.Tensor, weigh: _Weigh, indices: torch.Tensor | None, generator: torch.Generator | None
) -> torch.Tensor:
    rows = rows.detach()  # ids have no gradient, and the weights that they are found by are integers
    num_samples = len(rows) if indices is None else len(indices)
    source = rows.device if generator is None else generator.device
    uniforms = torch.rand(num_samples, dtype=torch.float64, device=source, generator=generator).to(rows.device)
    if indices is None:
        return _one_each(rows, weigh, uniforms)
    return _from_rows(rows, weigh, uniforms, indices.to(rows.device))


def _one_each(rows: torch.Tensor, weigh: _Weigh, uniforms: torch.Tensor) -> torch.Tensor:
    tokens = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        tokens[part] = _search(weigh(rows[part]).cumsum(-1), uniforms[part].unsqueeze(1)).squeeze(1)
    return tokens


def _from_rows(rows: torch.Tensor, weigh: _Weigh, uniforms: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Group samples by row, so that millions of samples from one row do not copy it."""
    tokens = torch.empty_like(indices)
    ordered, samples = indices.sort()
    chosen, counts = torch.unique_consecutive(ordered, return_counts=True)
    for row, mine in zip(chosen.tolist(), torch.split(samples, counts.tolist()), strict=True):
        found = _search(weigh(rows[row : row + 1]).cumsum(-1), uniforms[mine].unsqueeze(0))
        tokens[mine] = found.squeeze(0).to(tokens.dtype)
    return tokens


def _search(bounds: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token of each random number in [0, 1), ``[R, n]``; the bounds are cumulative weights."""
    return torch.searchsorted(bounds, points_in(bounds[:, -1:], uniforms), right=True)


def _top_k(probs: torch.Tensor, top_k: PerRow) -> torch.Tensor:
    """``probs`` with 0 for dropped tokens."""
    return top_k_mask(probs, top_k).clamp_min_(0.0)


def _top_p(probs: torch.Tensor, top_p: PerRow) -> torch.Tensor:
    kept, keys = probs.clone(), probs.detach()
    for some, beyond in beyond_shares(keys, lambda some: weights_of_probabilities(keys[some]), top_p.values):
        kept[some] = kept[some].masked_fill(beyond, 0.0)
    return kept


def _normalised(probs: torch.Tensor) -> torch.Tensor:
    return probs / row_sums(probs) if len(probs) else probs
