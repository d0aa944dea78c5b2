"""`scripts/install_packages.py` against an index of this test's own, on loopback."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import install_packages
import pytest
from image_files import environment_of
from install_packages import Download

REPOSITORY = Path(__file__).resolve().parents[2]
LARGE = 6_000_000


def wheel(name: str, version: str, requires: tuple[str, ...] = (), size: int = 100) -> bytes:
    """A wheel of one module with `size` bytes that cannot be compressed."""
    info = f"{name}-{version}.dist-info"
    data = base64.b85encode(random.Random(name).randbytes(size * 4 // 5)).decode()
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": f"DATA = {data!r}\n",
        f"{info}/METADATA": head + "".join(f"Requires-Dist: {one}\n" for one in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return buffer.getvalue()


def metadata(data: bytes) -> bytes:
    """The file of that name in a wheel, which an index serves beside it."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("METADATA")))


class Index(ThreadingHTTPServer):
    """A package index whose connections can be cut.

    Args:
        wheels: Files by name.
        most: Bytes that an answer has before its connection is cut, None for all.
        pause_s: Seconds between two pieces of 64 KiB.
    """

    daemon_threads = True

    def __init__(self, wheels: dict[str, bytes], most: int | None = None, pause_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wheels, self.most, self.pause_s = wheels, most, pause_s
        self.asked: list[tuple[str, str, int]] = []
        """Method, file and first byte of each request for a file."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def log_message(self, *_: object) -> None:
        """Keeps quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        name = self.path.rstrip("/").rpartition("/")[2]
        if name in self.server.wheels:
            self._send_file(name)
            return
        if name.endswith(".metadata"):
            self._send(200, metadata(self.server.wheels[name.removesuffix(".metadata")]), {})
            return
        links = "".join(
            f'<a href="/files/{file}#sha256={hashlib.sha256(data).hexdigest()}" data-core-metadata="true">{file}</a>\n'
            for file, data in self.server.wheels.items()
            if file.startswith(f"{name}-")
        )
        self._send(200 if links else 404, links.encode(), {"Content-Type": "text/html"})

    def _send_file(self, name: str) -> None:
        data = self.server.wheels[name]
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.server.asked.append((self.command, name, first))
        self._send(206 if first else 200, data[first:], {}, self.server.most)

    def _send(self, status: int, data: bytes, headers: dict[str, str], most: int | None = None) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data)), "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(OSError):
            for start in range(0, len(data[:most]), 2**16):
                self.wfile.write(data[:most][start : start + 2**16])
                time.sleep(self.server.pause_s)


