"""torch's functions as transformers' modules call them, with rows that do not depend on each other.

A decoder layer of transformers is Python code over torch's functions. Each of them is one of three:
its elements are one rounded operation, or moved; it is computed here in another, batch-invariant
way; or it is foreign, and then numerics are not exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from worker.engines.embedded.model.activations import activated, exponentials, sigmoid, softmax, sums
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear import Linear
from worker.engines.embedded.model.transformers_attention import scaled_dot_product_attention

_ARITHMETIC = """
    add add_ __add__ __iadd__ __radd__ sub sub_ __sub__ __rsub__ __isub__ rsub mul mul_ multiply __mul__ __rmul__
    __imul__ div div_ true_divide __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ floor_divide __floordiv__
    neg __neg__ abs sqrt square reciprocal relu relu_ clamp clamp_ clip minimum maximum min max amax amin floor
    round where eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ logical_and logical_or logical_not
    __and__ __or__ __invert__ bitwise_not bitwise_and bitwise_or masked_fill masked_fill_ isnan lerp remainder
    __mod__ any all addcmul
"""

_MOVING = """
    view reshape flatten unflatten transpose permute swapaxes t movedim squeeze unsqueeze unsqueeze_ expand expand_as
    view_as repeat repeat_interleave broadcast_to chunk split unbind narrow select index_select gather scatter
    scatter_ cat concat stack contiguous clone detach roll flip pad __getitem__ __setitem__ take_along_dim embedding
    to type type_as float bfloat16 half double long int bool topk sort argsort zeros_like ones_like full_like
    empty_like new_zeros new_ones new_empty new_tensor new_full zeros ones full empty arange tensor copy_ fill_ zero_
    masked_scatter one_hot nonzero tril triu dropout item tolist numel size dim stride is_contiguous data_ptr
    is_floating_point element_size __len__ __get__ __set__ __bool__ __int__ __index__ cpu requires_grad_
    split_with_sizes unfold as_strided nan_to_num diag_embed view_as_complex view_as_real is_complex result_type
    get_device __hash__ __iter__ tensor_split
