"""Keeps a worker registered with Dynamo's discovery by files (``DYN_DISCOVERY_BACKEND=file``).

Any process removes entries that nobody has renewed for 10 s. A worker that was stopped for longer
(SIGSTOP, a machine that slept) goes on, but Dynamo renews entries and never writes one again: it
would run and serve nobody.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between looks; an entry that is missing twice is written again."""


def entries_of(environ: Mapping[str, str], instance_id: int) -> FileEntries | None:
    """The entries of an instance, None where discovery is not by files."""
    if environ.get("DYN_DISCOVERY_BACKEND") != "file" or not environ.get("DYN_FILE_KV"):
        return None
    return FileEntries(Path(environ["DYN_FILE_KV"]), instance_id)


class FileEntries:
    """The files of one instance: its endpoint's and its model's.

    Args:
        directory: ``DYN_FILE_KV``.
        instance_id: Ends the names of the files, in hexadecimal digits.
    """

    def __init__(self, directory: Path, instance_id: int) -> None:
        self._directory = directory
        self._pattern = f"v1/*/*%2F{instance_id:x}"
        self._contents: dict[Path, bytes] = {}
        self._missing: set[Path] = set()

    def check(self) -> list[Path]:
        """Write those again that are missing since the last call.

        Returns:
            Those that were written.

        Raises:
            OSError: the directory cannot be read, or a file cannot be written.
        """
        found = {path: path.read_bytes() for path in self._directory.glob(self._pattern)}
        self._contents.update(found)
        missing = self._contents.keys() - found.keys()
        lost, self._missing = sorted(missing & self._missing), missing
        for path in lost:
            aside = self._directory / f".{os.getpid()}"  # nobody watches for entries there
            aside.write_bytes(self._contents[path])
            os.replace(aside, path)
        return lost


async def keep_registered(entries: FileEntries, is_leaving: Callable[[], bool]) -> None:
    """Write an instance's entries again whenever they are lost, until it leaves.

    Args:
        entries: Of the instance.
        is_leaving: Whether it shuts down, so that its entries are removed for good.
    """
    while not is_leaving():
        try:
            lost = await asyncio.to_thread(entries.check)
        except OSError as error:
            logger.warning("the registration cannot be checked: %s", error)
        else:
            if lost:
                logger.warning("registered again: entries were removed as those of a dead worker")
        await asyncio.sleep(CHECK_S)
