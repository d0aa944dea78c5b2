"""``quantization_config`` of checkpoints that other programs quantised: GPTQ, AWQ,
compressed-tensors, FP8 and MXFP4.

What it says becomes a `Scheme` for each module. Other methods, variants and values are refused by
name; `quantised_tensors` finds what a scheme means in the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from adapters.first_problem import first_problem
from worker.models.problems import ModelFileError, shown
from worker.models.quantised import format_of

_KEY = "config.json: quantization_config"

Layout = Literal["gptq", "awq", "pack-quantized", "int-quantized", "float-quantized", "fp8", "mxfp4"]

MXFP4: Final = "mxfp4"
"""Layout of blocks of 32 numbers of e2m1, which the native kernels read as experts of GPT-OSS."""

STACKED_EXPERTS = "gpt_oss"
"""Model type whose experts are kept in MXFP4; its checkpoints have the names of its modules."""

INTEGERS = ("gptq", "awq", "pack-quantized", "int-quantized")
"""Layouts of whole numbers, which the native kernels read."""

_Group = Annotated[int, Field(ge=-1, le=2**22)]
_Pair = Annotated[list[Annotated[int, Field(ge=1, le=2**20)]], Field(min_length=2, max_length=2)]
_Names = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=100_000)]

Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Scheme:
    """The way in which a module's weight is stored.

    Attributes:
        layout: Names, types and shapes of its tensors.
        bits: Bits of a code.
        group: Consecutive weights of a row that share a scale; None for all of them.
        block: Rows and columns that share a scale; None for no blocks.
        is_below: Whether a stored zero point is one below what it means, as in GPTQ's first format.
        has_zeros: Whether zero points must be there where its layout lets them be left out.
    """

    layout: Layout
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    is_below: bool = False
    has_zeros: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The scheme of some modules.

    Attributes:
        matches: Whether the module of that name is one of them.
        scheme: None for one whose weight is not quantised.
    """

    matches: Callable[[str], bool]
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation of a checkpoint.

    Attributes:
        name: Format of the weights, for people.
        rules: Rules of which the first that matches counts.
        notes: Lines about what the format asks for and is not done.
    """

    name: str
    rules: tuple[Rule, ...]
    notes: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module's weight; None if that is not quantised."""
        return next((rule.scheme for rule in self.rules if rule.matches(module)), None)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes that modules may have."""
        return tuple(rule.scheme for rule in self.rules if rule.scheme is not None)

    @property
    def is_kept(self) -> bool:
        """Whether the native kernels read weights of one of the schemes as they are."""
        return any(scheme.layout in (*INTEGERS, MXFP4) for scheme in self.schemes)

    @property
    def is_of_integers(self) -> bool:
        """Whether weights of one of the schemes are whole numbers, which are not rounded again."""
        return any(scheme.layout in INTEGERS for scheme in self.schemes)


def quantization_of(settings: Mapping[str, Any]) -> Quantization | None:
    """The quantisation of a checkpoint with this ``config.json``; None for none, and for our own.

    Raises:
        ModelFileError: it is not served, or a key has a wrong value.
    """
    found = settings.get("quantization_config")
    if found is None or format_of(settings) is not None:
        return None
    method = found.get("quant_method")
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ModelFileError(
            f"{_KEY}.quant_method {shown(method)} is not served; {', '.join(_METHODS)} are. Serve the model that it "
            "was made of, with --quantization int8 or int4"
        )
    try:
        return read(found)
    except ValidationError as error:
        raise ModelFileError(f"{_KEY}.{first_problem(error, shown)}") from None


class _Settings(BaseModel):
    model_config = ConfigDict(defer_build=True, strict=True, extra="ignore", allow_inf_nan=False)

    modules_to_not_convert: _Names | None = None

    @field_validator("modules_to_not_convert", "ignored_layers", "ignore", check_fields=False)
    @classmethod
    def _are_patterns(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            _compiled(name.removeprefix("re:"))
        return names


class _GptqOverride(BaseModel):
    """Settings of some modules."""

    model_config = ConfigDict(defer_build=True, strict=True, extra="ignore")

    bits: Literal[4, 8] | None = None
    group_size: _Group | None = None


class _Gptq(_Settings):
    """GPTQ, as AutoGPTQ and GPTQModel write it."""

    bits: Literal[4, 8]
    group_size: _Group
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None
    format: Literal["gptq", "gptq_v2"] | None = None
    is_marlin_format: Literal[False] = False
    pack_dtype: Literal["int32"] = "int32"
    dynamic: dict[str, _GptqOverride | Literal[False]] | None = None

    @field_validator("dynamic")
    @classmethod
    def _has_patterns(cls, found: dict[str, Any] | None) -> dict[str, Any] | None:
        for pattern in found or ():
            _compiled(pattern.removeprefix("+:").removeprefix("-:"))
        return found


class _Awq(_Settings):
    """AWQ, as AutoAWQ writes it."""

    bits: Literal[4]
    group_size: _Group
    zero_point: Literal[True] = True
    version: Literal["gemm", "GEMM"] = "gemm"


class _Fp8(_Settings):
    """FP8 with scales of blocks, rows or a whole weight, as DeepSeek, Qwen and vLLM have it."""

    fmt: Literal["e4m3"] = "e4m3"
    weight_block_size: _Pair | None = None
    activation_scheme: Literal["dynamic", "static"] | None = None
    kv_cache_scheme: Any = None
    ignored_layers: _Names | None = None


class _Args(BaseModel):
    """compressed-tensors' arguments of what is quantised; any other key is refused."""

    model_config = ConfigDict(defer_build=True, strict=True, extra="forbid")

    num_bits: Annotated[int, Field(ge=1, le=16)] = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    group_size: _Group | None = None
    strategy: str | None = None
    block_structure: _Pair | str | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: dict[str, Any] | None = None


