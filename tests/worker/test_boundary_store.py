"""The boundary store's protocol, on each of its kinds; a store that is killed works again once it
is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import nats.js.errors
import pytest
import pytest_asyncio
from nats.aio.client import Client
from ports import free_port
from servers import EtcdServer, NatsServer, ServerProcess

from worker.errors import BoundaryStoreUnavailable, StartupError
from worker.migration import record_store
from worker.migration.etcd_store import EtcdStore
from worker.migration.file_store import FileStore
from worker.migration.named_store import make_store
from worker.migration.nats_store import NatsStore
from worker.migration.record_store import RecordStore
from worker.migration.store import BoundaryStore, StoreError

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = ("file", "nats", "etcd")
KEY, OTHER, THIRD = "0123456789abcdef" * 2, "fedcba9876543210" * 2, "00ff" * 8


SERVERS: dict[str, type[NatsServer] | type[EtcdServer]] = {"nats": NatsServer, "etcd": EtcdServer}


def address(server: ServerProcess) -> str:
    """As ``--boundary-store`` takes it."""
    kind = next(kind for kind, made in SERVERS.items() if isinstance(server, made))
    return f"{kind}://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    started = {kind: made(tmp_path_factory.mktemp(kind)) for kind, made in SERVERS.items()}
    try:
        for server in started.values():
            server.start()
        yield started  # type: ignore[misc]
    finally:
        for server in started.values():
            server.kill()


@pytest.fixture(scope="module")
def addresses(servers: dict[str, ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("files") / "store"
    return {"file": f"file:{directory}"} | {kind: address(server) for kind, server in servers.items()}


@pytest_asyncio.fixture(params=KINDS, loop_scope="module")
async def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="module")
async def store(kind: str, addresses: dict[str, str]) -> AsyncIterator[BoundaryStore]:
    made = make_store(addresses[kind])
    await made.open()
    await answering(made)
    yield made
    await made.close()
    await made.close()


async def answering(store: BoundaryStore) -> None:
    """Until the store answers."""
    while True:
        try:
            await store.get(KEY)
            return
        except StoreError:
            await asyncio.sleep(0.02)


async def test_what_is_put_is_there_for_everyone_until_it_is_deleted(
    store: BoundaryStore, kind: str, addresses: dict[str, str]
) -> None:
    value = bytes(range(256))
    other = make_store(addresses[kind])
    await other.open()
    assert await store.get(KEY) is None
    await store.delete(KEY)
    await store.put(KEY, b"first")
    await store.put(KEY, value)
    await store.put(OTHER, b"2")
    assert [await other.get(KEY), await other.get(OTHER)] == [value, b"2"]
    await other.delete(KEY)
    assert [await store.get(KEY), await store.get(OTHER)] == [None, b"2"]
    await store.delete(OTHER)
    await other.close()


async def test_many_at_once(store: BoundaryStore) -> None:
    keys = [f"{number:032x}" for number in range(64)]
    await asyncio.gather(*(store.put(key, key.encode()) for key in keys))
    assert await asyncio.gather(*map(store.get, keys)) == [key.encode() for key in keys]
    await asyncio.gather(*map(store.delete, keys))
    assert await asyncio.gather(*map(store.get, keys)) == [None] * 64


@pytest.mark.parametrize("kind", ["nats", "etcd"])
async def test_a_dead_store_raises_and_works_again_when_it_is_back(
    kind: str, servers: dict[str, ServerProcess]
) -> None:
    store = make_store(address(servers[kind]))
    await store.open()
    await answering(store)
    await store.put(KEY, b"before")
    servers[kind].kill()
    for operation in (store.get(KEY), store.put(KEY, b"in vain"), store.delete(KEY)):
        with pytest.raises((StoreError, asyncio.TimeoutError), match=f"127.0.0.1:{servers[kind].port}|^$"):
            await asyncio.wait_for(operation, 1.0)
    servers[kind].start()
    await answering(store)
    assert await store.get(KEY) == b"before"
    await store.put(KEY, b"after")
    assert await store.get(KEY) == b"after"
    await store.delete(KEY)
    await store.close()


@pytest.mark.parametrize("kind", ["nats", "etcd"])
async def test_a_store_may_come_up_after_its_clients(kind: str, tmp_path: Path) -> None:
    server = SERVERS[kind](tmp_path)
    server.port = free_port()
    store = make_store(address(server))
    await store.open()
    with pytest.raises((StoreError, asyncio.TimeoutError)):
        await asyncio.wait_for(store.get(KEY), 1.0)
    try:
        server.start()
        await answering(store)
        await store.put(KEY, b"1")
        assert await store.get(KEY) == b"1"
    finally:
        await store.close()
        server.kill()


async def test_records_of_a_directory_go_away(tmp_path: Path) -> None:
    now_s = [0.0]
    store = FileStore(str(tmp_path), 10.0, clock=lambda: now_s[0])
    for name in (KEY, OTHER, f"{KEY}.12ab", "an operator's own file", "2024", "20260131"):
        (tmp_path / name).write_bytes(b"1")
    for now_s[0] in (6.0, 12.0):
        await store.put(THIRD, b"3")
        await store.put(OTHER, b"2")
        assert await store.get(KEY) == b"1"  # seen for no longer than its time to live
    now_s[0] = 18.0
    await store.put(THIRD, b"3")
    assert await store.get(KEY) is None
    assert await store.get(OTHER) == b"2"
    assert {path.name for path in tmp_path.iterdir()} == {THIRD, OTHER, "2024", "20260131", "an operator's own file"}
    await store.close()


async def test_a_directory_is_made_looked_at_and_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, looks, scandir = [0.0], list[Path](), os.scandir

    def looked(path: Path) -> Any:
        looks.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", looked)
    store = FileStore(str(tmp_path / "store"), 10.0, clock=lambda: now_s[0])
    await store.open()
    assert (tmp_path / "store").stat().st_mode & 0o77 == 0  # seeds and prompts' lengths are nobody else's
    now_s[0] = 6.0
    for _ in range(3):
        await store.put(KEY, b"1")
    assert len(looks) == 1  # not with each record
    (tmp_path / "store").rename(tmp_path / "gone")
    with pytest.raises(StoreError, match="No such file or directory"):
        await store.get(KEY)  # where it cannot be told whether there is a record
    await store.close()
    with pytest.raises(StoreError, match="it is closed"):
        await store.get(KEY)


async def test_what_cannot_be_removed_fails_no_request(tmp_path: Path) -> None:
    """A record was written when old ones are looked for: another user's in a shared directory, or a
    directory of that name, is left to its owner.
    """
    now_s = [0.0]
    store = FileStore(str(tmp_path), 10.0, clock=lambda: now_s[0])
    (tmp_path / THIRD).mkdir()
    (tmp_path / KEY).write_bytes(b"1")
    for now_s[0] in (6.0, 12.0, 18.0, 24.0):
        await store.put(OTHER, b"2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [THIRD, OTHER]
    await store.close()


async def test_a_directory_that_cannot_be_listed_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left for a moment: the record is written, and old ones go a little later."""

    def unlisted(path: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    now_s = [0.0]
    store = FileStore(str(tmp_path), 10.0, clock=lambda: now_s[0])
    (tmp_path / KEY).write_bytes(b"1")
    now_s[0] = 6.0
    await store.put(OTHER, b"2")
    now_s[0] = 12.0
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", unlisted)
        await store.put(OTHER, b"3")
    now_s[0] = 18.0
    await store.put(OTHER, b"4")
    assert [path.name for path in tmp_path.iterdir()] == [OTHER]
    await store.close()


@pytest.mark.parametrize("shift_s", [-86_400.0, 86_400.0])
async def test_setting_the_clock_neither_loses_nor_keeps_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift_s: float
) -> None:
    """Whether the machine's clock, and so that of its files, was set, or another machine's."""
    now_s = [0.0]
    store = FileStore(str(tmp_path), 10.0, clock=lambda: now_s[0])
    await store.put(KEY, b"live")
    await store.put(OTHER, b"left")
    for path in tmp_path.iterdir():  # what was written before the clock was set
        os.utime(path, (time.time() - shift_s, time.time() - shift_s))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    for now_s[0] in (6.0, 12.0, 18.0):
        assert await store.get(KEY) == b"live"
        await store.put(KEY, b"live")  # renewed
    assert await store.get(KEY) == b"live"
    assert await store.get(OTHER) is None
    await store.close()


