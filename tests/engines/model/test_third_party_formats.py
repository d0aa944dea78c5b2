"""Weights in other programs' formats: what is read is what a format's definition says, bitwise; and
what transformers dequantises, where its code runs on a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from third_party_checkpoints import E2M1, Integers, awq, bytes_of, gptq, packed, read
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from worker.engines.embedded.model.third_party_weights import stacked_experts
from worker.models.quantization_config import Scheme


@st.composite
def integers(draw: st.DrawFn, bits: int, is_grouped: bool = True, is_ordered: bool = True) -> tuple[Integers, int]:
    """Any codes, zero points and scales, and the size of a group; -1 for whole rows."""
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = 8 * draw(st.integers(1, 5))
    width = draw(st.sampled_from((8, 16, 32, 64, 128)))
    columns = draw(st.sampled_from((width, 2 * width, 3 * width, width + 8)))
    group = draw(st.sampled_from((-1, width))) if is_grouped else -1
    groups = np.arange(columns) // (columns if group < 0 else group)
    if is_ordered and draw(st.booleans()):
        groups = source.permutation(groups)
    shape = rows, int(groups.max()) + 1
    steps = source.standard_normal(shape) * 10.0 ** source.integers(-7, 3, shape)
    scales = torch.from_numpy(steps).to(draw(st.sampled_from((torch.float16, torch.bfloat16))))
    zeros = source.integers(0, 1 << bits, shape)
    if draw(st.booleans()):
        zeros[:] = 1 << bits - 1
    return Integers(bits, source.integers(0, 1 << bits, (rows, columns)), zeros, scales, groups), group


def scheme(layout: Any, bits: int, group: int, **also: Any) -> Scheme:
    return Scheme(layout, bits, None if group < 0 else group, **also)


def fits(of: Integers, group: int) -> bool:
    """Whether columns of a group are side by side; groups may be cut into parts of 8 and more."""
    columns = of.codes.shape[1]
    return bool((of.groups == np.arange(columns) // (columns if group < 0 else group)).all())


@settings(max_examples=examples(200), deadline=None)
@given(st.data(), st.sampled_from((4, 8)), st.booleans())
def test_gptq(data: st.DataObject, bits: int, is_first: bool) -> None:
    """Zero points of 0, too, which the first format stores as a word less one in each code."""
    of, group = data.draw(integers(bits))
    found, is_kept = read(gptq(of, is_first), scheme("gptq", bits, group, is_below=is_first))
    assert torch.equal(found, of.dense())
    assert is_kept == fits(of, group)


@settings(max_examples=examples(100), deadline=None)
@given(integers(4, is_ordered=False))
def test_awq(drawn: tuple[Integers, int]) -> None:
    of, group = drawn
    found, is_kept = read(awq(of), scheme("awq", 4, group))
    assert torch.equal(found, of.dense())
    assert is_kept == fits(of, group)


@settings(max_examples=examples(200), deadline=None)
@given(st.data(), st.sampled_from((4, 8)))
def test_compressed_tensors_in_words(data: st.DataObject, bits: int) -> None:
    of, group = data.draw(integers(bits))
    is_symmetric = bool((of.zeros == 1 << bits - 1).all())
    found, is_kept = read(packed(of, is_symmetric, has_groups=True), scheme("pack-quantized", bits, group))
    assert torch.equal(found, of.dense())
    assert is_kept == fits(of, group)


@settings(max_examples=examples(100), deadline=None)
@given(integers(8, is_ordered=False))
def test_compressed_tensors_in_bytes(drawn: tuple[Integers, int]) -> None:
    of, group = drawn
    found, is_kept = read(bytes_of(of), scheme("int-quantized", 8, group))
    assert torch.equal(found, of.dense())
    assert is_kept == fits(of, group)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(((4, 8), (16, 16), None)), st.booleans(), st.booleans())
def test_fp8(seed: int, block: tuple[int, int] | None, is_of_one: bool, is_power: bool) -> None:
    """Scales of blocks, the last ones cut off, of rows, or of the weight; powers of two, too."""
    source = np.random.default_rng(seed)
    rows, columns = (int(each) for each in source.integers(1, 40, 2))
    codes = torch.from_numpy(source.integers(0, 256, (rows, columns), dtype=np.uint8)).view(torch.float8_e4m3fn)
    codes = torch.where(codes.float().isnan(), torch.zeros(()), codes.float()).to(torch.float8_e4m3fn)
    high, wide = block or (rows if is_of_one else 1, columns)
    scales = torch.from_numpy(source.standard_normal((-(-rows // high), -(-columns // wide)))).float()
    if is_power:
        scales = scales.to(torch.float8_e8m0fnu)
    expected = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            expected[i, j] = codes[i, j].float() * scales[i // high, j // wide].float()
    stored = scales if block else scales.reshape((rows, 1) if not is_of_one else ())
    layout, name = ("fp8", ".weight_scale_inv") if block else ("float-quantized", ".weight_scale")
    found, is_kept = read({".weight": codes, name: stored}, Scheme(layout, 8, block=block))  # type: ignore[arg-type]
    assert torch.equal(found, expected)
    assert not is_kept
    if not (rows % high or columns % wide):
        dequantizer: Any = Fp8Dequantize
        theirs = dequantizer(None)._dequantize_one(codes, scales, torch.float32)
        assert torch.equal(found, theirs)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_mxfp4(seed: int) -> None:
    source = np.random.default_rng(seed)
    experts, rows, groups = (int(each) for each in source.integers(1, 4, 3))
    blocks = source.integers(0, 256, (experts, rows, groups, 16), dtype=np.uint8)
    scales = source.integers(1, 250, (experts, rows, groups), dtype=np.uint8)
    expected = np.zeros((experts, groups * 32, rows))
    for expert, row, column in np.ndindex(experts, rows, groups * 32):
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        code = byte >> 4 if column % 2 else byte & 15
        value = E2M1[code & 7] * (-1 if code & 8 else 1)
        expected[expert, column, row] = value * 2.0 ** (int(scales[expert, row, column // 32]) - 127)
    tensors = {"_blocks": torch.from_numpy(blocks), "_scales": torch.from_numpy(scales)}
    found, is_kept = read(tensors, Scheme("mxfp4", 4, 32))
    assert torch.equal(found, torch.from_numpy(expected).float())
    assert torch.equal(found, convert_moe_packed_tensors(*tensors.values(), dtype=torch.float32))
    assert not is_kept
    kept = stacked_experts(tensors["_blocks"], tensors["_scales"])
    assert kept.shape == found.shape
    assert all(torch.equal(kept.of(expert).dequantised().T, found[expert]) for expert in range(experts))


def test_stacked_experts_have_every_scale() -> None:
    """That float16 does not hold, too; but none that is no number."""
    blocks = torch.arange(256, dtype=torch.uint8).expand(253, 16, 256).reshape(253, 16, 16, 16).contiguous()
    scales = torch.arange(253, dtype=torch.uint8)[:, None, None].expand(253, 16, 16).contiguous()
    kept = stacked_experts(blocks, scales)
    assert kept.scales.dtype == torch.float32
    expected, _ = read({"_blocks": blocks, "_scales": scales}, Scheme("mxfp4", 4, 32))
    assert expected.isfinite().all()
    for expert in range(253):
        assert torch.equal(kept.of(expert, slice(3, 5)).dequantised().T, expected[expert, :, 3:5])
    for scale, said in ((255, "a scale is not a number"), (253, r"a scale is 2\^126: weights are more than float32")):
        with pytest.raises(ValueError, match=said):
            stacked_experts(blocks[:1], torch.full((1, 16, 16), scale, dtype=torch.uint8))
