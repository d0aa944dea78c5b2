"""Checks of the installation and the environment, before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from worker.arguments import Arguments
from worker.errors import ConfigurationError, StartupError
from worker.lifecycle.drain import FLUSH_S, MIGRATION_TIMEOUT_S

OLDEST_VERSION = (1, 4, 2)
SNAPSHOT_DIRECTORY = "DYN_SNAPSHOT_CONTROL_DIR"
SHUTDOWN_LIMIT = "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"

_OF_OPENENGINE = ("protobuf", "googleapis-common-protos", "grpcio", "grpcio-health-checking", "grpcio-reflection")
"""Distributions that ``--runtime openengine`` and ``--upstream grpc://`` need."""


def check_threads(environ: Mapping[str, str]) -> None:
    """Raises `ConfigurationError` if ``OMP_NUM_THREADS`` is not what OpenMP takes; it would take
    another number.
    """
    given = environ.get("OMP_NUM_THREADS")
    if given and not re.fullmatch(r"\s*[1-9]\d{0,4}\s*(,\s*[1-9]\d{0,4}\s*)*", given, re.ASCII):
        raise ConfigurationError(f"OMP_NUM_THREADS must be a number of threads, from 1 to 99999, got {given!r}")


def check_adapters_package() -> None:
    """Raises `ConfigurationError` if `adapters` is another distribution's package."""
    for name in ("adapters", "adapter-transformers"):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        raise ConfigurationError(
            f"the distribution {name!r} also installs a package called 'adapters'; remove it: pip uninstall {name}"
        )
    spec = importlib.util.find_spec("adapters")
    ours = Path(__file__).resolve().parents[1] / "adapters" / "__init__.py"
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != ours:
        found = "no package" if spec is None else spec.origin
        raise ConfigurationError(f"'adapters' must be the package at {ours.parent}, found {found}")


def check_runtime(arguments: Arguments, environ: MutableMapping[str, str]) -> None:
    """Raises `ConfigurationError` if the chosen runtime is not installed, or set wrong."""
    if arguments.runtime == "dynamo":
        check_dynamo()
        check_snapshot(environ)
        allow_drain(arguments.drain_timeout_s, environ)
    elif arguments.runtime == "nats" and importlib.util.find_spec("nats") is None:
        raise ConfigurationError("--runtime nats: nats-py is not installed")
    elif arguments.runtime == "openengine":
        check_openengine("--runtime openengine")


def check_openengine(option: str) -> None:
    """Raises `ConfigurationError` if a package that ``option`` needs for gRPC is not installed."""
    for name in _OF_OPENENGINE:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            problem = f"{name} is not installed; it is in the extra openengine"
            raise ConfigurationError(f"{option}: {problem}") from None


def check_engine(arguments: Arguments) -> None:
    """Raises `ConfigurationError` if the chosen engine cannot be driven here."""
    library = {"trtllm": "tensorrt_llm", "vllm": "vllm"}.get(arguments.engine)
    spec = None if library is None else importlib.util.find_spec(library)
    if library is not None and (spec is None or spec.origin is None):  # a directory of that name is no package
        raise ConfigurationError(f"--engine {arguments.engine}: {library} is not installed")


def check_dynamo() -> None:
    """Raises `ConfigurationError` if ai-dynamo is missing or too old. Imports nothing."""
    try:
        version = _installed_version()
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError("ai-dynamo is not installed") from None
    if version < OLDEST_VERSION:
        found, needed = (".".join(map(str, numbers)) for numbers in (version, OLDEST_VERSION))
        raise ConfigurationError(f"ai-dynamo {found} is too old, need {needed}")


def check_snapshot(environ: Mapping[str, str]) -> None:
    """Raises `ConfigurationError` if Dynamo Snapshot waits for this process to be ready for it."""
    if environ.get(SNAPSHOT_DIRECTORY):
        raise ConfigurationError(f"{SNAPSHOT_DIRECTORY} is set, but this worker takes no snapshots: a start is as fast")


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
        check_port(environ.get(host_name) or "0.0.0.0", int(text), port_name)


def _highest_system_port() -> int:
    """Versions before 1.6 read the system port as a signed 16-bit number."""
    try:
        return 65535 if _installed_version() >= (1, 6) else 32767
    except importlib.metadata.PackageNotFoundError:  # the doctor looks at ports without Dynamo, too
        return 65535


def _installed_version() -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version("ai-dynamo").split(".")[:3] if part.isdecimal())


def check_port(host: str, port: int, name: str) -> None:
    """Raises `StartupError`, which begins with `name`, if nobody can listen on `port` of `host`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # the latter of what can be no name of a host
        reason = error.strerror or error if isinstance(error, OSError) else "is no name of a host"
        raise StartupError(f"{name}: cannot listen on {host}:{port}: {reason}") from None


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
