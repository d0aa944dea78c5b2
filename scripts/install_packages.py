"""``pip install`` that says beforehand what it fetches, goes on where it was cut off, and says why
it failed.

``install_packages.py ARGUMENT...`` takes the arguments of ``pip install``. pip resolves the
requirements first, from metadata alone, so that a conflict ends it before anything large is
fetched. The files are then fetched here, several at a time, into
``~/.cache/dynamo-logits-worker/wheels``: what has come stays there when the connection or the
process ends. pip installs them without another look at an index, fetches what is left, and
installs that.

Standard library only: it runs in an environment that has nothing but pip.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

UNCOMPILED = () if os.environ.get("PYTHONDONTWRITEBYTECODE") else ("--no-compile",)
"""Python compiles a module when it is first imported, and keeps that: to compile all of them takes
half a minute, and most are never imported.
"""

PIP = (
    *(sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
    *UNCOMPILED,
)

CUDA = re.compile(r"(nvidia|cuda)-|triton$")
CPU_BUILD = 190_000_000
"""Bytes of PyTorch's CPU build for Linux on x86-64, in version 2.13."""

CPU_INDEX = "PIP_EXTRA_INDEX_URL to the index that https://pytorch.org/get-started/locally shows for Pip and CPU"
"""The setting of pip with which it finds that build."""

INSTALLED = 1.8
"""Bytes of an environment for each byte that was fetched for it, measured with the CUDA build."""

AT_A_TIME = 4
ATTEMPTS = 10
"""Attempts to go on with a file, one after another without a byte."""

TIMEOUT_S = 30.0
PATIENCE_S = 1.0
UNUSED_S = 30 * 24 * 3600
SHOWN_S = 10.0
MAX_REASONS = 30


@dataclass(frozen=True)
class Download:
    """A file that the installation needs; `size` in bytes, None if its server does not say."""

    name: str
    version: str
    url: str
    sha256: str | None = None
    size: int | None = None

    @property
    def file(self) -> str:
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    @property
    def is_remote(self) -> bool:
        return urlsplit(self.url).scheme in ("http", "https")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status, pip's own where pip failed."""
    with tempfile.TemporaryDirectory() as scratch:
        log, report = Path(scratch, "log"), Path(scratch, "report")
        say("resolving ...")
        status = run([*PIP, "--dry-run", "--report", str(report), *arguments], log)
        if status:
            return fail(log, status)
        downloads = sized(planned(json.loads(report.read_text())))
        wheels = cache_directory()
        for line in announcement(downloads, wheels):
            say(line)
        fetched = fetch(downloads, wheels)
        if fetched:
            say(f"unpacking {count_packages(len(fetched))} ...")
            local = (*PIP, "--no-deps", "--no-index", "--find-links", str(wheels))
            status = run([*local, *(f"{one.name}=={one.version}" for one in fetched)], log)
        status = status or run([*PIP, *arguments], log, say_phase)
        if status:
            return fail(log, status)
        forget_unused(wheels)
        return 0


def say(line: str) -> None:
    print(f"install: {line}", flush=True)


def run(command: Sequence[str], log: Path, each_line: Callable[[str], None] = lambda line: None) -> int:
    """Runs a command whose output goes into `log`; returns its exit status."""
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            output.write(line)
            each_line(line)
    return pip.returncode


def say_phase(line: str) -> None:
    """Say a phase of pip's that takes long, found in a line of its output."""
    if re.match(r"\s*Building editable .*: started", line):
        say("building this package ...")
    elif line.startswith("Installing collected packages:"):
        say(f"unpacking {count_packages(line.count(',') + 1)} ...")


def planned(report: Mapping[str, Any]) -> list[Download]:
    """Downloads that pip's installation report names; directories on this machine are none."""
    found = []
    for one in report["install"]:
        source = one["download_info"]
        if "archive_info" in source:
            sha256 = source["archive_info"].get("hashes", {}).get("sha256")
            found.append(Download(one["metadata"]["name"], one["metadata"]["version"], source["url"], sha256))
    return found


