"""A double of the native kernels' C library: the same functions, arguments and memory layouts.

It computes in torch, on what it finds at the addresses that it is passed. `install` puts it where
`native` loads its library, so that everything in Python around the kernels runs on every processor.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from worker.engines.embedded import native

COLUMNS = 32
VERSION = 1
NONE, SILU, ADD, MULTIPLY = range(4)


def at(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The tensor at an address; writes go there."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Function:
    """A function of the library; as in ctypes, its arguments are converted as `argtypes` says."""

    argtypes: tuple[Any, ...] = ()
    restype: Any = None

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute

    def __call__(self, *arguments: object) -> Any:
        converted = [kind(argument).value for kind, argument in zip(self.argtypes, arguments, strict=True)]
        return self._compute(*converted)


class Library:
    """The library of one dtype. `calls` counts the calls of each function."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.calls: Counter[str] = Counter()
        for name in ("linear", "rms_norm", "rotate_and_store", "attend"):
            setattr(self, name, Function(self._counted(name)))
        self.kernels_version = Function(lambda: VERSION)

    def _counted(self, name: str) -> Callable[..., None]:
        compute = getattr(self, f"_{name}")

        def counted(*arguments: Any) -> None:
            self.calls[name] += 1
            compute(*arguments)

        return counted

    def _linear(
        self,
        x: int,
        rows: int,
        inner: int,
        panels: int,
        columns: int,
        bias: int | None,
        epilogue: int,
        other: int | None,
        output: int,
        threads: int,
    ) -> None:
        per_word = 4 // self.dtype.itemsize
        packed = at(panels, self.dtype, -(-columns // COLUMNS), inner // per_word, COLUMNS, per_word)
        weight = packed.transpose(1, 2).reshape(-1, inner)[:columns]
        result = at(x, self.dtype, rows, inner).double() @ weight.double().T
        if bias is not None:
            result += at(bias, self.dtype, columns)
        if epilogue == SILU:
            result = functional.silu(result)
        elif epilogue == ADD:
            result += at(other or 0, self.dtype, rows, columns)
        elif epilogue == MULTIPLY:
            result *= at(other or 0, self.dtype, rows, columns)
        at(output, self.dtype, rows, columns).copy_(result)

    def _rms_norm(self, x: int, rows: int, width: int, weight: int, epsilon: float, output: int, threads: int) -> None:
        result = self._normed(at(x, self.dtype, rows, width), weight, epsilon)
        at(output, self.dtype, rows, width).copy_(result)

    def _normed(self, x: torch.Tensor, weight: int, epsilon: float) -> torch.Tensor:
        width = x.shape[-1]
        return functional.rms_norm(x.double(), (width,), at(weight, self.dtype, width).double(), epsilon).to(x.dtype)

    def _rotate_and_store(
        self,
        qkv: int,
        tokens: int,
        heads: int,
        kv_heads: int,
        width: int,
        cosine: int,
        sine: int,
        query_norm: int | None,
        key_norm: int | None,
        epsilon: float,
        query: int,
        keys: int,
        values: int,
        size: int,
        pages: int,
        slots: int,
        threads: int,
    ) -> None:
        projected = at(qkv, self.dtype, tokens, heads + 2 * kv_heads, width)
        cosines, sines = (at(each, self.dtype, tokens, 1, width).double() for each in (cosine, sine))
        index = at(pages, torch.int64, tokens), slice(None), at(slots, torch.int64, tokens)
        shape = int(index[0].max()) + 1, kv_heads, size, width

        def rotated(x: torch.Tensor, norm: int | None) -> torch.Tensor:
            x = (x if norm is None else self._normed(x, norm, epsilon)).double()
            first, second = x.chunk(2, -1)
            return (x * cosines + torch.cat((-second, first), -1) * sines).to(self.dtype)

        at(query, self.dtype, tokens, heads, width).copy_(rotated(projected[:, :heads], query_norm))
        at(keys, self.dtype, *shape)[index] = rotated(projected[:, heads:-kv_heads], key_norm)
        at(values, self.dtype, *shape)[index] = projected[:, -kv_heads:]

    def _attend(
        self,
        query: int,
        query_stride: int,
        output: int,
        keys: int,
        values: int,
        kv_heads: int,
        group: int,
        width: int,
        size: int,
        page_table: int,
        tiles: int,
        num_tiles: int,
        window: int,
        scale: float,
        softcap: float,
        threads: int,
    ) -> None:
        row = kv_heads * group * width
        for first, count, position, begin in at(tiles, torch.int64, num_tiles, 4).tolist():
            assert count * group <= 64
            length = position + count
            pages = at(page_table + 8 * begin, torch.int64, -(-length // size))
            stored = (at(each, self.dtype, int(pages.max()) + 1, kv_heads, size, width) for each in (keys, values))
            seen_keys, seen_values = (
                each[pages].transpose(1, 2).reshape(-1, kv_heads, width)[:length].double() for each in stored
            )
            for token in range(first, first + count):
                stop = position + token - first + 1
                seen = slice(max(0, stop - window) if window else 0, stop)
                address = query + token * query_stride * self.dtype.itemsize
                by_head = at(address, self.dtype, kv_heads, group, width).double()
                scores = torch.einsum("hgd,thd->hgt", by_head, seen_keys[seen]) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                result = torch.einsum("hgt,thd->hgd", scores.softmax(-1), seen_values[seen])
                at(output + token * row * self.dtype.itemsize, self.dtype, kv_heads, group, width).copy_(result)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[torch.dtype, Library]:
    """Let `native` load the double, on a processor that has what it needs; returns the libraries.

    Args:
        monkeypatch: Undoes it.
        folder: Where the libraries are said to be; files are made there.
    """
    libraries = {dtype: Library(dtype) for dtype in native._KINDS}
    by_path = {}
    for dtype, kind in native._KINDS.items():
        path = folder / f"{kind.name}{EXTENSION_SUFFIXES[0]}"
        path.touch()
        by_path[str(path)] = libraries[dtype]
    flags = frozenset(flag for kind in native._KINDS.values() for flag in kind.needs)
    monkeypatch.setattr(native, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(native, "__file__", str(folder / "__init__.py"))
    monkeypatch.setattr(native, "ctypes", SimpleNamespace(CDLL=by_path.__getitem__))
    monkeypatch.setattr(native, "_library", cache(native._library.__wrapped__))
    monkeypatch.setattr(native, "unavailable", cache(native.unavailable.__wrapped__))
    return libraries
