"""Rounding to Q4_K and Q6_K: the bits of llama.cpp's reference, from records of it."""

from __future__ import annotations

import base64
import hashlib

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from worker.engines.embedded.model import requantisation
from worker.engines.embedded.model.requantisation import requantised
from worker.engines.embedded.model.super_blocks import round_q4_k, round_q6_k
from worker.engines.embedded.native import PATHS, gguf_types, paths, unavailable
from worker.engines.embedded.native import weights as native_weights
from worker.engines.embedded.native.gguf_types import Rounded
from worker.models.quantised import Codes, unpack_blocks

ROUND = {Kind.Q4_K: round_q4_k, Kind.Q6_K: round_q6_k}

BLOCKS = {
    Kind.Q4_K: "7QUREv//8LX/9vDldxdfLx6XCFo1yNhirGqWSBoXh/OKWemDfol3byiTd7BsB3bc9pRDQydzfweJP89n2kxXcKuMGm"
    "RnRTfeTyuLa1iYhXhMmfYXlslEoTlDQIp1ukZ0s6YnpVeSmMGHCy2vYsuNTEuUwF6AyYpn0Zqy4uZ6aKqFBvOWyTb5"
    "ZYUnhomIvZbW",
    Kind.Q6_K: "ngix17KwsLEiq7XNadvcBijSdDtHwmtcDyxaIA8q5h8HSF15wbunRZSDyOuIaUvA3Ghh3A6MwhV3+FLtFi9ypQ/E9h"
    "rYYy/jkRthRlVIuE6KN1tiW1Vwob38Q17VDUVBwPngShjdPOZi3l4NEpDgguAZWgvI1lVk4pHZzNxzFQQfVY6KnUJy"
    "2Ge6NVkurZVAFkrSdKemqQuNlFlQqm1pYt5mMc21EpiUPlh4NimWnVhsKfGplSjabGkSY1tUjqvnnIB+bp1VfmSQmm"
    "iVdmFCk72A",
}
"""What ``ggml_quantize_chunk`` of ggml 0.25.3 makes of the first super-block of ``normal``."""

DIGESTS = {
    ("normal", "Q4_K"): "3152da7527b5c3a4",
    ("normal", "Q6_K"): "b2efe8d56034e20e",
    ("bfloat16", "Q4_K"): "0c53fa115709193e",
    ("bfloat16", "Q6_K"): "f11f7a26c4fcf5d7",
    ("wide", "Q4_K"): "9172f1c4c9e03f91",
    ("wide", "Q6_K"): "5284197d848a9eb1",
    ("sparse", "Q4_K"): "775f29ec1130836b",
    ("sparse", "Q6_K"): "704e605e86d6027a",
    ("positive", "Q4_K"): "45093220df37095d",
    ("positive", "Q6_K"): "70bf787a465b4e07",
    ("negative", "Q4_K"): "a650ffafd60e031c",
    ("negative", "Q6_K"): "0bda0eb0bc3a6302",
    ("integers", "Q4_K"): "4f1a4d1812e1fa82",
    ("integers", "Q6_K"): "a677f3987424f531",
    ("flat", "Q4_K"): "2d48888c1e19afdb",
    ("flat", "Q6_K"): "0487c672519381f3",
    ("zeros", "Q4_K"): "2566542ae219e559",
    ("zeros", "Q6_K"): "b0b98073dcc9502a",
}
"""`digest_of` the blocks that the same function makes of all `weights`, read by `unpack_blocks`."""


