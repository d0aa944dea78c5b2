"""A safetensors file whose metadata hold data of ours and the SHA-256 of its parts, read into huge
pages.

It is read without torch, so that threads can begin while the process still imports torch, which
takes one processor most of a second. They wait for Python's lock behind each part, up to 5 ms where
another thread computes in Python: so parts are large, and tensors have no digests of their own.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from worker.models.beside import num_cpus, opened, sealed, side_by_side
from worker.models.huge_pages import ALIGNMENT_BYTES, huge_pages, touch
from worker.models.problems import ModelFileError
from worker.models.regular_files import open_regular
from worker.models.safetensors_file import Stored, write_safetensors
from worker.models.weight_files import StoredTensor, header_and_metadata

_PART_BYTES = 16 * 2**20
"""Bytes of a part of the values, which has a digest."""

_MOST_AHEAD = 8
"""Threads that `begin` starts at most: memory is not faster for more."""


def write_sealed(path: Path, tensors: Iterable[Stored], content: Mapping[str, Any]) -> None:
    """Write a file for `SealedTensors`.

    Tensors of a multiple of `ALIGNMENT_BYTES` come first, so that they are aligned where they are
    read.

    Args:
        path: Path of the file.
        tensors: Tensors of the file, whose values are made twice.
        content: JSON data that lie in it, too.

    Raises:
        OSError: it cannot be written, or `Stored.parts` raises it.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.num_bytes % ALIGNMENT_BYTES > 0)
    forms = [[tensor.name, tensor.code, list(tensor.shape)] for tensor in ordered]
    digests = list(_digests(part for tensor in ordered for part in tensor.parts()))
    with path.open("wb") as file:
        write_safetensors(file, ordered, sealed({"content": content, "tensors": forms, "sha256": digests}))


class SealedTensors:
    """The tensors of a file that `write_sealed` made, which are read.

    Args:
        path: Path of the file; its header is read at once.

    Attributes:
        path: The same.
        content: JSON data that were written with the tensors.

    Raises:
        OSError, OverflowError: it cannot be read, or there is no memory for it.
        ValueError: its header is damaged, or another program's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path)
        try:
            size = os.fstat(self._file.fileno()).st_size
            self._tensors, metadata = header_and_metadata(self._file, size, path.name)
            self._begins = self._file.tell()
            found = opened(metadata)
            if "sha256" not in found:
                raise ValueError("another version made it")
            self.content: Any = found["content"]
            self._digests: list[str] = found["sha256"]
            if found["tensors"] != [[name, each.dtype, list(each.shape)] for name, (each, _) in self._tensors.items()]:
                raise ValueError("its tensors are not those that were written")
            if len(self._digests) != -(-(size - self._begins) // _PART_BYTES):
                raise ValueError("it has another number of parts")
            self._memory = huge_pages(size - self._begins)
        except (ModelFileError, LookupError, TypeError, AttributeError) as error:
            self._file.close()
            raise ValueError(f"it is damaged: {str(error) or type(error).__name__}") from error
        except BaseException:
            self._file.close()
            raise
        self._unread = iter(range(len(self._digests)))
        self._threads: list[threading.Thread] = []
        self._problems: list[Exception] = []

    def begin(self) -> None:
        """Read in threads that leave one processor to the caller."""
        for _ in range(max(1, min(num_cpus() - 1, len(self._digests), _MOST_AHEAD))):
            thread = threading.Thread(target=self._read, name="packed-copy-ahead", daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self) -> dict[str, tuple[StoredTensor, memoryview]]:
        """Read what is left, with all processors; nothing is kept here.

        Returns:
            Tensors by name, and their bytes, which can be written to. All lie in one block.

        Raises:
            OSError: it cannot be read.
            ValueError: a part has another SHA-256; or this was finished or closed before.
        """
        if self._file.closed:
            raise ValueError("it is closed")
        try:
            side_by_side(lambda _: self._read(), range(num_cpus()))
            memory = self._memory
        finally:
            self.close()
        if self._problems:
            raise self._problems.pop(0)  # which has this frame then, and with it the memory
        sizes = (stop - start for _, (start, stop) in self._tensors.values())
        starts = accumulate(sizes, initial=0)
        found = {}
        for name, (tensor, (start, stop)) in self._tensors.items():
            at = next(starts)
            found[name] = tensor, memory[at : at + stop - start]
        return found

    def close(self) -> None:
        """Read no more, and keep nothing in memory."""
        self._unread = iter(range(0))
        for thread in self._threads:
            thread.join()
        self._file.close()
        self._memory = memoryview(b"")

    def _read(self) -> None:
        """Read and check parts until none is left."""
        try:
            while (number := next(self._unread, None)) is not None and not self._problems:
                start = number * _PART_BYTES
                part = self._memory[start : start + _PART_BYTES]
                touch(part)
                _fill(part, self._file.fileno(), self._begins + start)
                if hashlib.sha256(part).hexdigest() != self._digests[number]:
                    raise ValueError("it is damaged: a part has another SHA-256")
        except Exception as error:  # `finish` raises it
            self._problems.append(error.with_traceback(None))  # its frames would keep the memory


def _fill(part: memoryview, file: int, position: int) -> None:
    """Read from a position of a file on."""
    done = 0
    while done < len(part):
        read = os.preadv(file, [part[done:]], position + done)
        if not read:
            raise OSError("it has become shorter meanwhile")
        done += read


def _digests(values: Iterable[bytes | memoryview]) -> Iterator[str]:
    """SHA-256 of each part of some values."""
    digest, room = hashlib.sha256(), _PART_BYTES
    for piece in values:
        rest = memoryview(piece)
        while len(rest) >= room:
            digest.update(rest[:room])
            yield digest.hexdigest()
            rest, digest, room = rest[room:], hashlib.sha256(), _PART_BYTES
        digest.update(rest)
        room -= len(rest)
    if room < _PART_BYTES:
        yield digest.hexdigest()
