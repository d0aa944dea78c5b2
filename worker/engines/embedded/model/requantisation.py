"""Float weights for a model whose checkpoint is quantised: rounded as the checkpoint's own were.

GGUF types are rounded to with the bits of llama.cpp's reference, so that an update gives the very
weights that a GGUF file of the new ones would hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from worker.engines.embedded.model import super_blocks
from worker.engines.embedded.model.linear import Projection
from worker.engines.embedded.model.llama_weights import LlamaWeights
from worker.engines.embedded.model.quantisation import (
    FORMATS,
    PackedQuantised,
    QuantisedWeight,
    StackedExperts,
    e8m0_halves,
    quantise,
)
from worker.engines.embedded.model.stored_weights import DTYPES
from worker.engines.embedded.native import gguf_types
from worker.engines.embedded.native import weights as native_weights
from worker.engines.embedded.native.gguf_types import Rounded
from worker.engines.embedded.native.quantised import QuantisedPanels
from worker.models.quantised import CODES, MOST_E8M0, OFFSETS, SCALES, TRANSPOSED, Codes
from worker.models.weight_files import StoredTensor

OTHER = "int8"
"""Format of tensors in whose own nothing here rounds: as ``--quantization int8``."""

_KINDS = {
    (8, 32, torch.float16, False): "Q8_0",
    (4, 32, torch.float16, False): "Q4_0",
    (4, 32, torch.float16, True): "Q4_1",
    (4, 32, torch.float32, True): "Q4_K",
    (8, 16, torch.float32, False): "Q6_K",
    (4, 32, torch.uint8, False): "MXFP4",
}
"""GGUF types by `Layout`; see `worker.models.quantised.unpack_blocks`."""

_ROWS_AT_ONCE = 256

_E2M1_SIZES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Twice the magnitudes of e2m1, by code."""


def formats_of(weights: LlamaWeights, stored: str, kv_rows: int) -> dict[str, str]:
    """Format of each quantised weight, by name: one of `FORMATS`, or a GGUF type.

    Args:
        weights: Packed weights of a quantised checkpoint.
        stored: The checkpoint's format; see `HfModel.stored_format`.
        kv_rows: Rows of a key projection, which are as many as a value projection's.
    """
    return {name: _format(stored, _layout(panels)) for name, panels in quantised_parts(weights, kv_rows)}


def formats_in(tensors: Mapping[str, StoredTensor], stored: str) -> dict[str, str]:
    """Format of each quantised weight of a checkpoint in the form of `worker.models.quantised`.

    Args:
        tensors: Tensors of its files, by name.
        stored: The checkpoint's format; see `worker.models.quantised.format_of`.
    """
    found = {}
    for name in (name.removesuffix(CODES) for name in tensors if name.endswith(CODES)):
        codes, scales = tensors[name + CODES], tensors[name + SCALES]
        bits = 8 if codes.dtype == "I8" else 4
        group = codes.shape[-1] * 8 // bits // scales.shape[-1]
        dtype = torch.uint8 if scales.dtype == "U8" else DTYPES[scales.dtype]
        layout = (bits, group, dtype, name + OFFSETS in tensors)
        found[name.removesuffix(TRANSPOSED)] = _format(stored, layout)
    return found


Layout = tuple[int, int, torch.dtype, bool]
"""Bits of a code, weights of a group, data type of scales as stored, which is uint8 for codes of
e2m1, and whether there are offsets.
"""


def _layout(panels: QuantisedPanels) -> Layout:
    dtype = torch.uint8 if panels.is_e2m1 else panels.scales.dtype
    return panels.bits, panels.group, dtype, panels.offsets is not None


def has_layout_of(weight: QuantisedWeight, panels: QuantisedPanels) -> bool:
    """Whether `weight` is packed as `panels` are."""
    group, dtype = weight.shape[1] // weight.scales.shape[1], weight.scales.dtype
    layout = weight.bits, group, torch.uint8 if weight.is_e2m1 else dtype, weight.offsets is not None
    return layout == _layout(panels) and dtype == panels.scales.dtype


