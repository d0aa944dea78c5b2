"""The store of files and batches against a model of it, with restarts at any point."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from batch_services import OWNER
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from worker.errors import StartupError
from worker.frontdoor.batches import stored_batches
from worker.frontdoor.batches.objects import INPUT, Result, StoredBatch, StoredFile, TokenCounts
from worker.frontdoor.batches.requests import new_batch
from worker.frontdoor.batches.store import Store
from worker.frontdoor.batches.stored_batches import KEPT_S, MOST_UNFINISHED
from worker.frontdoor.errors import Refused

CAPACITY = 40_000
TOKENS = TokenCounts(input_tokens=7, cached_tokens=4, output_tokens=5, reasoning_tokens=2)
OWNERS = st.sampled_from(["owner-a", "owner-b"])
CHAT = "/v1/chat/completions"


def incoming(store: Store, content: bytes) -> Path:
    path = store.files.incoming / "content"
    path.write_bytes(content)
    return path


def begin(store: Store, owner: str, file_id: str) -> StoredBatch:
    fields = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": "b"}}
    return store.add_batch(owner, new_batch(fields, (CHAT,)))


def result(line: int, status: int = 200) -> Result:
    return Result(line, status, f"request-{line}", b'{"line":%d}' % line)


class StoreMachine(RuleBasedStateMachine):
    """Every operation, on the store and on dictionaries; a restart changes nothing."""

    files = Bundle("files")
    batches = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.time = 1_000_000.0
        self.store = self.opened()
        self.contents: dict[str, tuple[StoredFile, bytes]] = {}
        self.known: dict[str, StoredBatch] = {}
        self.results: dict[str, dict[int, Result]] = {}

    def opened(self) -> Store:
        return Store(self.directory, CAPACITY, lambda: self.time)

    @rule()
    def restart(self) -> None:
        self.forget_old()
        self.store.close()
        self.store = self.opened()

    @rule(seconds=st.sampled_from([1, 3600, 20 * 24 * 3600]))
    def wait(self, seconds: int) -> None:
        self.time += seconds

    @rule()
    def delete_old(self) -> None:
        self.forget_old()
        self.store.delete_old()

    def forget_old(self) -> None:
        read = {each.input_file_id for each in self.known.values() if not each.is_finished}
        for file_id, (file, _) in list(self.contents.items()):
            if file.expires_at <= self.time and file_id not in read:
                del self.contents[file_id]
        for batch_id, batch in list(self.known.items()):
            ended = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
            if batch.is_finished and ended is not None and ended + KEPT_S <= self.time:
                del self.known[batch_id], self.results[batch_id]

    @rule(target=files, owner=OWNERS, content=st.binary(max_size=12_000), lifetime_s=st.sampled_from([3600, 10**6]))
    def upload(self, owner: str, content: bytes, lifetime_s: int) -> Any:
        used = sum(max(len(each), 4096) for _, each in self.contents.values())
        if used + max(len(content), 4096) > CAPACITY:
            with pytest.raises(Refused) as refused:
                self.store.files.add(owner, "name", INPUT, incoming(self.store, content), lifetime_s)
            assert refused.value.status == 413
            return multiple()
        file = self.store.files.add(owner, "name", INPUT, incoming(self.store, content), lifetime_s)
        self.contents[file.id] = (file, content)
        return file

    def is_there(self, file: StoredFile, owner: str) -> bool:
        return file.id in self.contents and file.owner == owner and file.expires_at > self.time

    @rule(file=files, owner=OWNERS)
    def read_file(self, file: StoredFile, owner: str) -> None:
        if self.is_there(file, owner):
            with self.store.files.open_content(owner, file.id) as content:
                assert content.read() == self.contents[file.id][1]
        else:
            with pytest.raises(Refused):
                self.store.files.get(owner, file.id)

    @rule(file=files, owner=OWNERS)
    def delete_file(self, file: StoredFile, owner: str) -> None:
        is_read = any(each.input_file_id == file.id and not each.is_finished for each in self.known.values())
        if self.is_there(file, owner) and not is_read:
            self.store.files.delete(owner, file.id)
            del self.contents[file.id]
        else:
            with pytest.raises(Refused):
                self.store.files.delete(owner, file.id)

    @rule(target=batches, file=files, owner=OWNERS)
    def begin_batch(self, file: StoredFile, owner: str) -> Any:
        if not self.is_there(file, owner):
            with pytest.raises(Refused) as refused:
                begin(self.store, owner, file.id)
            assert refused.value.status == 404
            return multiple()
        if sum(max(len(each), 4096) for _, each in self.contents.values()) > CAPACITY:
            with pytest.raises(Refused) as refused:
                begin(self.store, owner, file.id)
            assert refused.value.status == 413
            return multiple()
        batch = begin(self.store, owner, file.id)
        self.known[batch.id], self.results[batch.id] = batch, {}
        return batch

    @rule(batch=batches, total=st.integers(1, 4), fails=st.booleans())
    def validate(self, batch: StoredBatch, total: int, fails: bool) -> None:
        known = self.known.get(batch.id)
        changed = self.store.begin(batch.id, total, "m", errors="[]" if fails else None)
        assert (changed is not None) == (known is not None and known.status == "validating")
        if changed is not None:
            assert changed.status == ("failed" if fails else "in_progress")
            self.known[batch.id] = changed

    @rule(batch=batches, line=st.integers(1, 4), status=st.sampled_from([200, 400]))
    def answer_line(self, batch: StoredBatch, line: int, status: int) -> None:
        known = self.known.get(batch.id)
        if known is None or known.status != "in_progress" or line > known.total or line in self.results[batch.id]:
            return
        self.store.batches.add_result(batch.id, result(line, status))
        self.results[batch.id][line] = result(line, status)
        self.known[batch.id] = self.store.batches.get(known.owner, batch.id)

    @rule(batch=batches, owner=OWNERS)
    def cancel(self, batch: StoredBatch, owner: str) -> None:
        known = self.known.get(batch.id)
        if known is None or known.owner != owner or known.status not in ("validating", "in_progress", "cancelling"):
            with pytest.raises(Refused):
                self.store.batches.cancel(owner, batch.id)
            return
        self.known[batch.id] = self.store.batches.cancel(owner, batch.id)
        assert self.known[batch.id].status == "cancelling"

    @rule(batch=consumes(batches))
    def finish(self, batch: StoredBatch) -> None:
        known = self.known.get(batch.id)
        if known is None or known.is_finished or known.in_progress_at is None:
            return
        if known.status == "in_progress":
            self.store.batches.move(batch.id, ("in_progress",), "finalizing")
        missing = known.total - len(self.results[batch.id])
        answers = incoming(self.store, b"answers")
        done = self.store.finish(known, "completed", answers=answers, errors=None, num_unanswered=missing)
        assert done is not None
        assert done.output_file_id is not None
        assert done.completed + done.failed == done.total
        self.known[batch.id], self.results[batch.id] = done, {}
        self.contents[done.output_file_id] = (self.store.files.get(known.owner, done.output_file_id), b"answers")

    @invariant()
    def lists_are_those_of_the_model(self) -> None:
        for owner in ("owner-a", "owner-b"):
            expected = [each.id for each, _ in self.contents.values() if self.is_there(each, owner)]
            found: list[str] = []
            for _ in range(len(expected) + 1):
                page = self.store.files.page(
                    owner, after=found[-1] if found else None, limit=2, descending=False, purpose=None
                )
                found += [each.id for each in page.items]
                if not page.has_more:
                    break
            assert found == expected
            batches = [each for each in self.known.values() if each.owner == owner]
            assert self.store.batches.page(owner, after=None, limit=100).items[::-1] == batches

    @invariant()
    def results_are_those_of_the_model(self) -> None:
        for batch_id, expected in self.results.items():
            assert self.store.batches.answered(batch_id) == set(expected)
            assert self.store.batches.results(batch_id, 1, 2) == {n: expected[n] for n in (1, 2) if n in expected}
            known = self.known[batch_id]
            if not known.is_finished:
                assert (known.completed, known.failed) == (
                    sum(each.succeeded for each in expected.values()),
                    sum(not each.succeeded for each in expected.values()),
                )

    @invariant()
    def the_disk_has_the_known_files_alone(self) -> None:
        on_disk = {path.name for path in (self.directory / "files").iterdir() if path.is_file()}
        assert on_disk == set(self.contents)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_two_front_doors_cannot_share_a_directory(tmp_path: Path) -> None:
    first = Store(tmp_path, CAPACITY)
    with pytest.raises(StartupError, match="another front door uses it"):
        Store(tmp_path, CAPACITY)
    first.close()
    Store(tmp_path, CAPACITY).close()


def test_a_directory_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, CAPACITY)
    store._database.connection.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(StartupError, match="version 99"):
        Store(tmp_path, CAPACITY)


def garbled(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 64)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def overwritten(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:8192] + b"x" * 8192 + content[16384:])


def overwritten_among_many(path: Path) -> None:
    lines = "WITH RECURSIVE lines (line) AS (SELECT 1 UNION ALL SELECT line + 1 FROM lines WHERE line < 2000)"
    execute(path, f"{lines} INSERT INTO results SELECT 'batch', line, 1, 200, 'id', x'7b7d' FROM lines")
    content = path.read_bytes()
    path.write_bytes(content[:-12288] + b"x" * 4096 + content[-8192:])


def of_other_tables(path: Path) -> None:
    execute(path, "ALTER TABLE files RENAME COLUMN owner TO holder")


def of_another_program(path: Path) -> None:
    path.unlink()
    execute(path, "CREATE TABLE files (id)")


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def beside_no_directory(path: Path) -> None:
    shutil.rmtree(path.with_name("files"))
    path.with_name("files").write_bytes(b"")


def execute(path: Path, statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(statements)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (garbled, "batches.sqlite is damaged"),
        (cut, "batches.sqlite is damaged"),
        (overwritten, "batches.sqlite is damaged"),
        (overwritten_among_many, "batches.sqlite is damaged"),
        (of_other_tables, "has other tables than those of this worker"),
        (of_another_program, "has other tables than those of this worker"),
        (a_directory, "Is a directory"),
        (beside_no_directory, "File exists"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_directory_that_is_unusable_says_why(change: Any, problem: str, tmp_path: Path) -> None:
    Store(tmp_path, CAPACITY).close()
    change(tmp_path / "batches.sqlite")
    for _ in range(2):  # and its lock is given back
        with pytest.raises(StartupError, match=problem) as error:
            Store(tmp_path, CAPACITY)
        assert str(error.value).startswith(f"--batch-dir {tmp_path}: ")
        assert "another front door" not in str(error.value)


def test_the_files_of_others_are_not_swept(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("files/thesis.txt", "files/file-1", "files/incoming/a", "files/a/b")]
    for each in others:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_bytes(b"x")
    Store(tmp_path, CAPACITY).close()
    assert all(each.exists() for each in others)


def test_contents_are_readable_by_their_user_alone(tmp_path: Path) -> None:
    Store(tmp_path, CAPACITY).close()
    for name in ("files", "files/incoming", "batches.sqlite"):
        assert (tmp_path / name).stat().st_mode & 0o77 == 0


def test_tables_of_version_1_are_taken_over(tmp_path: Path) -> None:
    store = Store(tmp_path, CAPACITY)
    file = store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 3600)
    before = begin(store, OWNER, file.id)
    store.close()
    counts = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    columns = ";".join(f"ALTER TABLE batches DROP COLUMN {name}" for name in counts)
    execute(tmp_path / "batches.sqlite", f"{columns}; PRAGMA user_version = 1")
    for _ in range(2):
        store = Store(tmp_path, CAPACITY)
        store.batches.add_result(before.id, result(1 + store.batches.get(OWNER, before.id).completed), TOKENS)
        assert store.batches.get(OWNER, before.id).as_json()["usage"] is None  # not that of the rest alone
        after = begin(store, OWNER, file.id)
        store.batches.add_result(after.id, result(1), TOKENS)
        assert store.batches.get(OWNER, after.id).as_json()["usage"]["total_tokens"] == 12
        store.close()


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"xy")], ids=["missing", "cut"])
def test_a_damaged_content_is_an_error_of_its_own(change: Any, tmp_path: Path) -> None:
    store = Store(tmp_path, CAPACITY)
    file = store.files.add(OWNER, "a", INPUT, incoming(store, b"xyz"), 3600)
    change(store.files.path(file.id))
    with pytest.raises(Refused, match=f"the content of {file.id}") as refused:
        store.files.open_content(OWNER, file.id)
    assert (refused.value.status, refused.value.code) == (500, "file_damaged")
    store.files.delete(OWNER, file.id)
    store.close()


def test_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    store = Store(tmp_path, CAPACITY)
    kept = store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 3600)
    for name in (f"file-{'0' * 24}", f"incoming/{'0' * 32}", f"incoming/{'0' * 32}.answers"):
        (tmp_path / "files" / name).write_bytes(b"x")
    store.close()
    again = Store(tmp_path, CAPACITY)
    assert [path.name for path in (tmp_path / "files").rglob("*") if path.is_file()] == [kept.id]
    again.close()


def test_a_failed_end_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, CAPACITY)
    file = store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 3600)
    batch = begin(store, OWNER, file.id)
    store.begin(batch.id, 1, "m")
    store.batches.move(batch.id, ("in_progress",), "finalizing")

    def full(batch_id: str) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(store.batches, "delete_results", full)
        with pytest.raises(OSError, match="full"):
            store.finish(batch, "completed", answers=incoming(store, b"y"), errors=None, num_unanswered=0)
    assert store.batches.get(OWNER, batch.id).status == "finalizing"
    assert [each.id for each in store.files.page(OWNER, after=None, limit=9, descending=True, purpose=None).items] == [
        file.id
    ]
    assert {path.name for path in (tmp_path / "files").iterdir()} == {file.id, "incoming"}
    done = store.finish(batch, "completed", answers=incoming(store, b"y"), errors=None, num_unanswered=0)
    assert done is not None
    assert done.status == "completed"
    store.close()


class FullAtTheEnd:
    """A connection whose disk has no room for what a transaction writes at its end."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        if statement == "COMMIT":
            raise sqlite3.OperationalError("database or disk is full")
        return self._connection.execute(statement, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_a_file_without_room_for_its_row_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client tries again and again: what each upload left would make a full disk fuller."""
    store = Store(tmp_path, CAPACITY)
    kept = store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 3600)
    with monkeypatch.context() as patched:
        patched.setattr(store._database, "connection", FullAtTheEnd(store._database.connection))
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError, match="disk is full"):
                store.files.add(OWNER, "a", INPUT, incoming(store, b"y"), 3600)
    assert {path.name for path in (tmp_path / "files").iterdir()} == {kept.id, "incoming"}
    again = store.files.add(OWNER, "a", INPUT, incoming(store, b"y"), 3600)
    assert {path.name for path in (tmp_path / "files").iterdir()} == {kept.id, again.id, "incoming"}
    store.close()


class FullUntilGone:
    """A connection on a full disk, where a row can be deleted once some contents are gone."""

    def __init__(self, connection: sqlite3.Connection, *contents: Path) -> None:
        self._connection = connection
        self._contents = contents

    def execute(self, statement: str, *values: Any) -> Any:
        if statement.startswith("DELETE FROM files") and any(each.exists() for each in self._contents):
            self._connection.execute("ROLLBACK")  # as SQLite does
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._connection.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_on_a_full_disk_files_can_be_deleted(tmp_path: Path) -> None:
    """By their client, and when their time is over: nothing else makes room."""
    now = 1000.0
    with contextlib.closing(Store(tmp_path / "store", 10**6, lambda: now)) as store:
        kept, mine, used, old = (
            store.files.add(OWNER, "a", INPUT, incoming(store, b"{}"), lifetime_s) for lifetime_s in (100, 100, 100, 10)
        )
        batch = begin(store, OWNER, used.id)
        store._database.connection = FullUntilGone(  # type: ignore[assignment]
            store._database.connection, store.files.path(mine.id), store.files.path(old.id)
        )
        with pytest.raises(Refused, match="which has not ended"):
            store.files.delete(OWNER, used.id)
        now = 1010.0
        store.files.path(mine.id).rename(tmp_path / "aside")  # so that the old one alone is in the way
        store.files.delete_expired()
        (tmp_path / "aside").rename(store.files.path(mine.id))
        store.files.delete(OWNER, mine.id)
        left = store.files.page(OWNER, after=None, limit=9, descending=False, purpose=None).items
        assert [each.id for each in left] == [kept.id, used.id]
        assert {each.name for each in store.files.path(kept.id).parent.iterdir()} == {"incoming", kept.id, used.id}
        assert store.batches.get(OWNER, batch.id).input_file_id == used.id


def test_a_client_cannot_begin_batches_without_end(tmp_path: Path) -> None:
    store = Store(tmp_path, CAPACITY)
    file = store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 3600)
    other = store.files.add("owner-b", "a", INPUT, incoming(store, b"x"), 3600)
    for _ in range(MOST_UNFINISHED):
        last = begin(store, OWNER, file.id)
    with pytest.raises(Refused) as refused:
        begin(store, OWNER, file.id)
    assert refused.value.status == 429
    begin(store, "owner-b", other.id)
    store.begin(last.id, 0, None, errors="[]")
    begin(store, OWNER, file.id)
    store.close()


def test_batches_that_ended_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that begins batches which fail at once, for ever: the last ones are known."""
    monkeypatch.setattr(stored_batches, "MOST_KEPT", 3)
    store = Store(tmp_path, CAPACITY)
    files = {owner: store.files.add(owner, "a", INPUT, incoming(store, b"x"), 3600) for owner in (OWNER, "owner-b")}
    other = begin(store, "owner-b", files["owner-b"].id)
    unfinished = begin(store, OWNER, files[OWNER].id)
    begun = list[StoredBatch]()
    for _ in range(8):
        begun.append(begin(store, OWNER, files[OWNER].id))
        store.begin(begun[-1].id, 0, None, errors="[]")
    found = [each.id for each in store.batches.page(OWNER, after=None, limit=100).items]
    assert found == [each.id for each in begun[:-4:-1]] + [unfinished.id]
    assert store.batches.get("owner-b", other.id).status == "validating"
    store.close()


def test_a_full_store_begins_no_batch(tmp_path: Path) -> None:
    """Results are written at any rate: the same input, run again and again, would fill the disk."""
    store = Store(tmp_path, CAPACITY)
    file = store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 3600)
    store.files.add(OWNER, "a", "batch_output", incoming(store, b"x" * CAPACITY), 3600)
    with pytest.raises(Refused) as refused:
        begin(store, OWNER, file.id)
    assert (refused.value.status, refused.value.code) == (413, "storage_full")
    assert refused.value.param == "input_file_id"
    store.close()


