"""torch imported without its meta kernels, in processes of this package.

A quarter of the time of ``import torch`` goes into ``torch._meta_registrations``, which computes
shapes for the ``meta`` device, and the decompositions that it imports. Only compilation, export,
fake tensors and models on that device need them. `install` defers them, in a process's entry
point: importing this package as a library changes nothing about torch.

A finder in ``sys.meta_path`` imports the meta kernels before a module that needs them (`USERS`),
and so does torch when they are asked for by attribute. Code that computes on the ``meta`` device
and imports none of `USERS` calls `complete` first; without it, torch says that an operation has no
meta kernel.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

TESTED = ("2.13", "2.14", "2.15")
"""Versions of torch whose meta kernels `install` defers: those that its tests have been run with.
Others may need them for something else.
"""

META_KERNELS = "torch._meta_registrations"

_FAMILY = ("torch._decomp", "torch._prims", "torch._refs")
"""Packages that the meta kernels import, and that can be imported in their order only."""

USERS = frozenset({*_FAMILY, "torch._dynamo", "torch._inductor", "accelerate", "tensorrt_llm", "transformers", "vllm"})
"""Modules before which the meta kernels are imported."""

_LAZY_NAMES = frozenset(name.removeprefix("torch.") for name in (META_KERNELS, *_FAMILY))


def install() -> bool:
    """Let this process import torch without its meta kernels.

    Returns:
        Whether it will: not if torch has been imported, is missing or of a version that is not in
        `TESTED`.
    """
    if "torch" in sys.modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return False
    try:
        number = version("torch")
    except PackageNotFoundError:
        return False
    if ".".join(number.split(".")[:2]) not in TESTED:
        return False
    sys.meta_path.insert(0, _Finder())
    return True


def complete() -> None:
    """Import the meta kernels if they were deferred. Thread-safe, as imports are."""
    for finder in list(sys.meta_path):
        if isinstance(finder, _Finder) and "torch" in sys.modules:
            finder.complete()


class _Placeholder(ModuleType):
    """The meta kernels while torch is imported; if one is used then, all are imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        complete()
        return getattr(sys.modules[META_KERNELS], name)


class _Finder(MetaPathFinder):
    """Finds torch, the meta kernels, and what needs these; leaves ``sys.meta_path`` with them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torch":
            return around(PathFinder.find_spec(name, path), self._import_torch)
        if name == META_KERNELS:
            return around(PathFinder.find_spec(name, path), self._import_meta_kernels)
        if name in USERS and "torch" in sys.modules:
            self.complete()
            if name in sys.modules:  # imported with them
                return imported(sys.modules[name])
        return None

    def complete(self) -> None:
        if isinstance(sys.modules.get(META_KERNELS), _Placeholder):
            del sys.modules[META_KERNELS]
        importlib.import_module(META_KERNELS)

    def _import_torch(self, execute: Callable[[], None]) -> None:
        sys.modules[META_KERNELS] = _Placeholder(META_KERNELS)
        try:
            with _frames_known():
                execute()
        finally:
            is_deferred = isinstance(sys.modules.get(META_KERNELS), _Placeholder)
            if is_deferred:
                del sys.modules[META_KERNELS]
        if is_deferred:
            torch = sys.modules["torch"]
            vars(torch).pop("_meta_registrations", None)
            torch._lazy_modules.update(_LAZY_NAMES)  # which torch imports as attributes
            _allow_generators(torch)

    def _import_meta_kernels(self, execute: Callable[[], None]) -> None:
        execute()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        lazy: set[str] = getattr(sys.modules["torch"], "_lazy_modules", set())
        lazy -= _LAZY_NAMES


@contextmanager
def _frames_known() -> Iterator[None]:
    """Lets `inspect` find a frame's module by its name.

    It looks at the files of all modules otherwise: 40 ms, for the name of one of torch's own.
    """
    getmodule = inspect.getmodule

    def found(of: Any, _filename: str | None = None) -> ModuleType | None:
        known = sys.modules.get(of.f_globals.get("__name__", "")) if inspect.isframe(of) else None
        return known or getmodule(of, _filename)

    vars(inspect)["getmodule"] = found
    try:
        yield
    finally:
        vars(inspect)["getmodule"] = getmodule


def _allow_generators(torch: Any) -> None:
    """Let ``torch.Generator`` be made: of what ``torch._prims`` does, serving needs this alone."""
    try:
        base = importlib.import_module("torch._custom_class_base")
    except ModuleNotFoundError:  # its name before 2.14, and a warning in 2.15
        base = importlib.import_module("torch._opaque_base")
    torch._C._set_generator_metaclass(base.OpaqueBaseMeta)


def around(
    spec: ModuleSpec | None, run: Callable[[Callable[[], None]], None], into: ModuleType | None = None
) -> ModuleSpec | None:
    """``spec`` with a loader that lets ``run`` execute the module: ``into`` if that is given.

    The loader puts the real one back.
    """
    if spec is not None and spec.loader is not None:
        spec.loader = _Around(spec.loader, run, into)
    return spec


class _Around(Loader):
    def __init__(self, loader: Loader, run: Callable[[Callable[[], None]], None], into: ModuleType | None) -> None:
        self._loader, self._run, self._into = loader, run, into

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec) if self._into is None else self._into

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._run(lambda: self._loader.exec_module(module))


def imported(module: ModuleType) -> ModuleSpec:
    """The spec of a module that was imported while it was being found: it is not executed again.

    The import system takes the spec that such a module has, so it has this one for a moment.
    """
    spec = ModuleSpec(module.__name__, _Imported(module))
    module.__spec__ = spec
    return spec


class _Imported(Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
