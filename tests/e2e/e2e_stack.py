"""Real frontend and worker processes on loopback, with file discovery and no services."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import psutil
from ports import free_port
from warm_start import WarmProcess

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "tiny"
START_TIMEOUT_S = 90.0
STAND_IN = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests/trtllm_standin"}
"""Environment of a worker that takes the stand-in for TensorRT-LLM."""

DYNAMO = tuple(int(part) for part in version("ai-dynamo").split(".")[:2])
"""(1, 4) or (1, 6): what a client sees of an error differs."""


def wait_for(condition: Any, what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
    """The first true value of ``condition()``; other processes offer nothing to await."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout_s:g} s")


def http(url: str, body: Any = None, timeout_s: float = 30.0) -> tuple[int, str]:
    """Status and text of one request, POST if there is a body; (0, reason) if there is no
    answer.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class Process:
    """One process of ours, its log in a file; ended by its pid.

    Args:
        command: Program and arguments.
        environ: The whole environment.
        log: Where it writes.
        warm: Fork Python from a process that has imported Dynamo, which read its variables for logs
            and traces then.
    """

    def __init__(self, command: list[str], environ: Mapping[str, str], log: Path, *, warm: bool = True) -> None:
        self.log_path = log
        self.child: WarmProcess | subprocess.Popen[bytes]
        if warm and command[0] == sys.executable:
            self.child = WarmProcess(command[1:], environ, log)
        else:
            with log.open("wb") as output:
                self.child = subprocess.Popen(command, env=dict(environ), stdout=output, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        """Everything that it wrote, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log_path.read_text(errors="replace"))

    @property
    def complaint(self) -> str:
        """The one line that says why a worker of ours ended. Threads of Dynamo's runtime, which see
        its connections close, may log behind it.
        """
        (line,) = (line for line in self.log.splitlines() if line.startswith("worker: error: "))
        return line

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Exit status; negative for a signal."""
        return self.child.wait(timeout_s)

    @property
    def running(self) -> bool:
        return self.child.poll() is None

    def end(self) -> None:
        if self.running:
            self.child.send_signal(signal.SIGKILL)
        self.child.wait(30)


class Worker(Process):
    """A worker process with its system port."""

    def __init__(
        self, command: list[str], environ: Mapping[str, str], log: Path, port: int, *, warm: bool = True
    ) -> None:
        super().__init__(command, environ, log, warm=warm)
        self.port = port

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of metric ``name`` that carry all ``labels``."""
        status, text = http(f"http://127.0.0.1:{self.port}/metrics")
        assert status == 200, text
        total = 0.0
        for line in text.splitlines():
            match = re.match(rf"{name}(?:{{(.*)}})? (\S+)$", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def children(self, word: str) -> list[psutil.Process]:
        """Processes that it has started with ``word`` in their commands."""
        found = psutil.Process(self.child.pid).children()
        return [child for child in found if word in " ".join(child.cmdline())]

    def end_unnoticed(self) -> None:
        """As if its machine died: nobody removes its entries from discovery but who misses it."""
        (guard,) = wait_for(lambda: self.children("/bin/sh"), "the guard of its entries")
        guard.kill()
        self.end()


class Stack:
    """Processes that find each other in one directory."""

    def __init__(self, directory: Path, model_path: Path, *, warm: bool = True) -> None:
        self.directory = directory
        self.warm = warm
        self.model_path = model_path
        self.http_port = free_port()
        self.inner_port = free_port()
        """Of the other server where a pod has two: a front door, and the frontend behind it."""
        self.url = f"http://127.0.0.1:{self.http_port}"
        self._processes: list[Process] = []
        self._clients: list[openai.OpenAI] = []
        self._coming_up: Process | None = None  # a frontend of which nobody has heard yet
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "DYNAMO_", "WORKER_"))},
            "DLW_POOL_SECRET": secrets.token_hex(32),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
            "DYN_HTTP_HOST": "127.0.0.1",
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "WORKER_ENABLE_KV_ROUTING": "false",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        }

    def start_frontend(self, *arguments: str) -> Process:
        """Start a frontend; what asks it waits until it answers, so that a worker may start
        meanwhile.
        """
        command = [sys.executable, "-m", "dynamo.frontend", "--http-port", str(self.http_port), *arguments]
        frontend = Process(
            command, self.environ, self.directory / f"frontend{len(self._processes)}.log", warm=self.warm
        )
        self._processes.append(frontend)
        self._coming_up = frontend
        return frontend

    @property
    def upstream(self) -> str:
        """Address that a front door stands before."""
        return self.url

    def door_arguments(self, *arguments: str) -> list[str]:
        """The arguments of a front door that is given ``arguments``."""
        return list(arguments)

    def wait_for_workers(self, door: Any) -> None:
        """Until a front door has workers to ask, where it asks them itself."""

    @property
    def frontend(self) -> Process:
        """The frontend that was started last."""
        return next(process for process in reversed(self._processes) if process.log_path.name.startswith("frontend"))

    def wait_for_frontend(self) -> None:
        """Until the frontend that was started last answers."""
        frontend, self._coming_up = self._coming_up, None
        if frontend is not None:
            wait_for(lambda: http(f"{self.url}/health")[0] == 200 or not frontend.running, "frontend")
            assert frontend.running, frontend.log

    def start_worker(
        self, *arguments: str, scripted: bool = False, script: Path | None = None, wait: bool = True, **environ: str
    ) -> Worker:
        """Start a worker; ``scripted`` replaces its engine by `scripted_worker.ScriptedEngine`, and
        ``script`` runs instead of ``-m worker``.
        """
        script = Path(__file__).with_name("scripted_worker.py") if scripted else script
        program = ["-m", "worker"] if script is None else [str(script)]
        command = [sys.executable, *program, "--served-model-name", MODEL, *arguments]
        if not any(argument.startswith("--model-path") for argument in arguments):
            command += ["--model-path", str(self.model_path)]
        port = int(environ.pop("DYN_SYSTEM_PORT", "0")) or free_port()
        log = self.directory / f"worker{len(self._processes)}.log"
        worker = Worker(command, {**self.environ, "DYN_SYSTEM_PORT": str(port), **environ}, log, port, warm=self.warm)
        self._processes.append(worker)
        if wait:
            self.wait_registered(worker)
        return worker

    def wait_registered(self, worker: Worker) -> None:
        """Until the frontend lists the model, answers at its routes, and this worker serves its
        system port.
        """
        self.wait_for_frontend()
        wait_for(lambda: http(f"http://127.0.0.1:{worker.port}/metrics")[0] == 200 or not worker.running, "worker")
        self.wait_endpoint(worker)
        wait_for(lambda: f'"{MODEL}"' in http(f"{self.url}/v1/models")[1], "model in the frontend")
        for route in ("chat/completions", "completions"):  # which it opens a moment later
            wait_for(lambda url=f"{self.url}/v1/{route}": http(url, {})[0] != 404, route)

    def wait_endpoint(self, worker: Worker) -> None:
        """Until this worker is to be found, which does not yet make a model of it.

        A frontend that finds prefill and decode within milliseconds may keep them apart for good
        ("P/D routing remains disabled"), so that a pair is started one after the other.
        """
        wait_for(lambda: "Registered endpoint" in worker.log or not worker.running, "registration")
        assert worker.running, worker.log

    def client(self) -> openai.OpenAI:
        self.wait_for_frontend()
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self._clients.append(client)
        return client

    def async_client(self) -> openai.AsyncOpenAI:
        self.wait_for_frontend()
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, **body: Any) -> tuple[int, str]:
        self.wait_for_frontend()
        return http(f"{self.url}/v1/{path}", {"model": MODEL, **body})

    def keep(self, process: Process) -> None:
        """End this process with the others."""
        self._processes.append(process)

    @property
    def workers(self) -> list[Worker]:
        return [process for process in self._processes if isinstance(process, Worker)]

    def evidence(self) -> str:
        """What the processes say of themselves, for the report of a request without an answer."""
        urls: dict[Process, str] = {self.frontend: self.url}
        urls |= {worker: f"http://127.0.0.1:{worker.port}" for worker in self.workers}
        return "\n".join(_evidence(process, url) for process, url in urls.items())

    def registered(self) -> list[Path]:
        """Instances in the discovery directory."""
        return [path for path in (self.directory / "discovery").glob("v1/instances/*") if path.is_file()]

    def end(self) -> None:
        for client in self._clients:
            client.close()
        for process in reversed(self._processes):
            process.end()