def _format(stored: str, layout: Layout) -> str:
    if stored in FORMATS:
        return "int8" if layout[0] == 8 else "int4"
    kind = _KINDS.get(layout)
    return OTHER if kind is None or kind not in stored.split(", ") else kind


def quantised_parts(weights: LlamaWeights, kv_rows: int) -> Iterator[tuple[str, QuantisedPanels]]:
    """Each quantised weight, by name, and the panels that its rows lie in; see `formats_of`."""
    embedding = "model.embed_tokens.weight"
    if isinstance(weights.embedding, PackedQuantised):
        yield embedding, weights.embedding.parts[0]
    yield from _parts(weights.head, [embedding if weights.is_tied else "lm_head.weight"], [0])
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}"
        queries = layer.qkv.weight.shape[0] - 2 * kv_rows
        yield from _parts(
            layer.qkv, [f"{at}.self_attn.{one}_proj.weight" for one in "qkv"], [0, queries, queries + kv_rows]
        )
        yield from _parts(layer.output, [f"{at}.self_attn.o_proj.weight"], [0])
        for name, projection in (("gate", layer.gate), ("up", layer.up), ("down", layer.down)):
            yield from _parts(projection, [f"{at}.mlp.{name}_proj.weight"], [0])


def _parts(projection: Projection, names: list[str], starts: list[int]) -> Iterator[tuple[str, QuantisedPanels]]:
    if not isinstance(projection.weight, PackedQuantised):
        return
    for name, start in zip(names, starts, strict=True):
        first = 0
        for part in projection.weight.parts:
            if first <= start < first + part.columns:
                yield name, part
            first += part.columns


def requantised(
    weight: torch.Tensor, format: str, check: Callable[[float], None] = lambda largest: None
) -> QuantisedWeight:
    """``weight [N, K]`` rounded to `format`, one of `formats_of`. A scale of MXFP4 is as large as a
    number of float32 needs.

    Args:
        weight: The weight.
        format: The format.
        check: Called with the largest magnitude of the weight's numbers, which is infinite or NaN
            where one of them is; raises what it raises.

    Raises:
        ValueError: its scales cannot hold the weight.
    """
    if format == "MXFP4":
        check(largest_of(weight))
        return round_mxfp4(weight.detach())
    if format not in FORMATS and native_weights.are_available():
        rounding = gguf_types.rounding_of(format, weight.detach(), 1)  # tensors are rounded side by side
        check(rounding.largest if weight.dtype != torch.float64 else largest_of(weight))
        found, is_finite = QuantisedWeight(*rounding.rounded), rounding.is_finite
    else:
        check(largest_of(weight))
        found = quantise(weight, format) if format in FORMATS else _rounded_to(format, weight)
        parts = [found.scales, *([] if found.offsets is None else [found.offsets])]
        is_finite = all(bool(part.isfinite().all()) for part in parts)
    if not is_finite:
        raise ValueError(f"holds what the float16 scales of {format} cannot")
    return found


def rounded_as(
    format: str, weight: torch.Tensor, is_transposed: bool, check: Callable[[float], None]
) -> QuantisedWeight | StackedExperts:
    """A weight ``[N, K]`` by `requantised`; or each of all experts' ``[E, N, K]``, ``[E, K, N]`` if
    they are transposed.

    Raises:
        ValueError: scales cannot hold a weight.
    """
    if weight.ndim == 2:
        return requantised(weight, format, check)
    parts = [requantised(each.T if is_transposed else each, format, check) for each in weight.detach()]
    is_narrow = all(part.scales.dtype == torch.float16 for part in parts)
    scales = [part.scales if is_narrow else part.scales.float() for part in parts]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return StackedExperts(
        torch.stack([part.codes for part in parts]),
        torch.stack(scales),
        torch.stack(offsets) if offsets else None,
        parts[0].is_e2m1,
        is_transposed,
    )


def largest_of(numbers: torch.Tensor) -> float:
    """The largest magnitude; infinite or NaN where a number is."""
    least, most = (float(each) for each in torch.aminmax(numbers))
    return max(-least, most)


