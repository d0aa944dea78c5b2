"""Workers behind OpenEngine and a front door that asks them itself: no process of Dynamo."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from e2e_stack import MODEL, Process, Stack, Worker, http, wait_for
from ports import free_port

EXACT = {"DEVICE": "cpu", "DTYPE": "float32", "NUMERICS": "exact", "KV_BLOCKS": "512"}
"""Options of every worker, over which its arguments win."""

_DYNAMOS = ("DYN_DISCOVERY_BACKEND", "DYN_REQUEST_PLANE", "DYN_EVENT_PLANE")
"""Variables that are options of no worker behind OpenEngine."""
_FOR_THE_FRONT_DOOR = {"--dyn-reasoning-parser", "--dyn-tool-call-parser", "--custom-jinja-template"}
"""Options that a worker behind OpenEngine has no use for, and refuses."""


class EngineStack(Stack):
    """Workers behind OpenEngine, in the place of a stack of Dynamo's processes.

    Attributes:
        targets: Address of each worker, in the order in which they were started.
    """

    def __init__(self, directory: Path, model_path: Path, *, warm: bool = True) -> None:
        super().__init__(directory, model_path, warm=warm)
        self.targets: list[str] = []
        self._worker_arguments: list[str] = []
        for name in _DYNAMOS:
            del self.environ[name]
        self.environ |= {f"WORKER_{name}": value for name, value in EXACT.items()}

    def start_frontend(self, *arguments: str) -> Process | None:  # type: ignore[override]
        """Start nothing: the front door is the frontend."""

    def start_worker(self, *arguments: str, **_: Any) -> Worker:
        """Start a worker with the arguments of one of Dynamo's, and wait until it serves."""
        worker = self.start_engine(*arguments)
        wait_for(lambda: http(f"http://127.0.0.1:{worker.port}/health")[0] == 200 or not worker.running, "worker")
        assert worker.running, worker.log
        return worker

    def start_engine(self, *arguments: str, scheme: str = "grpc", port: int = 0) -> Worker:
        """Start a worker; a front door waits until it is ready."""
        port, probes = port or free_port(), free_port()
        self._worker_arguments = list(arguments)
        for flag in _FOR_THE_FRONT_DOOR.intersection(arguments):
            place = arguments.index(flag)
            arguments = (*arguments[:place], *arguments[place + 2 :])
        command = [sys.executable, "-m", "worker", "--runtime", "openengine", "--grpc-port", str(port)]
        command += ["--metrics-port", str(probes), "--served-model-name", MODEL, "--model-path", str(self.model_path)]
        log = self.directory / f"worker{len(self._processes)}.log"
        worker = Worker([*command, *arguments], self.environ, log, probes, warm=self.warm)
        self._processes.append(worker)
        self.targets.append(f"{scheme}://127.0.0.1:{port}")
        return worker

    @property
    def upstream(self) -> str:
        """Addresses of all workers."""
        return ",".join(self.targets)

    def door_arguments(self, *arguments: str) -> list[str]:
        """The model, and the workers' own arguments behind those of the front door."""
        model = [] if "--model-path" in arguments else ["--model-path", str(self.model_path)]
        own = [] if "--" in arguments else ["--"]
        return [*model, *arguments, *own, *self._worker_arguments]

    def wait_for_workers(self, door: Any) -> None:
        """Until all workers are ready."""

        def is_ready() -> bool:
            for process in self._processes:
                assert process.running, process.log
            return f'"instances": {len(self.targets)}' in http(f"{door.url}/health")[1]

        wait_for(is_ready, "workers", 300.0)


@contextlib.contextmanager
def running_engines(directory: Path, model_path: Path) -> Iterator[EngineStack]:
    """A stack whose processes are killed at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    stack = EngineStack(directory, model_path)
    try:
        yield stack
    finally:
        stack.end()