async def leave_until_cancelled(client: openai.AsyncOpenAI, worker: Worker) -> None:
    """Close streams after their first event, until the worker has counted one as cancelled.

    On a busy machine an answer may be complete before.
    """

    def cancelled() -> float:
        return worker.metric("dlw_requests_total", outcome="cancelled")

    before = cancelled()
    while cancelled() == before:
        stream = await client.completions.create(
            model=MODEL, prompt="Once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "slot freed")


def _evidence(process: Process, url: str) -> str:
    status, text = http(f"{url}/metrics", timeout_s=2)
    found = (line for line in text.splitlines() if line.startswith(("dlw_", "dynamo_")) and "_bucket" not in line)
    metrics = "\n".join(line for line in found if float(line.rpartition(" ")[2]) != 0)
    state = "runs" if process.running else "has ended"
    return f"== {process.log_path.name} {state}; its metrics ({status}):\n{metrics}\n-- its log:\n{process.log[-4000:]}"


@contextlib.contextmanager
def asking(num_clients: int, ask: Callable[[], object], pause_s: float = 0.0) -> Iterator[None]:
    """Clients that each ask again, after a pause, as soon as they have an answer."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(pause_s):
            ask()

    threads = [threading.Thread(target=run) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def running_stack(directory: Path, model_path: Path, *, warm: bool = True) -> Iterator[Stack]:
    """A stack whose processes are killed at the end; with ``DLW_UPSTREAM=grpc`` in the environment
    one without Dynamo.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stack = Stack(directory, model_path, warm=warm)
    if os.environ.get("DLW_UPSTREAM") == "grpc":
        from engine_stack import EngineStack  # which imports this module

        stack = EngineStack(directory, model_path, warm=warm)
    try:
        yield stack
    finally:
        stack.end()
