"""``python -m worker``: check, load, serve, drain; with ``replay`` or ``inspect`` first, those.

Exit 0 after a clean drain, 2 for configuration, 1 for the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from worker.build import build
from worker.errors import ConfigurationError, ServingError, StartupError
from worker.runtimes import dynamo as runtime

EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; every failure is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    if list(argv[:1]) == ["replay"]:
        from worker.replay import main as replay  # imports torch

        return replay(argv[1:])
    if list(argv[:1]) == ["inspect"]:
        from worker.inspect import main as inspect  # imports torch

        return inspect(argv[1:])
    try:
        built = build(argv)
    except ConfigurationError as error:
        return _complain(error, EXIT_CONFIGURATION)
    except StartupError as error:
        return _complain(error, EXIT_FAILURE)

    from worker.runtimes.llm_engine import WorkerEngine  # imports the runtime, which `build` looked for

    engine, config = WorkerEngine.of(built)
    try:
        runtime.run(engine, config)
    except Exception as error:  # the process boundary: one line, and a status that says so
        return _complain(engine.startup_error or error, EXIT_FAILURE)
    if engine.broken is not None:
        return _complain(f"engine broken: {engine.broken}", EXIT_FAILURE)
    return 0


def _complain(reason: ServingError | Exception | str, status: int) -> int:
    print(f"worker: error: {' '.join(str(reason).split())}", file=sys.stderr)
    return status


def run() -> None:
    """Console script: `main`, then an exit that the runtime's threads cannot spoil."""
    runtime.finish(main())


if __name__ == "__main__":
    run()
