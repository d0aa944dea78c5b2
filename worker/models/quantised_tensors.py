"""The tensors of weights that other programs quantised: which belong together, and their shapes.

Headers of the files alone are looked at. A tensor that is missing, or of another type or shape than
its format has, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from worker.models.problems import ModelFileError, shown
from worker.models.quantization_config import Quantization, Scheme

Shape = tuple[int, ...]


class TensorHeader(Protocol):
    """A tensor as the header of a file has it; see `weight_files.StoredTensor`."""

    @property
    def file(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True, slots=True)
class ThirdPartyWeight:
    """A quantised weight of another program's checkpoint.

    Attributes:
        name: Name of the weight that it stands for.
        shape: Shape of that weight.
        scheme: The way in which it is stored.
        parts: Names of its tensors: of ``codes`` and ``scales`` and, where there are any, of
            ``zeros``, of ``groups`` (the group of each column) and of ``shape``.
    """

    name: str
    shape: Shape
    scheme: Scheme
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FoundTensors:
    """The tensors of a checkpoint.

    Attributes:
        weights: Quantised weights, by name.
        plain: Names of tensors that are not quantised.
        activation_scales: Names of those that say how activations are rounded.
        kv_scales: Names of those that say how the KV cache is rounded.
    """

    weights: Mapping[str, ThirdPartyWeight]
    plain: tuple[str, ...]
    activation_scales: tuple[str, ...]
    kv_scales: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a quantised weight.

    Attributes:
        suffixes: Ends of its name, behind the module's, of which the first that is there counts.
        dtypes: Types that it may have.
        shapes: Shapes that it may have.
        is_needed: Whether it must be there.
    """

    suffixes: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    is_needed: bool = True


_Parts = tuple[Shape, dict[str, _Part]]
"""Shape of a weight, and its parts beside the codes."""

