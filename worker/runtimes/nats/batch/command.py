"""``dlw-batch``: submit files in OpenAI's batch format, look at them, collect results, cancel; back
all of them up, and restore them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError
from tqdm import tqdm

from adapters.standard_output import discard, write
from adapters.whole_files import write_whole
from worker.arguments.values import positive_seconds
from worker.errors import ConfigurationError, ServingError, shown
from worker.runtimes.nats import protocol
from worker.runtimes.nats.batch.backup import backup, restore
from worker.runtimes.nats.batch.layout import PRIORITIES
from worker.runtimes.nats.batch.store import BatchStatus, BatchStore, DamagedResults
from worker.runtimes.nats.connection import ConnectionOptions, connect
from worker.standard_error import say

POLL_S = 0.5

_CONNECTION = {
    "url": ("WORKER_NATS_URL", "NATS servers, separated by commas (default: nats://127.0.0.1:4222)"),
    "credentials": ("WORKER_NATS_CREDENTIALS", "file with a JWT and an NKey seed"),
    "token": ("WORKER_NATS_TOKEN", "token; better in the variable"),
    "nkey_seed": ("WORKER_NATS_NKEY_SEED", "file with an NKey's seed"),
    "tls_ca": ("WORKER_NATS_TLS_CA", "file of the certificates that sign the server's"),
    "tls_cert": ("WORKER_NATS_TLS_CERT", "file of the own certificate"),
    "tls_key": ("WORKER_NATS_TLS_KEY", "file of its key"),
    "inbox_prefix": ("DLW_NATS_INBOX_PREFIX", "what this user's inboxes begin with (default: _INBOX)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for a batch that is not complete or has errors, 2 for a mistake."""
    parser = _parser()
    options = parser.parse_args(argv)
    commands: dict[str, Callable[[Client, Any], Awaitable[int]]] = {
        "submit": _submit,
        "status": _status,
        "results": _results,
        "cancel": _cancel,
        "backup": _backup,
        "restore": _restore,
    }
    try:
        return asyncio.run(_connected(options, commands[options.command]))
    except (ServingError, NatsError, OSError) as error:
        say(f"dlw-batch: error: {str(error) or type(error).__name__}")
        return 2
    except KeyboardInterrupt:
        return 130


async def _connected(options: Any, command: Callable[[Client, Any], Awaitable[int]]) -> int:
    given = {name: getattr(options, name) or os.environ.get(env) for name, (env, _) in _CONNECTION.items()}
    chosen = ConnectionOptions(**{name: value for name, value in given.items() if value})
    connection = await connect(chosen, "dlw-batch")
    try:
        return await command(connection, options)
    finally:
        await connection.close()


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    for name, (env, text) in _CONNECTION.items():
        shared.add_argument(f"--nats-{name.replace('_', '-')}", dest=name, help=f"{text} [{env}]")
    parser = argparse.ArgumentParser(prog="dlw-batch", description="Durable batches over NATS JetStream.")
    commands = parser.add_subparsers(dest="command", required=True)
    submit = commands.add_parser("submit", parents=[shared], help="queue the requests of a file; prints the batch's id")
    submit.add_argument("file", type=Path, help="requests in OpenAI's batch format, one a line")
    submit.add_argument("--model", help="served model name, whatever bodies say (default: what they say)")
    submit.add_argument("--model-version", default="1", help="of the model (default: 1)")
    submit.add_argument("--priority", choices=PRIORITIES, default="normal", help="default: normal")
    submit.add_argument("--deadline-s", type=_seconds, help="seconds from now after which nothing is answered any more")
    submit.add_argument("--id", help="of the batch; the same again continues a submission that was interrupted")
    status = commands.add_parser("status", parents=[shared], help="how far a batch is")
    status.add_argument("batch")
    status.add_argument("--watch", action="store_true", help="show a progress bar until it is complete")
    results = commands.add_parser("results", parents=[shared], help="the results so far, in OpenAI's output format")
    results.add_argument("batch")
    results.add_argument("-o", "--output", type=Path, help="file to write (default: standard output)")
    cancel = commands.add_parser("cancel", parents=[shared], help="answer no more of its requests")
    cancel.add_argument("batch")
    backup = commands.add_parser("backup", parents=[shared], help="copy all batches of the server into a directory")
    backup.add_argument("directory", type=Path, help="is made")
    restore = commands.add_parser("restore", parents=[shared], help="put the batches of a backup into a server")
    restore.add_argument("directory", type=Path)
    return parser


def _seconds(text: str) -> float:
    try:
        return positive_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}, got {text!r}") from None


