"""Weight-only quantisation: weights of 4 or 8 bits in groups, and the GEMM backend that reads them.

A weight is ``scale * code + offset`` in float32, rounded once, with a scale and an offset for each
group of consecutive weights of a row. What GGUF files hold in Q8_0, Q4_0, Q4_1, Q4_K and Q6_K is of
this form without a loss, as is what `quantise` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from worker.engines.embedded.model.panels import Panels
from worker.engines.embedded.native.gemm import Gemm, linear, unpacked_rows
from worker.engines.embedded.native.quantised import (
    BLOCK,
    QuantisedPanels,
    fits_blocks,
    panels_of,
)
from worker.engines.embedded.native.whole_scales import BYTES, E2M1, NIBBLES, whole_scales
from worker.errors import StartupError

FORMATS = ("int8", "int4")
"""Formats of `quantise`: 8 bits with a scale for each row, or 4 bits in groups of `GROUP`."""

GROUP = 32

_ZERO = {4: -8.0, 8: 0.0}
"""Offset in units of the scale, by bits, where a weight has no offsets: codes of 4 bits have no
sign.
"""

_E2M1_TWICE = torch.tensor([0.0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
"""Twice the number of e2m1 of each code (OCP Microscaling Formats 1.0, 5.3.3)."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight ``[N, K]``, row by row.

    Attributes:
        codes: int8 ``[N, K]``, or uint8 ``[N, K / 2]``, each two codes of 4 bits, the first one
            lower.
        scales: float16 or float32 ``[N, groups]``, finite.
        offsets: float16 or float32 ``[N, groups]``; None for symmetric codes, which count from 0,
            those of 4 bits from -8.
        is_e2m1: Whether codes, of 4 bits, are numbers of e2m1, without offsets; a weight is twice
            its number times the scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    is_e2m1: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def shape(self) -> torch.Size:
        """N and K."""
        return torch.Size((len(self.codes), self.codes.shape[1] * 8 // self.bits))

    @property
    def layout(self) -> tuple[object, ...]:
        """Weights of the same one can be joined."""
        has_offsets = self.offsets is not None
        return self.bits, self.is_e2m1, self.shape[1], self.scales.shape[1], self.scales.dtype, has_offsets

    @property
    def parts(self) -> tuple[QuantisedWeight, ...]:
        """The weight as the only part of a `StackedWeight`."""
        return (self,)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return self.codes.nbytes + self.scales.nbytes + (self.offsets.nbytes if self.offsets is not None else 0)

    def rows(self, rows: slice) -> QuantisedWeight:
        """Some of its rows."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return QuantisedWeight(self.codes[rows], self.scales[rows], offsets, self.is_e2m1)

    def halves(self) -> tuple[QuantisedWeight, QuantisedWeight]:
        """The upper and the lower half of its rows."""
        count = len(self.codes) // 2
        return self.rows(slice(0, count)), self.rows(slice(count, 2 * count))

    def dequantised(self) -> torch.Tensor:
        """The weight in float32."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        if self.is_e2m1:
            codes = _E2M1_TWICE[codes.long()]
        groups = codes.reshape(*self.scales.shape, self.shape[1] // self.scales.shape[1]).float()
        scales = self.scales.float()[..., None]
        offsets = self.offsets.float()[..., None] if self.offsets is not None else self._zero * scales
        # one rounding: a product with a scale of float16, or of less than 24 bits, is exact
        return (groups * scales + offsets).flatten(-2)

    def packed(
        self, rounds_to: str = "none", panels: Callable[[torch.Tensor], torch.Tensor] = panels_of
    ) -> QuantisedPanels:
        """The weight as the native kernels read it.

        Args:
            rounds_to: See `QuantisedPanels`.
            panels: Makes panels of rows, as `panels_of`; called for codes, scales, offsets, steps
                and units in this order.

        Raises:
            StartupError: its groups and the blocks of rounded rows do not fit.
        """
        codes = self.codes
        columns, inner = self.shape
        if rounds_to == "int8":
            group = inner // self.scales.shape[1]
            if not fits_blocks(group, inner):
                reason = f"groups of {group} weights do not fit blocks of {BLOCK}"
                raise StartupError(f"rows cannot be rounded to int8, {reason}: use --activation-dtype none")
            if codes.shape[1] % 4:
                codes = functional.pad(codes, (0, -codes.shape[1] % 4))
        if self.bits == 4 or rounds_to == "int8":
            codes = codes.contiguous().view(torch.int32)
        packed, scales = panels(codes), panels(self.scales)
        offsets = panels(self.offsets) if self.offsets is not None else None
        steps = units = None
        if rounds_to == "int8":
            kind = E2M1 if self.is_e2m1 else NIBBLES if self.bits == 4 else BYTES
            steps, units = map(panels, whole_scales(self.scales, self.offsets, inner, kind))
        return QuantisedPanels(
            packed, scales, offsets, self._zero, self.bits, columns, inner, rounds_to, self.is_e2m1, steps, units
        )

    @property
    def _zero(self) -> float:
        return 0.0 if self.is_e2m1 else _ZERO[self.bits]


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """A projection's weights of all experts, ``[E, N, K]``, or ``[E, K, N]`` if transposed.

    Attributes:
        codes: uint8 ``[E, N, K / 2]`` or int8 ``[E, N, K]``; see `QuantisedWeight`.
        scales: float16 or float32 ``[E, N, groups]``.
        offsets: The same, or None; see `QuantisedWeight`.
        is_e2m1: See `QuantisedWeight`.
        is_transposed: Whether the parameter has each expert's matrix transposed.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    is_e2m1: bool = False
    is_transposed: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        rows, inner = self.of(0).shape
        return torch.Size((len(self.codes), *((inner, rows) if self.is_transposed else (rows, inner))))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return self.codes.nbytes + self.scales.nbytes + (self.offsets.nbytes if self.offsets is not None else 0)

    def of(self, expert: int, rows: slice = slice(None)) -> QuantisedWeight:
        """Rows of an expert's weight ``[N, K]``."""
        offsets = None if self.offsets is None else self.offsets[expert, rows]
        return QuantisedWeight(self.codes[expert, rows], self.scales[expert, rows], offsets, self.is_e2m1)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The parameter, dequantised one expert at a time."""
        found = torch.empty(self.shape, dtype=dtype)
        for expert, to in enumerate(found):
            weight = self.of(expert).dequantised()
            to.copy_(weight.T if self.is_transposed else weight)
        return found


def e8m0_halves(exponents: torch.Tensor) -> torch.Tensor:
    """Halves of the scales of MXFP4, since its codes count twice: float16 where that holds all of
    them, else float32.

    Args:
        exponents: uint8, at most `MOST_E8M0`; a scale is 2 to the power of the exponent less 127.
    """
    halves = torch.ones(exponents.shape).ldexp(exponents.to(torch.int32) - 128)
    narrow = halves.half()
    return narrow if torch.equal(narrow.float(), halves) else halves


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Quantised weights of different layouts, one below the other.

    Attributes:
        parts: Weights with the same number of columns, in order of their rows.
    """

    parts: tuple[QuantisedWeight, ...]

    @property
    def shape(self) -> torch.Size:
        """N and K."""
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class PackedQuantised:
    """A quantised weight, or several one below the other, as the native kernels read it.

    Attributes:
        parts: Panels of the weights, in order.
    """

    parts: tuple[QuantisedPanels, ...]

    @property
    def shape(self) -> torch.Size:
        """N and K."""
        return torch.Size((sum(part.columns for part in self.parts), self.parts[0].inner))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


Quantised = QuantisedWeight | StackedWeight | PackedQuantised


def concatenated(weights: Sequence[QuantisedWeight]) -> QuantisedWeight | StackedWeight:
    """The rows of all weights."""
    if len(weights) == 1:
        return weights[0]
    if len({weight.layout for weight in weights}) > 1:
        return StackedWeight(tuple(weights))
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return QuantisedWeight(
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat(offsets) if offsets else None,
        weights[0].is_e2m1,
    )


def quantise(weight: torch.Tensor, to: str) -> QuantisedWeight:
    """``weight [N, K]`` rounded to the nearest codes of `to`, one of `FORMATS`.

    A weight whose rows are no whole groups, or that float16 cannot hold, has 8 bits in either.
    Codes of 8 bits are symmetric, those of 4 bits reach from the least to the greatest weight of a
    group.

    Raises:
        ValueError: a weight is infinite or not a number.
    """
    weight = weight.detach().float()
    if not weight.isfinite().all():
        raise ValueError("a weight that is infinite or not a number cannot be quantised")
    return _to_int4(weight) if to == "int4" and _fits_int4(weight) else _to_int8(weight)


def _fits_int4(weight: torch.Tensor) -> bool:
    return weight.shape[1] % GROUP == 0 and bool(weight.abs().amax() < torch.finfo(torch.float16).max)


def _to_int8(weight: torch.Tensor) -> QuantisedWeight:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / _divisor(scales)).round().clamp(-127, 127)  # a subnormal scale is not exact
    return QuantisedWeight(codes.to(torch.int8), scales)


def _to_int4(weight: torch.Tensor) -> QuantisedWeight:
    groups = weight.reshape(len(weight), -1, GROUP)
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scales, offsets = ((most - least) / 15).half(), least.half()
    codes = ((groups - offsets.float()) / _divisor(scales.float())).round().clamp(0, 15).to(torch.uint8).flatten(1)
    return QuantisedWeight(codes[:, ::2] | codes[:, 1::2] << 4, scales[..., 0], offsets[..., 0])


class QuantisedGemm:
    """The native kernels on a quantised weight; implements `GemmBackend`.

    Attributes:
        parts: GEMMs for `native.layers`, whose results are put beside each other.
    """

    kernels = "native"
    is_batch_invariant = True
    is_packed = True

    def __init__(
        self, weight: Quantised, bias: torch.Tensor | None, is_unrounded: bool = False, rounds_to: str = "none"
    ) -> None:
        self.packed = (
            weight
            if isinstance(weight, PackedQuantised)
            else PackedQuantised(tuple(part.packed(rounds_to) for part in weight.parts))
        )
        panels = self.packed.parts
        rows = [part.columns for part in panels]
        biases = torch.split(bias, rows) if bias is not None else [None] * len(rows)
        self.parts = tuple(Gemm(part, of_part) for part, of_part in zip(panels, biases, strict=True))
        self._is_unrounded = is_unrounded

    @classmethod
    def supports(cls, weight: object) -> bool:
        return isinstance(weight, Quantised)

    def __call__(self, x: torch.Tensor, epilogue: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        if len(self.parts) == 1:
            return linear(x, self.parts[0], epilogue, other, self._is_unrounded)
        others = (
            [None] * len(self.parts) if other is None else torch.split(other, [gemm.columns for gemm in self.parts], 1)
        )
        results = [
            linear(x, gemm, epilogue, part, self._is_unrounded) for gemm, part in zip(self.parts, others, strict=True)
        ]
        return torch.cat(results, 1)

    def layouts(self) -> Iterator[Panels]:
        yield from ()

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows ``[..., K]`` of a weight of one part by their indices, int64 ``[...]``."""
        [gemm] = self.parts
        return unpacked_rows(gemm, ids, dtype)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    return scales.where(scales != 0, 1.0)