def cache_directory() -> Path:
    """Directory of fetched files; the environment itself if the user's cache cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("HOME") and f"{os.environ['HOME']}/.cache")
    for directory in [Path(base, "dynamo-logits-worker", "wheels")] if base else []:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            if os.access(directory, os.W_OK):
                return directory
    directory = Path(sys.prefix, "wheels")
    directory.mkdir(exist_ok=True)
    return directory


def open_url(url: str, *, method: str = "GET", first: int = 0) -> Any:
    """The answer to a request of a file's bytes from `first` on."""
    headers = {"Range": f"bytes={first}-"} if first else {}
    request = urllib.request.Request(url, method=method, headers=headers)
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    return urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context)


def sized(downloads: Sequence[Download]) -> list[Download]:
    """The downloads with their sizes, as far as their servers tell."""

    def size(one: Download) -> int | None:
        if not one.is_remote:
            return None
        try:
            with open_url(one.url, method="HEAD") as answer:
                return int(answer.headers["Content-Length"])
        except (OSError, HTTPException, TypeError, ValueError):
            return None

    with ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(size, downloads))
    return [replace(one, size=found) for one, found in zip(downloads, sizes, strict=True)]


def announcement(downloads: Iterable[Download], wheels: Path) -> Iterator[str]:
    """Lines on what will be fetched."""
    remote = [one for one in downloads if one.is_remote]
    waiting = [one for one in remote if not (wheels / one.file).exists()]
    if not waiting:
        return
    total = total_size(waiting)
    unknown = sum(one.size is None for one in waiting)
    yield f"{count_packages(len(waiting))} to fetch, {megabytes(total)}{f', {unknown} of unknown size' * bool(unknown)}"
    largest = sorted(waiting, key=lambda one: one.size or 0, reverse=True)[:3]
    if len(waiting) > len(largest):
        yield "the largest: " + ", ".join(f"{one.name} {megabytes(one.size or 0)}" for one in largest)
    needed, free = int(total_size(remote) * INSTALLED), shutil.disk_usage(sys.prefix).free
    if needed > free:
        yield f"{sys.prefix} will need about {megabytes(needed)}, and {megabytes(free)} are free there"
    cuda = total_size(one for one in waiting if CUDA.match(one.name))
    if cuda and not has_gpu():
        yield (
            f"{megabytes(cuda)} of it are CUDA, and this machine has no NVIDIA GPU; for PyTorch's CPU build"
            f" ({megabytes(CPU_BUILD)}, no CUDA) press Ctrl-C and set {CPU_INDEX}"
        )


def count_packages(number: int) -> str:
    return "1 package" if number == 1 else f"{number} packages"