"""

_ONE_OPERATION = frozenset(_ARITHMETIC.split())
"""Names of functions whose elements are one correctly rounded operation each; of integers, any."""

_MOVES = frozenset(_MOVING.split())
"""Names of functions that move elements, convert them, choose among them, or make constant ones."""

_ROW_BY_ROW = frozenset(("layer_norm", "cos", "sin", "log", "log1p", "expm1", "__rpow__", "outer", "polar"))
"""Names of functions that torch computes row by row, or element by element with one code for whole
vectors and for what is left of them; the trial of layers compares their bits, too.
"""


class RowFunctions(TorchFunctionMode):
    """The functions that transformers' modules call, while it is active.

    Args:
        parameters: Weights that no `Linear` holds, such as those of routers.
        kernels: Backends that compute what is replaced.

    Attributes:
        foreign: Names of the functions that were called and of whose bits nothing is known.
        layers: The linear layers of those `parameters` that functions were called with.
        has_layer_norm: Whether torch's ``layer_norm`` was called.
    """

    def __init__(self, parameters: list[torch.Tensor], kernels: KernelBackend) -> None:
        super().__init__()
        self._kernels = kernels
        self._parameters = {id(each): each for each in parameters}
        self._converted: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._layers: dict[tuple[int, bool], Linear] = {}
        self.layers = torch.nn.ModuleList()
        self.foreign: set[str] = set()
        self.has_layer_norm = False
        self._replaced: dict[str, Callable[..., Any]] = {
            "linear": self._linear,
            **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), self._matmul),
            **dict.fromkeys(("to", "float", "type"), self._convert),
            **dict.fromkeys(("tanh", "tanh_"), self._tanh),
            "pow": self._pow,
            "__pow__": self._pow,
            "rms_norm": self._rms_norm,
            "scaled_dot_product_attention": scaled_dot_product_attention,
            **_REPLACED,
        }

    def settle(self) -> None:
        """Hold no other parameters than those that functions were called with so far."""
        used = {key for key, _ in (*self._layers, *self._converted)}
        self._parameters = {key: each for key, each in self._parameters.items() if key in used}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        replaced = self._replaced.get(name)
        if replaced is not None:
            result = replaced(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        elif name in _ONE_OPERATION or name in _MOVES or name in _ROW_BY_ROW:
            self.has_layer_norm |= name == "layer_norm"
            return func(*args, **kwargs)
        if any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in args):
            self.foreign.add(name.strip("_"))
        return func(*args, **kwargs)

    def _convert(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """A parameter in another data type: converted once."""
        result = func(tensor, *args, **kwargs)
        if id(tensor) not in self._parameters or result is tensor:
            return result
        kept = self._converted.setdefault((id(tensor), result.dtype), result)
        self._parameters[id(kept)] = kept
        return kept

    def _linear(self, func: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return self._multiply(x, weight, bias, False)

    def _matmul(self, func: Any, left: torch.Tensor, right: torch.Tensor) -> Any:
        if left.shape[-1] == 1:
            return func(left, right)  # one product for each element
        return self._multiply(left, right, None, True)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool) -> Any:
        if id(weight) not in self._parameters or weight.dim() != 2:
            return NotImplemented
        key = (id(weight), is_transposed)
        if key not in self._layers:
            held = weight.T.contiguous() if is_transposed else weight
            self._layers[key] = Linear(held, bias, is_quantisable=False)
            self.layers.append(self._layers[key])
        return self._layers[key](x)

    def _tanh(self, func: Any, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.soft_cap(x.float().clone(memory_format=torch.contiguous_format), 1.0).to(x.dtype)

    def _pow(self, func: Any, x: Any, exponent: Any) -> Any:
        powers = {2: lambda: x * x, 3: lambda: x * x * x, 0.5: lambda: x.sqrt(), -0.5: lambda: 1.0 / x.sqrt()}
        return powers[exponent]() if isinstance(exponent, (int, float)) and exponent in powers else NotImplemented

    def _rms_norm(
        self, func: Any, x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
    ) -> Any:
        if len(shape) != 1:
            return NotImplemented
        weight = torch.ones(shape[0], device=x.device) if weight is None else weight.float()
        epsilon = torch.finfo(x.dtype).eps if eps is None else eps
        return self._kernels.rms_norm(x.float().contiguous(), weight, epsilon).to(x.dtype)


def as_they_are(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a module of ours, none of whose functions is to be replaced."""

    def computed(*arguments: Any, **named: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(*arguments, **named)

    return computed


def _over(dim: int, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A function of rows ``[n, K]`` along another dimension; of float32."""
    moved = x.float().movedim(dim, -1)
    result = function(moved.reshape(-1, moved.shape[-1]))
    return result.reshape(*moved.shape[:-1], -1).movedim(-1, dim).to(x.dtype)


def _softmax(
    func: Any, input: torch.Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _over(dim, input if dtype is None else input.to(dtype), softmax)


def _sum(
    func: Any,
    input: torch.Tensor,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    keepdims: bool = False,  # numpy's name, which torch takes, too
) -> Any:
    keepdim = keepdim or keepdims
    dims = [dim] if isinstance(dim, int) else dim
    if not input.is_floating_point():
        return func(input, dim, keepdim=keepdim) if dim is not None else func(input)
    if dims is None or len(dims) != 1:
        return NotImplemented
    result = _over(dims[0], input if dtype is None else input.to(dtype), sums)
    return result if keepdim else result.squeeze(dims[0])


def _mean(func: Any, input: torch.Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    total = _sum(func, input, dim, keepdim)
    if total is NotImplemented:
        return total
    return total / input.shape[dim if isinstance(dim, int) else dim[0]]


def _in_float32(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda func, input, **_: function(input.float()).to(input.dtype)


def _gelu(func: Any, input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return activated("gelu" if approximate == "none" else "gelu_tanh", input)


_REPLACED: dict[str, Callable[..., Any]] = {
    "softmax": _softmax,
    "sum": _sum,
    "mean": _mean,
    "sigmoid": _in_float32(sigmoid),
    "exp": _in_float32(exponentials),
    "softplus": _in_float32(lambda x: x.clamp(min=0.0) + exponentials(-x.abs()).log1p()),
    "rsqrt": _in_float32(lambda x: 1.0 / x.sqrt()),
    "silu": lambda func, input, inplace=False: activated("silu", input),
    "gelu": _gelu,
}
"""Functions by name; the first argument is torch's."""
