"""``dlw-batch backup`` and ``restore`` against real servers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from nats.aio.client import Client
from nats_workers import running
from servers import NatsServer
from test_nats_batch import QUICK, completed, connection, line, mixed_lines

from worker.errors import ConfigurationError
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.batch.backup import DATA, MANIFEST, META, backup, restore
from worker.runtimes.nats.batch.command import main
from worker.runtimes.nats.batch.store import BatchStore


@asynccontextmanager
async def new_server(directory: Path) -> AsyncIterator[tuple[NatsServer, Client]]:
    """A server without streams, and a connection to it."""
    directory.mkdir()
    server = NatsServer(directory)
    server.start()
    try:
        async with connection(server) as client:
            yield server, client
    finally:
        server.kill()


async def names(client: Client) -> set[str | None]:
    return {info.config.name for info in await client.jetstream().streams_info()}


def nothing(said: str) -> None:
    pass


@pytest.mark.parametrize(
    "num_before", [pytest.param(0, marks=pytest.mark.campaign), 4, pytest.param(30, marks=pytest.mark.campaign)]
)
async def test_batches_go_on_in_another_server(tmp_path: Path, tiny_model: Path, num_before: int) -> None:
    """Also of a server whose workers are busy, with none of the results lost or different."""
    lines = [*mixed_lines(29, "moves"), line("large", prompt=[9, 30], max_tokens=3, user="u" * 600_000)]
    async with new_server(tmp_path / "first") as (server, client):
        store = BatchStore(client)
        record = await store.submit(lines, "moves")
        async with running(tiny_model, server.url, "moves", *QUICK):
            while (await store.status(record.id)).num_answered < num_before:
                await asyncio.sleep(0.01)
            copied = await backup(client, tmp_path / "backup", nothing)
            expected = await completed(store, record.id)
    async with new_server(tmp_path / "second") as (server, client):
        assert await asyncio.to_thread(main, ["restore", "--nats-url", server.url, str(tmp_path / "backup")]) == 0
        assert len(await names(client)) == copied
        store = BatchStore(client)
        assert (await store.status(record.id)).num_answered >= num_before
        async with running(tiny_model, server.url, "moves", *QUICK):
            assert await completed(store, record.id) == expected


@pytest.fixture
async def kept(tmp_path: Path) -> tuple[Path, str]:
    """A backup of one batch, and the name of its queue."""
    async with new_server(tmp_path / "kept") as (_, client):
        record = await BatchStore(client).submit(mixed_lines(3), "kept")
        await backup(client, tmp_path / "backup", nothing)
    return tmp_path / "backup", layout.stream_name(record.subjects, "normal")


async def test_what_is_no_whole_backup_is_refused(kept: tuple[Path, str], tmp_path: Path) -> None:
    directory, queue = kept
    data = directory / queue / DATA
    content = data.read_bytes()
    async with new_server(tmp_path / "other") as (_, client):

        async def refusal() -> str:
            with pytest.raises(ConfigurationError) as error:
                await restore(client, directory, nothing)
            assert await names(client) == set()
            return str(error.value)

        data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert "was altered after the backup" in await refusal()
        data.unlink()
        assert "is no whole backup" in await refusal()
        data.write_bytes(content)
        manifest = (directory / MANIFEST).read_text()
        for broken in ("[]", "{", ""):
            (directory / MANIFEST).write_text(broken)
            assert "is no whole backup" in await refusal()
        (directory / MANIFEST).write_text(manifest)
        text = (directory / queue / META).read_text()
        (directory / queue / META).write_text(text.replace('"max_age": 0', '"max_age": 9'))
        assert "was altered after the backup" in await refusal()
        (directory / queue / META).write_text(text.replace("workqueue", "no such thing"))
        sealed = hashlib.sha256(content + (directory / queue / META).read_bytes()).hexdigest()
        (directory / MANIFEST).write_text(json.dumps({**json.loads(manifest), queue: sealed}))
        assert "no such thing" in await refusal()  # by the server, for the last stream


async def test_no_altered_byte_is_restored(kept: tuple[Path, str], tmp_path: Path) -> None:
    """Of any file: a queue with other limits, or a batch less, would lose requests in silence."""
    directory, _ = kept
    rng = Random(0)
    async with new_server(tmp_path / "other") as (_, client):
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            content = path.read_bytes()
            for _ in range(8):
                at, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
                path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
                with pytest.raises(ConfigurationError, match=r"altered|no whole backup"):
                    await restore(client, directory, nothing)
            path.write_bytes(content)
        assert await names(client) == set()


async def test_two_batches_do_not_become_one(kept: tuple[Path, str], tmp_path: Path) -> None:
    """Ids that clients choose may differ in one character, which a flipped bit makes the same."""
    directory, queue = kept
    digests = json.dumps({f"{queue}2": "of another", **json.loads((directory / MANIFEST).read_text())})
    (directory / MANIFEST).write_text(digests.replace(f"{queue}2", queue, 1))
    async with new_server(tmp_path / "other") as (_, client):
        with pytest.raises(ConfigurationError, match=r"no whole backup: .*occurs twice"):
            await restore(client, directory, nothing)


async def test_a_command_that_cannot_say_it_names_what(tmp_path: Path) -> None:
    """And what is done all the same: the id of a batch is nowhere else."""
    async with new_server(tmp_path / "server") as (server, client):
        (tmp_path / "lines").write_text("\n".join(mixed_lines(2)))
        record = await BatchStore(client).submit(mixed_lines(2), "said")

        async def said(output: str, *arguments: str) -> tuple[int | None, str]:
            command = [sys.executable, "-m", "worker.runtimes.nats.batch.command", *arguments, "--nats-url", server.url]
            with Path(output).open("w") as stdout:
                process = await asyncio.create_subprocess_exec(*command, stdout=stdout, stderr=asyncio.subprocess.PIPE)
                _, errors = await process.communicate()
            return process.returncode, errors.decode()

        full = "standard output: No space left on device\n"
        assert await said("/dev/full", "status", record.id) == (2, f"dlw-batch: error: {full}")
        code, error = await said("/dev/full", "submit", "--model", "said", str(tmp_path / "lines"))
        submitted = error.removeprefix("dlw-batch: error: ").partition(" is submitted; ")[0]
        assert (code, error) == (2, f"dlw-batch: error: {submitted} is submitted; {full}")
        assert (await BatchStore(client).status(submitted)).record.num_requests == 2
        missing = tmp_path / "none" / "results"
        code, error = await said("/dev/null", "results", record.id, "-o", str(missing))
        assert (code, error) == (2, f"dlw-batch: error: {missing}: No such file or directory\n")


async def test_nothing_is_written_over(kept: tuple[Path, str], tmp_path: Path, capsys: Any) -> None:
    directory, queue = kept
    async with new_server(tmp_path / "other") as (server, client):
        address = ["--nats-url", server.url, str(directory)]
        record = await BatchStore(client).submit(mixed_lines(2), "kept")
        assert await asyncio.to_thread(main, ["restore", *address]) == 2
        assert f"{queue}" in capsys.readouterr().err
        assert (await BatchStore(client).status(record.id)).record.num_requests == 2
        assert await asyncio.to_thread(main, ["backup", *address]) == 2
        assert "exists; a backup is a new directory" in capsys.readouterr().err