def test_capacity_and_lifetime_are_what_they_say(tmp_path: Path) -> None:
    now = [1000.0]
    with contextlib.closing(Store(tmp_path, 2 * 4096, lambda: now[0])) as store:
        for _ in range(2):  # to the last byte
            file = store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 10)
        with pytest.raises(Refused, match="more than 8192 bytes"):
            store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 10)
        for now[0], is_there in ((1009.0, True), (1010.0, False)):
            found = store.files.page(OWNER, after=None, limit=9, descending=False, purpose=None).items
            assert (file in found) is is_there
            with contextlib.nullcontext() if is_there else pytest.raises(Refused):
                store.files.get(OWNER, file.id)


def test_a_batch_whose_input_is_damaged_keeps_no_results(tmp_path: Path) -> None:
    with contextlib.closing(Store(tmp_path, CAPACITY)) as store:
        file = store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 3600)
        batch = begin(store, OWNER, file.id)
        store.begin(batch.id, 2, "m")
        store.batches.add_result(batch.id, result(1))
        assert not store.fail_if_damaged(batch)
        store.files.path(file.id).unlink()
        assert store.fail_if_damaged(batch)
        assert store.batches.get(OWNER, batch.id).status == "failed"
        assert store.batches.answered(batch.id) == set()


def test_batches_are_known_in_order_for_thirty_days(tmp_path: Path) -> None:
    now = [1000.0]
    with contextlib.closing(Store(tmp_path, CAPACITY, lambda: now[0])) as store:
        file = store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 100 * KEPT_S)
        batches = [begin(store, OWNER, file.id) for _ in range(3)]
        assert [each.id for each in store.batches.unfinished()] == [each.id for each in batches]  # begun again so
        assert not store.batches.page(OWNER, after=None, limit=3).has_more
        assert store.batches.page(OWNER, after=None, limit=2).has_more
        cancelled = store.batches.cancel(OWNER, batches[0].id)
        now[0] = 1001.0
        assert store.batches.cancel(OWNER, batches[0].id) == cancelled
        store.begin(batches[1].id, 0, None, errors="[]")
        store.batches.move(batches[2].id, ("validating",), "expired")
        for now[0], left in ((1000.0 + KEPT_S, batches), (1001.0 + KEPT_S, batches[:1])):
            store.delete_old()
            found = store.batches.page(OWNER, after=None, limit=9).items[::-1]
            assert [each.id for each in found] == [each.id for each in left]


