"""torch imported when something of it is used, in processes that may never use it.

It takes half a second and 180 MiB. The catalogue of processors is also what says which fields a
request may have, and for that the modules of processors are imported, but none of their tensors is
ever made. `install` puts a module in ``torch``'s place, in a process's entry point, and its first
attribute that is asked for imports torch into it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from adapters.lean_torch import around, imported


def install() -> bool:
    """Let this process import torch at its first use; after `lean_torch.install`, where both are.

    Returns:
        Whether it will: not if torch has been imported, or is missing.
    """
    if "torch" in sys.modules:
        return False
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return False
    unused = importlib.util.module_from_spec(spec)
    unused.__class__ = _Unused
    sys.meta_path.insert(0, _Finder(unused))
    sys.modules["torch"] = unused
    return True


def complete() -> None:
    """Import torch where it has not been: for code that may ask for more than attributes."""
    if isinstance(sys.modules.get("torch"), _Unused):
        _import_torch()


class _Unused(ModuleType):
    """torch before its import, as which other modules keep it: it becomes torch itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # which `inspect` and the like ask every module for
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _import_torch()
        return ModuleType.__getattribute__(self, name)


_lock = threading.Lock()


def _import_torch() -> None:
    """Import torch. If another thread is doing so, the import system waits for it."""
    with _lock:
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) and not finder.is_asked:
                finder.is_asked = True
                sys.modules.pop("torch", None)
    importlib.import_module("torch")


class _Finder(MetaPathFinder):
    """Finds torch once it is to be imported, and imports it before a module that lies in it."""

    def __init__(self, unused: ModuleType) -> None:
        self._unused = unused
        self.is_asked = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torch" and self.is_asked:
            return self._spec_of_torch(path, target)
        if name.startswith("torch.") and not self.is_asked:
            _import_torch()
            if name in sys.modules:  # imported with it
                return imported(sys.modules[name])
        return None

    def _spec_of_torch(self, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec("torch", path, target)
            if spec is not None and spec.loader is not None:
                return around(spec, self._execute, self._unused)
        return None

    def _execute(self, execute: Callable[[], None]) -> None:
        execute()
        self._unused.__class__ = ModuleType