def total_size(downloads: Iterable[Download]) -> int:
    """Bytes, as far as they are known."""
    return sum(one.size or 0 for one in downloads)


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def has_gpu() -> bool:
    """Whether NVIDIA's driver is there."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


@dataclass
class Fetching:
    """Files that threads fetch into a directory, and how far they are."""

    directory: Path
    waiting: deque[Download]
    total: int
    received: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def work(self) -> None:
        """Fetch until nothing waits."""
        while True:
            try:
                one = self.waiting.popleft()
            except IndexError:
                return
            try:
                self._fetch(one)
            except (OSError, HTTPException, ValueError) as error:
                self.failures[one.file] = f"{one.file}: {error}"

    def _fetch(self, one: Download) -> None:
        """Raises `OSError` or `HTTPException` when nothing more comes, `ValueError` for a wrong
        file.
        """
        part = self.directory / f"{one.file}.part"
        attempts = ATTEMPTS
        while (first := part.stat().st_size if part.exists() else 0) < (one.size or 0):
            self.received[one.file] = first
            try:
                self._receive(one, part, first)
            except (OSError, HTTPException) as error:
                attempts = ATTEMPTS if part.exists() and part.stat().st_size > first else attempts - 1
                if not attempts or (isinstance(error, urllib.error.HTTPError) and error.code < 500):
                    raise
                time.sleep(PATIENCE_S)
        if digest(part) != one.sha256:
            part.unlink()
            raise ValueError(f"its SHA-256 is not {one.sha256}")
        part.rename(self.directory / one.file)

    def _receive(self, one: Download, part: Path, first: int) -> None:
        with open_url(one.url, first=first) as answer:
            goes_on = answer.status == HTTPStatus.PARTIAL_CONTENT
            received = first if goes_on else 0
            with part.open("ab" if goes_on else "wb") as output:
                while data := answer.read1(2**18):
                    output.write(data)
                    received += len(data)
                    self.received[one.file] = received

    def __str__(self) -> str:
        return f"{sum(self.received.values()) / 1e6:,.0f} of {megabytes(self.total)}"


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(downloads: Iterable[Download], wheels: Path) -> list[Download]:
    """Fetches wheels whose digest is known into `wheels`, and returns those that are there.

    What fails is left to pip, which knows of credentials and proxies that are not known here.
    """
    known = [one for one in downloads if one.is_remote and one.file.endswith(".whl") and one.sha256 and one.size]
    for one in known:
        if (wheels / one.file).exists():
            os.utime(wheels / one.file)
    waiting = [one for one in known if not (wheels / one.file).exists()]
    if not waiting:
        return known
    state = Fetching(wheels, deque(waiting), total_size(waiting))
    threads = [threading.Thread(target=state.work, daemon=True) for _ in range(AT_A_TIME)]
    for thread in threads:
        thread.start()
    show(state, threads)
    for failure in state.failures.values():
        say(f"left to pip: {failure}")
    return [one for one in known if one.file not in state.failures]


def show(state: Fetching, threads: Sequence[threading.Thread]) -> None:
    """Says how far it is until the threads end: one line that changes on a terminal, a line every
    10 s elsewhere.
    """
    started = time.monotonic()
    interval = 0.2 if sys.stdout.isatty() else SHOWN_S
    due = started + interval
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
        now = time.monotonic()
        if now < due:
            continue
        due = now + interval
        line = f"fetched {state} in {now - started:.0f} s"
        if sys.stdout.isatty():
            print(f"\r\x1b[Kinstall: {line}", end="", flush=True)
        else:
            say(line)
    print("\r\x1b[K" * sys.stdout.isatty(), end="")
    say(f"fetched {state} in {time.monotonic() - started:.0f} s")


def forget_unused(wheels: Path) -> None:
    """Removes files that no installation has used for `UNUSED_S`."""
    for path in wheels.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another installation has renamed it, or removed it
            if path.stat().st_mtime < time.time() - UNUSED_S:
                path.unlink()


def fail(log: Path, status: int) -> int:
    """Says why pip failed, and how to go on; returns `status`."""
    text = log.read_text(errors="replace")
    for line in reasons(text):
        print(line, file=sys.stderr)
    for line in ways_on(text):
        print(f"install: {line}", file=sys.stderr)
    return status


def reasons(log: str) -> list[str]:
    """Lines of pip's log that say why it failed: its errors, and the conflicts behind them."""
    lines = [line for line in log.splitlines() if line.strip()]
    found = []
    explains = False
    for line in lines:
        if re.match(r"The conflict is caused by|Additionally, some packages", line):
            explains = True
        elif re.match(r"To fix this you could try|\S", line):
            explains = False
        if explains or re.match(r"\s*(ERROR|error)\b|\s*[\w.]*(Error|Exception): |.*:\d+: (fatal )?error: ", line):
            found.append(line)
    return found[:MAX_REASONS] or lines[-MAX_REASONS:]


def ways_on(log: str) -> Iterator[str]:
    """Lines on what to do about it."""
    if re.search(r"ResolutionImpossible|No matching distribution|Could not find a version", log):
        if re.search(r"\btorch==[\d.]+\+cpu\b", log):
            yield f"the public package index has no CPU build of PyTorch, which this needs: set {CPU_INDEX}"
        else:
            yield "constraints.txt pins versions of the public package index, for Linux, x86-64 or aarch64, glibc 2.31"
        for line in pip_sources():
            yield f"pip is set otherwise: {line}"
    if re.search(r"No space left on device|\[Errno 28\]", log):
        free = shutil.disk_usage(sys.prefix).free
        yield f"{megabytes(free)} are free in {sys.prefix}; XDG_CACHE_HOME and TMPDIR can lie elsewhere"
    yield "run the same command again to go on: what was fetched is not fetched again"


def pip_sources() -> list[str]:
    """Settings of pip on where packages come from, without passwords."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    about = re.compile(r".*\.(?:(?:extra-)?index-url|find-links|no-index|constraint|only-binary|no-binary)=")
    return [re.sub(r"//[^/@]*@", "//", line) for line in listed if about.match(line)]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