def test_a_batch_of_no_file_names_the_field(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30)
    with pytest.raises(Refused) as refused:
        begin(store, "a", "file-none")
    assert (refused.value.status, refused.value.param) == (404, "input_file_id")
    store.close()


def test_pages_join_to_the_whole_list(tmp_path: Path) -> None:
    store = Store(tmp_path, 10**6)
    ids = [store.files.add(OWNER, "a", INPUT, incoming(store, b"x"), 3600).id for _ in range(7)]
    for descending, limit in itertools.product((True, False), (1, 2, 7, 8)):
        found: list[str] = []
        while True:
            page = store.files.page(
                OWNER, after=found[-1] if found else None, limit=limit, descending=descending, purpose=INPUT
            )
            found += [each.id for each in page.items]
            if not page.has_more:
                break
        assert found == (ids[::-1] if descending else ids)
    assert store.files.page(OWNER, after=None, limit=9, descending=True, purpose="batch_output").items == []
    with pytest.raises(Refused, match="after"):
        store.files.page("owner-b", after=ids[0], limit=9, descending=True, purpose=None)
    batch = begin(store, OWNER, ids[0])
    with pytest.raises(Refused, match="after"):
        store.batches.page("owner-b", after=batch.id, limit=9)
    with pytest.raises(Refused):
        store.batches.get("owner-b", batch.id)
    store.close()
