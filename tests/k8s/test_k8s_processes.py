"""Pods of `k8s/graphs/agg.yaml` and `disagg.yaml`, run here as processes: they start within their
probes, answer the smoke test, stay below their limits, and end within their grace periods.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import Stack, http, running_stack, wait_for
from gguf_files import Source
from manifest_files import Component, components
from ports import free_port
from running_pods import Limits, RunningContainer, num_bytes

from worker.tiny_model import write_tiny_model

MODEL = "tiny-model"
START_S = 120.0


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    write_tiny_model(tmp_path / "models" / MODEL)
    with running_stack(tmp_path, tmp_path / "models" / MODEL) as stack:
        yield stack


def run(stack: Stack, part: Component, container: dict[str, Any], **environ: str) -> RunningContainer:
    """With the manifest's command, arguments and variables; ports, paths and discovery are this
    machine's.
    """
    system_port, behind = str(free_port()), str(stack.inner_port)
    ports = {"8000": str(stack.http_port), "8001": behind, "9090": system_port}
    here = {**ports, "0.0.0.0": "127.0.0.1", "eth0": "lo", "/cache": f"{stack.directory}/cache"}
    words = [here.get(word, word).replace(":8001", f":{behind}") for word in container["args"]]
    for folder in ("/models/", "/packed"):
        words = [word.replace(folder, f"{stack.directory}{folder}") for word in words]
    command = [sys.executable, *container["command"][1:], *words]
    given = {name: here.get(value, value) for name, value in part.environ.items()}
    own = {"HOME": str(stack.directory), "DYN_NAMESPACE_WORKER_SUFFIX": ""}
    of_pod = ("DLW_POOL_SECRET", "DYN_SYSTEM_PORT", "XDG_CACHE_HOME")
    kept: dict[str, str] = {name: given[name] for name in of_pod if name in given}
    log = stack.directory / f"{part.type}-{container['name']}.log"
    grace_s = part.pod["terminationGracePeriodSeconds"]
    return RunningContainer(
        container, command, {**given, **stack.environ, **own, **kept, **environ}, ports, grace_s, log
    )


@pytest.mark.parametrize("graph", ["agg", pytest.param("disagg", marks=pytest.mark.campaign)])
def test_the_pods_of_a_graph_pass_the_smoke_test(stack: Stack, graph: str) -> None:
    parts = [part for part in components("frontend", "prefill", "decode", "worker") if part.graph == graph]
    with ExitStack() as running:
        pods = [
            running.enter_context(closing(run(stack, part, container, DYN_ENABLE_TEST_LOGITS_PROCESSOR="1")))
            for part in parts
            for container in part.pod["containers"]
        ]
        for pod in pods:
            pod.await_ready(START_S)
        wait_for(lambda: MODEL in http(f"{stack.url}/v1/models")[1], "model")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
        answer = wait_for(lambda: answered(stack, body), "an answer")
        assert "Hello world!" in answer
        status, answer = http(f"{stack.url}/detokenize", {"model": MODEL, "tokens": [5]})
        assert (status, "prompt" in answer) == (200, True), answer  # the front door has the model's files
        assert http(f"{stack.url}/v1/chat/completions", {**body, "user": "a" * 2**21})[0] == 413
        assert http(f"{stack.url}/v1/chat/completions", {**body, "suffix": "a"})[0] == 400
        workers = pods[1 - len(parts) :]  # the frontend's pod, which comes first, has two containers
        assert [pod.end() for pod in workers] == [0] * len(workers)


def test_a_frontend_that_leaves_loses_no_answer(stack: Stack) -> None:
    """Neither one that is begun, nor one that comes before every node knows that the pod leaves."""
    (part,) = (part for part in components("frontend") if part.graph == "agg")
    options = ("--engine", "constant", "--constant-step-s", "0.1")
    worker = stack.start_worker(*options, wait=False, DYN_NAMESPACE=part.environ["DYN_NAMESPACE"])
    with ExitStack() as running, ThreadPoolExecutor(2) as pool:
        pods = [running.enter_context(closing(run(stack, part, each))) for each in part.pod["containers"]]
        for pod in pods:
            pod.await_ready(START_S)
        stack.wait_endpoint(worker)
        url, body = f"{stack.url}/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 1}
        wait_for(lambda: '"tiny"' in http(f"{stack.url}/v1/models")[1], "model")
        wait_for(lambda: http(url, body)[0] == 200, "an answer")
        long = {**body, "max_tokens": 80, "ignore_eos": True, "stream": True}
        with urllib.request.urlopen(json_request(url, long), timeout=30) as stream:
            stream.readline()
            ends = [pool.submit(pod.end) for pod in pods]
            time.sleep(1)
            late = http(url, body)
            assert late[0] == 200, late
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert [end.result() for end in ends] == [0, 0]


def test_a_converted_checkpoint_outlives_its_pod(stack: Stack) -> None:
    """In the volume that is mounted for it: there is nothing of it below HOME, which is small."""
    models = stack.directory / "models"
    Source(models / MODEL).write(models / "tiny.gguf")
    (part,) = (part for part in components("worker") if part.graph == "agg")
    container = {**part.main, "args": [word.replace(MODEL, "tiny.gguf") for word in part.main["args"]]}
    logs = []
    for _ in range(2):
        with closing(run(stack, part, container)) as pod:
            pod.await_ready(START_S)
            logs.append(pod.process.log)
            assert pod.end() == 0
    assert ["converting tiny" in log for log in logs] == [True, False], logs
    (kept,) = stack.directory.rglob("dynamo-logits-worker/models/*/tiny/model.safetensors")
    assert kept.is_relative_to(stack.directory / "cache")


def json_request(url: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})


def answered(stack: Stack, body: dict[str, Any]) -> str | None:
    """The answer; None while there is no worker for it."""
    status, text = http(f"{stack.url}/v1/chat/completions", body)
    assert status != 400, text
    return text if status == 200 else None


PROBE = {"httpGet": {"path": "/live", "port": 80}, "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1}
SERVES = """
import http.server, signal, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() < {ends_s} else 503)
        self.end_headers()
