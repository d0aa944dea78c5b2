"""A sealed file gives the tensors that were written, or an error: however far it has been read."""

from __future__ import annotations

import json
import math
import os
import threading
import weakref
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.models import sealed_tensors
from worker.models.beside import last_used, note_use
from worker.models.huge_pages import ALIGNMENT_BYTES, address_of
from worker.models.safetensors_file import Stored
from worker.models.sealed_tensors import SealedTensors, write_sealed

SIZES = {"I8": 1, "BF16": 2, "F32": 4}

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
kinds = st.tuples(st.sampled_from(sorted(SIZES)), st.one_of(shapes, st.sampled_from([(64,), (32, 64), (5, 128)])))


def size_of(code: str, shape: tuple[int, ...]) -> int:
    return SIZES[code] * math.prod(shape)


def stored(name: str, code: str, shape: tuple[int, ...], values: bytes, step: int) -> Stored:
    pieces = [values[at : at + step] for at in range(0, len(values), step)]
    return Stored(name, code, shape, len(values), lambda: iter(pieces))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_tensors, "_PART_BYTES", 1000)


def written(path: Path, found: list[tuple[str, tuple[int, ...]]], step: int = 77) -> dict[str, bytes]:
    values = {f"tensor {i}": os.urandom(size_of(*kind)) for i, kind in enumerate(found)}
    tensors = [stored(name, *kind, values[name], step) for name, kind in zip(values, found, strict=True)]
    write_sealed(path, tensors, {"of": "this test"})
    return values


def reading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "packed-copy-ahead"]


@pytest.mark.usefixtures("small_parts")
@settings(max_examples=examples(200), deadline=None)
@given(found=st.lists(kinds, max_size=8), step=st.integers(1, 3000), begins=st.booleans())
def test_what_was_written_is_read(
    found: list[tuple[str, tuple[int, ...]]],
    step: int,
    begins: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("sealed") / "file"
    values = written(path, found, step)
    file = SealedTensors(path)
    assert file.content == {"of": "this test"}
    if begins:
        file.begin()
    tensors = file.finish()
    assert {name: bytes(content) for name, (_, content) in tensors.items()} == values
    assert {name: (each.dtype, each.shape) for name, (each, _) in tensors.items()} == dict(
        zip(values, found, strict=True)
    )
    for _, content in tensors.values():
        assert not content.readonly
        assert len(content) % ALIGNMENT_BYTES or not content or address_of(content)[0] % ALIGNMENT_BYTES == 0
    assert not reading()


@pytest.mark.usefixtures("small_parts")
@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), begins=st.booleans())
def test_damage_is_an_error(data: st.DataObject, begins: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("sealed") / "file"
    values = written(path, [("F32", (9, 64)), ("I8", (3,)), ("BF16", (20, 32))])
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))]) + whole[place + 1 :]
    path.write_bytes(data.draw(st.sampled_from([whole[:place], flipped, whole + whole[place:]])))
    try:
        file = SealedTensors(path)
        if begins:
            file.begin()
        tensors = file.finish()
    except (ValueError, OSError):
        assert not reading()
        return
    assert {name: bytes(content) for name, (_, content) in tensors.items()} == values  # a space, say


@pytest.mark.usefixtures("small_parts")
def test_one_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "file", [("F32", (1000,))])
    file = SealedTensors(tmp_path / "file")
    os.truncate(tmp_path / "file", (tmp_path / "file").stat().st_size - 1)
    with pytest.raises(OSError, match="shorter"):
        file.finish()


@pytest.mark.usefixtures("small_parts")
def test_a_closed_one_reads_no_more_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "file", [("F32", (1000,))])
    file = SealedTensors(tmp_path / "file")
    begun, goes_on = threading.Event(), threading.Event()
    fill = sealed_tensors._fill

    def filled(part: memoryview, number: int, position: int) -> None:
        begun.set()
        goes_on.wait(60)
        fill(part, number, position)

    monkeypatch.setattr(sealed_tensors, "_fill", filled)
    file.begin()
    assert begun.wait(60)
    closing = threading.Thread(target=file.close)
    closing.start()
    goes_on.set()
    closing.join()
    file.close()
    assert not reading()
    assert not len(file._memory)
    assert next(file._unread, None) is None


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("finishes", [True, False])
def test_a_damaged_one_keeps_no_memory(finishes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "file", [("F32", (1000,))])
    whole = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    blocks: list[weakref.ref[mmap]] = []

    class Block(mmap):
        def __init__(self, *_: object, **__: object) -> None:
            blocks.append(weakref.ref(self))

    monkeypatch.setattr("worker.models.huge_pages.mmap.mmap", Block)
    file = SealedTensors(tmp_path / "file")
    file.begin()
    if finishes:
        with pytest.raises(ValueError, match="damaged"):
            file.finish()
    else:
        for thread in file._threads:
            thread.join()
        file.close()
    assert [block() for block in blocks] == [None]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("end", [SealedTensors.finish, SealedTensors.close])
def test_one_is_finished_once(end: Callable[[SealedTensors], object], tmp_path: Path) -> None:
    written(tmp_path / "file", [("F32", (1000,))])
    file = SealedTensors(tmp_path / "file")
    end(file)
    with pytest.raises(ValueError, match="closed"):
        file.finish()


def test_safetensors_reads_it_too(tmp_path: Path) -> None:
    from safetensors import safe_open

    values = written(tmp_path / "file", [("F32", (3, 64)), ("F32", (5,)), ("F32", (2, 2, 16))])
    with safe_open(tmp_path / "file", framework="np") as file:
        assert {name: file.get_tensor(name).tobytes() for name in file.keys()} == values  # noqa: SIM118
        assert json.loads(file.metadata()["content"])["content"] == {"of": "this test"}


def test_the_one_that_was_used_last(tmp_path: Path) -> None:
    assert last_used(tmp_path) is None
    assert last_used(tmp_path / "none") is None
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for number, path in enumerate(paths):
        path.write_bytes(b"")
        os.utime(path, (1000 + number, 2000))
    assert last_used(tmp_path) == paths[2]
    note_use(paths[1])
    assert last_used(tmp_path) == paths[1]
    assert paths[1].stat().st_mtime == 2000
    note_use(tmp_path / "none")