class _Weights(_Args):
    """Arguments of weights."""

    num_bits: Literal[4, 8] = 8
    strategy: Literal["tensor", "channel", "group", "block"] | None = None
    block_structure: _Pair | None = None
    dynamic: Literal[False] = False


class _ModuleGroup(BaseModel):
    """A group of modules that are quantised alike."""

    model_config = ConfigDict(defer_build=True, strict=True, extra="forbid")

    targets: _Names
    weights: _Weights | None = None
    input_activations: _Args | None = None
    output_activations: _Args | None = None
    format: str | None = None


class _CompressedTensors(_Settings):
    format: str
    config_groups: dict[str, _ModuleGroup]
    ignore: _Names | None = None
    kv_cache_scheme: _Args | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    quantization_status: Literal["compressed", "frozen"] = "compressed"

    @field_validator("sparsity_config")
    @classmethod
    def _is_dense(cls, found: dict[str, Any] | None) -> dict[str, Any] | None:
        if found and found.get("format") != "dense":
            raise ValueError(f"format must be dense, got {shown(found.get('format'))}")
        return found

    @field_validator("transform_config")
    @classmethod
    def _transforms_nothing(cls, found: dict[str, Any] | None) -> dict[str, Any] | None:
        if found and found.get("config_groups"):
            raise ValueError("config_groups must be empty: transformed weights are not served")
        return found


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{shown(pattern)} is no pattern: {error}") from None


def _group(size: int | None) -> int | None:
    if size == 0:
        raise ModelFileError(f"{_KEY}.group_size must be -1 or above 0, got 0")
    return None if size is None or size < 0 else size


def _not_converted(patterns: Iterable[str] | None) -> tuple[Rule, ...]:
    """The modules that transformers does not convert: whose name begins with a pattern that ends at
    a dot or the end, or ends in it.
    """
    compiled = [(each, _compiled(rf"(?:{each})(?:(?<=\.)|(?=\.|$))")) for each in patterns or ()]

    def matches(name: str) -> bool:
        return any(pattern.match(name) or name.endswith(text) for text, pattern in compiled)

    return (Rule(matches, None),) if compiled else ()


def _any(name: str) -> bool:
    return True


def _gptq(found: Mapping[str, Any]) -> Quantization:
    given = _Gptq.model_validate(found)
    is_first = "gptq_v2" not in (given.checkpoint_format, given.format)
    base = Scheme("gptq", given.bits, _group(given.group_size), is_below=is_first)
    rules = list(_not_converted(given.modules_to_not_convert))
    for pattern, override in (given.dynamic or {}).items():
        matches = _compiled(pattern.removeprefix("+:").removeprefix("-:")).match
        scheme: Scheme | None = None
        if override and not pattern.startswith("-:"):
            group = base.group if override.group_size is None else _group(override.group_size)
            scheme = replace(base, bits=override.bits or base.bits, group=group)
        rules.append(Rule(lambda name, matches=matches: bool(matches(name)), scheme))  # type: ignore[misc]
    return Quantization(f"GPTQ int{given.bits}", (*rules, Rule(_any, base)))


def _awq(found: Mapping[str, Any]) -> Quantization:
    given = _Awq.model_validate(found)
    scheme = Scheme("awq", given.bits, _group(given.group_size))
    return Quantization("AWQ int4", (*_not_converted(given.modules_to_not_convert), Rule(_any, scheme)))


