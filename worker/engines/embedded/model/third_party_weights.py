"""Weights that other programs quantised, as their formats define them.

Whole numbers in equal groups become a `QuantisedWeight` of the same values: ``scale * (code -
zero)`` is ``scale * code + offset`` with ``offset = -scale * zero``, both exact where scales have
at most 11 bits (float16, bfloat16). All else is dequantised in float32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from safetensors import safe_open

from worker.engines.embedded.model.quantisation import QuantisedWeight, StackedExperts, e8m0_halves
from worker.engines.embedded.model.stored_weights import Weight
from worker.models.problems import ModelFileError
from worker.models.quantised import MOST_E8M0
from worker.models.quantised_tensors import ThirdPartyWeight
from worker.models.quantization_config import MXFP4
from worker.models.weight_files import WeightFiles

Plain = torch.Tensor | QuantisedWeight
"""A weight that is not of all experts."""

Read = Callable[[str], torch.Tensor]
"""Reads the tensor of that name."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, whose code is in each nibble of AWQ's words, from the lowest one on."""

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Values of MXFP4's codes (OCP Microscaling Formats 1.0, 5.3.3)."""

_E8M0_BIAS, _E8M0_NAN = 127, 255


class ThirdPartyWeights:
    """The weights of a checkpoint that another program quantised.

    Args:
        files: Files of the checkpoint.
        dtype: Data type of the weights that are not kept.

    Attributes:
        dequantised: Numbers of quantised weights that native kernels do not read, by the reason.
    """

    def __init__(self, files: WeightFiles, dtype: torch.dtype) -> None:
        assert files.third_party is not None
        self._files, self._found, self._dtype = files, files.third_party, dtype
        self.dequantised: Counter[str] = Counter()

    @property
    def num_quantised(self) -> int:
        """Number of quantised weights."""
        return len(self._found.weights)

    def read(self, keeps: bool, keeps_experts: bool = False) -> Iterator[tuple[str, Weight]]:
        """The weights by name, one after the other.

        Args:
            keeps: Whether those that native kernels read are a `QuantisedWeight` each.
            keeps_experts: Whether experts in MXFP4 are `StackedExperts`.

        Raises:
            ModelFileError: a tensor holds what its format or the data type cannot.
        """
        with ExitStack() as stack:
            opened = {
                file: stack.enter_context(safe_open(self._files.directory / file, framework="pt"))
                for file in self._files.files
            }

            def tensor(name: str) -> torch.Tensor:
                found: torch.Tensor = opened[self._files.tensors[name].file].get_tensor(name)
                return found

            for name in self._found.plain:
                yield name, tensor(name)
            for weight in self._found.weights.values():
                if keeps_experts and weight.scheme.layout == MXFP4:
                    yield weight.name, self._experts(weight, tensor)
                else:
                    yield weight.name, self._weight(weight, tensor, keeps)

    def _experts(self, stored: ThirdPartyWeight, tensor: Read) -> StackedExperts:
        try:
            return stacked_experts(tensor(stored.parts["codes"]), tensor(stored.parts["scales"]))
        except ValueError as error:
            raise self._problem(stored, error) from None

    def _problem(self, stored: ThirdPartyWeight, error: ValueError) -> ModelFileError:
        name = stored.parts["codes"]
        return ModelFileError(f"{self._files.tensors[name].file}: tensor {name}: {error}")

    def _weight(self, stored: ThirdPartyWeight, tensor: Read, keeps: bool) -> Plain:
        try:
            found = read_weight(stored, tensor, self._dtype)
            if isinstance(found, QuantisedWeight):
                _check_finite(found.scales)
                if keeps:
                    return found
                found = found.dequantised()
            else:
                self.dequantised[_reason(stored)] += 1
            found = found.to(self._dtype)
            _check_finite(found)
        except ValueError as error:
            raise self._problem(stored, error) from None
        return found


def _reason(stored: ThirdPartyWeight) -> str:
    if "groups" in stored.parts:
        return "columns of a group are not side by side (act-order)"
    if stored.scheme.layout in ("float-quantized", "fp8", MXFP4):
        return "native kernels do not read their codes"
    return f"native kernels do not read groups of {stored.scheme.group} weights of 4 bits"


def _check_finite(numbers: torch.Tensor) -> None:
    if not numbers.isfinite().all():
        dtype = str(numbers.dtype).removeprefix("torch.")
        raise ValueError(f"a scale or weight is infinite, not a number, or more than {dtype} holds")


