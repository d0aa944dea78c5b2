"""``dlw-batch backup`` and ``restore``: all batches as files, by JetStream's snapshots of streams.

Each stream is a directory of the form that ``nats stream restore`` reads, too. A backup of batches
that are worked on loses nothing: the queues are copied before the results, so that a request is in
one of them at least, and one that is in both is answered once more and keeps its result. A restore
puts the queues back last: what stands in them is asked for from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import APIError, NotFoundError

from adapters.strict_json import read_object
from worker.errors import ConfigurationError
from worker.runtimes.nats.batch import layout

CHUNK_BYTES = 128 * 2**10
CHUNK_S = 30.0
"""Seconds for the server to send one chunk, or to take one."""

META, DATA = "backup.json", "stream.tar.s2"
"""A stream's configuration and state, and its contents, as the server's archive."""

MANIFEST = "streams.json"
"""Names of the streams, each with one digest of its files; written last, so that it is not in a
backup that was interrupted.
"""

_QUEUE = "DLW_BATCH_"
_RESULTS = f"KV_{layout.results_bucket('')}"
_RECORDS = (f"KV_{layout.BATCHES}", f"OBJ_{layout.BODIES}")

Shown = Callable[[str], None]


async def backup(client: Client, directory: Path, shown: Shown) -> int:
    """Copy the streams of all batches into a new directory; returns how many there are.

    Args:
        client: Connection to the server, as a user that may take snapshots.
        directory: Must not exist.
        shown: Called with a line for each stream.

    Raises:
        ConfigurationError: the directory exists, or the server refuses.
        NatsError: the server is gone.
    """
    try:
        await asyncio.to_thread(directory.mkdir, parents=True)
    except FileExistsError:
        raise ConfigurationError(f"{directory} exists; a backup is a new directory") from None
    digests: dict[str, str] = {}
    for name in sorted(await _streams(client), key=_copied_as):
        with contextlib.suppress(NotFoundError):  # it was deleted meanwhile
            digests[name] = await _copy(client, name, directory / name)
            shown(f"{name}: {(directory / name / DATA).stat().st_size} bytes")
    (directory / MANIFEST).write_text(json.dumps(digests, indent=1), encoding="utf-8")
    return len(digests)


async def restore(client: Client, directory: Path, shown: Shown) -> int:
    """Put the streams of a backup back; returns how many there are.

    Args:
        client: Connection to the server, as a user that may restore streams.
        directory: Directory that `backup` made.
        shown: Called with a line for each stream.

    Raises:
        ConfigurationError: it is no whole backup, a stream of it exists, or the server refuses; no
            stream has been restored then.
        NatsError: the server is gone; streams that were restored are deleted if it comes back.
    """
    digests = await asyncio.to_thread(_checked, directory)
    present = sorted(digests.keys() & await _streams(client))
    if present:
        problem = f"{', '.join(present[:4])}{' and others' * (len(present) > 4)} exist on the server"
        raise ConfigurationError(f"{problem}: restore before workers with --batch are started, or delete them")
    restored: list[str] = []
    try:
        for name in sorted(digests, key=_restored_as):
            restored.append(name)
            await _put(client, name, directory / name)
            shown(name)
    except BaseException:
        for name in restored:
            with contextlib.suppress(NatsError, TimeoutError):
                await client.jetstream().delete_stream(name)
        raise
    return len(restored)


def _copied_as(stream: str) -> tuple[int, str]:
    """Records and bodies come before the queues, whose requests need them; results come after."""
    return (0 if stream in _RECORDS else 1 if _is_queue(stream) else 2), stream


def _restored_as(stream: str) -> tuple[bool, str]:
    return _is_queue(stream), stream


def _is_queue(stream: str) -> bool:
    return stream.startswith(_QUEUE) and stream != layout.DEAD_LETTERS


async def _streams(client: Client) -> set[str]:
    """The streams of batches that the server has."""
    found: set[str] = set()
    while page := (await _ask(client, "$JS.API.STREAM.NAMES", {"offset": len(found)})).get("streams"):
        found |= set(page)
    own = (*_RECORDS, f"KV_{layout.RETURNS}")
    return {name for name in found if name in own or name.startswith((_QUEUE, _RESULTS))}


async def _copy(client: Client, name: str, directory: Path) -> str:
    """Write a stream into a directory; returns the digest of its files."""
    inbox, digest = client.new_inbox(), hashlib.sha256()
    async with _subscribed(client, inbox) as chunks:
        asked = {"deliver_subject": inbox, "no_consumers": False, "jsck": False, "chunk_size": CHUNK_BYTES}
        told = await _ask(client, f"$JS.API.STREAM.SNAPSHOT.{name}", asked)
        await asyncio.to_thread(directory.mkdir)
        with (directory / DATA).open("xb") as file:
            while (message := await chunks.next_msg(CHUNK_S)).data:
                file.write(message.data)
                digest.update(message.data)
                if message.reply:
                    await client.publish(message.reply)
            status = (message.headers or {}).get("Status", "204")
            if status != "204":
                reason = (message.headers or {}).get("Description", "the server gave no reason")
                raise ConfigurationError(f"{name}: the snapshot has ended early: {status} {reason}")
    meta = json.dumps({"config": told["config"], "state": told["state"]}).encode()
    (directory / META).write_bytes(meta)
    digest.update(meta)
    return digest.hexdigest()


async def _put(client: Client, name: str, directory: Path) -> None:
    meta = json.loads((directory / META).read_text(encoding="utf-8"))
    subject = (await _ask(client, f"$JS.API.STREAM.RESTORE.{name}", meta))["deliver_subject"]
    with (directory / DATA).open("rb") as file:
        while chunk := file.read(min(CHUNK_BYTES, client.max_payload)):
            await _answered(client, name, subject, chunk)
    await _answered(client, name, subject, b"")


async def _ask(client: Client, subject: str, asked: Any) -> Any:
    return await _answered(client, subject.rpartition(".")[2], subject, json.dumps(asked).encode())


async def _answered(client: Client, stream: str, subject: str, data: bytes) -> Any:
    """The answer of JetStream's API. Raises `ConfigurationError` with the server's reason."""
    answer = await client.request(subject, data, timeout=CHUNK_S)
    found = json.loads(answer.data or b"{}")
    if "error" in found:
        try:
            APIError.from_error(found["error"])
        except NotFoundError:
            raise
        except APIError as error:
            raise ConfigurationError(f"{stream}: {error.description}") from None
    return found


@contextlib.asynccontextmanager
async def _subscribed(client: Client, subject: str) -> AsyncIterator[Any]:
    subscription = await client.subscribe(subject)
    try:
        yield subscription
    finally:
        await subscription.unsubscribe()


def _checked(directory: Path) -> dict[str, str]:
    """The streams of a backup whose files are whole, with their digests."""
    try:
        found: dict[str, str] = read_object((directory / MANIFEST).read_bytes())
        for name, digest in found.items():
            with (directory / name / DATA).open("rb") as file:
                read = hashlib.file_digest(file, "sha256")
            read.update((directory / name / META).read_bytes())
            if read.hexdigest() != digest:
                raise ConfigurationError(f"{directory / name} was altered after the backup")
    except FileNotFoundError as error:
        raise ConfigurationError(f"{directory} is no whole backup: {error.filename} is not there") from None
    except (ValueError, AttributeError) as error:
        raise ConfigurationError(f"{directory} is no whole backup: {error}") from None
    return found
