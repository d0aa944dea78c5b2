"""float32 values as the bytes of other data types."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Size of a value, by data type."""


def encoded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """`values` rounded to the nearest of `dtype`, one of `BYTES`, ties to even; what is too large
    is infinite. bfloat16 as its bits, uint16.
    """
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))  # to nearest, ties to even
    return (rounded >> np.uint32(16)).astype(np.uint16)


def decoded(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The values that `encoded` rounded to, float32."""
    if values.dtype != np.uint16:
        return values.astype(np.float32)
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def are_exact(values: npt.NDArray[np.float32], dtype: str) -> bool:
    """Whether each value is one of `dtype`."""
    return bool(np.array_equal(decoded(encoded(values, dtype)), values))


def shortest(value: float) -> float:
    """The shortest decimal number that float32 holds as `value`."""
    return float(str(np.float32(value)))
