"""Entries of discovery by files that were removed are written again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from worker.runtimes import file_discovery
from worker.runtimes.file_discovery import FileEntries, entries_of, keep_registered

INSTANCE = 0x6EFE02838F2B40F9


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for kind in ("instances", "mdc"):
        directory = tmp_path / "v1" / kind
        directory.mkdir(parents=True)
        for instance in (INSTANCE, INSTANCE + 1):
            (directory / f"dynamo%2Fbackend%2Fgenerate%2F{instance:x}").write_text(f"{kind} {instance:x}")
    return tmp_path


def contents(store: Path) -> dict[str, str]:
    return {str(path.relative_to(store)): path.read_text() for path in store.rglob("*") if path.is_file()}


def test_what_is_missing_twice_is_written_again(store: Path) -> None:
    """Once may be a file that is being replaced."""
    before, entries = contents(store), FileEntries(store, INSTANCE)
    assert entries.check() == []
    own = sorted(store.glob(f"v1/*/*{INSTANCE:x}"))
    for path in own:
        path.unlink()
    assert entries.check() == []
    assert entries.check() == own
    assert contents(store) == before
    assert entries.check() == []


def test_others_are_left_alone(store: Path) -> None:
    entries = FileEntries(store, INSTANCE)
    entries.check()
    for path in store.glob(f"v1/*/*{INSTANCE + 1:x}"):
        path.unlink()
    for _ in range(3):
        assert entries.check() == []


def test_the_last_content_counts(store: Path) -> None:
    entries = FileEntries(store, INSTANCE)
    entries.check()
    path = store / "v1" / "instances" / f"dynamo%2Fbackend%2Fgenerate%2F{INSTANCE:x}"
    path.write_text("changed")
    entries.check()
    path.unlink()
    entries.check()
    entries.check()
    assert path.read_text() == "changed"


async def test_a_worker_that_leaves_stays_removed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_discovery, "CHECK_S", 0.001)
    leaving = False
    entries = FileEntries(store, INSTANCE)
    entries.check()
    keeping = asyncio.create_task(keep_registered(entries, lambda: leaving))
    path = store / "v1" / "instances" / f"dynamo%2Fbackend%2Fgenerate%2F{INSTANCE:x}"
    path.unlink()
    while not path.exists():
        await asyncio.sleep(0.001)
    leaving = True
    await asyncio.wait_for(keeping, 10)
    path.unlink()
    assert not path.exists()


async def test_a_directory_that_is_gone_is_no_end(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_discovery, "CHECK_S", 0.001)
    entries = FileEntries(store, INSTANCE)
    entries.check()
    store.rename(store.with_name("elsewhere"))
    keeping = asyncio.create_task(keep_registered(entries, lambda: False))
    while "cannot be checked" not in caplog.text:
        await asyncio.sleep(0.001)
    assert not keeping.done()
    keeping.cancel()


@pytest.mark.parametrize("environ", [{}, {"DYN_DISCOVERY_BACKEND": "etcd", "DYN_FILE_KV": "d"}])
def test_only_discovery_by_files_has_them(environ: dict[str, str]) -> None:
    assert entries_of(environ, INSTANCE) is None
    assert entries_of({"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": "d"}, INSTANCE) is not None
