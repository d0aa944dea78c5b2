"""``python -m worker``: check, load, serve, drain; with ``replay``, ``inspect``, ``quantize``
or ``doctor`` first, those.

Exit 0 after a clean drain, 2 for configuration, 1 for the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from worker.build import Built, build
from worker.errors import ConfigurationError, ServingError, StartupError
from worker.importing import prepare, uncollected
from worker.installation import check_threads
from worker.runtimes import dynamo as runtime
from worker.standard_error import say

if TYPE_CHECKING:
    from worker.server import RequestServer

EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2

Command: TypeAlias = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; every failure is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # in a log on a full disk one fails the start
    try:
        check_threads(os.environ)
    except ConfigurationError as error:
        return _complain(error, EXIT_CONFIGURATION)
    if argv and (command := _COMMANDS.get(argv[0])) is not None:
        with uncollected():
            run_command = command()
        return run_command(argv[1:])
    try:
        with uncollected():
            built = build(argv)
            serve, server = _RUNTIMES[built.arguments.runtime](built)
    except ConfigurationError as error:
        return _complain(error, EXIT_CONFIGURATION)
    except (StartupError, OSError) as error:  # the system's own reasons name the file
        return _complain(error, EXIT_FAILURE)
    return _served(serve, server)


def _replay() -> Command:
    from worker.replay import main as replay  # imports torch, as those below do

    return replay


def _inspect() -> Command:
    from worker.inspect import main as inspect

    return inspect


def _quantize() -> Command:
    from worker.quantize import main as quantize

    return quantize


def _doctor() -> Command:
    from worker.doctor import main as doctor

    return doctor


_COMMANDS = {"replay": _replay, "inspect": _inspect, "quantize": _quantize, "doctor": _doctor}


def _on_dynamo(built: Built) -> tuple[Callable[[], None], RequestServer]:
    from worker.runtimes.dynamo_engine import WorkerEngine  # imports the runtime, which `build` looked for

    engine, config = WorkerEngine.of(built)
    return lambda: runtime.run(engine, config, engine.server.signalled), engine.server


def _on_nats(built: Built) -> tuple[Callable[[], None], RequestServer]:
    from worker.runtimes.direct.process import run
    from worker.runtimes.nats.runtime import NatsWorker

    worker = NatsWorker(built)
    return lambda: run(worker), worker.server


def _on_openengine(built: Built) -> tuple[Callable[[], None], RequestServer]:
    from worker.runtimes.direct.process import run
    from worker.runtimes.openengine.runtime import OpenEngineWorker

    worker = OpenEngineWorker(built)
    return lambda: run(worker), worker.server


_RUNTIMES = {"dynamo": _on_dynamo, "nats": _on_nats, "openengine": _on_openengine}


def _served(serve: Callable[[], None], server: RequestServer) -> int:
    try:
        serve()
    except Exception as error:  # the process boundary: one line, and a status that says so
        return _complain(server.startup_error or error, EXIT_FAILURE)
    if server.broken is not None:
        return _complain(f"engine broken: {server.broken}", EXIT_FAILURE)
    return 0


def _complain(reason: ServingError | Exception | str, status: int) -> int:
    say(f"worker: error: {' '.join(str(reason).split())}")
    return status


def run() -> None:
    """Console script: `main`, then an exit that the runtime's threads cannot spoil."""
    prepare()
    runtime.finish(main())


if __name__ == "__main__":
    run()
