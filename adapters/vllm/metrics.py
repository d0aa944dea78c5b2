"""``dlw_processor_errors_total``, which the worker has too, among the metrics of vLLM's server.

Processors fail in vLLM's engine, and its server is asked. So each process of the engine keeps its
counts in a file, which the server reads. Where several processes serve, `prometheus_client` has
files of its own for that, in ``PROMETHEUS_MULTIPROC_DIR``, and its counter is used.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from adapters.vllm.reports import Failure

logger = logging.getLogger(__name__)

NAME = "dlw_processor_errors"
DOCUMENTATION = "Requests that a processor failed, by reason."
LABELS = ("processor", "reason")


def error_counter(config: Any) -> Callable[[Failure], None] | None:
    """The counter of one process of vLLM's engine; None where another one counts the same failures.

    Args:
        config: The engine's ``VllmConfig``.
    """
    parallel = config.parallel_config
    if parallel.rank % parallel.tensor_parallel_size:
        return None
    if _has_several_servers():
        return partial(_count_in, _library_counter())
    try:
        return ErrorFile(_directory() / f"{config.instance_id}-{os.getpid()}.json").count
    except OSError as error:
        logger.warning("failures of processors are not among the metrics: %s", error)
        return None


def publish(config: Any) -> None:
    """Add the counts of an engine to the metrics of this process, its server. Idempotent."""
    if not _has_several_servers():
        _registered_files().instance_ids.add(config.instance_id)


@cache
def _registered_files() -> ErrorFiles:
    files = ErrorFiles()
    prometheus_client.REGISTRY.register(files)
    return files


@cache
def _library_counter() -> prometheus_client.Counter:
    return prometheus_client.Counter(NAME, DOCUMENTATION, LABELS)


def _count_in(counter: prometheus_client.Counter, failure: Failure) -> None:
    for labels in _labels(failure):
        counter.labels(*labels).inc()


class ErrorFile:
    """Counts in a file, which is replaced at each failure and removed at exit.

    Args:
        path: The file.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[tuple[str, str]] = Counter()
        self._write()
        atexit.register(path.unlink, missing_ok=True)

    def count(self, failure: Failure) -> None:
        """Count a failure."""
        self._counts.update(_labels(failure))
        try:
            self._write()
        except OSError as problem:  # the step goes on
            logger.warning("a failure of a processor is not among the metrics: %s", problem)

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps([[*labels, number] for labels, number in self._counts.items()]), encoding="utf-8")
        new.replace(self._path)


class ErrorFiles(Collector):
    """Sums the counts of all processes of some engines.

    Attributes:
        instance_ids: Ids of the engines; those of their data-parallel ranks begin with them.
    """

    def __init__(self) -> None:
        self.instance_ids: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        """The counter."""
        family = CounterMetricFamily(NAME, DOCUMENTATION, labels=LABELS)
        for labels, number in self._counts().items():
            family.add_metric(labels, number)
        yield family

    def _counts(self) -> Counter[tuple[str, str]]:
        counts: Counter[tuple[str, str]] = Counter()
        try:
            paths = [path for each in self.instance_ids for path in _directory().glob(f"{each}*.json")]
        except OSError:  # which the engine has told
            return counts
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # its process has ended
                counts.update({(name, reason): number for name, reason, number in json.loads(path.read_text())})
        return counts


def _labels(failure: Failure) -> list[tuple[str, str]]:
    """Several processors may be to blame: labels for each."""
    return [(name, failure.reason) for name in failure.processor.split(", ")]


def _has_several_servers() -> bool:
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


def _directory() -> Path:
    """The directory of this user's counts, which no other user can write."""
    path = Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return path