def _rounded_to(kind: str, weight: torch.Tensor) -> QuantisedWeight:
    parts = [_ROUNDED_TO[kind](rows.float()) for rows in torch.split(weight.detach(), _ROWS_AT_ONCE)]
    codes, scales, offsets = zip(*parts, strict=True)
    return QuantisedWeight(torch.cat(codes), torch.cat(scales), None if offsets[0] is None else torch.cat(offsets))


def _q8_0(rows: torch.Tensor) -> Rounded:
    """``quantize_row_q8_0_ref`` of ggml-quants.c: ``roundf`` rounds halves away from zero."""
    blocks = _blocks(rows)
    scales = blocks.abs().amax(2) / 127
    codes = blocks * _inverse(scales)[..., None]
    sizes = codes.abs()
    whole = sizes.floor()
    rounded = whole.add_(sizes.sub_(whole).mul_(2).floor_()).copysign_(codes)
    return rounded.to(torch.int8).flatten(1), scales.half(), None


def _q4_0(rows: torch.Tensor) -> Rounded:
    """``quantize_row_q4_0_ref``: the largest weight of a block has code 0."""
    blocks = _blocks(rows)
    scales = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))[..., 0] / -8
    codes = (blocks * _inverse(scales)[..., None]).add_(8.5)
    return _paired(codes), scales.half(), None


def _q4_1(rows: torch.Tensor) -> Rounded:
    """``quantize_row_q4_1_ref``: codes reach from the least to the greatest weight of a block."""
    blocks = _blocks(rows)
    least, most = torch.aminmax(blocks, dim=2)
    scales = (most - least) / 15
    codes = (blocks - least[..., None]).mul_(_inverse(scales)[..., None]).add_(0.5)
    return _paired(codes), scales.half(), least.half()


def _q4_k(rows: torch.Tensor) -> Rounded:
    return _as_tensors(super_blocks.round_q4_k(rows.numpy()))


def _q6_k(rows: torch.Tensor) -> Rounded:
    return _as_tensors(super_blocks.round_q6_k(rows.numpy()))


def round_mxfp4(weight: torch.Tensor) -> QuantisedWeight:
    """``quantize_row_mxfp4_ref`` of ggml-quants.c: of two numbers as near, the smaller magnitude.
    Numbers that a block of MXFP4 holds exactly keep their values.
    """
    codes, exponents = [], []
    for rows in torch.split(weight, _ROWS_AT_ONCE):
        blocks = _blocks(rows.float())
        logarithms = blocks.abs().amax(2).double().log2().float()  # rounded to float32, as log2f's are
        found = (logarithms.floor() + (127 - 2)).clamp_(0, MOST_E8M0).to(torch.uint8)
        exponents.append(found)
        step = torch.ones(found.shape).ldexp(found.to(torch.int32) - 128)[..., None]
        sizes = blocks.abs()
        code, least = torch.zeros_like(sizes, dtype=torch.uint8), sizes.clone()
        for index, number in enumerate(_E2M1_SIZES[1:], 1):
            error = (number * step - sizes).abs_()
            code[error < least] = index
            torch.minimum(least, error, out=least)
        code[(blocks < 0) & (code > 0)] |= 8
        codes.append(_paired(code))
    return QuantisedWeight(torch.cat(codes), e8m0_halves(torch.cat(exponents)), is_e2m1=True)


def _as_tensors(found: Codes) -> Rounded:
    offsets = None if found.offsets is None else torch.from_numpy(found.offsets)
    return torch.from_numpy(found.codes), torch.from_numpy(found.scales), offsets


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(len(rows), -1, 32)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 0.0, 1 / scales)


def _paired(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, cut off to whole numbers, two to a byte."""
    whole = codes.clamp_(0, 15).to(torch.uint8).flatten(1)
    return whole[:, ::2] | whole[:, 1::2] << 4


_ROUNDED_TO: dict[str, Callable[[torch.Tensor], Rounded]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
"""Rounding of rows ``[n, K]`` in float32, by GGUF type, without native kernels."""
