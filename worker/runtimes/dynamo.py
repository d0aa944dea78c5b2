"""What differs between ai-dynamo 1.4.2 and 1.6.1: settings, exceptions, start and exit.

`tests/worker/test_dynamo_contract.py` pins every fact of the SDK that is relied on here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from worker.arguments import Arguments
from worker.errors import (
    BoundaryStoreUnavailable,
    ConfigurationError,
    Draining,
    EngineBroken,
    GrammarsUnavailable,
    InvalidRequest,
    Overloaded,
    ProcessorUnavailable,
    RequestFailed,
    ServingError,
    StartupError,
)
from worker.lifecycle.drain import FLUSH_S, MIGRATION_TIMEOUT_S

if TYPE_CHECKING:
    from dynamo.common.backend.engine import EngineConfig
    from dynamo.common.backend.worker import WorkerConfig

    from worker.engines import EngineInfo
    from worker.runtimes.dynamo_engine import WorkerEngine

OLDEST_VERSION = (1, 4, 2)
SHUTDOWN_LIMIT = "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"


def check_installed() -> None:
    """Raises `ConfigurationError` if ai-dynamo is missing or too old. Imports nothing."""
    try:
        version = _installed_version()
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError("ai-dynamo is not installed") from None
    if version < OLDEST_VERSION:
        found, needed = (".".join(map(str, numbers)) for numbers in (version, OLDEST_VERSION))
        raise ConfigurationError(f"ai-dynamo {found} is too old, need {needed}")


def check_ports(environ: Mapping[str, str]) -> None:
    """Raises `StartupError` if a port of the runtime is taken, `ConfigurationError` if malformed.

    The runtime itself finds out only after the model is loaded, and says so in several lines.
    """
    for host_name, port_name in (("DYN_SYSTEM_HOST", "DYN_SYSTEM_PORT"), ("DYN_TCP_RPC_HOST", "DYN_TCP_RPC_PORT")):
        text = environ.get(port_name, "")
        if not text or text in ("-1", "0"):
            continue
        highest = _highest_system_port() if port_name == "DYN_SYSTEM_PORT" else 65535
        if not text.isdecimal() or int(text) > highest:
            raise ConfigurationError(f"{port_name} must be a port number up to {highest}, got {text!r}")
        _check_port(environ.get(host_name) or "0.0.0.0", int(text), port_name)


def _highest_system_port() -> int:
    """Versions before 1.6 read the system port as a signed 16-bit number."""
    return 65535 if _installed_version() >= (1, 6) else 32767


def _installed_version() -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version("ai-dynamo").split(".")[:3] if part.isdecimal())


def _check_port(host: str, port: int, name: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise StartupError(f"{name}: cannot listen on {host}:{port}: {error.strerror or error}") from None


def allow_drain(drain_timeout_s: float, environ: MutableMapping[str, str]) -> None:
    """Raise the runtime's shutdown limit to what the drain needs; its default is 30 s.

    Raises:
        ConfigurationError: the operator's own limit is malformed, or shorter than the drain.
    """
    needed = math.ceil(drain_timeout_s + MIGRATION_TIMEOUT_S + FLUSH_S)
    given = environ.get(SHUTDOWN_LIMIT)
    if not given:
        environ[SHUTDOWN_LIMIT] = str(needed + 10)
    elif not given.isdecimal():
        raise ConfigurationError(f"{SHUTDOWN_LIMIT} must be a whole number of seconds, got {given!r}")
    elif int(given) < needed:
        raise ConfigurationError(
            f"{SHUTDOWN_LIMIT} is {given} s, but --drain-timeout-s {drain_timeout_s:g} needs at least {needed} s"
        )


def worker_config(arguments: Arguments) -> WorkerConfig:
    """The SDK's settings. Fields that only one version has are set where they exist.

    Raises:
        ConfigurationError: an argument needs a field that the installed version lacks.
    """
    from dynamo.common.backend.worker import WorkerConfig
    from dynamo.common.constants import DisaggregationMode
    from dynamo.llm import ModelInput

    known = {field.name for field in dataclasses.fields(WorkerConfig)}
    if "response_plane" not in known and arguments.response_plane != "tcp":
        raise ConfigurationError(f"--response-plane {arguments.response_plane} needs a newer ai-dynamo")
    return WorkerConfig.from_runtime_config(
        arguments,
        model_name=arguments.model_path,
        served_model_name=arguments.served_model_name,
        model_input=ModelInput.Tokens,
        disaggregation_mode=DisaggregationMode[arguments.disaggregation_mode.upper()],
        enable_local_indexer=False,
    )


def engine_config(info: EngineInfo, arguments: Arguments) -> EngineConfig:
    """What the model is registered with. Uses only fields that both versions have."""
    from dynamo.common.backend.engine import EngineConfig, LlmRegistration

    return EngineConfig(
        model=arguments.model_path,
        served_model_name=arguments.served_model_name,
        llm=LlmRegistration(
            context_length=info.context_length,
            kv_cache_block_size=info.kv_block_size,
            total_kv_blocks=info.total_kv_blocks,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
        ),
    )


class RouterEvents:
    """Passes an engine's KV events on to the router.

    Args:
        publisher: The runtime's.
        block_size: Tokens per block.
    """

    def __init__(self, publisher: Any, block_size: int) -> None:
        self._publisher = publisher
        self._block_size = block_size

    def stored(
        self,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
    ) -> None:
        parent = None if parent_hash is None else _signed(parent_hash)
        sizes = [self._block_size] * len(block_hashes)
        hashes = [_signed(each) for each in block_hashes]
        self._publisher.publish_stored(list(token_ids), sizes, hashes, parent, cache_salt=cache_salt)

    def removed(self, block_hashes: Sequence[int]) -> None:
        self._publisher.publish_removed([_signed(each) for each in block_hashes])


def _signed(number: int) -> int:
    """The 64 bits of `number` as the signed integer that the runtime takes."""
    return number - 2**64 if number >= 2**63 else number


def trace_headers(context: Any) -> Mapping[str, str] | None:
    """The W3C trace context of a request; None where Dynamo passes none on."""
    headers: Mapping[str, str] | None = context.trace_headers()
    return headers


def to_dynamo(error: ServingError) -> Exception:
    """The Dynamo exception for an error; `docs/failures.md` has what clients see of each.

    `EngineShutdown` is the one error that 1.4.2 migrates, and it takes the instance out of rotation
    for seconds, so it is only for a worker that leaves. An overloaded worker stays in rotation with
    `HttpError` 529. A failed request is an `InvalidArgument` because only that carries its message
    to the client.
    """
    from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument, Unknown

    if isinstance(error, (InvalidRequest, RequestFailed)):
        return InvalidArgument(str(error))
    if isinstance(error, Overloaded):
        return HttpError(529, str(error))
    if isinstance(error, (ProcessorUnavailable, GrammarsUnavailable, BoundaryStoreUnavailable)):
        return HttpError(503, str(error))
    if isinstance(error, (Draining, EngineBroken)):
        return EngineShutdown(str(error))
    return Unknown(str(error))


def shut_down() -> None:
    """Make the runtime shut down: unregister, grace period, `cleanup`, return from `run`."""
    os.kill(os.getpid(), signal.SIGTERM)


def run(engine: WorkerEngine, config: WorkerConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises whatever kept the runtime from starting."""
    import uvloop

    uvloop.run(_serve(engine, config))


async def _serve(engine: WorkerEngine, config: WorkerConfig) -> None:
    """Run the SDK's worker.

    Its own signal handlers start the shutdown and then call those that were there before. Python's
    handler for SIGINT would cancel the event loop under the drain, so ours takes its place; it
    hears every signal after the SDK did.
    """
    from dynamo.common.backend.worker import Worker

    loop = asyncio.get_running_loop()

    def handler(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(engine.server.signalled)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    await Worker(engine, config).run()


def finish(status: int) -> None:
    """End the process with ``status``, now.

    Python's own exit would stop the interpreter under the runtime's native threads; on 1.4.2 they
    then abort the process (SIGABRT), which looks like a crash. Everything of ours has been released
    by `WorkerEngine.cleanup`.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its disk is full
            stream.flush()
    os._exit(status)
