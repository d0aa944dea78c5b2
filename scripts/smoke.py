"""The smoke test of an installed worker: makes a tiny model, serves it on loopback with the test
processor on, and checks that a chat through frontend and front door answers ``Hello world!``.

``python smoke.py``, with the Python that has the worker; nothing of the checkout is used. Exit
status 0 if it passed and every process ended as it should. Only the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

EXPECTED = "Hello world!"
START_S = 300.0
STOP_S = 90.0
MODEL = "tiny-model"
LOG_CHARACTERS = 8000
"""Characters of the processes' output that a failure shows."""


class Failed(Exception):
    """The message says why."""


def free_ports(number: int) -> list[int]:
    """Free ports of loopback, all different."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def environ_in(directory: Path) -> dict[str, str]:
    """Everything on loopback, all state in ``directory``, and packages from this Python alone."""
    ours = ("DYN_", "DYNAMO_", "FRONT_DOOR_", "WORKER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {
        **kept,
        "HOME": str(directory),
        "TMPDIR": str(directory),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
        "PYTHONSAFEPATH": "1",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(directory / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_LOG": "warn",
        "WORKER_ENABLE_KV_ROUTING": "false",
        "DYN_ENABLE_TEST_LOGITS_PROCESSOR": "1",
    }


def commands(directory: Path, door: int, frontend: int) -> dict[str, list[str]]:
    """Commands of the processes to start, by name."""
    host = ["--host", "127.0.0.1", "--port", str(door)]
    model = ["--model-path", str(directory / MODEL), "--device", "cpu", "--kv-blocks", "512"]
    return {
        "frontend": ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(frontend)],
        "front door": ["-m", "worker.frontdoor", *host, "--upstream", f"http://127.0.0.1:{frontend}"],
        "worker": ["-m", "worker", *model],
    }


def answer(url: str) -> str | None:
    """Text of one chat, None until there is one."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        error.close()
        return None
    except OSError:
        return None


def await_answer(url: str, processes: dict[str, subprocess.Popen[bytes]]) -> str:
    """Raises `Failed` if a process ends first, or nobody answers for `START_S`."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        for name, process in processes.items():
            if process.poll() is not None:
                raise Failed(f"the {name} ended with status {process.returncode}")
        text = answer(url)
        if text is not None:
            return text
        time.sleep(0.2)
    raise Failed(f"no answer within {START_S:g} s")


def end(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """The last started first: the worker drains while the frontend is there. Raises `Failed`."""
    problems = []
    for name, process in reversed(processes.items()):
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status:
            problems.append(f"the {name} ended with status {status}")
    if problems:
        raise Failed("; ".join(problems))


def main() -> int:
    """Run it; the exit status."""
    with tempfile.TemporaryDirectory(prefix="dlw-smoke-") as name:
        directory, environ = Path(name), environ_in(Path(name))
        python = [sys.executable, "-m", "worker.tiny_model", str(directory / MODEL)]
        subprocess.run(python, env=environ, cwd=directory, check=True, stdout=subprocess.DEVNULL)
        door, frontend = free_ports(2)
        processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for part, command in commands(directory, door, frontend).items():
                with (directory / "log").open("ab") as log:
                    processes[part] = subprocess.Popen(
                        [sys.executable, *command], env=environ, cwd=directory, stdout=log, stderr=log
                    )
            text = await_answer(f"http://127.0.0.1:{door}/v1/chat/completions", processes)
            end(processes)
            if text != EXPECTED:
                raise Failed(f"expected {EXPECTED!r}, got {text!r}")
        except Failed as error:
            sys.stderr.write((directory / "log").read_text(errors="replace")[-LOG_CHARACTERS:])
            sys.stderr.write(f"smoke: {error}\n")
            return 1
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    sys.stdout.write(f"smoke: {text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
