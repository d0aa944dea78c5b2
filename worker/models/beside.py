"""Files that the worker keeps beside a checkpoint for its next start, and whether they still fit.

They lie in the checkpoint's directory ``.packed``, where they are as trustworthy as the checkpoint:
whoever can write one can write the other. Or in a directory that is named instead: trust who can
write there.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from worker import __version__
from worker.models.regular_files import read_regular

Item = TypeVar("Item")
Result = TypeVar("Result")

DIRECTORY = ".packed"

_PACKAGES = ("transformers", "tokenizers")
"""Packages that read the checkpoint: what they make of it is in the files."""

_PART_BYTES = 32 * 2**20
_READ_AT_ONCE = 2**20

_DIGESTS = "digests.json"
_SETTLED_NS = 2 * 10**9
"""Age of a file's last change from which on another one would have another time."""

_digests_lock = threading.Lock()
_digests: dict[Path, dict[str, list[Any]]] = {}
"""Digests that this process knows, by directory; as in a file of digests."""


def copies_of(checkpoint: Path, setting: str = "auto") -> Path | None:
    """Directory of what is kept for the next start of a checkpoint; None if nothing is.

    Args:
        checkpoint: Directory of the checkpoint.
        setting: ``auto``: `DIRECTORY` in it; ``off``; or a directory, in which each checkpoint has
            one of its own.
    """
    if setting == "off":
        return None
    if setting == "auto":
        return checkpoint / DIRECTORY
    path = checkpoint.resolve()
    return Path(setting, f"{path.name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}")


def note_use(path: Path) -> None:
    """Make a copy the `last_used` one of its directory, where that can be written."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def last_used(copies: Path) -> Path | None:
    """The copy of weights in a directory that was used last; None if there is none."""
    try:
        return max(copies.glob("*.safetensors"), key=lambda path: path.stat().st_atime_ns, default=None)
    except OSError:  # one is being replaced
        return None


class Provenance:
    """Origin of a file: the checkpoint's files that it is made of, and what read and wrote them.

    Make it before the checkpoint is read.

    Args:
        checkpoint: Directory of the checkpoint.
        patterns: Patterns of the names of the checkpoint's files.
        format: Version of the format of the file that is made.
        copies: Result of `copies_of`; None keeps no digests of the files.
    """

    def __init__(self, checkpoint: Path, patterns: Sequence[str], format: int, copies: Path | None) -> None:
        self._checkpoint, self._patterns, self._copies = checkpoint, patterns, copies
        self._versions = [format, __version__, *map(importlib.metadata.version, _PACKAGES)]
        self._states = self._stat()

    def _stat(self) -> dict[Path, list[int]]:
        """Size, inode and times of the files."""
        states = {}
        for path in sorted({path for pattern in self._patterns for path in self._checkpoint.glob(pattern)}):
            try:
                found = path.stat()
            except OSError:  # a link to nothing
                continue
            if stat.S_ISREG(found.st_mode):
                states[path] = _state(found)
        return states

    def still_holds(self) -> bool:
        """Whether the files are still those that were there, by size, inode and time of change."""
        found, known = ({path: each[:3] for path, each in states.items()} for states in (self._stat(), self._states))
        return found == known

    def record(self) -> dict[str, Any]:
        """JSON data for `check`; reads all of the files.

        Raises:
            OSError: a file cannot be read, or has changed.
        """
        digests = file_digests(self._checkpoint, list(self._states), self._copies)
        files = {path.name: [*state, digests[path]] for path, state in self._states.items()}
        if self._stat() != self._states:
            raise OSError("the checkpoint has changed meanwhile")
        return {"versions": self._versions, "files": files}

    def check(self, recorded: dict[str, Any]) -> None:
        """Raises `ValueError` unless versions and files are the same.

        A file whose size, inode and times are the same is not read; of another the SHA-256 counts.
        """
        if recorded["versions"] != self._versions:
            raise ValueError("another version made it")
        files = recorded["files"]
        if sorted(files) != [path.name for path in self._states]:
            raise ValueError("the checkpoint has other files")
        for path, state in self._states.items():
            *known, digest = files[path.name]
            if known != state and (
                known[0] != state[0] or file_digests(self._checkpoint, [path], self._copies)[path] != digest
            ):
                raise ValueError(f"the checkpoint has another {path.name}")


def file_digests(directory: Path, paths: Iterable[Path], copies: Path | None) -> dict[Path, str]:
    """`file_digest` of each of some files.

    It is computed once: a file whose size, inode and times are the same is not read again, in this
    process, and in later ones if there are `copies` (see `copies_of`), where that can be written.
    Digests of a file that was changed a moment ago are not kept: it might
    be changed once more without another time.

    Raises:
        OSError: a file cannot be read, or changes meanwhile.
    """
    now_ns = time.time_ns()
    states = {path: _state(path.stat()) for path in paths}  # of all: what loads beside this reads them in another order
    with _digests_lock:
        known = (_read_digests(copies) if copies else {}) | _digests.get(directory, {})
        found, new = {}, {}
        for path, state in states.items():
            name = os.path.relpath(path, directory)
            *before, digest = known.get(name, [None])
            if before != state:
                digest = file_digest(path)
                if _state(path.stat()) != state:
                    raise OSError(f"{path} has changed meanwhile")
                if state[-1] < now_ns - _SETTLED_NS:
                    new[name] = [*state, digest]
            found[path] = str(digest)
        if new:
            _digests[directory] = known | new
            if copies:
                _keep_digests(copies, known | new)
        return found


def _state(found: os.stat_result) -> list[int]:
    """Size, inode and times of a file, which change with its content."""
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _read_digests(copies: Path) -> dict[str, list[Any]]:
    try:
        content: dict[str, list[Any]] = opened(json.loads(read_regular(copies / _DIGESTS)))
        return {str(name): [*map(int, state), str(digest)] for name, (*state, digest) in content.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, or a damaged one
        return {}


def _keep_digests(copies: Path, content: dict[str, list[Any]]) -> None:
    def write(path: Path) -> None:
        path.write_text(json.dumps(sealed(content)), encoding="ascii")

    with suppress(OSError):  # it cannot be written, or another process is doing so: they are computed again
        keep(copies / _DIGESTS, write)


@contextmanager
def work_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A directory in `parent` that goes away, as do those that killed processes left there.

    For the one process that holds a lock.
    """
    for stale in parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as work:
        yield Path(work)


