"""Keeps a worker registered with Dynamo's discovery by files (``DYN_DISCOVERY_BACKEND=file``) as
long as it lives, and no longer.

Any process removes entries that have not been renewed for 10 s. A worker that was stopped for
longer (SIGSTOP, a machine that slept) goes on, but Dynamo renews entries and never writes one
again: it would run without a request. A worker that was killed is listed for those 10 s, and
ai-dynamo 1.4.2 answers the requests that a frontend sends there with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between looks; an entry that is missing twice is written again."""

CLOSE_S = 5.0
"""Seconds that the shell of a `Guard` may take to end."""

_GUARD = """
while IFS= read -r path; do
    set -- "$@" "$path"
done
rm -f -- "$@"
"""
"""Reads names of files until the pipe ends, and removes them then. Any POSIX shell runs it."""


def entries_of(backend: str, environ: Mapping[str, str], instance_id: int) -> FileEntries | None:
    """The entries of an instance, None where discovery is not by files.

    Args:
        backend: Dynamo's discovery backend.
        environ: Environment, in which ``DYN_FILE_KV`` may be set.
        instance_id: Id that the runtime gave the instance.
    """
    if backend != "file":
        return None
    directory = environ.get("DYN_FILE_KV") or f"{environ.get('TMPDIR') or '/tmp'}/dynamo_store_kv"
    return FileEntries(Path(directory), instance_id)


class FileEntries:
    """The files of one instance: its endpoint's, its model's and its LoRA adapters'.

    Args:
        directory: Directory of discovery.
        instance_id: Part of the names of the files, in hexadecimal digits.
    """

    def __init__(self, directory: Path, instance_id: int) -> None:
        self._directory = directory.absolute()
        # Named by the instance: containers that share the directory number their processes alike.
        self._aside = self._directory / f".{instance_id:x}"
        self._names = re.compile(rf".*%2F{instance_id:x}(%2F.*)?", re.DOTALL)
        self._contents: dict[Path, bytes] = {}
        self._missing: set[Path] = set()
        self._forgotten: set[str] = set()  # adapters
        self._listed: dict[str, list[Listing]] = {}  # the last two looks at each directory

    @property
    def paths(self) -> list[Path]:
        """Paths of all entries that it has seen."""
        return sorted(self._contents)

    def forget(self, adapter: str) -> None:
        """Do not write the entry of a LoRA adapter again, which is about to be removed: not until
        `remember`, since it may be there for a while yet.
        """
        self._forgotten.add(adapter)

    def remember(self, adapter: str) -> None:
        """Keep the entry of a LoRA adapter, which is about to be written."""
        self._forgotten.discard(adapter)

    def check(self) -> list[Path]:
        """Write those again that are missing since the last call.

        Returns:
            Paths of the entries that were written.

        Raises:
            OSError: the directory cannot be read, or a file cannot be written.
        """
        paths = [path for directory in _directories(self._directory / "v1") for path in self._own(directory)]
        found = {path: content for path in paths if (content := _content(path)) is not None}
        gone = [_naming(adapter) for adapter in tuple(self._forgotten)]
        known = {**self._contents, **found}.items()
        self._contents = {path: content for path, content in known if not any(name in content for name in gone)}
        missing = self._contents.keys() - found.keys()
        lost, self._missing = sorted(missing & self._missing), missing
        for path in lost:
            self._aside.write_bytes(self._contents[path])  # entries are not looked for there
            os.replace(self._aside, path)
        return lost

    def _own(self, directory: str) -> list[Path]:
        """The instance's entries in a directory. One that did not change since it was listed twice
        is not listed again: that of 500 workers, each of which does, would keep a core busy. Twice,
        because a file that comes within the clock's tick after a change leaves the time as it is.
        """
        changed_ns = os.stat(directory).st_mtime_ns
        listed = self._listed.get(directory, [])
        if len(listed) < 2 or any(one.changed_ns != changed_ns for one in listed):
            names = [name for name in os.listdir(directory) if self._names.fullmatch(name)]
            listed = [*listed[-1:], Listing(changed_ns, [Path(directory, name) for name in names])]
            self._listed[directory] = listed
        return listed[-1].paths


@dataclass(frozen=True, slots=True)
class Listing:
    """An instance's entries in a directory, and when that changed last, as the file system says."""

    changed_ns: int
    paths: list[Path]


def _naming(adapter: str) -> bytes:
    """The part of an entry that names a LoRA adapter."""
    return f'"lora":{{"name":{json.dumps(adapter, ensure_ascii=False)}'.encode()


def _directories(parent: Path) -> list[str]:
    """None before the first registration."""
    try:
        with os.scandir(parent) as found:
            return [one.path for one in found if one.is_dir()]
    except FileNotFoundError:
        return []


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # it is being replaced, or has been removed
        return None


class Guard:
    """Removes files when this process ends, however it ends: a shell at the other end of a pipe.

    It has a session of its own, so that what is sent to this process's group does not end it first.
    """

    def __init__(self) -> None:
        self._paths: dict[Path, None] = {}  # in order
        self._told: set[Path] = set()  # those that the shell knows
        self._shell: subprocess.Popen[bytes] | None = None

    def add(self, paths: Iterable[Path]) -> None:
        """Remove these too. Raises `OSError` if no shell can be told of them; the next call tries
        again.
        """
        # the shell reads a line for each: a path with a line feed would be those of other files
        self._paths.update(dict.fromkeys(path for path in paths if "\n" not in str(path)))
        if self._shell is not None and self._shell.poll() is not None:  # it was killed
            self._drop_shell(self._shell)
        new = [path for path in self._paths if path not in self._told]
        if not new:
            return
        if self._shell is None:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.defpath},
                start_new_session=True,
            )
        assert self._shell.stdin is not None
        self._shell.stdin.write(b"".join(os.fsencode(path) + b"\n" for path in new))
        self._shell.stdin.flush()
        self._told.update(new)
        logger.info("%d entries of discovery are removed when this process ends", len(self._told))

    def _drop_shell(self, shell: subprocess.Popen[bytes]) -> None:
        """Have another one, which is told of all paths."""
        self._shell, self._told = None, set()
        assert shell.stdin is not None
        with contextlib.suppress(OSError):  # of what it has not read
            shell.stdin.close()

    def close(self) -> None:
        """Remove them now. Idempotent."""
        if self._shell is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._shell.communicate(timeout=CLOSE_S)


async def keep_registered(entries: FileEntries, is_leaving: Callable[[], bool]) -> None:
    """Write an instance's entries again whenever they are lost, until it leaves; remove them when
    it leaves or dies.

    Args:
        entries: Entries of the instance.
        is_leaving: Whether it shuts down, so that its entries are removed for good.
    """
    guard, problem = Guard(), ""
    try:
        while not is_leaving():
            try:
                lost = await asyncio.to_thread(entries.check)
                await asyncio.to_thread(guard.add, entries.paths)
            except (OSError, RuntimeError) as error:  # a full disk, no descriptor, no thread: until there is one again
                if str(error) != problem:
                    logger.warning("the registration cannot be checked: %s", error)
                problem = str(error)
            else:
                problem = ""
                if lost:
                    logger.warning("registered again: entries were removed as those of a dead worker")
            await asyncio.sleep(CHECK_S)
    finally:
        guard.close()
