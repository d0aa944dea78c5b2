"""The front door's process: serve until SIGTERM or SIGINT, then let the answers finish.

Exit 0 after that, 2 for configuration, 1 if it cannot start. A second signal ends it at once, as
the first one does before it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from adapters.catalog import Catalog, CatalogError
from worker.arguments import keys_in
from worker.errors import ConfigurationError, StartupError, one_line
from worker.frontdoor import call_formats
from worker.frontdoor.batch_lines import LineAnswers
from worker.frontdoor.batches import BatchService, Limits
from worker.frontdoor.client_connection import protocol_factory
from worker.frontdoor.handlers import HANDLERS, TRANSLATORS
from worker.frontdoor.options import Options, parse_options
from worker.frontdoor.server import FrontDoor
from worker.frontdoor.uploads import Uploads
from worker.frontdoor.upstreams import Upstreams
from worker.importing import end_at_once
from worker.installation import check_openengine
from worker.models import hub_checkpoint, is_hub_id
from worker.standard_error import say

if TYPE_CHECKING:
    from worker.frontdoor.openengine.frontend import EngineFrontend

logger = logging.getLogger("worker.frontdoor.main")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

BACKLOG = 1024
ROOM_OF_FORM = 64 * 1024
"""Bytes of an upload beside its file."""

OTHER_DESCRIPTORS = 32
"""Descriptors that are no connections': of the event loop, of files and batches, of uploads."""


def make_front_door(options: Options, engines: EngineFrontend | None = None) -> FrontDoor:
    """The front door of ``options``.

    Args:
        options: The options.
        engines: The workers behind OpenEngine that ``--upstream`` names, if it names such.

    Raises:
        StartupError: a processor or a file is not there.
    """
    try:
        catalog = Catalog.load(allow=options.allow_logits_processors, options=options.logits_processor)
    except CatalogError as error:
        raise StartupError(str(error)) from None
    if options.calls is None:
        logger.info("only tool calls that a request forces are held to their tools (--tool-call-format)")
    upstreams = Upstreams(options.frontends if engines is None else [engines], options.connect_timeout_s)
    keys = keys_in(options.api_key_file, "--api-key-file")
    (engine_key,) = keys_in(options.engine_key_file, "--engine-key-file")[:1] or [""]
    return FrontDoor(options, catalog, upstreams, keys, engine_key)


def make_batches(door: FrontDoor) -> BatchService | None:
    """The files and batches of a front door, None where they are off. Raises `StartupError`."""
    options = door.options
    if options.batch_dir is None:
        return None
    limits = Limits(
        file=options.batch_file_limit_mib * 2**20,
        storage=options.batch_storage_mib * 2**20,
        concurrency=options.batch_concurrency,
        body=door.max_body,
    )
    answers = LineAnswers(door, HANDLERS, TRANSLATORS)

    def uploads(directory: Path) -> Uploads:
        largest = limits.file + ROOM_OF_FORM
        return Uploads(directory, largest, options.body_rate_kib_s * 1024, options.body_timeout_s, time.monotonic)

    return BatchService(Path(options.batch_dir), limits, uploads, answers.ask, answers.models)


async def serve(options: Options) -> None:
    """Serve until a signal.

    Raises:
        ConfigurationError: a package that ``--upstream`` needs is not installed.
        StartupError: it cannot be served.
    """
    if options.engines:
        check_openengine("--upstream grpc://")
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in _SIGNALS:
        signal.signal(number, end_at_once)  # nothing is under way yet, and a tokenizer takes seconds
    engines = None
    if options.engines:
        from worker.frontdoor.openengine.opening import open_engines  # only here is gRPC needed

        engines = await asyncio.to_thread(open_engines, options)
        engines.start()
    door = make_front_door(options, engines)
    door.batches = make_batches(door)
    gc.collect()
    gc.freeze()  # what is loaded stays, and a collection that looks at it would hold up every answer
    for number in _SIGNALS:
        loop.add_signal_handler(number, stopping.set)
    try:
        server = await loop.create_server(
            protocol_factory(door), options.host, options.port, backlog=BACKLOG, reuse_port=options.reuse_port or None
        )
    except (OSError, socket.gaierror) as error:
        raise StartupError(f"cannot serve on {options.host}:{options.port}: {error}") from None
    if door.batches is not None:
        await door.batches.start()
    port = server.sockets[0].getsockname()[1]
    logger.info("front door on %s:%d, before %s", options.host, port, ", ".join(map(str, options.upstream)))
    try:
        await stopping.wait()
    finally:
        server.close()
        for number in _SIGNALS:  # SIG_DFL would not end the first process of a container
            loop.add_signal_handler(number, end_at_once, number, None)
    if door.batches is not None:
        await door.batches.stop()
    await door.drain(options.drain_timeout_s)
    if engines is not None:
        await engines.stop()
    if door.batches is not None:
        await door.batches.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; every failure is one line on stderr."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    for each in (logger, call_formats.logger, logging.getLogger("worker.frontdoor.openengine")):
        each.setLevel(logging.INFO)
    try:
        options = _with_descriptors(_with_hub_model(parse_options(argv)))
        uvloop.run(serve(options))
    except ConfigurationError as error:
        return _complain(error, 2)
    except StartupError as error:
        return _complain(error, 1)
    return 0


def _with_hub_model(options: Options) -> Options:
    """The options with the directory of a model that is named by its id on the Hugging Face Hub,
    without its weights. Raises `StartupError`.
    """
    name = options.model_path
    if name is None or not is_hub_id(name):
        return options
    return replace(options, model_path=str(hub_checkpoint(name, options.revision, logger.info, has_weights=False)))


def _with_descriptors(options: Options) -> Options:
    """The options with no more connections than there are descriptors for, as many as this process
    may have: each connection may need another one to a frontend.

    Where the system has none left, it would close connections without an answer.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # where the system has a limit below
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = max(1, (limit - OTHER_DESCRIPTORS) // 2)
    if limit == resource.RLIM_INFINITY or options.max_connections <= most:
        return options
    note = "--max-connections is %d, not %d: this process may have %d open files, which ulimit -n sets"
    logger.warning(note, most, options.max_connections, limit)
    return replace(options, max_connections=most)


def _complain(error: Exception, status: int) -> int:
    say(f"frontdoor: error: {one_line(error)}")
    return status