@contextlib.contextmanager
def serving(index: Index) -> Iterator[Index]:
    thread = threading.Thread(target=index.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield index
    finally:
        index.shutdown()
        thread.join()
        index.server_close()


WHEELS = {
    "big-1.0-py3-none-any.whl": wheel("big", "1.0", ("small>=1",), LARGE),
    "small-1.0-py3-none-any.whl": wheel("small", "1.0"),
    "small-2.0-py3-none-any.whl": wheel("small", "2.0"),
    "picky-1.0-py3-none-any.whl": wheel("picky", "1.0", ("small==1.0",)),
    "torch-2.0-py3-none-any.whl": wheel("torch", "2.0"),
    "served-1.0-py3-none-any.whl": wheel("served", "1.0", ("torch==2.0+cpu",)),
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory, with an environment in ``environment`` that has nothing but pip."""
    environment_of(["pip"], tmp_path / "environment")
    return tmp_path


def installed(home: Path) -> set[str]:
    """Names and versions of what is in the environment."""
    return {path.name.removesuffix(".dist-info") for path in home.glob("environment/lib/*/site-packages/*.dist-info")}


def start(index: Index, home: Path, *arguments: str, **settings: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "XDG_"))}
    environ = kept | {"HOME": str(home), "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.url} | settings
    command = [str(home / "environment/bin/python"), str(REPOSITORY / "scripts/install_packages.py")]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *arguments], env=environ, stdout=pipe, stderr=pipe, text=True)


def install(index: Index, home: Path, *arguments: str, **settings: str) -> tuple[int, str, str]:
    with start(index, home, *arguments, **settings) as process:
        output, errors = process.communicate()
    return process.returncode, output, errors


BIG = "big-1.0-py3-none-any.whl"


def test_it_says_beforehand_what_it_fetches(home: Path) -> None:
    with serving(Index(WHEELS)) as index:
        status, output, errors = install(index, home, "big")
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert lines[:2] == ["install: resolving ...", "install: 2 packages to fetch, 6 MB"]
    assert lines[2].startswith("install: fetched 6 of 6 MB in ")
    assert lines[3:] == ["install: unpacking 2 packages ..."]
    assert {"big-1.0", "small-2.0"} <= installed(home)


@pytest.mark.parametrize("settings", [{}, {"PYTHONDONTWRITEBYTECODE": "1"}])
def test_modules_are_compiled_where_a_start_would_not_keep_that(home: Path, settings: dict[str, str]) -> None:
    with serving(Index(WHEELS)) as index:
        assert install(index, home, "small", **settings)[0] == 0
    compiled = list(home.glob("environment/lib/*/site-packages/__pycache__/small.*.pyc"))
    assert len(compiled) == len(settings)


def test_a_download_that_is_cut_repeatedly_is_resumed(home: Path) -> None:
    with serving(Index(WHEELS, most=1_500_000)) as index:
        status, _, errors = install(index, home, "big")
    assert (status, errors) == (0, "")
    firsts = [first for method, name, first in index.asked if (method, name) == ("GET", BIG)]
    assert firsts == list(range(0, len(WHEELS[BIG]), 1_500_000))
    assert "big-1.0" in installed(home)


def test_a_killed_run_is_gone_on_with(home: Path) -> None:
    part = home / f".cache/dynamo-logits-worker/wheels/{BIG}.part"
    with serving(Index(WHEELS, pause_s=0.05)) as index:
        with start(index, home, "big") as process:
            while not part.exists() or part.stat().st_size < 1_000_000:
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        received = part.stat().st_size
        assert 1_000_000 <= received < LARGE
        index.pause_s = 0.0
        index.asked.clear()
        assert install(index, home, "big")[0] == 0
        assert [first for method, name, first in index.asked if (method, name) == ("GET", BIG)] == [received]
        assert not part.exists()


def test_what_was_fetched_serves_another_environment(home: Path) -> None:
    with serving(Index(WHEELS)) as index:
        assert install(index, home, "big")[0] == 0
        shutil.rmtree(home / "environment")
        environment_of(["pip"], home / "environment")
        index.asked.clear()
        status, output, _ = install(index, home, "big")
    assert status == 0
    assert output.splitlines() == ["install: resolving ...", "install: unpacking 2 packages ..."]
    assert ("GET", BIG) not in {(method, name) for method, name, _ in index.asked}
    assert {"big-1.0", "small-2.0"} <= installed(home)


def test_what_no_installation_uses_goes_after_a_month(home: Path) -> None:
    wheels = home / ".cache/dynamo-logits-worker/wheels"
    wheels.mkdir(parents=True)
    for name, days in (("old.whl", 31), ("new.whl", 29)):
        (wheels / name).touch()
        os.utime(wheels / name, (0, time.time() - days * 24 * 3600))
    gone = wheels / "gone.part"  # as one that another installation renames once it is listed
    gone.symlink_to("nowhere")
    with serving(Index(WHEELS)) as index:
        assert install(index, home, "big")[0] == 0
    assert {path.name for path in wheels.iterdir()} == {"new.whl", gone.name, BIG, "small-2.0-py3-none-any.whl"}


def test_a_file_that_was_altered_is_not_installed(home: Path) -> None:
    part = home / f".cache/dynamo-logits-worker/wheels/{BIG}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(len(WHEELS[BIG])))
    with serving(Index(WHEELS)) as index:
        status, output, _ = install(index, home, "big")
    assert status == 0
    assert f"install: left to pip: {BIG}: its SHA-256 is not " in output
    assert not part.exists()
    assert "big-1.0" in installed(home)


def test_a_conflict_is_told_before_anything_is_fetched(home: Path) -> None:
    constraints = home / "constraints.txt"
    constraints.write_text("small==2.0\n")
    with serving(Index(WHEELS)) as index:
        status, _, errors = install(index, home, "-c", str(constraints), "picky", "big")
    assert status != 0
    assert index.asked == []
    lines = errors.splitlines()
    assert "    picky 1.0 depends on small==1.0" in lines
    assert "    The user requested (constraint) small==2.0" in lines
    assert f"install: pip is set otherwise: :env:.index-url='{index.url}'" in lines
    assert lines[-1].startswith("install: run the same command again")


def test_a_requirement_that_the_index_lacks_is_named(home: Path) -> None:
    with serving(Index(WHEELS)) as index:
        status, _, errors = install(index, home, "small==3.0")
    assert status != 0
    assert "ERROR: No matching distribution found for small==3.0" in errors
    assert "constraints.txt pins versions" in errors


@pytest.mark.parametrize("wanted", [("served",), ("torch==2.0", "served==1.0")])
def test_where_to_find_a_cpu_build_is_told(home: Path, wanted: tuple[str, ...]) -> None:
    """As vLLM's build for CPUs needs one, which the public package index lacks."""
    with serving(Index(WHEELS)) as index:
        status, _, errors = install(index, home, *wanted)
    assert status != 0
    assert "torch==2.0+cpu" in errors
    assert f"which this needs: set {install_packages.CPU_INDEX}" in errors
    assert "constraints.txt" not in errors


CUDA = [
    Download("torch", "2.13.0", "https://index.example/torch.whl", size=500_000_000),
    Download("nvidia-cublas", "13", "https://index.example/cublas.whl", size=400_000_000),
    Download("triton", "3", "https://index.example/triton.whl", size=200_000_000),
]


@pytest.mark.parametrize("gpu", [False, True])
def test_cuda_without_a_gpu_is_told(gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install_packages, "has_gpu", lambda: gpu)
    text = "\n".join(install_packages.announcement(CUDA, tmp_path))
    assert text.startswith("3 packages to fetch, 1,100 MB")
    assert ("600 MB of it are CUDA" in text) == ("PIP_EXTRA_INDEX_URL" in text) == (not gpu)


def test_a_cpu_build_from_a_directory_is_nothing_to_fetch(tmp_path: Path) -> None:
    local = Download("torch", "2.13.0+cpu", "file:///wheels/torch.whl")
    assert list(install_packages.announcement([local], tmp_path)) == []


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = install_packages.shutil.disk_usage(tmp_path)  # type: ignore[attr-defined]
    monkeypatch.setattr(install_packages.shutil, "disk_usage", lambda _: usage._replace(free=700_000_000))  # type: ignore[attr-defined]
    text = "\n".join(install_packages.announcement(CUDA, tmp_path))
    assert f"{sys.prefix} will need about 1,980 MB, and 700 MB are free there" in text
    log = "Collecting small\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert install_packages.reasons(log) == [log.splitlines()[1]]
    assert any(line.startswith("700 MB are free in") for line in install_packages.ways_on(log))


def test_passwords_in_pips_settings_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:secret@index.example/simple")
    assert ":env:.index-url='https://index.example/simple'" in install_packages.pip_sources()