signal.signal(signal.SIGTERM, {at_end})
http.server.ThreadingHTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


def serving(directory: Path, ends_s: float, at_end: str, memory: str = "4Gi") -> RunningContainer:
    """A container that answers its probes until a time of the monotonic clock."""
    port = free_port()
    probes = dict.fromkeys(("startupProbe", "livenessProbe", "readinessProbe"), PROBE)
    script = SERVES.format(ends_s=ends_s, at_end=at_end, port=port)
    container = {**probes, "resources": {"limits": {"memory": memory}}}
    probes["startupProbe"] = {**PROBE, "failureThreshold": 60}
    container |= probes
    command = ["/usr/bin/env", sys.executable, "-c", script]
    return RunningContainer(container, command, dict(os.environ), {"80": str(port)}, 1, directory / "log")


def test_what_kubelet_would_kill_is_noticed(tmp_path: Path) -> None:
    """A process that stops answering, one that outlives its grace period, and one above its
    memory.
    """
    with closing(serving(tmp_path, float("1e18"), "signal.SIG_IGN")) as pod:
        pod.await_ready(START_S)
        assert pod.end() == -9
    with closing(serving(tmp_path, float("1e18"), "lambda *_: sys.exit(0)")) as pod:
        pod.await_ready(START_S)
        assert pod.end() == 0
    with closing(serving(tmp_path, float("1e18"), "signal.SIG_DFL", memory="1Mi")) as pod:
        pod.await_ready(START_S)
        with pytest.raises(AssertionError, match="with limits"):
            pod.end()
    with closing(serving(tmp_path, time.monotonic() + 3, "signal.SIG_DFL")) as pod:
        wait_for(lambda: pod.verdict, "that the liveness probe fails")
        assert not pod.is_ready.is_set()
        with pytest.raises(AssertionError):
            pod.end()


def test_limits_are_those_of_a_control_group(tmp_path: Path) -> None:
    """In a tree that looks like one of version 2; none is made where none may be."""
    with subprocess.Popen(["sleep", "60"]) as process:
        assert Limits({"memory": "1Gi"}, process.pid, tmp_path).group is None
        (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
        limits = Limits({"memory": "512Mi", "cpu": "1.5"}, process.pid, tmp_path)
        assert limits.group is not None
        written = {path.name: path.read_text() for path in limits.group.iterdir()}
        assert written == {
            "memory.max": str(2**29),
            "cpu.max": "150000 100000",
            "cgroup.procs": str(process.pid),
        }
        process.kill()
    assert num_bytes("4Gi") == 4 * 2**30
