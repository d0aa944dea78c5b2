"""Weights that compressed-tensors' own code and vLLM's packers write are read as they mean them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from third_party_checkpoints import read
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack, pack_cols

from worker.models.quantization_config import quantization_of

ROWS, COLUMNS = 48, 128


def weight() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)).half()


@pytest.mark.parametrize(
    ("format", "arguments"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}),
        ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}),
        ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 128}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
    ],
)
def test_compressed_tensors(format: str, arguments: dict[str, object]) -> None:
    of = weight()
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    shape = {"tensor": (1,), "channel": (ROWS, 1), "block": (ROWS // 16, COLUMNS // 32)}.get(
        str(args.strategy), (ROWS, COLUMNS // (args.group_size or COLUMNS))
    )
    state = {"weight": of, "weight_scale": (torch.rand(shape) * 0.1 + 0.4).half() / (2 if args.num_bits == 4 else 20)}
    if not args.symmetric:
        state["weight_zero_point"] = torch.randint(-3, 4, shape, dtype=torch.int8)
    if args.actorder:
        state["weight_g_idx"] = (torch.arange(COLUMNS) // 32)[torch.randperm(COLUMNS)].int()
    compressor = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"]}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": args.model_dump(exclude_none=True)}}
    quantization = quantization_of({"quantization_config": config})
    assert quantization is not None
    found_scheme = quantization.scheme_of("m")
    assert found_scheme is not None
    found, _ = read({f".{name}": each for name, each in stored.items()}, found_scheme)
    torch.testing.assert_close(found, expected.float(), rtol=2e-3, atol=1e-4)  # they round to float16
    assert torch.equal(found.half(), expected.half())


@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "awq"])
def test_words_that_vllm_packs(method: str) -> None:
    source = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (COLUMNS, ROWS), generator=source)
    zeros = torch.randint(1, 16, (COLUMNS // 32, ROWS), generator=source)
    scales = torch.rand(COLUMNS // 32, ROWS, generator=source).half()
    expected = ((codes - zeros.repeat_interleave(32, 0)) * scales.double().repeat_interleave(32, 0)).float()
    config = {"quant_method": method.removesuffix("_v2"), "bits": 4, "group_size": 32}
    if method == "awq":
        stored = {
            ".qweight": awq_pack(codes, 4, COLUMNS, ROWS),
            ".qzeros": awq_pack(zeros, 4, COLUMNS // 32, ROWS),
        }
    else:
        below = 0 if method == "gptq_v2" else 1
        config["checkpoint_format"] = method
        stored = {
            ".qweight": gptq_pack(codes, 4, COLUMNS, ROWS),
            ".qzeros": pack_cols(zeros - below, 4, COLUMNS // 32, ROWS),
        }
    quantization = quantization_of({"quantization_config": config})
    assert quantization is not None
    scheme = quantization.scheme_of("m")
    assert scheme is not None
    found, is_kept = read(stored | {".scales": scales}, scheme)
    assert torch.equal(found, expected.T)
    assert is_kept
