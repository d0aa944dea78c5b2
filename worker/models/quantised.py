"""Quantised checkpoints: what the embedded engine reads without dequantising it.

A directory as of a Hugging Face checkpoint, whose ``config.json`` says so under
``quantization_config``. A quantised weight ``X`` is stored as ``X.codes``, int8 ``[N, K]`` or uint8
``[N, K / 2]`` (two codes of 4 bits, the first one lower), ``X.scales`` ``[N, groups]`` and, where
codes are not symmetric, ``X.offsets``: ``scale * code + offset``. Symmetric codes of 4 bits count
from -8. Those whose scales are uint8 are numbers of e2m1, and scales exponents (MXFP4). Weights of
all experts have the count of experts in front of these shapes; where the parameter ``X`` has each
expert's matrix transposed, they are stored as ``X.transposed.codes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

CODES, SCALES, OFFSETS = ".codes", ".scales", ".offsets"
"""Suffixes of a weight's name."""

TRANSPOSED = ".transposed"
"""Suffix before these: experts' weights are stored as ``[E, N, K]``, their parameter is ``[E, K,
N]``.
"""

MOST_E8M0 = 252
"""The greatest exponent of MXFP4 with which 6 times the scale is finite in float32."""

_METHOD = "dynamo-logits-worker"


def quantization_config(format: str) -> dict[str, str]:
    """``quantization_config`` of a checkpoint whose weights are in `format`, a name for people."""
    return {"quant_method": _METHOD, "format": format}


def format_of(settings: Mapping[str, Any]) -> str | None:
    """The format of a checkpoint with this ``config.json``; None if it is none of ours."""
    found = settings.get("quantization_config")
    if not isinstance(found, dict) or found.get("quant_method") != _METHOD:
        return None
    return str(found.get("format"))


@dataclass(frozen=True, slots=True)
class Codes:
    """Some rows of a quantised weight, as they are stored.

    Attributes:
        codes: int8 ``[n, K]`` or uint8 ``[n, K / 2]``.
        scales: float16 or float32 ``[n, groups]``; uint8 for exponents of codes of e2m1.
        offsets: float16 or float32 ``[n, groups]``, or None.
    """

    codes: npt.NDArray[Any]
    scales: npt.NDArray[Any]
    offsets: npt.NDArray[Any] | None = None


def unpack_blocks(packed: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> Codes:
    """GGUF's rows of blocks ``[n, bytes]``, of one of `READ`, with the same values.

    The layouts are those of ggml's ``ggml-common.h``.
    """
    return READ[kind.name](packed)


def _blocks(packed: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    return packed.reshape(len(packed), -1, size)


def _halves(part: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    """float16 ``[n, blocks]`` in two bytes ``[n, blocks, 2]``."""
    return np.ascontiguousarray(part).view(np.float16)[..., 0]


def _paired(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes of 4 bits ``[n, ..., K]``, two to a byte, ``[n, K / 2]``."""
    rows = codes.reshape(len(codes), -1)
    paired: npt.NDArray[np.uint8] = rows[:, ::2] | rows[:, 1::2] << np.uint8(4)
    return paired


def _nibbles(part: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The lower halves of some bytes ``[..., n]``, then the upper ones, ``[..., 2 n]``."""
    return np.concatenate((part & 15, part >> 4), -1)


def _q8_0(packed: npt.NDArray[np.uint8]) -> Codes:
    blocks = _blocks(packed, 34)
    return Codes(blocks[..., 2:].reshape(len(packed), -1).view(np.int8), _halves(blocks[..., :2]))


def _q4_0(packed: npt.NDArray[np.uint8]) -> Codes:
    blocks = _blocks(packed, 18)
    return Codes(_paired(_nibbles(blocks[..., 2:])), _halves(blocks[..., :2]))


def _q4_1(packed: npt.NDArray[np.uint8]) -> Codes:
    blocks = _blocks(packed, 20)
    return Codes(_paired(_nibbles(blocks[..., 4:])), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q4_k(packed: npt.NDArray[np.uint8]) -> Codes:
    """Eight groups of 32, whose scales and minima of 6 bits count in the block's float16 steps."""
    blocks = _blocks(packed, 144)
    step, least_step = (_halves(blocks[..., at : at + 2]).astype(np.float32)[..., None] for at in (0, 2))
    from gguf.quants import Q4_K  # no second start needs the library

    scales, minima = Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
    shape = (*blocks.shape[:2], 8)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Codes(
        _paired(codes),
        (step * scales.reshape(shape).astype(np.float32)).reshape(len(packed), -1),
        -(least_step * minima.reshape(shape).astype(np.float32)).reshape(len(packed), -1),
    )


def _q6_k(packed: npt.NDArray[np.uint8]) -> Codes:
    """Sixteen groups of 16; codes of 6 bits, whose upper two lie apart, become 8 bits."""
    blocks = _blocks(packed, 210)
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | high.reshape(low.shape) << 4).astype(np.int8) - np.int8(32)
    steps = _halves(blocks[..., 208:]).astype(np.float32)[..., None]
    scales = steps * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    return Codes(codes.reshape(len(packed), -1), scales.reshape(len(packed), -1))


def _mxfp4(packed: npt.NDArray[np.uint8]) -> Codes:
    blocks = _blocks(packed, 17)
    return Codes(_paired(_nibbles(blocks[..., 1:])), np.ascontiguousarray(blocks[..., 0]))


READ = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
"""Types of GGUF's tensors that are kept as they are, by name."""