_FLOATS = ("F16", "BF16", "F32")
_ACTIVATION_ENDS = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".input_scale_ub"),
    *(".output_zero_point", ".input_g_idx"),
)
_KV_ENDS = (".k_scale", ".v_scale", ".kv_scale", ".k_zero_point", ".v_zero_point", ".q_scale", ".prob_scale")
_OUTPUT_SCALE = ".output_scale"
_PART_ENDS = (
    *(".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_shape", ".weight_scale"),
    *(".weight_scale_inv", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale", "_blocks", "_scales"),
)


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _groups(scheme: Scheme, columns: int) -> int:
    return 1 if scheme.group is None else _ceil(columns, scheme.group)


def _gptq(shape: Shape, scheme: Scheme) -> _Parts:
    per_word = 32 // scheme.bits
    columns, rows = shape[0] * per_word, shape[1]
    groups = _groups(scheme, columns)
    return (rows, columns), {
        "scales": _Part((".scales",), _FLOATS, ((groups, rows),)),
        "zeros": _Part((".qzeros",), ("I32",), ((groups, _ceil(rows, per_word)),)),
        "groups": _Part((".g_idx",), ("I32",), ((columns,),), False),
    }


def _awq(shape: Shape, scheme: Scheme) -> _Parts:
    columns, words = shape
    groups = _groups(scheme, columns)
    return (8 * words, columns), {
        "scales": _Part((".scales",), _FLOATS, ((groups, 8 * words),)),
        "zeros": _Part((".qzeros",), ("I32",), ((groups, words),)),
    }


def _scales(scheme: Scheme, rows: int, columns: int) -> tuple[Shape, ...]:
    """Shapes of scales of a weight: of one for all, of one for each row, group or block."""
    if scheme.block is not None:
        return ((_ceil(rows, scheme.block[0]), _ceil(columns, scheme.block[1])),)
    if scheme.group is not None:
        return ((rows, _groups(scheme, columns)),)
    return (), (1,), (1, 1), (rows,), (rows, 1)


def _packed(shape: Shape, scheme: Scheme) -> _Parts:
    per_word = 32 // scheme.bits
    rows, columns = shape[0], shape[1] * per_word
    scales = _scales(scheme, rows, columns)
    zeros = (_ceil(rows, per_word), _groups(scheme, columns))
    return (rows, columns), {
        "scales": _Part((".weight_scale",), _FLOATS, scales),
        "zeros": _Part((".weight_zero_point",), ("I32",), (zeros,), scheme.has_zeros),
        "groups": _Part((".weight_g_idx",), ("I32", "I64"), ((columns,),), False),
        "shape": _Part((".weight_shape",), ("I32", "I64"), ((2,),)),
    }


def _integers(shape: Shape, scheme: Scheme) -> _Parts:
    scales = _scales(scheme, *shape)
    return shape, {
        "scales": _Part((".weight_scale",), _FLOATS, scales),
        "zeros": _Part((".weight_zero_point",), ("I8",), scales, scheme.has_zeros),
        "groups": _Part((".weight_g_idx",), ("I32", "I64"), ((shape[1],),), False),
    }


def _floats(shape: Shape, scheme: Scheme) -> _Parts:
    return shape, {
        "scales": _Part((".weight_scale_inv", ".weight_scale"), (*_FLOATS, "F8_E8M0"), _scales(scheme, *shape))
    }


def _mxfp4(shape: Shape, scheme: Scheme) -> _Parts:
    experts, rows, groups, _ = shape
    return (experts, 32 * groups, rows), {"scales": _Part(("_scales",), ("U8",), (shape[:3],))}


@dataclass(frozen=True, slots=True)
class _Format:
    """The codes of a layout.

    Attributes:
        suffix: End of the codes' name, behind the module's.
        weight: End of the name of the weight that they stand for.
        dtype: Type of the codes.
        dimensions: Number of dimensions of the codes.
        parts: Shapes of the weight and of its other parts, from theirs.
    """

    suffix: str
    weight: str
    dtype: str
    dimensions: int
    parts: Callable[[Shape, Scheme], _Parts]


_FORMATS = {
    "gptq": _Format(".qweight", ".weight", "I32", 2, _gptq),
    "awq": _Format(".qweight", ".weight", "I32", 2, _awq),
    "pack-quantized": _Format(".weight_packed", ".weight", "I32", 2, _packed),
    "int-quantized": _Format(".weight", ".weight", "I8", 2, _integers),
    "float-quantized": _Format(".weight", ".weight", "F8_E4M3", 2, _floats),
    "fp8": _Format(".weight", ".weight", "F8_E4M3", 2, _floats),
    "mxfp4": _Format("_blocks", "", "U8", 4, _mxfp4),
}
_CODE_DTYPES = ("I8", "U8", "I32", "F8_E4M3", "F8_E5M2")


def find_tensors(tensors: Mapping[str, TensorHeader], quantization: Quantization) -> FoundTensors:
    """The tensors of a checkpoint, sorted by use.

    Raises:
        ModelFileError: one is missing, has a wrong type or shape, or belongs to nothing.
    """
    formats = [_FORMATS[layout] for layout in dict.fromkeys(each.layout for each in quantization.schemes)]
    weights: dict[str, ThirdPartyWeight] = {}
    taken: set[str] = set()
    for name, header in tensors.items():
        found = next((each for each in formats if _has_codes(name, header, each)), None)
        if found is None:
            continue
        weight = _weight(name, name.removesuffix(found.suffix), header, tensors, quantization)
        if weight.name in tensors and weight.name != name:
            raise ModelFileError(f"{header.file}: tensor {name}: {weight.name} is there, not quantised, too")
        weights[weight.name] = weight
        taken |= set(weight.parts.values())
    if not weights:
        raise ModelFileError(f"config.json: quantization_config: no weight is stored in {quantization.name}")
    rest = [name for name in tensors if name not in taken]
    kv, activations, plain = _sorted(rest, tensors)
    return FoundTensors(weights, plain, activations, kv)


def _has_codes(name: str, header: TensorHeader, format: _Format) -> bool:
    is_by_dtype = format.suffix == format.weight  # plain weights have the same name
    return name.endswith(format.suffix) and (header.dtype == format.dtype or not is_by_dtype)


def _weight(
    name: str, module: str, codes: TensorHeader, tensors: Mapping[str, TensorHeader], quantization: Quantization
) -> ThirdPartyWeight:
    scheme = quantization.scheme_of(module)
    where = f"{codes.file}: tensor {name}"
    if scheme is None:
        raise ModelFileError(f"{where}: config.json: quantization_config says that {module} is not quantised")
    format = _FORMATS[scheme.layout]
    if not name.endswith(format.suffix) or codes.dtype != format.dtype:
        raise ModelFileError(
            f"{where} must be {module}{format.suffix} of type {format.dtype}, as config.json has it, got {codes.dtype}"
        )
    if len(codes.shape) != format.dimensions or 0 in codes.shape or (scheme.layout == "mxfp4" and codes.shape[3] != 16):
        raise ModelFileError(f"{where} must have {format.dimensions} dimensions, got {shown(list(codes.shape))}")
    shape, parts = format.parts(codes.shape, scheme)
    names = {"codes": name}
    for role, part in parts.items():
        found = next((module + each for each in part.suffixes if module + each in tensors), None)
        if found is not None:
            _check(found, tensors[found], part)
            names[role] = found
        elif part.is_needed:
            raise ModelFileError(f"{where}: tensor {module}{part.suffixes[0]} is missing beside it")
    return ThirdPartyWeight(module + format.weight, shape, scheme, names)


def _check(name: str, header: TensorHeader, part: _Part) -> None:
    if header.dtype not in part.dtypes:
        raise ModelFileError(
            f"{header.file}: tensor {name} must be of type {' or '.join(part.dtypes)}, got {header.dtype}"
        )
    if header.shape not in part.shapes:
        wanted = " or ".join(str(list(each)) for each in part.shapes)
        raise ModelFileError(
            f"{header.file}: tensor {name} must be of shape {wanted}, as config.json has it, got "
            f"{shown(list(header.shape))}"
        )


def _sorted(names: Iterable[str], tensors: Mapping[str, TensorHeader]) -> tuple[tuple[str, ...], ...]:
    """Scales of the KV cache, those of activations, and plain tensors. Raises `ModelFileError` for
    what is none of them.
    """
    kv: list[str] = []
    activations: list[str] = []
    plain: list[str] = []
    for name in names:
        header = tensors[name]
        if name.endswith(_KV_ENDS) or name.endswith((f".k_proj{_OUTPUT_SCALE}", f".v_proj{_OUTPUT_SCALE}")):
            kv.append(name)
        elif name.endswith((*_ACTIVATION_ENDS, _OUTPUT_SCALE)):
            activations.append(name)
        elif name.endswith(_PART_ENDS):
            raise ModelFileError(f"{header.file}: tensor {name} belongs to no quantised weight")
        elif header.dtype in _CODE_DTYPES:
            raise ModelFileError(
                f"{header.file}: tensor {name} of type {header.dtype} has no place in what config.json says of "
                "quantised weights"
            )
        else:
            plain.append(name)
    return tuple(kv), tuple(activations), tuple(plain)
