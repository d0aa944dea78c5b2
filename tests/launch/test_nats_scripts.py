"""The launch scripts with NATS, as a user runs them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launched_script import REPOSITORY, LaunchedScript, launched
from ports import free_port

BATCH = "worker.runtimes.nats.batch.command"


def run(*argv: str) -> str:
    """Output of one of our programs. Raises if it fails."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, *argv], check=True, capture_output=True, text=True, env=environment).stdout


def test_requests_and_a_batch(tmp_path: Path) -> None:
    (tmp_path / "batch.jsonl").write_text(
        json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 3}})
    )
    (tmp_path / "an environment").symlink_to(sys.prefix)
    variables = {"NATS_PORT": str(free_port()), "DLW_VENV": str(tmp_path / "an environment")}
    with launched(tmp_path, "--device", "cpu", variables=variables, script="nats.sh") as script:
        script.wait_until_ready()
        printed = f"{script.read_until('nats_client.py').strip()} --max-tokens 8"
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        assert subprocess.run(["bash", "-c", printed], check=True, capture_output=True, env=environment).stdout.strip()
        there = ["--nats-url", script.url]
        batch = run("-m", BATCH, "submit", str(tmp_path / "batch.jsonl"), "--model", script.model, *there).strip()
        run("-m", BATCH, "status", batch, "--watch", *there)
        (line,) = run("-m", BATCH, "results", batch, *there).splitlines()
        assert json.loads(line)["response"]["body"]["usage"]["completion_tokens"] == 3
        check_ctrl_c(script)


def test_two_servers_do_not_keep_their_state_in_one_place(tmp_path: Path) -> None:
    """The second one would take what the first one has for its own, and write over it."""
    store = tmp_path / "store"
    store.mkdir()
    variables = {"NATS_PORT": str(free_port()), "NATS_STORE": str(store)}
    with (store / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with launched(tmp_path, variables=variables, script="nats.sh") as script:
            assert script.finish() == 1
    assert f"another nats-server keeps its state in {store}; set NATS_URL" in script.output


def test_a_port_that_another_server_has(tmp_path: Path) -> None:
    """The worker would begin to serve there, and our own server's log of why it ended is gone."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with launched(tmp_path, variables={"NATS_PORT": port}, script="nats.sh") as script:
            assert script.finish() == 1
    said = f"port {port} on 127.0.0.1 is taken; set NATS_PORT to a free one, or NATS_URL to the server that is there"
    assert script.output == f"nats: error: {said}\n"


@pytest.mark.parametrize(
    ("script", "variable", "expected"),
    [
        ("nats.sh", "NATS_PORT", "a port number"),
        ("agg_nats.sh", "ETCD_LEASE_TTL", "a number from 1 to 100000"),
    ],
)
def test_numbers_are_numbers(tmp_path: Path, script: str, variable: str, expected: str) -> None:
    with launched(tmp_path, variables={variable: "60s"}, script=script) as started:
        assert started.finish() == 1
    assert started.output == f"{script.removesuffix('.sh')}: error: {variable} must be {expected}, got '60s'\n"


@pytest.mark.campaign
def test_the_kv_router_over_nats(tmp_path: Path) -> None:
    with launched(tmp_path, "--device", "cpu", script="agg_nats.sh") as script:
        script.wait_until_ready()
        with script.client() as client:
            answer = client.completions.create(model=script.model, prompt="Hello", max_tokens=4)
        assert answer.choices[0].text
        check_ctrl_c(script)


def check_ctrl_c(script: LaunchedScript) -> None:
    children = []
    for each in psutil.Process(script.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the sleep that the script is in
            if each.name() != "sleep":
                children.append(each)
    script.press_ctrl_c()
    assert script.finish() == 0, script.output
    script.assert_nothing_left(children)
