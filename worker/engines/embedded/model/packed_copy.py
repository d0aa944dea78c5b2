"""A packed copy: what the engine made of a checkpoint, in a file beside it, for the next start.

It is one file of `worker.models.sealed_tensors`, which says what it holds, and of which checkpoint
(`worker.models.beside`). A process that is to load the model can have it read while it still
imports torch (`worker.build.weights_ahead`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.models.beside import Provenance, keep, note_use
from worker.models.huge_pages import ALIGNMENT_BYTES, address_of
from worker.models.safetensors_file import Stored
from worker.models.sealed_tensors import SealedTensors, write_sealed
from worker.models.weight_files import StoredTensor

logger = logging.getLogger(__name__)

FORMAT = 5
"""Raised when the same checkpoint would be packed, or written, differently."""

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_SOURCES = (
    *("config.json", "generation_config.json", *_TOKENIZER),
    *("*.safetensors", "*.safetensors.index.json"),
)
_CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_WRITTEN_AT_ONCE = 16 * 2**20
_LOWEST_PRIORITY = 19


def provenance_of(checkpoint: Path, copies: Path | None) -> Provenance:
    """The provenance of a packed copy; make it before the checkpoint is read."""
    return Provenance(checkpoint, _SOURCES, FORMAT, copies)


class PackedCopy:
    """The packed copy of a checkpoint for some settings.

    Args:
        copies: Directory of the checkpoint's copies, from `beside.copies_of`.
        provenance: Result of `provenance_of`.
        name: Name of the settings on which packed weights depend; part of the file's name.
        kinds: Dataclasses that it may hold; their fields are numbers, strings, data types, tensors,
            tuples, and such dataclasses.

    Attributes:
        path: Path of the file, be it there or not.
    """

    def __init__(self, copies: Path, provenance: Provenance, name: str, kinds: Sequence[type]) -> None:
        self.path = copies / f"{name}.safetensors"
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._provenance = provenance
        self._seen = _state(self.path)

    def read(self, ahead: SealedTensors | None = None) -> Any:
        """The object that was written; None if nothing was.

        Args:
            ahead: This file, of which a part may have been read.

        Raises:
            ValueError: it is damaged, or of another checkpoint or version.
        """
        began = time.monotonic()
        try:
            if ahead is None and not self.path.exists():
                return None
            with contextlib.closing(ahead or SealedTensors(self.path)) as file:
                self._provenance.check(file.content["provenance"])
                tensors = {name: _tensor(*stored) for name, stored in file.finish().items()}
            value = self._decoded(file.content["value"], tensors)
        except (OSError, OverflowError) as error:
            raise ValueError(f"it cannot be read: {error}") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"it is damaged: {str(error) or type(error).__name__}") from error
        note_use(self.path)
        logger.info("packed weights: read from %s in %.1f s", self.path, time.monotonic() - began)
        return value

    def write(self, value: Any, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Write `value`; logs why if it cannot be written.

        Args:
            value: Object of the kinds that the copy may hold.
            goes_on: Asked every few megabytes; nothing is kept once it is false.
        """

        def parts(tensor: torch.Tensor) -> Iterator[memoryview]:
            for part in _parts(tensor):
                if not goes_on():
                    raise OSError("this process ends")
                yield part

        tensors: dict[str, torch.Tensor] = {}
        tree = _encoded(value, tensors)
        size = sum(tensor.nbytes for tensor in tensors.values())

        def write(path: Path) -> None:
            if _state(self.path) != self._seen:
                raise BlockingIOError("it has been written meanwhile")
            if shutil.disk_usage(path.parent).free < 2 * size:
                raise OSError(f"its {size // 10**6} MB would take more than half of what is free")
            stored = [
                Stored(name, _CODES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, partial(parts, tensor))
                for name, tensor in tensors.items()
            ]
            write_sealed(path, stored, {"provenance": self._provenance.record(), "value": tree})

        try:
            keep(self.path, write)
        except BlockingIOError:
            logger.debug("another process keeps %s", self.path)
        except OSError as error:
            logger.info("no packed weights are kept in %s: %s", self.path, error)
        else:
            logger.info("packed weights: %d MB kept in %s for the next start", size // 10**6, self.path)

    def write_beside(self, value: Any) -> threading.Thread:
        """`write` in a thread of its own, which takes what time others leave.

        A start does not wait for it: a probe could end the process each time before it is done. The
        end of the process does, for some megabytes more: Python ends a daemon thread wherever it
        is, which aborts the process where that is in torch.
        """

        def work() -> None:
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
            try:
                self.write(value, threading.main_thread().is_alive)
            except RuntimeError as error:  # pools of threads take no more work by then
                if threading.main_thread().is_alive() and "interpreter shutdown" not in str(error):
                    raise

        thread = threading.Thread(target=work, name="packed-copy")
        try:
            thread.start()
        except RuntimeError as error:  # the system has none: the next start packs the weights again
            logger.info("no packed weights are kept in %s: %s", self.path, error)
        return thread

    def _decoded(self, tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
        if isinstance(tree, list):
            return tuple(self._decoded(each, tensors) for each in tree)
        if not isinstance(tree, dict):
            return tree
        [(key, content)] = tree.items()
        if key == "tensor":
            return tensors[content]
        if key == "dtype":
            return getattr(torch, content)
        return self._kinds[key](**{name: self._decoded(each, tensors) for name, each in content.items()})


def _encoded(value: Any, tensors: dict[str, torch.Tensor], name: str = "") -> Any:
    """`value` as JSON data; its tensors are put into `tensors`, by where they are in it."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return [_encoded(each, tensors, f"{name}.{index}") for index, each in enumerate(value)]
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        content = {each: _encoded(getattr(value, each), tensors, f"{name}.{each}".lstrip(".")) for each in names}
        return {type(value).__name__: content}
    return value


def _state(path: Path) -> tuple[int, int] | None:
    """Identity of the file that is there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _tensor(stored: StoredTensor, content: memoryview) -> torch.Tensor:
    """A tensor in the memory of its values; in some of its own if there it would not be aligned."""
    dtype = _DTYPES[stored.dtype]
    if not content:
        return torch.empty(stored.shape, dtype=dtype)
    is_aligned = address_of(content)[0] % ALIGNMENT_BYTES == 0
    values = torch.frombuffer(content if is_aligned else bytearray(content), dtype=dtype).view(stored.shape)
    return values if is_aligned else values.clone()


def _parts(tensor: torch.Tensor) -> Iterator[memoryview]:
    view = _bytes(tensor).ravel().data
    for start in range(0, len(view), _WRITTEN_AT_ONCE):
        yield view[start : start + _WRITTEN_AT_ONCE]


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.detach().contiguous().view(torch.uint8).numpy()