def read_weight(stored: ThirdPartyWeight, tensor: Read, dtype: torch.dtype = torch.float32) -> Plain:
    """The weight that is stored so, in the form of the native kernels if it has one.

    Args:
        stored: Tensors of the weight, whose types and shapes fit each other.
        tensor: Reads one of them.
        dtype: Data type of large weights that have no such form, to save memory; others are
            float32.

    Raises:
        ValueError: a tensor holds what its format cannot.
    """
    parts = {role: tensor(name) for role, name in stored.parts.items()}
    layout = stored.scheme.layout
    if layout in ("fp8", "float-quantized"):
        return _floats(stored, parts["codes"], parts["scales"])
    if layout == MXFP4:
        return _mxfp4(parts["codes"], parts["scales"], dtype)
    return _INTEGERS[layout](stored, parts)


def _gptq(stored: ThirdPartyWeight, parts: dict[str, torch.Tensor]) -> Plain:
    """Words of codes along columns, of zero points along rows."""
    bits = stored.scheme.bits
    zeros = parts["zeros"]
    if stored.scheme.is_below:
        # a word as a whole, as GPTQModel does: a zero point of 0 has borrowed from the next one
        ones = sum(1 << at for at in range(0, 32, bits))
        zeros = ((zeros.long() + ones) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    zeros = _unpacked(_bytes(zeros), bits)[:, : stored.shape[0]]
    return _integers(stored, _bytes(parts["codes"].T), zeros.T, parts["scales"].T, parts.get("groups"))


def _awq(stored: ThirdPartyWeight, parts: dict[str, torch.Tensor]) -> Plain:
    """Words along rows, in AWQ's order, of codes and of zero points."""
    codes, zeros = (_awq_ordered(parts[each]) for each in ("codes", "zeros"))
    return _integers(stored, _paired(codes.T.contiguous()), zeros.T, parts["scales"].T)


def _awq_ordered(words: torch.Tensor) -> torch.Tensor:
    """int32 ``[n, m]`` to codes ``[n, 8 m]``."""
    nibbles = _unpacked(_bytes(words), 4).view(len(words), -1, 8)
    return nibbles[..., torch.tensor(_AWQ_ORDER).argsort()].flatten(1)


def _packed(stored: ThirdPartyWeight, parts: dict[str, torch.Tensor]) -> Plain:
    """Words along columns, of codes to which half their range is added; zero points along rows."""
    shape, bits = parts["shape"].tolist(), stored.scheme.bits
    if tuple(shape) != stored.shape:
        raise ValueError(f"weight_shape must be {list(stored.shape)}, got {shape}")
    zeros = parts.get("zeros")
    if zeros is not None:
        zeros = _unpacked(_bytes(zeros.T), bits)[:, : stored.shape[0]].T
    return _integers(stored, _bytes(parts["codes"]), zeros, _by_row(stored, parts["scales"]), parts.get("groups"))


def _bytes_of_integers(stored: ThirdPartyWeight, parts: dict[str, torch.Tensor]) -> Plain:
    """Codes and zero points with a sign, a byte each."""
    zeros = parts.get("zeros")
    if zeros is not None:
        zeros = _by_row(stored, zeros).to(torch.int16) + 128
    codes = parts["codes"].view(torch.uint8) ^ 128
    return _integers(stored, codes, zeros, _by_row(stored, parts["scales"]), parts.get("groups"))


_INTEGERS: dict[str, Callable[[ThirdPartyWeight, dict[str, torch.Tensor]], Plain]] = {
    "gptq": _gptq,
    "awq": _awq,
    "pack-quantized": _packed,
    "int-quantized": _bytes_of_integers,
}


def _by_row(stored: ThirdPartyWeight, numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of groups, of rows or of the whole weight as ``[N, groups]``."""
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(stored.shape[0], 1)
    return numbers.reshape(stored.shape[0], -1)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 ``[n, m]`` as uint8 ``[n, 4 m]``, the lowest byte first."""
    return words.contiguous().view(torch.uint8)


def _unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 ``[n, m]`` as codes: two from each byte, the lower one first, or the byte."""
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def _paired(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits ``[n, m]``, two to a byte."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _integers(
    stored: ThirdPartyWeight,
    codes: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    groups: torch.Tensor | None = None,
) -> Plain:
    """The weight ``scales * (codes - zeros)``.

    Args:
        stored: Shape of the weight, and bits of a code.
        codes: uint8 ``[N, K * bits / 8]``, without a sign; of 4 bits two in a byte, the first one
            lower.
        zeros: Whole numbers ``[N, groups]``; None for the middle of the codes' range.
        scales: ``[N, groups]``.
        groups: The group of each column ``[K]``; None for equal ones, one after the other.
    """
    bits, (_, columns) = stored.scheme.bits, stored.shape
    middle = 1 << bits - 1
    scales = scales.float()
    width = columns if stored.scheme.group is None else min(stored.scheme.group, columns)
    consecutive = torch.arange(columns) // width
    index = consecutive if groups is None else groups.long()
    if not (0 <= int(index.min()) and int(index.max()) < scales.shape[1]):
        raise ValueError(f"groups of columns must be from 0 to {scales.shape[1] - 1}")
    equal = math.gcd(width, columns)  # the last group may be shorter: parts of groups are equal ones, too
    if torch.equal(index, consecutive) and (bits == 8 or equal % 8 == 0):
        firsts = consecutive[::equal]
        return _kept(bits, codes, zeros[:, firsts] if zeros is not None else None, scales[:, firsts])
    numbers = _unpacked(codes, bits).float()
    zero = torch.full_like(scales, middle) if zeros is None else zeros.float()
    return (numbers - zero[:, index]) * scales[:, index]


def _kept(bits: int, codes: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor) -> QuantisedWeight:
    """The weight in equal groups."""
    is_symmetric = zeros is None or bool((zeros == 1 << bits - 1).all())
    first = 0 if bits == 4 else 128  # our codes of 8 bits have a sign
    offsets = None if is_symmetric or zeros is None else -(scales * (zeros.float() - first))
    if all(each is None or torch.equal(each.half().float(), each) for each in (scales, offsets)):
        scales, offsets = scales.half(), offsets.half() if offsets is not None else None
    if bits == 8:
        codes = (codes ^ 128).view(torch.int8)
    return QuantisedWeight(
        codes.contiguous(), scales.contiguous(), offsets.contiguous() if offsets is not None else None
    )


def _floats(stored: ThirdPartyWeight, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP8 numbers times the scale of their block, row or weight."""
    rows, columns = stored.shape
    factors, block, group = scales.float(), stored.scheme.block, stored.scheme.group
    if block is not None:
        factors = factors.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    elif group is not None:
        factors = factors.repeat_interleave(group, 1)[:, :columns]
    else:
        factors = _by_row(stored, factors)
    return codes.float() * factors


def _mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Experts' weights ``[E, K, N]`` of blocks ``[E, N, K / 32, 16]``, one expert at a time."""
    _check_exponents(scales)
    experts, rows, groups, _ = blocks.shape
    found = torch.empty(experts, 32 * groups, rows, dtype=dtype)
    for expert in range(experts):
        values = _E2M1[_unpacked(blocks[expert], 4).long()]
        exponents = scales[expert].to(torch.int32)[..., None] - _E8M0_BIAS
        found[expert] = torch.ldexp(values, exponents).flatten(1).T
    return found


def _check_exponents(scales: torch.Tensor) -> None:
    if bool((scales == _E8M0_NAN).any()):
        raise ValueError("a scale is not a number")


def stacked_experts(blocks: torch.Tensor, scales: torch.Tensor) -> StackedExperts:
    """Experts' weights of blocks ``[E, N, K / 32, 16]``, as they are.

    Raises:
        ValueError: a scale is not a number, or a weight may be more than float32 holds.
    """
    _check_exponents(scales)
    if bool((scales > MOST_E8M0).any()):
        raise ValueError(f"a scale is 2^{int(scales.max()) - _E8M0_BIAS}: weights are more than float32 holds")
    return StackedExperts(blocks.flatten(2), e8m0_halves(scales), is_e2m1=True, is_transposed=True)


def changes_nothing(name: str, value: Weight) -> bool:
    """Whether a tensor that the model lacks may be left out: AutoGPTQ writes biases of zeros, old
    checkpoints the frequencies of RoPE.
    """
    is_zero = isinstance(value, torch.Tensor) and not value.any()
    return name.endswith("rotary_emb.inv_freq") or (name.endswith(".bias") and is_zero)