async def _submit(client: Client, options: Any) -> int:
    lines = await asyncio.to_thread(_lines_of, options.file)
    deadline_s = None if options.deadline_s is None else time.time() + options.deadline_s
    with tqdm(total=len(lines), unit="requests", disable=not sys.stderr.isatty()) as bar:
        record = await BatchStore(client).submit(
            lines,
            options.model or _model_of(lines),
            options.model_version,
            priority=options.priority,
            deadline_s=deadline_s,
            batch=options.id,
            shown=lambda count: bar.update(count - bar.n),
        )
    _print(record.id + "\n", f"{record.id} is submitted; ")
    return 0


def _lines_of(path: Path) -> list[str]:
    """Lines of a file; only a line feed ends one: JSON may have Unicode's other ends in a text, and
    a carriage return between its values.
    """
    try:
        return path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{path}: line {number}: is not UTF-8") from None


def _model_of(lines: Sequence[str]) -> str:
    """The model that the bodies name: one queue is that of one model."""
    named = [(number, _named_model(line)) for number, line in enumerate(lines, 1) if line.strip()]
    model = named[0][1] if named else None
    if model is None:
        raise ConfigurationError("the first request's body names no model; give --model")
    for number, other in named:
        if other not in (None, model):
            problem = f"the model is {shown(other)}, and {shown(model)} before it"
            raise ConfigurationError(f"line {number}: {problem}; submit a file for each, or give --model for all")
    return model


def _named_model(line: str) -> str | None:
    """The model that the body of a line names; None without one, and for what is no request."""
    try:
        model = protocol.decoded(line.encode())["body"]["model"]
    except (ValueError, KeyError, TypeError):
        return None
    return model if isinstance(model, str) and model else None


async def _status(client: Client, options: Any) -> int:
    store = BatchStore(client)
    if options.watch:
        await _watch(store, options.batch)
    status = await store.status(options.batch, count_failed=True)
    _print(json.dumps(_as_json(status)) + "\n")
    return 0 if status.state == "completed" and not status.num_failed else 1


async def _watch(store: BatchStore, batch: str) -> None:
    bar = None
    try:
        while (status := await store.status(batch)).state in ("submitting", "in_progress"):
            if bar is None and status.record.num_requests:
                bar = tqdm(total=status.record.num_requests, unit="requests")
            if bar is not None:
                bar.update(status.num_answered - bar.n)
            await asyncio.sleep(POLL_S)
        if bar is not None:
            bar.update(status.num_answered - bar.n)
    finally:
        if bar is not None:
            bar.close()


def _as_json(status: BatchStatus) -> dict[str, Any]:
    """A batch in OpenAI's form."""
    failed = status.num_failed or 0
    record = status.record
    return {
        "id": record.id,
        "object": "batch",
        "status": status.state,
        "model": record.model,
        "model_version": record.version,
        "priority": record.priority,
        "expires_at": record.deadline_s,
        "request_counts": {
            "total": record.num_requests,
            "completed": status.num_answered - failed,
            "failed": failed,
        },
    }


async def _results(client: Client, options: Any) -> int:
    store = BatchStore(client)
    lines: list[str] = []
    damage: DamagedResults | None = None
    try:
        async for line in store.results(options.batch):
            lines.append(json.dumps(line) + "\n")  # in ASCII: clients and terminals know more ends of lines than JSON
    except DamagedResults as error:  # the whole ones are shown, whatever became of others
        damage = error
    text = "".join(lines)
    if options.output is None:
        _print(text)
    else:
        await asyncio.to_thread(_write, options.output, text)
    if damage is not None:
        raise damage
    status = await store.status(options.batch)
    return 0 if status.state == "completed" else 1


async def _cancel(client: Client, options: Any) -> int:
    store = BatchStore(client)
    record = await store.cancel(options.batch)
    _print(json.dumps(_as_json(await store.status(record.id, count_failed=True))) + "\n")
    return 0


async def _backup(client: Client, options: Any) -> int:
    _print(f"{await backup(client, options.directory, say)} streams\n")
    return 0


async def _restore(client: Client, options: Any) -> int:
    _print(f"{await restore(client, options.directory, say)} streams\n")
    return 0


def _print(text: str, done: str = "") -> None:
    """Print a text; raises `ConfigurationError` where it cannot be, which says what is done."""
    try:
        write(text)
    except OSError as error:
        discard()
        raise ConfigurationError(f"{done}standard output: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    """Write a file. Raises `ConfigurationError` with its name, which that of a full disk lacks."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None


def run() -> None:
    """Console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
