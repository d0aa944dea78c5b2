"""Weights in the formats of other programs, written from the formats' definitions, and checkpoints
of them; what each means is computed in float64.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from worker.engines.embedded.model.quantisation import QuantisedWeight
from worker.engines.embedded.model.third_party_weights import read_weight
from worker.models.quantised_tensors import find_tensors
from worker.models.quantization_config import Quantization, Rule, Scheme

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def read(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> tuple[torch.Tensor, bool]:
    """The weight of module ``m`` in float32, and whether native kernels read its form."""
    headers = {
        f"m{end}": SimpleNamespace(file="f", dtype=DTYPES[each.dtype], shape=tuple(each.shape))
        for end, each in tensors.items()
    }
    found = find_tensors(headers, Quantization("", (Rule(lambda name: True, scheme),)))
    assert not found.plain
    [weight] = found.weights.values()
    value = read_weight(weight, lambda name: tensors[name.removeprefix("m")])
    assert value.shape == weight.shape
    is_kept = isinstance(value, QuantisedWeight)
    return (value.dequantised() if isinstance(value, QuantisedWeight) else value), is_kept


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Integers:
    """``scales * (codes - zeros)``: codes ``[N, K]`` without a sign, zeros and scales ``[N, G]``,
    the group of each column ``[K]``.
    """

    bits: int
    codes: np.ndarray[Any, np.dtype[np.int64]]
    zeros: np.ndarray[Any, np.dtype[np.int64]]
    scales: torch.Tensor
    groups: np.ndarray[Any, np.dtype[np.int64]]

    def dense(self) -> torch.Tensor:
        numbers = (self.codes - self.zeros[:, self.groups]).astype(np.float64)
        return torch.from_numpy(numbers * self.scales.double().numpy()[:, self.groups]).float()


def in_words(codes: np.ndarray[Any, np.dtype[np.int64]], bits: int) -> torch.Tensor:
    """Codes ``[n, m]`` side by side in words of 32 bits, the first one lowest."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // bits))))
    parts = padded.reshape(len(codes), -1, 32 // bits)
    words = sum(parts[..., at] << bits * at for at in range(32 // bits))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def gptq(of: Integers, is_first: bool = True, has_groups: bool = True) -> dict[str, torch.Tensor]:
    zeros = in_words(of.zeros.T, of.bits)
    if is_first:  # as GPTQModel subtracts one from each code: from the words
        ones = sum(1 << at for at in range(0, 32, of.bits))
        zeros = torch.from_numpy((zeros.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    found = {".qweight": in_words(of.codes, of.bits).T.contiguous()}
    found |= {".qzeros": zeros, ".scales": of.scales.T.contiguous()}
    return found | ({".g_idx": torch.from_numpy(of.groups.astype(np.int32))} if has_groups else {})


def awq(of: Integers) -> dict[str, torch.Tensor]:
    def words(codes: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        order = codes.reshape(len(codes), -1, 8)[..., list(AWQ_ORDER)]
        return in_words(order.reshape(len(codes), -1), 4)

    return {".qweight": words(of.codes.T), ".qzeros": words(of.zeros.T), ".scales": of.scales.T.contiguous()}


def packed(of: Integers, is_symmetric: bool = False, has_groups: bool = False) -> dict[str, torch.Tensor]:
    found = {
        ".weight_packed": in_words(of.codes, of.bits),
        ".weight_scale": of.scales.contiguous(),
        ".weight_shape": torch.tensor(of.codes.shape),
    }
    if not is_symmetric:
        found[".weight_zero_point"] = in_words(of.zeros.T, of.bits).T.contiguous()
    return found | ({".weight_g_idx": torch.from_numpy(of.groups.astype(np.int32))} if has_groups else {})


def bytes_of(of: Integers, is_symmetric: bool = False) -> dict[str, torch.Tensor]:
    found = {
        ".weight": torch.from_numpy((of.codes - 128).astype(np.int8)),
        ".weight_scale": of.scales.contiguous(),
    }
    return found if is_symmetric else found | {".weight_zero_point": torch.from_numpy((of.zeros - 128).astype(np.int8))}


def rounded(weight: torch.Tensor, bits: int, group: int, is_symmetric: bool, is_ordered: bool = False) -> Integers:
    """`weight` rounded to whole numbers, in groups of columns, at random if `is_ordered`."""
    rows, columns = weight.shape
    width = columns if group < 0 else group
    groups = np.arange(columns) // width
    if is_ordered:
        groups = np.random.default_rng(columns).permutation(groups)
    found = weight.double().numpy()
    top, middle = (1 << bits) - 1, 1 << bits - 1
    zeros, scales = np.zeros((rows, groups.max() + 1), np.int64), np.zeros((rows, groups.max() + 1))
    for each in range(groups.max() + 1):
        part = found[:, groups == each]
        if is_symmetric:
            zeros[:, each], scales[:, each] = middle, np.abs(part).max(1) / (middle - 1) + 1e-6
        else:
            least, most = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, each] = (most - least) / top + 1e-6
            zeros[:, each] = np.round(-least / scales[:, each]).clip(0, top)
    halves = torch.from_numpy(scales).half()
    steps = halves.double().numpy()[:, groups]
    codes = np.round(found / steps + zeros[:, groups]).clip(0, top).astype(np.int64)
    return Integers(bits, codes, zeros, halves, groups)


Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors by the ends of their names, and the weight that they mean."""


def in_gptq(bits: int, group: int, is_first: bool = True, **how: bool) -> Callable[[torch.Tensor], Stored]:
    def store(weight: torch.Tensor) -> Stored:
        found = rounded(weight, bits, group, how.get("is_symmetric", False), how.get("is_ordered", False))
        return gptq(found, is_first), found.dense()

    return store


def in_awq(group: int) -> Callable[[torch.Tensor], Stored]:
    def store(weight: torch.Tensor) -> Stored:
        found = rounded(weight, 4, group, False)
        return awq(found), found.dense()

    return store


def in_packed(bits: int, group: int, is_symmetric: bool, is_ordered: bool = False) -> Callable[[torch.Tensor], Stored]:
    def store(weight: torch.Tensor) -> Stored:
        found = rounded(weight, bits, group, is_symmetric, is_ordered)
        return packed(found, is_symmetric, is_ordered), found.dense()

    return store


def in_bytes(weight: torch.Tensor) -> Stored:
    found = rounded(weight, 8, -1, True)
    return bytes_of(found, True), found.dense()


def in_fp8(block: tuple[int, int] | None, name: str) -> Callable[[torch.Tensor], Stored]:
    """With a scale for each block, or for each row."""

    def store(weight: torch.Tensor) -> Stored:
        rows, columns = weight.shape
        high, wide = block or (1, columns)
        scales = torch.zeros(-(-rows // high), -(-columns // wide))
        means = torch.zeros(rows, columns, dtype=torch.float64)
        codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scales[i, j] = (weight[at].abs().max() / 448).bfloat16() + 2.0**-20
                codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
                means[at] = codes[at].double() * scales[i, j].double()
        return {".weight": codes, name: scales}, means.float()

    return store


def in_mxfp4(weight: torch.Tensor) -> Stored:
    """Experts' weights ``[E, K, N]``, whose blocks lie along K."""
    experts, columns, rows = weight.shape
    parts = weight.mT.reshape(experts, rows, columns // 32, 32)
    exponents = (parts.abs().amax(-1) / 6).clamp(min=2.0**-100).log2().ceil()
    values = torch.tensor([*E2M1, *(-each for each in E2M1)])
    codes = ((parts / exponents.exp2()[..., None])[..., None] - values).abs().argmin(-1)
    means = (values[codes].double() * exponents.double().exp2()[..., None]).reshape(experts, rows, columns)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    stored = {"_blocks": blocks.to(torch.uint8), "_scales": (exponents + 127).to(torch.uint8)}
    return stored, means.mT.contiguous().float()


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}} | {
        "ignore": ["lm_head"]
    }


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}

FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Stored], bool]] = {
    "gptq": (GPTQ, in_gptq(4, 32), True),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, in_gptq(4, 32, is_first=False), True),
    "gptq_sym": (GPTQ | {"sym": True, "group_size": -1}, in_gptq(4, -1, is_symmetric=True), True),
    "gptq_order": (GPTQ | {"desc_act": True}, in_gptq(4, 32, is_ordered=True), False),
    "gptq_8": (GPTQ | {"bits": 8}, in_gptq(8, 32), True),
    "awq": (AWQ, in_awq(32), True),
    "packed": (compressed("pack-quantized", num_bits=4, group_size=32, strategy="group"), in_packed(4, 32, True), True),
    "packed_8": (
        compressed("pack-quantized", num_bits=8, group_size=16, strategy="group", symmetric=False),
        in_packed(8, 16, False),
        True,
    ),
    "packed_order": (
        compressed("pack-quantized", num_bits=4, group_size=32, strategy="group", actorder="group"),
        in_packed(4, 32, True, True),
        False,
    ),
    "int_quantized": (compressed("int-quantized", num_bits=8, strategy="channel"), in_bytes, True),
    "float_quantized": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        in_fp8(None, ".weight_scale"),
        False,
    ),
    "fp8": (FP8, in_fp8((16, 32), ".weight_scale_inv"), False),
}
"""``quantization_config``, what stores a weight, and whether native kernels read that as it is."""


