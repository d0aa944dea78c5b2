"""Activation functions and softmax, batch-invariant by construction.

torch computes the last elements of each thread's part by other code than those before: in float32
its silu, sigmoid and gelu have other bits there, and where a part ends depends on the batch and on
the number of threads. The functions here are made of single additions, multiplications, divisions
and comparisons, each of which IEEE 754 rounds in one way only. They stand in where no GEMM backend
computes the activation in its epilogue (`native.ACTIVATIONS`, oneDNN's).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional

_LOG2_E = 1.44269504
_SQRT_HALF = 0.707106781
_TWICE_SQRT_2_PI = 1.59576912
_EXP2 = (1.54035304e-4, 1.33335581e-3, 9.61812911e-3, 5.55041087e-2, 2.40226507e-1, 6.93147181e-1, 1.0)
"""Series of exp(x * ln 2), highest power first, for \\|x\\| <= 1/2."""

_ERFC = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)
"""Press et al., "Numerical Recipes in C", 6.2."""


def _polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result.mul_(x).add_(coefficient)
    return result


def _exp2(x: torch.Tensor) -> torch.Tensor:
    """``2 ** x``, as `vec_exp2` in ``native/vector.h``; x of 200 stands for all above it."""
    x = x.clamp(max=200.0)
    whole = x.round()
    power = _polynomial(x - whole, _EXP2)
    exponent = whole.clamp(-252.0, 254.0).nan_to_num(0.0).int()
    half = exponent >> 1
    for part in (half, exponent - half):  # 2 ** 128 is no float32
        power *= ((part + 127) << 23).view(torch.float32)
    return torch.where(x < -126.0, 0.0, power)


def _gated(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``y * sigmoid(x)``."""
    return y / (_exp2(x * -_LOG2_E) + 1.0)


def exponentials(x: torch.Tensor) -> torch.Tensor:
    """``exp(x)`` of float32."""
    return _exp2(x * _LOG2_E)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))`` of float32."""
    return 1.0 / (exponentials(-x) + 1.0)


def _silu(y: torch.Tensor) -> torch.Tensor:
    return _gated(y, y)


def _gelu_tanh(y: torch.Tensor) -> torch.Tensor:
    return _gated(y, (y * y * y * 0.044715 + y) * _TWICE_SQRT_2_PI)


def _gelu(y: torch.Tensor) -> torch.Tensor:
    size = y.abs()
    z = size * _SQRT_HALF
    t = 1.0 / (z * 0.5 + 1.0)
    complement = t * _exp2((_polynomial(t, _ERFC) - z * z) * _LOG2_E)
    return y.clamp(min=0.0) - size * (complement * 0.5)


_FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": (_silu, functional.silu),
    "gelu": (_gelu, functional.gelu),
    "gelu_tanh": (_gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
    "relu": (functional.relu, functional.relu),
}
"""Functions by the names of `native.ACTIVATIONS`: in float32 on a CPU, and elsewhere."""


def activated(name: str, x: torch.Tensor) -> torch.Tensor:
    """The activation `name` of each element, of the data type of `x`."""
    on_cpu, elsewhere = _FUNCTIONS[name]
    return on_cpu(x.float()).to(x.dtype) if x.device.type == "cpu" else elsewhere(x)


@cache
def name_of(activation: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """The name of transformers' `activation`, told by its values, those of large numbers too, which
    some clip; None if it is none of ours, as one with weights is.
    """
    if isinstance(activation, torch.nn.Module) and next(activation.parameters(), None) is not None:
        return None
    x = torch.cat((torch.linspace(-8.0, 8.0, 257), torch.tensor([-1e4, -100.0, -12.0, 12.0, 100.0, 1e4])))
    values = activation(x)
    return next((name for name in _FUNCTIONS if torch.allclose(activated(name, x), values, 1e-5, 1e-5)), None)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of float32 ``[n, K]``."""
    if x.device.type != "cpu":
        return x.softmax(-1)
    powers = _exp2((x - x.amax(-1, keepdim=True)) * _LOG2_E)
    return powers / sums(powers)


def sums(x: torch.Tensor) -> torch.Tensor:
    """Sums ``[n, 1]`` of rows ``[n, K]``: halves are added until one element is left."""
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        x = x[:, :half] + functional.pad(x[:, half:], (0, 2 * half - width))
    return x