async def test_links_in_a_directory_are_not_followed(tmp_path: Path) -> None:
    """A directory that others may write to: nothing of theirs is read or written through a link."""
    directory, theirs = tmp_path / "store", tmp_path / "theirs"
    theirs.write_bytes(b"secret")
    directory.mkdir()
    store = FileStore(str(directory))
    await store.open()
    (directory / KEY).symlink_to(theirs)
    (directory / OTHER).symlink_to(tmp_path / "nowhere")
    for key in (KEY, OTHER):
        with pytest.raises(StoreError, match="symbolic links"):
            await store.get(key)
        await store.put(key, b"record")
        assert await store.get(key) == b"record"
    assert theirs.read_bytes() == b"secret"
    assert not (tmp_path / "nowhere").exists()
    await store.delete(KEY)
    (directory / KEY).symlink_to(theirs)
    await store.delete(KEY)
    assert theirs.read_bytes() == b"secret"
    linked = FileStore(str(tmp_path / "link"))  # of the operator's
    (tmp_path / "link").symlink_to(directory)
    await linked.open()
    assert await linked.get(OTHER) == b"record"
    await asyncio.gather(store.close(), linked.close())


async def test_what_is_no_record_file_holds_up_nobody(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    await store.open()
    os.mkfifo(tmp_path / KEY)
    with pytest.raises(StoreError, match="a record is no file"):
        await asyncio.wait_for(store.get(KEY), 10)
    (tmp_path / OTHER).write_bytes(b"x" * 2**20)
    with pytest.raises(StoreError, match="larger than 65536 bytes"):
        await store.get(OTHER)
    (tmp_path / THIRD).mkdir()
    for operation in (store.get(THIRD), store.put(THIRD, b"1"), store.delete(THIRD)):
        with pytest.raises(StoreError, match="directory"):
            await operation
    await store.close()


@contextlib.contextmanager
def small_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Functions that fill a file system and free it: a real one where this user may mount one."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:

        def fill(full: bool) -> None:
            for number in range(8):
                path = place / f"filler {number}"
                with contextlib.suppress(OSError):
                    path.write_bytes(b"x" * 4096) if full else path.unlink()

        try:
            yield fill
        finally:
            subprocess.run(["umount", str(place)], check=True)
    else:
        real, is_full = os.open, [False]

        def opened(path: Any, flags: int, *more: Any) -> int:
            if is_full[0] and flags & os.O_CREAT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(path, flags, *more)

        monkeypatch.setattr(os, "open", opened)
        yield lambda full: is_full.__setitem__(0, full)


async def test_a_full_disk_is_said_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "small"
    with small_disk(place, monkeypatch) as fill:
        store = FileStore(str(place))
        await store.open()
        await store.put(KEY, b"1")
        fill(True)
        for _ in range(3):
            with pytest.raises(StoreError, match="No space left on device"):
                await store.put(OTHER, b"x" * 4096)
        assert await store.get(KEY) == b"1"
        assert [path.name for path in place.iterdir() if not path.name.startswith("filler")] == [KEY]
        fill(False)
        await store.put(OTHER, b"2")
        assert await store.get(OTHER) == b"2"
        await store.close()


async def test_a_full_jetstream_is_said(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, config="jetstream { max_file_store: 1MB }\n")
    server.start()
    store = make_store(address(server))
    client = await nats.connect(server.url)
    try:
        await store.put(KEY, b"1")
        await client.jetstream().add_stream(name="FILL", subjects=["fill"])
        with contextlib.suppress(nats.js.errors.ServiceUnavailableError):
            while True:
                await client.jetstream().publish("fill", b"x" * 4096)
        with pytest.raises(StoreError, match="insufficient resources"):
            await store.put(OTHER, b"x" * 8192)
        assert await store.get(KEY) == b"1"
        await client.jetstream().purge_stream("FILL")
        await store.put(OTHER, b"2")
    finally:
        await client.close()
        await store.close()
        server.kill()


async def put_and_seen(store: BoundaryStore, value: bytes) -> None:
    """Put a record that may be gone before a busy machine looks for it."""
    while await store.get(KEY) != value:
        await store.put(KEY, value)


async def test_records_of_nats_go_away(servers: dict[str, ServerProcess]) -> None:
    server = servers["nats"]
    store = NatsStore(f"nats://127.0.0.1:{server.port}", 1.0, bucket="short-lived")
    await put_and_seen(store, b"1")
    while await store.get(KEY) is not None:
        await asyncio.sleep(0.02)
    await store.close()


async def test_records_of_etcd_go_away(servers: dict[str, ServerProcess]) -> None:
    store = EtcdStore(f"http://127.0.0.1:{servers['etcd'].port}", 1.0)
    await put_and_seen(store, b"1")
    while await store.get(KEY) is not None:
        await asyncio.sleep(0.02)
    await put_and_seen(store, b"2")  # by another lease
    await store.delete(KEY)
    await store.close()


async def test_what_can_never_work_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"--boundary-store file:.*file: File exists"):
        await make_store(f"file:{tmp_path / 'file'}").open()
    of_etcd = (
        "etcd:127.0.0.1:2379",
        "etcd:ftp://127.0.0.1",
        "etcd:http://",
        "etcd://h:port",
        "etcd://u:p@h",
        "etcd://[::1",
    )
    for address in of_etcd:
        with pytest.raises(StartupError, match="must be etcd:http://HOST:PORT"):
            make_store(address)
    for address in (
        "nats://h:port",
        "nats://",
        "nats://a:4222,nats://b:4222",
        "nats://a,b",
        "nats://[::1",
        "nats:h:0",
        "nats:a..b",
    ):
        with pytest.raises(StartupError, match="must be nats:URL, the URL of one server"):
            make_store(address)


