"""GGUF's blocks as codes and scales: the same values, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from gguf_files import Source
from safetensors.torch import load_file

from worker.engines.embedded.model.quantisation import QuantisedWeight
from worker.engines.embedded.model.stored_weights import weights_in
from worker.models import convert_gguf
from worker.models.quantised import CODES, MOST_E8M0, OFFSETS, READ, SCALES, format_of, unpack_blocks
from worker.tiny_model import write_tiny_model

HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
"""Where a block's float16 numbers are."""


def blocks(kind: GGMLQuantizationType, rows: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Rows of random blocks, all of whose scales are finite, some of them subnormal or negative."""
    source = np.random.default_rng(0)
    size = GGML_QUANT_SIZES[kind][1]
    found = source.integers(0, 256, (rows, count, size), dtype=np.uint8)
    for at in HALVES[kind.name]:
        numbers = (source.standard_normal((rows, count)) * 10.0 ** source.integers(-7, 3, (rows, count))).astype(
            np.float16
        )
        found[..., at : at + 2] = numbers[..., None].view(np.uint8)
    if kind == GGMLQuantizationType.MXFP4:
        found[..., 0] %= MOST_E8M0 + 1
    return found.reshape(rows, -1)


@pytest.mark.parametrize("kind", [GGMLQuantizationType[name] for name in READ], ids=lambda kind: kind.name)
def test_values_are_those_that_gguf_py_dequantises(kind: GGMLQuantizationType) -> None:
    packed = blocks(kind, 40, 3)
    found = unpack_blocks(packed, kind)
    parts = {".codes": found.codes, ".scales": found.scales, ".offsets": found.offsets}
    [(_, weight)] = weights_in({name: torch.from_numpy(part) for name, part in parts.items() if part is not None})
    assert isinstance(weight, QuantisedWeight)
    assert weight.shape == (40, 3 * GGML_QUANT_SIZES[kind][0])
    assert np.array_equal(weight.dequantised().numpy(), dequantize(packed, kind))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_file_keeps_its_blocks(tmp_path: Path, arch: str, kind: GGMLQuantizationType) -> None:
    """Names, and the order of rows, are those of the dequantised checkpoint."""
    file = Source(write_tiny_model(tmp_path / "source", arch=arch), kind).write(tmp_path / "model.gguf")
    dense, kept = (
        convert_gguf(file, tmp_path / "cache", lambda line: None, keeps_blocks) for keeps_blocks in (False, True)
    )
    assert format_of(json.loads((dense / "config.json").read_text())) is None
    assert format_of(json.loads((kept / "config.json").read_text())) == kind.name
    expected, found = (load_file(each / "model.safetensors") for each in (dense, kept))
    for name, value in expected.items():
        if value.ndim == 1:
            assert torch.equal(found[name], value)
            continue
        weight = QuantisedWeight(found[name + CODES], found[name + SCALES], found.get(name + OFFSETS))
        assert torch.equal(weight.dequantised().bfloat16(), value)
    assert {
        name.rpartition(".")[0] if "." + name.rpartition(".")[2] in (CODES, SCALES, OFFSETS) else name for name in found
    } == set(expected)


def test_other_types_are_dequantised(tmp_path: Path) -> None:
    """Beside blocks that are kept, and where none is."""
    source = Source(write_tiny_model(tmp_path / "source"), GGMLQuantizationType.Q8_0)
    name = "blk.0.ffn_down.weight"
    source.tensors[name] = (source.tensors[name][0], GGMLQuantizationType.Q5_0)
    mixed = convert_gguf(source.write(tmp_path / "mixed.gguf"), tmp_path / "cache", lambda line: None, True)
    tensors = load_file(mixed / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert "model.layers.1.mlp.down_proj.weight" + CODES in tensors
    source = Source(write_tiny_model(tmp_path / "source"), GGMLQuantizationType.Q5_0)
    none = convert_gguf(source.write(tmp_path / "none.gguf"), tmp_path / "cache", lambda line: None, True)
    assert "quantization_config" not in json.loads((none / "config.json").read_text())
