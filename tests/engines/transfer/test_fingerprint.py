"""A fingerprint tells every two checkpoints apart, and costs a later start nothing."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.embedded.transfer import fingerprint, fingerprint_beside
from worker.engines.embedded.transfer.fingerprint import weight_files
from worker.errors import StartupError
from worker.models import beside

INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The first shard is beside the index, one in a directory below, and one in another one."""
    directory = tmp_path / "model"
    (directory / "inside").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    names = ["model-1.safetensors", "inside/model-2.safetensors", "../elsewhere/model-3.safetensors"]
    for number, name in enumerate(names):
        (directory / name).write_bytes(bytes([number]) * 100_000)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / INDEX).write_text(json.dumps({"weight_map": {str(at): name for at, name in enumerate(names)}}))
    return directory


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read whole."""
    names: list[str] = []
    file_digest = beside.file_digest
    monkeypatch.setattr(beside, "file_digest", lambda path: (names.append(path.name), file_digest(path))[1])  # type: ignore[func-returns-value]
    return names


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    beside._digests.clear()
    yield
    beside._digests.clear()


def settled(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until the files count as unchanged for a while, which is a short one from now on."""
    monkeypatch.setattr(beside, "_SETTLED_NS", 20_000_000)
    newest = max(path.stat().st_ctime_ns for path in weight_files(directory))
    while time.time_ns() - newest <= beside._SETTLED_NS:
        time.sleep(0.005)


def store(directory: Path) -> Path:
    return directory / beside.DIRECTORY / beside._DIGESTS


def test_what_other_workers_write_is_not_looked_at(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of theirs goes away while it is looked at."""
    (checkpoint / beside.DIRECTORY / "partial-digests-1").mkdir(parents=True)
    files, scandir = weight_files(checkpoint), os.scandir

    def scanned(path: str | Path = ".") -> object:
        if beside.DIRECTORY in Path(path).parts:
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scanned)
    assert weight_files(checkpoint) == files


def test_files_that_change_before_their_turn_are_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded meanwhile, in another order."""
    files, file_digest = weight_files(checkpoint), beside.file_digest

    def replaced(path: Path) -> str:
        if path == files[0]:
            monkeypatch.undo()
            files[-1].with_suffix(".new").write_bytes(bytes(100_000))
            files[-1].with_suffix(".new").rename(files[-1])
        return file_digest(path)

    monkeypatch.setattr(beside, "file_digest", replaced)
    with pytest.raises(StartupError, match="has changed meanwhile"):
        fingerprint(checkpoint)
    assert fingerprint(checkpoint)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_every_byte_of_every_file_counts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    names = data.draw(st.lists(st.sampled_from(["a", "b", "in/c", "in/in/d"]), min_size=1, unique=True))
    for name in names:
        path = directory / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.draw(st.binary(min_size=1, max_size=2000)) * data.draw(st.sampled_from([1, 50])))
    (directory / "config.json").write_text("{}")
    before = fingerprint(directory)
    assert fingerprint(directory) == before
    changed = data.draw(st.sampled_from(weight_files(directory)))
    times = changed.stat()
    with changed.open("r+b") as file:  # in place: the same inode
        place = data.draw(st.integers(0, times.st_size - 1))
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ data.draw(st.integers(1, 255))]))
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint(directory) != before
    with changed.open("r+b") as file:
        file.seek(place)
        file.write(bytes([byte]))
    assert fingerprint(directory) == before
    os.truncate(changed, times.st_size - 1)
    assert fingerprint(directory) != before


def test_shards_wherever_they_are(checkpoint: Path) -> None:
    found = [path.name for path in weight_files(checkpoint)]
    assert sorted(found) == ["model-1.safetensors", "model-2.safetensors", "model-3.safetensors"]
    before = fingerprint(checkpoint)
    for path in weight_files(checkpoint):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"x")
        assert fingerprint(checkpoint) != before
        path.write_bytes(content)
    assert fingerprint(checkpoint) == before
    (checkpoint / "inside" / "model-2.safetensors").rename(checkpoint / "inside" / "model-4.safetensors")
    with pytest.raises(StartupError, match=r"model-2\.safetensors"):
        fingerprint(checkpoint)


def test_files_are_read_once(checkpoint: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settled(checkpoint, monkeypatch)
    before = fingerprint(checkpoint)
    assert len(hashed) == 3
    beside._digests.clear()  # as in another process
    assert fingerprint(checkpoint) == before
    assert len(hashed) == 3
    (checkpoint / "model-1.safetensors").touch()
    assert fingerprint(checkpoint) == before
    assert hashed[3:] == ["model-1.safetensors"]


def test_a_file_that_changed_a_moment_ago_is_read_again(checkpoint: Path, hashed: list[str]) -> None:
    fingerprint(checkpoint)
    fingerprint(checkpoint)
    assert len(hashed) == 6
    assert not store(checkpoint).exists()


def test_a_directory_that_cannot_be_written(
    checkpoint: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(checkpoint, monkeypatch)
    (checkpoint / beside.DIRECTORY).write_text("a file where the directory should be")
    assert fingerprint(checkpoint) == fingerprint(checkpoint)
    assert len(hashed) == 3  # this process knows
    beside._digests.clear()
    fingerprint(checkpoint)
    assert len(hashed) == 6


def test_nothing_is_written_unless_it_may_be(
    checkpoint: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(checkpoint, monkeypatch)
    fingerprint(checkpoint, "off")
    assert not (checkpoint / beside.DIRECTORY).exists()


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"content": "{}", "sha256": "0"}', b"{"])
def test_a_damaged_store_is_made_again(
    checkpoint: Path, hashed: list[str], damage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(checkpoint, monkeypatch)
    before = fingerprint(checkpoint)
    store(checkpoint).write_bytes(damage)
    beside._digests.clear()
    assert fingerprint(checkpoint) == before
    assert len(hashed) == 6
    beside._digests.clear()
    assert fingerprint(checkpoint) == before
    assert len(hashed) == 6


def test_a_copy_has_the_same_one(checkpoint: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(checkpoint, tmp_path / "copied")
    assert fingerprint(copied) == fingerprint(checkpoint)


def test_other_weight_formats_count_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    before = fingerprint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"Weights")
    assert fingerprint(tmp_path) != before


def test_an_error_comes_to_the_one_who_waits(checkpoint: Path) -> None:
    assert fingerprint_beside(checkpoint).result() == fingerprint(checkpoint)
    (checkpoint / INDEX).write_text("[]")
    with pytest.raises(StartupError, match="weight_map must be an object"):
        fingerprint_beside(checkpoint).result()
