"""A GPU for tests on machines that have none: its tensors lie in main memory and say otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda", 0)

_TAKES_BOTH = ("__getitem__", "__setitem__", "copy_", "to", "as_subclass")
"""Functions that take tensors of main memory beside those of a device."""


class OnGpu(torch.Tensor):
    """A tensor of the pretended GPU."""

    device = property(lambda self: DEVICE)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ == "cpu" or _named_device(args[1:], kwargs) == "cpu":
            plain = [each.as_subclass(torch.Tensor) if isinstance(each, OnGpu) else each for each in args]
            return func(*plain, **kwargs).clone()
        if func.__name__ not in _TAKES_BOTH:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, torch.Tensor) and not isinstance(each, OnGpu) and each.dim():
                    raise RuntimeError(f"{func.__name__}: expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class PretendGpu(TorchFunctionMode):
    """While it is active, tensors can be made on, and moved to, `DEVICE`.

    Attributes:
        computed: Names of the functions that were called with tensors there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, OnGpu) for each in tree_leaves((args, kwargs))):
            self.computed.add(func.__name__)
        if func.__name__ == "pin_memory":
            return args[0]
        kwargs.pop("pin_memory", None)
        if _named_device(args[1:], kwargs) == "cuda":
            if func.__name__ == "to":
                return args[0].as_subclass(OnGpu)
            return func(*args, **{**kwargs, "device": "cpu"}).as_subclass(OnGpu)
        return func(*args, **kwargs)


def _named_device(args: Any, kwargs: Any) -> str | None:
    """Kind of the device that a call names."""
    named: Iterator[Any] = (each for each in (*args, kwargs.get("device")) if isinstance(each, (str, torch.device)))
    found = next(named, None)
    return None if found is None else torch.device(found).type
