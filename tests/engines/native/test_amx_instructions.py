"""A processor's own AMX instructions against the emulator's arithmetic, with which the kernels are
tested where there is no AMX.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import amx_emulation
import numpy as np
import numpy.typing as npt
import pytest
import torch

from worker.engines.embedded import native

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not amx_emulation.IS_REAL, reason="this processor has no AMX, only the emulator's"),
]

Words = npt.NDArray[np.uint16] | npt.NDArray[np.uint32] | npt.NDArray[np.uint8]
Multiply = Callable[[int, tuple[int, int, int], Words, Words, npt.NDArray[np.uint32]], npt.NDArray[np.uint32]]
"""Kind of product, ``(rows, columns, words)``, a, b and the sums before; returns the sums after."""

SOURCE = Path(__file__).with_name("amx_product.c")
BFLOAT16 = 0
KINDS_OF_BYTES = [
    pytest.param(1, np.int8, np.int8, id="signed"),
    pytest.param(2, np.int8, np.uint8, id="signed by unsigned"),
    pytest.param(3, np.uint8, np.int8, id="unsigned by signed"),
    pytest.param(4, np.uint8, np.uint8, id="unsigned"),
]
ROWS, STRIDE = 16, 20
"""Rows of the largest tile, and words from one row to the next: four more than its columns."""

POSITIVE = np.array(
    [
        *(0x0000, 0x0001, 0x0040, 0x007F),  # zero and subnormal numbers
        *(0x0080, 0x0081, 0x0100, 0x1F80, 0x2000),  # the smallest normal ones, and what multiplies to about them
        *(0x3300, 0x3380, 0x3B00, 0x3B80),  # 2^-25, 2^-24, 2^-9, 2^-8: halves of a last digit beside 1
        *(0x3F7F, 0x3F80, 0x3F81, 0x4000),  # about 1, and 2
        *(0x5F80, 0x7F00, 0x7F7F),  # 2^64 and the largest ones, whose products are too large
    ],
    dtype=np.uint16,
)
FINITE = np.concatenate([POSITIVE, POSITIVE | np.uint16(0x8000)])
NOT_FINITE = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF], dtype=np.uint16)
"""Infinities, quiet NaN and signalling ones."""

MORE_SUMS = np.array(
    [0x00000001, 0x007FFFFF, 0x00800001, 0x3F800001, 0x3F800003, 0x3F7FFFFF, 0x7F7FFFFF], dtype=np.uint32
)
"""Float32 whose last digit is not bfloat16's: subnormal, odd (for ties) and the largest."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Multiply, Multiply]:
    """The processor's products and the emulator's."""
    assert native.unavailable(torch.float32, "amx") is None  # which asks the system for tiles, too
    folder = tmp_path_factory.mktemp("amx")
    return product_of(folder / "real.so"), product_of(folder / "emulated.so", "-DEMULATED")


def product_of(library: Path, *options: str) -> Multiply:
    command = ["cc", "-O2", "-mavx2", "-mfma", "-shared", "-fPIC", *options, str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True, timeout=100)
    function = ctypes.CDLL(str(library)).multiply_tiles
    matrix = (ctypes.c_void_p, ctypes.c_int64)
    function.restype, function.argtypes = None, (*[ctypes.c_int] * 4, *matrix, *matrix, *matrix)

    def multiply(
        kind: int, sizes: tuple[int, int, int], a: Words, b: Words, before: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.uint32]:
        sums = before.copy()
        function(kind, *sizes, *(value for x in (a, b, sums) for value in (x.ctypes.data, x.strides[0])))
        return sums

    return multiply


