"""Entries of discovery by files that were removed are written again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from system_faults import no_descriptors

from worker.runtimes import file_discovery
from worker.runtimes.file_discovery import FileEntries, Guard, entries_of, keep_registered

INSTANCE = 0x6EFE02838F2B40F9
KINDS = ("instances", "mdc")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for kind in KINDS:
        directory = tmp_path / "dynamo_store_kv" / "v1" / kind
        directory.mkdir(parents=True)
        for instance in (INSTANCE, INSTANCE + 1):
            (directory / f"dynamo%2Fbackend%2Fgenerate%2F{instance:x}").write_text(f"{kind} {instance:x}")
    return tmp_path / "dynamo_store_kv"


def contents(store: Path) -> dict[str, str]:
    found = {str(path.relative_to(store)): path.read_text() for path in store.rglob("*") if path.is_file()}
    return dict(sorted(found.items()))


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


def test_entries_of_adapters_are_kept_too(store: Path) -> None:
    adapters = [store / "v1" / "mdc" / f"dynamo%2Fbackend%2Fgenerate%2F{INSTANCE + n:x}%2Fmine" for n in (0, 1)]
    for path in adapters:
        path.write_text("adapter")
    entries = FileEntries(store, INSTANCE)
    entries.check()
    for path in adapters:
        path.unlink()
    assert (entries.check(), entries.check()) == ([], adapters[:1])


def test_a_forgotten_adapter_is_not_written_again(store: Path) -> None:
    """Though it is there for a while yet. One of its name that comes later is kept."""
    path = store / "v1" / "mdc" / f"dynamo%2Fbackend%2Fgenerate%2F{INSTANCE:x}%2Fmine"
    path.write_text('{"lora":{"name":"mine"}}')
    entries = FileEntries(store, INSTANCE)
    entries.check()
    entries.forget("mine")
    entries.check()
    path.unlink()
    assert [entries.check() for _ in range(3)] == [[], [], []]
    entries.remember("mine")
    path.write_text('{"lora":{"name":"mine"}}')
    entries.check()
    path.unlink()
    assert (entries.check(), entries.check()) == ([], [path])


def test_workers_of_one_number_do_not_write_over_each_other(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers that share the directory number their processes alike, and a machine that slept
    lets all of them write at once.
    """
    both = [FileEntries(store, instance) for instance in (INSTANCE, INSTANCE + 1)]
    before = contents(store)
    for entries in both:
        entries.check()
    for path in store.glob("v1/*/*"):
        path.unlink()
    for entries in both:
        entries.check()
    replace = os.replace

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        both[1].check()
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    both[0].check()
    assert contents(store) == before


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