def keep(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file whole or not at all; what a killed process left goes away.

    Args:
        path: Path of the file; its directory is made.
        write: Writes it to the path that it is given.

    Raises:
        BlockingIOError: another process is writing it.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # It stays there: what is removed could be locked twice. "+" waits for no reader of a pipe.
    with path.with_suffix(".lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with work_directory(path.parent, f"partial-{path.stem}-") as work:
            partial = work / path.name
            write(partial)
            partial.replace(path)


def sealed(content: Any) -> dict[str, str]:
    """JSON data as text, with its SHA-256; see `opened`."""
    text = json.dumps(content, separators=(",", ":"))
    return {"content": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def opened(seal: dict[str, str]) -> Any:
    """The JSON data of `sealed`.

    Raises:
        ValueError: it is damaged.
        LookupError, TypeError, AttributeError: it is something else.
    """
    if hashlib.sha256(seal["content"].encode()).hexdigest() != seal["sha256"]:
        raise ValueError("it has another SHA-256")
    return json.loads(seal["content"])


def file_digest(path: Path) -> str:
    """SHA-256 of the SHA-256s of a file's parts of 32 MiB, which are computed side by side.

    Nothing is mapped: a process ends where it reads a mapped file that has become shorter.

    Raises:
        OSError: it cannot be read, or becomes shorter meanwhile.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size

        def digest_from(start: int) -> bytes:
            digest, end = hashlib.sha256(), min(size, start + _PART_BYTES)
            while start < end:
                content = os.pread(file.fileno(), min(_READ_AT_ONCE, end - start), start)
                if not content:
                    raise OSError(f"{path} has become shorter meanwhile")
                digest.update(content)
                start += len(content)
            return digest.digest()

        parts = side_by_side(digest_from, range(0, size, _PART_BYTES))
        return hashlib.sha256(b"".join(parts)).hexdigest() if size else ""


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`work` of each item, in as many threads as there are CPUs for it."""
    with ThreadPoolExecutor(num_cpus()) as threads:
        return list(threads.map(work, items))


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