def weights(name: str) -> NDArray[np.float32]:
    """Weights ``[64, 512]``; numpy keeps the numbers of a `RandomState`."""
    source = np.random.RandomState(7)
    normal = source.standard_normal((64, 512)).astype(np.float32)
    small = normal * np.float32(0.02)
    found = {
        "normal": small,
        "bfloat16": (small.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
        "wide": normal * np.float32(10) ** source.randint(-9, 4, normal.shape).astype(np.float32),
        "sparse": np.where(source.random_sample(normal.shape) < 0.7, np.float32(0), normal),
        "positive": np.abs(normal) + np.float32(1),
        "negative": -np.abs(normal) - np.float32(1),
        "integers": np.round(normal * 2),
        "flat": np.repeat(normal[:, :16], 32, 1),
        "zeros": np.where(np.arange(64)[:, None] % 2, normal, 0),
    }
    return np.ascontiguousarray(found[name], dtype=np.float32)


def compute_natively(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels of `path` compute in float32, for this test."""
    if reason := unavailable(torch.float32, path):
        pytest.skip(reason)
    monkeypatch.setitem(paths._chosen, torch.float32, path)


def rounded(kind: str, rows: torch.Tensor, num_threads: int | None = None) -> Rounded:
    return gguf_types.rounding_of(kind, rows, num_threads).rounded


def rounded_natively(rows: NDArray[np.float32], kind: Kind) -> Codes:
    found = rounded(kind.name, torch.from_numpy(rows))
    return Codes(*[part.numpy() for part in found if part is not None])


def digest_of(found: Codes) -> str:
    digest = hashlib.sha256()
    for part in (found.codes, found.scales, *([] if found.offsets is None else [found.offsets])):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("kind", ROUND, ids=lambda kind: kind.name)
def test_a_block_is_that_of_the_reference(kind: Kind) -> None:
    block = np.frombuffer(base64.b64decode(BLOCKS[kind]), np.uint8)[None]
    expected, found = unpack_blocks(block, kind), ROUND[kind](weights("normal")[:1, :256])
    assert np.array_equal(found.codes, expected.codes)
    assert np.array_equal(found.scales, expected.scales)
    assert (found.offsets is None) == (expected.offsets is None)
    if found.offsets is not None and expected.offsets is not None:
        assert np.array_equal(found.offsets, expected.offsets)


@pytest.mark.parametrize(("name", "kind"), DIGESTS)
def test_all_bits_are_those_of_the_reference(name: str, kind: str) -> None:
    """Also of groups of zeros, of one number, and far smaller than their neighbours."""
    assert digest_of(ROUND[Kind[kind]](weights(name))) == DIGESTS[name, kind]


@pytest.mark.native
@pytest.mark.parametrize("path", PATHS)
def test_kernels_have_the_same_bits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_natively(path, monkeypatch)
    found = {(name, kind): digest_of(rounded_natively(weights(name), Kind[kind])) for name, kind in DIGESTS}
    assert found == DIGESTS


@pytest.mark.native
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("exponent", [-42, -38, -30, -16, -4, 0, 4, 8, 20, 30])
def test_kernels_agree_on_any_numbers(exponent: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where squares overflow, or scales do: no number stands for them then."""
    compute_natively(path, monkeypatch)
    source = np.random.RandomState(11)
    exponents = exponent + source.randint(-8, 6, (5, 1280))
    rows = np.clip(source.standard_normal((5, 1280)) * 10.0**exponents, -3e38, 3e38).astype(np.float32)
    for kind in ROUND:
        expected, found = ROUND[kind](rows), rounded_natively(rows, kind)
        assert np.array_equal(found.codes, expected.codes)
        assert np.array_equal(found.scales, expected.scales, equal_nan=True)
        if found.offsets is not None and expected.offsets is not None:
            assert np.array_equal(found.offsets, expected.offsets, equal_nan=True)


@pytest.mark.native
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_kernels_agree_on_plain_blocks(kind: Kind, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch, whose bits `test_weight_update` compares with llama.cpp's."""
    compute_natively(path, monkeypatch)
    source = np.random.RandomState(5)
    halves = np.round(source.standard_normal((64, 512)) * 8).astype(np.float32) / 2  # ties
    for name in sorted({name for name, _ in DIGESTS}):
        for rows in (weights(name), halves, -halves, halves * np.float32(2**-20)):
            expected = requantisation._ROUNDED_TO[kind.name](torch.from_numpy(rows))
            for found, wanted in zip(rounded(kind.name, torch.from_numpy(rows)), expected, strict=True):
                assert (found is None) == (wanted is None)
                if found is not None and wanted is not None:
                    assert torch.equal(found, wanted)


@pytest.mark.native
@pytest.mark.parametrize("kind", gguf_types.TYPES)
def test_kernels_take_whole_blocks(kind: str) -> None:
    for rows in (torch.zeros(2, 255), torch.zeros(256), torch.zeros(2, 256, dtype=torch.int32)):
        with pytest.raises(ValueError, match="expected numbers in rows of whole blocks"):
            gguf_types.rounding_of(kind, rows)
    narrow = torch.randn(600, 256).bfloat16()  # more rows than are widened at once
    both = rounded(kind, narrow), rounded(kind, narrow.float(), 2)
    for found, wanted in zip(*both, strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or wanted is None or torch.equal(found, wanted)
    assert len(rounded(kind, torch.zeros(0, 256))[0]) == 0
    transposed, plain = (rounded(kind, each)[0] for each in (torch.ones(256, 3).T, torch.ones(3, 256)))
    assert torch.equal(transposed, plain)


@pytest.mark.native
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", gguf_types.TYPES)
def test_kernels_read_halves_and_say_what_they_saw(kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of 16 bits are those of 32; the largest is found, and what is not finite."""
    compute_natively(path, monkeypatch)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = (torch.from_numpy(weights("normal")[:19]) * 3).to(dtype)
        found, wanted = gguf_types.rounding_of(kind, rows), gguf_types.rounding_of(kind, rows.float())
        assert (found.largest, found.is_finite) == (float(rows.abs().max()), True)
        for one, other in zip(found.rounded, wanted.rounded, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)
        for place, number in ((18, 511), float("inf")), ((3, 5), -float("inf")), ((0, 0), float("nan")):
            broken = rows.clone()
            broken[place] = number
            assert not gguf_types.rounding_of(kind, broken).largest < float("inf")
    for scale, is_finite in ((1e9, False), (1e3, True)):
        rows = torch.cat([torch.ones(3, 256), torch.linspace(-scale, scale, 256)[None]])
        found = gguf_types.rounding_of(kind, rows)
        assert (found.largest, found.is_finite) == (scale, is_finite)


@pytest.mark.parametrize("kind", ROUND, ids=lambda kind: kind.name)
@pytest.mark.parametrize("has_kernels", [True, False], ids=["native", "numpy"])
def test_an_update_rounds_with_either(kind: Kind, has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_weights, "are_available", lambda: has_kernels)
    rows, found = torch.from_numpy(weights("normal")), ROUND[kind](weights("normal"))
    weight = requantised(rows, kind.name)
    assert np.array_equal(weight.codes.numpy(), found.codes)
    assert np.array_equal(weight.scales.numpy(), found.scales)


@pytest.mark.parametrize("kind", ROUND, ids=lambda kind: kind.name)
def test_subnormal_weights_are_zeros(kind: Kind) -> None:
    """Their scales are 0 in float16, whatever the codes of a group are."""
    rows = weights("normal") * np.float32(1e-40)
    found = requantised(torch.from_numpy(rows), kind.name)
    assert not found.dequantised().any()


@pytest.mark.parametrize("kind", ROUND, ids=lambda kind: kind.name)
def test_rows_are_rounded_one_by_one(kind: Kind) -> None:
    """The number of rows that are rounded at once changes none of them."""
    rows = weights("wide")
    whole, parts = ROUND[kind](rows), [ROUND[kind](row[None]) for row in rows]
    assert np.array_equal(whole.codes, np.concatenate([part.codes for part in parts]))
    assert np.array_equal(whole.scales, np.concatenate([part.scales for part in parts]))