def is_nan(sums: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    return (sums & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)


def widened(values: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    """Float32 of bfloat16."""
    return values.astype(np.uint32) << np.uint32(16)


@pytest.mark.parametrize("zeros", [0.0, 0.7], ids=["dense", "mostly zeros"])
@pytest.mark.parametrize("words", [1, 2, 16, None], ids=["one word", "two words", "whole rows", "any words"])
@pytest.mark.parametrize("has_infinities", [False, True], ids=["finite", "with infinities and NaN"])
def test_bfloat16_has_the_emulators_bits(
    both: tuple[Multiply, Multiply], zeros: float, words: int | None, has_infinities: bool
) -> None:
    """Of tiles of any sizes, with numbers that are subnormal, too large, or rounded at a tie.

    Where the one has NaN, the other has; which of several NaN it is, no document says.
    """
    generator = np.random.default_rng([int(10 * zeros), words or 0, has_infinities])
    hard = np.concatenate([FINITE, NOT_FINITE]) if has_infinities else FINITE
    hard_sums = np.concatenate([widened(hard), MORE_SUMS, MORE_SUMS | np.uint32(1 << 31)])
    seen = dict.fromkeys(("zero", "negative zero", "infinity", "NaN", "number"), 0)
    for round_ in range(300):
        rows, columns, some_words = (int(n) for n in generator.integers(1, 17, 3))
        sizes = rows, columns, words or some_words
        a, b = (
            generator.choice(hard, (ROWS, 2 * STRIDE))
            if round_ % 3
            else generator.integers(0, 0x7F80 if not has_infinities else 0x10000, (ROWS, 2 * STRIDE), dtype=np.uint16)
            for _ in range(2)
        )
        for operand in (a, b):
            operand[generator.random(operand.shape) < zeros] = 0
        before = generator.choice(hard_sums, (ROWS, STRIDE)).astype(np.uint32)
        found, expected = (multiply(BFLOAT16, sizes, a, b, before) for multiply in both)
        assert np.array_equal(is_nan(found), is_nan(expected))
        assert np.array_equal(found[~is_nan(found)], expected[~is_nan(found)])
        inside = np.zeros(before.shape, dtype=bool)
        inside[:rows, :columns] = True
        assert np.array_equal(found[~inside], before[~inside])  # which may be NaN
        sums = found[inside]
        seen["zero"] += int((sums == 0).sum())
        seen["negative zero"] += int((sums == 1 << 31).sum())
        seen["infinity"] += int(((sums & np.uint32(0x7FFFFFFF)) == 0x7F800000).sum())
        seen["NaN"] += int(is_nan(sums).sum())
        seen["number"] += int(((sums & np.uint32(0x7F800000)) % np.uint32(0x7F800000) != 0).sum())
    assert seen["number"] > 0
    assert seen["infinity"] > 0  # of finite numbers, too, whose products are too large
    assert seen["NaN"] > 0 or not has_infinities
    assert words not in (1, 2) or (seen["zero"] > 0 and seen["negative zero"] > 0)


def bits(*values: float) -> npt.NDArray[np.uint32]:
    return np.array(values, dtype=np.float32).view(np.uint32)


TINY = 2.0**-126  # the smallest normal number


@pytest.mark.parametrize(
    ("a", "b", "before", "after"),
    [
        pytest.param([2.0**-24, 0], [1, 0], 1.0, 1.0, id="a tie goes to the even 1"),
        pytest.param([2.0**-24, 0], [1, 0], 1 + 2.0**-23, 1 + 2.0**-22, id="a tie goes to the even number above"),
        pytest.param([1, 0, 2.0**-24, 0], [1, 0, 1, 0], 2.0**-24, 1.0, id="products of a part are added first"),
        pytest.param([1, 2.0**-24], [1, 1], 2.0**-23, 1 + 2.0**-23, id="even and odd ones apart, then before"),
        pytest.param([1 + 2.0**-7, 0, -1, 0], [1 + 2.0**-7, 0, 1, 0], 0.0, 2.0**-6 + 2.0**-14, id="exact products"),
        pytest.param([TINY, 0, 2.0**-80, 0], [1, 0, -(2.0**-90), 0], 0.0, TINY, id="rounded up to a normal number"),
        pytest.param([TINY, 0], [0.5, 0], 0.0, 0.0, id="a subnormal product is 0"),
        pytest.param([2 * TINY, 0, TINY, 0], [1, 0, -1.5, 0], 1.0, 1.0, id="a subnormal difference is 0"),
        pytest.param([TINY, TINY], [-1, 1.5], 0.0, 0.0, id="a subnormal sum of both is 0"),
        pytest.param([TINY, 0], [-1, 0], 1.5 * TINY, 0.0, id="a subnormal result is 0"),
        pytest.param([TINY / 2, 0], [2, 0], 0.0, 0.0, id="a subnormal operand is 0"),
        pytest.param([0, 0], [1, 1], TINY / 2, 0.0, id="a subnormal sum before is 0"),
        pytest.param([-TINY, -TINY], [0.5, 0.5], -0.0, -0.0, id="zeros keep their sign"),
        pytest.param([0, -TINY], [1, 0.5], -0.0, 0.0, id="zeros of both signs are positive"),
        pytest.param([2.0**127, 0], [2, 0], 0.0, float("inf"), id="too large"),
        pytest.param([2.0**127, 0, 2.0**127, 0], [2, 0, -1, 0], 0.0, float("inf"), id="not again a number"),
        pytest.param([2.0**127, 0], [2.0**100, 0], -float("inf"), float("nan"), id="infinity less infinity"),
        pytest.param([float("inf"), 0], [0, 0], 0.0, float("nan"), id="infinity times 0"),
        pytest.param([float("inf"), 0], [TINY / 2, 0], 0.0, float("nan"), id="infinity times a subnormal number"),
    ],
)
def test_what_the_arithmetic_is(
    both: tuple[Multiply, Multiply], a: list[float], b: list[float], before: float, after: float
) -> None:
    """By hand, one sum, of which the rest of the tile has none."""
    row = np.zeros((1, 32), dtype=np.uint16)
    column = np.zeros((ROWS, 2), dtype=np.uint16)
    row[0, : len(a)] = bits(*a) >> np.uint32(16)
    column[: len(b) // 2] = (bits(*b) >> np.uint32(16)).reshape(-1, 2)
    for multiply in both:
        found = multiply(BFLOAT16, (1, 1, len(a) // 2), row, column, bits(before)[None])
        if np.isnan(after):
            assert is_nan(found).all()
        else:
            assert found.item() == bits(after).item()


@pytest.mark.parametrize(("kind", "a_type", "b_type"), KINDS_OF_BYTES)
def test_bytes_have_the_emulators_sums(
    both: tuple[Multiply, Multiply], kind: int, a_type: type[np.number], b_type: type[np.number]
) -> None:
    """Random and extreme bytes; of sums that exceed 32 bits the lowest are kept."""
    generator = np.random.default_rng(kind)
    extremes = np.array([0, 1, 127, 128, 255], dtype=np.uint8)
    for round_ in range(200):
        rows, columns, words = (int(n) for n in generator.integers(1, 17, 3))
        a, b = (
            generator.choice(extremes, (ROWS, 4 * STRIDE))
            if round_ % 2
            else generator.integers(0, 256, (ROWS, 4 * STRIDE), dtype=np.uint8)
            for _ in range(2)
        )
        before = generator.choice(np.array([0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], dtype=np.uint32), (ROWS, STRIDE))
        found, expected = (multiply(kind, (rows, columns, words), a, b, before) for multiply in both)
        assert np.array_equal(found, expected)
        wide_a = a.view(a_type)[:rows, : 4 * words].astype(np.int64)
        wide_b = b.view(b_type)[:words, : 4 * columns].astype(np.int64).reshape(words, columns, 4)
        sums = before[:rows, :columns] + wide_a @ wide_b.transpose(0, 2, 1).reshape(4 * words, columns)
        assert np.array_equal(found[:rows, :columns], (sums % 2**32).astype(np.uint32))