def test_a_directory_that_does_not_change_is_listed_twice_alone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many workers it has: each looks once a second."""
    listed: list[str] = []
    listdir = os.listdir

    def noted(path: str) -> list[str]:
        listed.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", noted)
    entries = FileEntries(store, INSTANCE)
    for _ in range(5):
        assert entries.check() == []
    assert sorted(listed) == sorted(str(store / "v1" / kind) for kind in KINDS for _ in range(2))


def test_before_the_first_registration_there_is_nothing(tmp_path: Path) -> None:
    assert FileEntries(tmp_path / "none", INSTANCE).check() == []


def test_an_entry_is_found_whenever_it_comes(store: Path) -> None:
    """Also one that leaves the directory's time of change as it was, within a tick of the clock."""
    directory = store / "v1" / "mdc"
    entries, path = FileEntries(store, INSTANCE), directory / f"dynamo%2Fbackend%2Fgenerate%2F{INSTANCE:x}%2Fmine"
    entries.check()
    changed = directory.stat()
    path.write_text("adapter")
    os.utime(directory, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    entries.check()
    assert path in entries.paths
    for _ in range(3):
        entries.check()
    later = path.with_name(f"{path.name}2")
    later.write_text("adapter")
    entries.check()
    assert later in entries.paths


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
    assert not path.exists()
    assert list(contents(store)) == [f"v1/{kind}/dynamo%2Fbackend%2Fgenerate%2F{INSTANCE + 1:x}" for kind in KINDS]


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
    await asyncio.wait([keeping])


async def test_a_fault_is_said_once_and_is_no_end(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where there is no thread for the look: entries of a worker that serves stay."""
    monkeypatch.setattr(file_discovery, "CHECK_S", 0.001)
    before, attempts = contents(store), 0

    async def no_thread(*_: object) -> None:
        nonlocal attempts
        attempts += 1
        raise RuntimeError("can't start new thread")

    entries = FileEntries(store, INSTANCE)
    entries.check()
    guard = Guard()
    guard.add(entries.paths)
    monkeypatch.setattr(file_discovery, "Guard", lambda: guard)
    monkeypatch.setattr(asyncio, "to_thread", no_thread)
    keeping = asyncio.create_task(keep_registered(entries, lambda: False))
    while attempts < 5:
        await asyncio.sleep(0.001)
    assert caplog.text.count("cannot be checked") == 1
    assert contents(store) == before
    keeping.cancel()
    await asyncio.wait([keeping])


def test_a_path_of_two_lines_is_no_path_of_others(tmp_path: Path) -> None:
    """Entries of a directory whose name has a line feed are left to Dynamo, which waits 10 s."""
    mine, other, entry = tmp_path / "mine", tmp_path / "store", tmp_path / "store\nof" / "entry"
    for path in (mine, other, entry):
        path.parent.mkdir(exist_ok=True)
        path.write_text("kept")
    guard = Guard()
    guard.add([mine, entry])
    guard.close()
    assert [path.exists() for path in (mine, other, entry)] == [False, True, True]


DIES = """
import sys
from pathlib import Path
from worker.runtimes.file_discovery import Guard

guard = Guard()
guard.add([Path(name) for name in sys.argv[1:]])
print("guarded", flush=True)
sys.stdin.read()
"""


def test_what_is_guarded_is_removed_when_its_process_is_killed(tmp_path: Path) -> None:
    """And nothing else; nobody is left of the process."""
    paths = [tmp_path / name for name in ("one", "a name with 'signs", "$(touch no)", "gone")]
    for path in paths[:3]:
        path.write_text("entry")
    (tmp_path / "other").write_text("entry")
    command = [sys.executable, "-c", DIES, *map(str, paths)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"guarded\n"
        assert len(list(tmp_path.iterdir())) == 4
        (shell,) = psutil.Process(process.pid).children()
        process.kill()
    shell.wait(60)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_guard_that_was_killed_is_replaced(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        path.write_text("entry")
    others, guard = psutil.Process().children(), Guard()
    guard.add(paths[:1])
    (shell,) = set(psutil.Process().children()) - set(others)
    assert os.getpgid(shell.pid) != os.getpgid(0)  # what ends the whole group ends the worker first
    shell.kill()
    shell.wait(60)
    guard.add(paths[1:])
    guard.close()
    assert not list(tmp_path.iterdir())


def test_a_guard_begins_once_there_are_descriptors(tmp_path: Path) -> None:
    path, guard = tmp_path / "one", Guard()
    path.write_text("entry")
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        guard.add([path])
    guard.add([path])
    guard.close()
    assert not path.exists()


@pytest.mark.parametrize("backend", ["etcd", "kubernetes", "mem"])
def test_only_discovery_by_files_has_them(backend: str) -> None:
    assert entries_of(backend, {"DYN_FILE_KV": "d"}, INSTANCE) is None


@pytest.mark.parametrize("variable", ["DYN_FILE_KV", "TMPDIR"])
def test_the_directory_is_the_runtimes(store: Path, variable: str) -> None:
    directory = store if variable == "DYN_FILE_KV" else store.parent
    entries = entries_of("file", {variable: str(directory)}, INSTANCE)
    assert entries is not None
    entries.check()
    assert len(entries.paths) == len(KINDS)