async def test_no_message_has_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients see it: a request is refused with the store's error."""

    async def refused(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError("refused")

    async def silent(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    async def closed(_: Client) -> None:
        pass

    monkeypatch.setattr(record_store, "TIMEOUT_S", 0.01)
    monkeypatch.setattr(Client, "close", closed)
    for connect, problem in ((refused, "refused"), (silent, "does not answer within")):
        monkeypatch.setattr(Client, "connect", connect)
        records = RecordStore(make_store("nats://user:secret@127.0.0.1:4222"))
        with pytest.raises(BoundaryStoreUnavailable) as raised:
            await records.read(KEY)
        assert str(raised.value).startswith(f"the boundary store nats://127.0.0.1:4222: {problem}")
    for address in (
        "nats://user:secret@h:port",
        "nats:tls://user:secret@h:port",
        "etcd://user:secret@h",
        "x://a:secret@h",
    ):
        with pytest.raises(StartupError) as unfit:
            make_store(address)
        assert "secret" not in str(unfit.value)


async def test_a_bucket_that_an_operator_deletes_is_made_again(servers: dict[str, ServerProcess]) -> None:
    """One that the ``nats`` CLI has made is read from directly: nobody answered for it any more."""
    server = servers["nats"]
    client = await nats.connect(f"nats://127.0.0.1:{server.port}")
    await client.jetstream().create_key_value(bucket="theirs", direct=True)
    store = NatsStore(f"nats://127.0.0.1:{server.port}", bucket="theirs")
    try:
        await store.put(KEY, b"1")
        await client.jetstream().delete_key_value("theirs")
        async with asyncio.timeout(10):
            await answering(store)
        assert await store.get(KEY) is None
        await store.put(KEY, b"2")
        assert await store.get(KEY) == b"2"
    finally:
        await store.close()
        await client.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_user_that_is_taken_away_may_come_back(tmp_path: Path) -> None:
    """The connection that the server had closed for good was kept."""
    users = 'authorization {{ users: [ {{ user: "{}", password: p }}, {{ user: other, password: p }} ] }}\n'
    server = NatsServer(tmp_path, config=users.format("ours"))
    server.start()
    store = NatsStore(f"nats://ours:p@127.0.0.1:{server.port}")
    try:
        await answering(store)
        (tmp_path / "nats.conf").write_text(users.format("theirs"))
        server.signal(signal.SIGHUP)
        with contextlib.suppress(StoreError, asyncio.TimeoutError):
            while True:
                await asyncio.wait_for(store.get(KEY), 1.0)
        (tmp_path / "nats.conf").write_text(users.format("ours"))
        server.signal(signal.SIGHUP)
        async with asyncio.timeout(10):
            await answering(store)
    finally:
        await store.close()
        server.kill()
        gc.collect()  # sockets that nats-py leaves open where it is refused while it comes back
