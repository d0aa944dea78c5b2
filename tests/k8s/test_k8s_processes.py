"""Processes of `k8s/graphs/agg.yaml`, started here as in a pod, answer their probes and end in
time.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import Process, Stack, http, running_stack, wait_for
from manifest_files import Component, components
from ports import free_port

from worker.tiny_model import write_tiny_model

MODEL = "tiny-model"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    write_tiny_model(tmp_path / "models" / MODEL)
    with running_stack(tmp_path, tmp_path / "models" / MODEL) as stack:
        yield stack


def parts() -> tuple[Component, Component]:
    frontend, worker = (part for part in components("frontend", "worker") if part.graph == "agg")
    return frontend, worker


def start(stack: Stack, part: Component, ports: dict[str, str], **environ: str) -> Process:
    """With the manifest's command, arguments and variables; ports, paths and discovery are this
    machine's.
    """
    given = {name: ports.get(value, value) for name, value in part.environ.items()}
    home = {"HOME": str(stack.directory), "DYN_NAMESPACE_WORKER_SUFFIX": ""}
    log = stack.directory / f"{part.type}.log"
    return Process(command(stack, part.main, ports), {**given, **stack.environ, **home, **environ}, log)


def command(stack: Stack, container: dict[str, Any], ports: dict[str, str]) -> list[str]:
    words = [ports.get(word, word) for word in [*container["command"], *container["args"]]]
    words = [word.replace(":8001", f":{ports.get('8001')}") for word in words]
    return [
        sys.executable,
        *(
            word.replace("/models/", f"{stack.directory}/models/").replace("/packed", f"{stack.directory}/packed")
            for word in words[1:]
        ),
    ]


def test_probes_answer_and_the_pod_ends_in_time(stack: Stack) -> None:
    frontend_part, worker_part = parts()
    system_port = worker_part.main["startupProbe"]["httpGet"]["port"]
    port = str(free_port())
    ports = {"8000": str(stack.http_port), "8001": str(free_port()), str(system_port): port, "0.0.0.0": "127.0.0.1"}
    frontend = start(stack, frontend_part, ports)
    door = Process(command(stack, frontend_part.door, ports), stack.environ, stack.directory / "door.log")
    worker = start(stack, worker_part, ports, DYN_SYSTEM_PORT=port, DYN_ENABLE_TEST_LOGITS_PROCESSOR="1")
    try:
        for process, part in ((worker, worker_part), (frontend, frontend_part)):
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = part.main[name]["httpGet"]
                url = f"http://127.0.0.1:{ports[str(asked['port'])]}{asked['path']}"
                wait_for(lambda url=url, p=process: http(url)[0] == 200 or not p.running, f"{name} of {part}")
                assert process.running, process.log
        wait_for(lambda: MODEL in http(f"{stack.url}/v1/models")[1], "model")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
        status, answer = http(f"{stack.url}/v1/chat/completions", body)
        assert (status, "Hello world!" in answer) == (200, True), answer
        status, answer = http(f"{stack.url}/detokenize", {"model": MODEL, "tokens": [5]})
        assert (status, "prompt" in answer) == (200, True), answer  # the front door has the model's files
        assert http(f"{stack.url}/v1/chat/completions", {**body, "user": "a" * 2**21})[0] == 413
        assert http(f"{stack.url}/v1/chat/completions", {**body, "suffix": "a"})[0] == 400
        worker.signal(signal.SIGTERM)
        assert worker.wait(worker_part.pod["terminationGracePeriodSeconds"]) == 0, worker.log
    finally:
        worker.end()
        door.end()
        frontend.end()
