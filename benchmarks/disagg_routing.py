"""Time to first token of a known beginning, behind round-robin and behind the KV router; a part
of `disagg.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from serve import end

MODEL = "model"
START_TIMEOUT_S = 120.0
ENDING = 16
PAUSE_S = 1.0
"""Between a prompt and its second sending: the KV events are on their way."""


def measure_routing(model_path: Path, rounds: int, prefix: int) -> tuple[float, float]:
    """Median seconds to the second prompt's first token: where round-robin misses, and where the
    KV router finds.
    """
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory), model_path) as (round_robin, kv):
        numbers = random.Random(2)
        for port in (round_robin, kv):
            first_token(port, numbers.choices(range(300, 900), k=prefix))  # the first request is slower
        times = [
            [second_sending(port, numbers, prefix, known) for port, known in ((round_robin, False), (kv, True))]
            for _ in range(rounds)
        ]
    missed, found = (statistics.median(column) for column in zip(*times, strict=True))
    return missed, found


def second_sending(port: int, numbers: random.Random, prefix: int, known: bool) -> float:
    """Send one beginning with two endings; seconds to the second one's first token.

    Raises:
        RuntimeError: the second one was not sent where it should be.
    """
    beginning = numbers.choices(range(300, 900), k=prefix)
    endings = [numbers.choices(range(300, 900), k=ENDING) for _ in range(2)]
    first_token(port, beginning + endings[0])
    time.sleep(PAUSE_S)
    seconds, cached = first_token(port, beginning + endings[1])
    if (cached >= prefix) != known:
        raise RuntimeError(f"{cached} tokens were known, at port {port}")
    return seconds


def first_token(port: int, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's tokens the worker had."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 2,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    seconds = 0.0
    usage: dict[str, Any] = {}
    with post(port, body) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            seconds = seconds or time.perf_counter() - began
            usage = json.loads(line.removeprefix(b"data: ")).get("usage") or usage
    return seconds, int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def post(port: int, body: dict[str, Any]) -> Any:
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


@contextlib.contextmanager
def serving(directory: Path, model_path: Path) -> Iterator[tuple[int, int]]:
    """Two workers behind two frontends on loopback; yields the ports of round-robin's and of the
    KV router's.
    """
    environment = os.environ | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_FILE_KV": str(directory / "discovery"),
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_LOG": "error,dynamo_runtime::storage=off,dynamo_llm::http=off",
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "HOME": str(directory),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "TMPDIR": str(directory),
    }
    ports = free_port(), free_port()
    frontend = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port"]
    worker = ["-m", "worker", "--model-path", str(model_path), "--served-model-name", MODEL, "--device", "cpu"]
    commands = [
        [*frontend, str(ports[0])],
        [*frontend, str(ports[1]), "--router-mode", "kv"],
        *([*worker, "--max-num-seqs", "8", "--enable-kv-routing", "true"] for _ in range(2)),
    ]
    processes = [subprocess.Popen([sys.executable, *command], env=environment) for command in commands]
    try:
        for port in ports:
            await_condition(lambda port=port: is_answered(port), processes)  # type: ignore[misc]
        discovery = directory / "discovery" / "v1" / "instances"
        await_condition(lambda: sum(one.is_file() for one in discovery.rglob("*")) >= 2, processes)
        time.sleep(PAUSE_S)
        yield ports
    finally:
        end(reversed(processes))  # the frontends last


def await_condition(condition: Callable[[], bool], processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise SystemExit("disagg: a frontend or a worker did not start")
        time.sleep(0.2)


def is_answered(port: int) -> bool:
    with contextlib.suppress(OSError):
        first_token(port, [300])
        return True
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