def _fp8(found: Mapping[str, Any]) -> Quantization:
    given = _Fp8.model_validate(found)
    block = (given.weight_block_size[0], given.weight_block_size[1]) if given.weight_block_size else None
    patterns = [*(given.modules_to_not_convert or ()), *(given.ignored_layers or ())]
    notes = [_ACTIVATIONS.format("FP8")]
    if given.kv_cache_scheme is not None:
        notes.append(_KV_CACHE)
    return Quantization("FP8", (*_not_converted(patterns), Rule(_any, Scheme("fp8", 8, block=block))), tuple(notes))


def _mxfp4(found: Mapping[str, Any]) -> Quantization:
    given = _Settings.model_validate(found)
    return Quantization(
        "MXFP4", (*_not_converted(given.modules_to_not_convert), Rule(_any, Scheme(MXFP4, 4, group=32)))
    )


_ACTIVATIONS = "activations are not rounded to {}, as its own runtime does: weights count as they are"
_KV_CACHE = "scales of the KV cache are not used: it is in --kv-cache-dtype, not in what the checkpoint names"


def _compressed_tensors(found: Mapping[str, Any]) -> Quantization:
    given = _CompressedTensors.model_validate(found)
    rules: list[tuple[int, Rule]] = []
    names, notes = set(), []
    for name, group in given.config_groups.items():
        if group.weights is None:
            continue
        format = group.format or given.format
        scheme = _scheme(f"{_KEY}.config_groups.{name}", format, group.weights)
        names.add(f"{format} {'FP8' if scheme.layout == 'float-quantized' else f'int{scheme.bits}'}")
        for args in (group.input_activations, group.output_activations):
            if args is not None:
                notes.append(_ACTIVATIONS.format("FP8" if args.type == "float" else f"int{args.num_bits}"))
        rules += [_targeted(target, scheme) for target in group.targets]
    if not rules:
        raise ModelFileError(f"{_KEY}.config_groups must name weights that are quantised")
    if given.kv_cache_scheme is not None:
        notes.append(_KV_CACHE)
    ignored = [Rule(_targeted(each, None)[1].matches, None) for each in given.ignore or ()]
    ordered = [rule for _, rule in sorted(rules, key=lambda each: each[0])]
    title = f"compressed-tensors {', '.join(sorted(names))}"
    return Quantization(title, (*ignored, *ordered), tuple(dict.fromkeys(notes)))


def _targeted(target: str, scheme: Scheme | None) -> tuple[int, Rule]:
    """The modules that a target names, and its rank: a name, then a pattern, then a class."""
    if target.startswith("re:"):
        pattern = _compiled(target.removeprefix("re:"))
        return 1, Rule(lambda name: bool(pattern.match(name)), scheme)
    if target == "Linear":
        return 2, Rule(_any, scheme)
    return 0, Rule(lambda name: name == target, scheme)


def _scheme(key: str, format: str, weights: _Weights) -> Scheme:
    """Scheme of a group. Raises `ModelFileError` for one that is not served."""
    served = {"pack-quantized": ("int", (4, 8)), "int-quantized": ("int", (8,)), "float-quantized": ("float", (8,))}
    layout = format
    if format == "naive-quantized":
        layout = f"{weights.type}-quantized"
    if layout not in served:
        raise ModelFileError(f"{key}: format must be one of {', '.join(served)}, got {shown(format)}")
    kind, bits = served[layout]
    if weights.type != kind or weights.num_bits not in bits:
        raise ModelFileError(
            f"{key}.weights: {format} must have type {kind} and num_bits {' or '.join(map(str, bits))}, got "
            f"{weights.type} and {weights.num_bits}"
        )
    strategy = weights.strategy
    if (strategy == "group") and not weights.group_size:
        raise ModelFileError(f"{key}.weights.group_size must be above 0, got {weights.group_size}")
    if (strategy == "block") != (weights.block_structure is not None):
        raise ModelFileError(f"{key}.weights.block_structure must be there for strategy block alone")
    block = (weights.block_structure[0], weights.block_structure[1]) if weights.block_structure else None
    if block is not None and layout != "float-quantized":
        raise ModelFileError(f"{key}.weights.strategy block is served for float-quantized weights alone")
    return Scheme(
        layout,  # type: ignore[arg-type]
        weights.num_bits,
        _group(weights.group_size),
        block,
        has_zeros=not weights.symmetric,
    )


_METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
}
"""Readers by ``quant_method``."""