def write(source: Path, directory: Path, format: str, files: int = 1) -> Path:
    """The checkpoint `source` in a format, and beside it, in ``dense``, what it means.

    Args:
        source: A checkpoint in one file.
        directory: A new directory.
        format: One of `FORMATS`, of linear layers; or ``mxfp4``, of fused experts.
        files: Number of files, between which the tensors of a weight may be apart.
    """
    if format == "mxfp4":
        config: dict[str, Any] = {"quant_method": "mxfp4"}
        store: Callable[[torch.Tensor], Stored] = in_mxfp4
        ends: tuple[str, ...] = ("gate_up_proj", "down_proj")
    else:
        (config, store, _), ends = FORMATS[format], ("_proj.weight",)
    dense = directory / "dense"
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors", ".packed"))
    shutil.copytree(directory, dense)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(ends):
            parts, meant[name] = store(tensor)
            stored |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        else:
            stored[name] = meant[name] = tensor
    save_file({name: each.contiguous() for name, each in meant.items()}, dense / "model.safetensors", {"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    save(stored, directory, files)
    return directory


def save(stored: dict[str, torch.Tensor], directory: Path, files: int = 1) -> None:
    """Write tensors in some files, in turn; files that are there are replaced."""
    names = [f"model-{at + 1:05}-of-{files:05}.safetensors" for at in range(files)]
    if files == 1:
        names = ["model.safetensors"]
    placed = {name: names[at % files] for at, name in enumerate(sorted(stored))}
    for file in names:
        part = {name: each.contiguous() for name, each in stored.items() if placed[name] == file}
        save_file(part, directory / "partial", {"format": "pt"})
        (directory / "partial").replace(directory / file)
    if files > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": placed}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
