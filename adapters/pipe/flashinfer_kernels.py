"""The functions of `adapters.pipe.torch_kernels` by FlashInfer's CUDA kernels; imported on use.

Ties differ from the torch kernels: top-k and top-p keep all tokens that tie with the last one.
"""

from __future__ import annotations

from typing import Any

import torch
from flashinfer import sampling

from adapters.pipe.parameters import PerRow
from adapters.pipe.torch_kernels import min_p_renorm as min_p_renorm  # plain torch in FlashInfer too
from adapters.pipe.torch_kernels import scale as scale


def softmax(logits: torch.Tensor, temperature: PerRow | None, enable_pdl: bool | None) -> torch.Tensor:
    given = None if temperature is None else _argument(temperature, logits.device, torch.float32)
    result: torch.Tensor = sampling.softmax(logits.contiguous(), temperature=given, enable_pdl=enable_pdl)
    return result


def top_k_mask(logits: torch.Tensor, top_k: PerRow) -> torch.Tensor:
    result: torch.Tensor = sampling.top_k_mask_logits(logits.contiguous(), _top_k(top_k, logits))
    return result


def top_k_renorm(probs: torch.Tensor, top_k: PerRow) -> torch.Tensor:
    result: torch.Tensor = sampling.top_k_renorm_probs(probs.contiguous(), _top_k(top_k, probs))
    return result


def top_p_renorm(probs: torch.Tensor, top_p: PerRow, is_deterministic: bool) -> torch.Tensor:
    # Older releases have no such parameter.
    options = {"is_deterministic": True} if is_deterministic else {}
    given = _argument(top_p, probs.device, torch.float32)
    result: torch.Tensor = sampling.top_p_renorm_probs(probs.contiguous(), given, **options)
    return result


def top_k_sample(
    probs: torch.Tensor,
    top_k: PerRow,
    indices: torch.Tensor | None,
    deterministic: bool,
    generator: torch.Generator | None,
) -> torch.Tensor:
    arguments = _sampling_arguments(probs, indices, deterministic, generator)
    result: torch.Tensor = sampling.top_k_sampling_from_probs(probs.contiguous(), _top_k(top_k, probs), **arguments)
    return result


def top_p_sample(
    probs: torch.Tensor,
    top_p: PerRow,
    indices: torch.Tensor | None,
    deterministic: bool,
    generator: torch.Generator | None,
) -> torch.Tensor:
    arguments = _sampling_arguments(probs, indices, deterministic, generator)
    given = _argument(top_p, probs.device, torch.float32)
    result: torch.Tensor = sampling.top_p_sampling_from_probs(probs.contiguous(), given, **arguments)
    return result


def min_p_sample(
    probs: torch.Tensor,
    min_p: PerRow,
    indices: torch.Tensor | None,
    deterministic: bool,
    generator: torch.Generator | None,
) -> torch.Tensor:
    arguments = _sampling_arguments(probs, indices, deterministic, generator)
    given = _argument(min_p, probs.device, torch.float32)
    result: torch.Tensor = sampling.min_p_sampling_from_probs(probs.contiguous(), given, **arguments)
    return result


def top_k_top_p_sample(
    probs: torch.Tensor,
    top_k: PerRow,
    top_p: PerRow,
    indices: torch.Tensor | None,
    deterministic: bool,
    generator: torch.Generator | None,
) -> torch.Tensor:
    arguments = _sampling_arguments(probs, indices, deterministic, generator)
    given = _argument(top_p, probs.device, torch.float32)
    result: torch.Tensor = sampling.top_k_top_p_sampling_from_probs(
        probs.contiguous(), _top_k(top_k, probs), given, filter_apply_order="joint", **arguments
    )
    return result


def sample_logits(
    logits: torch.Tensor, indices: torch.Tensor | None, deterministic: bool, generator: torch.Generator | None
) -> torch.Tensor:
    arguments = _sampling_arguments(logits, indices, deterministic, generator)
    result: torch.Tensor = sampling.sampling_from_logits(logits.contiguous(), **arguments)
    return result


def sample_probs(
    probs: torch.Tensor, indices: torch.Tensor | None, deterministic: bool, generator: torch.Generator | None
) -> torch.Tensor:
    arguments = _sampling_arguments(probs, indices, deterministic, generator)
    result: torch.Tensor = sampling.sampling_from_probs(probs.contiguous(), **arguments)
    return result


def _sampling_arguments(
    rows: torch.Tensor, indices: torch.Tensor | None, deterministic: bool, generator: torch.Generator | None
) -> dict[str, Any]:
    moved = None if indices is None else indices.to(rows.device)
    return {"indices": moved, "deterministic": deterministic, "generator": generator}


def _top_k(top_k: PerRow, rows: torch.Tensor) -> torch.Tensor | float:
    """Never beyond the vocabulary, so that it fits in the kernels' int32."""
    if isinstance(top_k.given, torch.Tensor):
        return top_k.given.clamp_max(rows.shape[1]).to(rows.device, torch.int32)
    return min(top_k.given, rows.shape[1])


def _argument(parameter: PerRow, device: torch.device, dtype: torch.dtype) -> torch.Tensor | float:
    """The parameter, up to the highest number of ``dtype``: -inf / inf is NaN."""
    highest = torch.finfo(dtype).max
    if isinstance(parameter.given, torch.Tensor):
        return parameter.given.to(device, dtype).clamp_max(highest)
    return min(float(parameter.given), highest)
