"""Dynamo's frontend lists the worker's routes, and a trainer finds and asks them there."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import DYNAMO, Stack, http, wait_for
from ports import free_port

pytestmark = pytest.mark.skipif(DYNAMO < (1, 6), reason="/v1/rl/workers came with ai-dynamo 1.6")

KEY = "a trainer's key"


def ask(url: str, body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def test_a_trainer_finds_the_worker(stack: Stack, tmp_path: Path) -> None:
    port, keys = free_port(), tmp_path / "keys.txt"
    keys.write_text(KEY)
    stack.environ["DYN_RL_PORT"] = str(port)
    stack.environ["DYN_ENABLE_RL"] = "true"
    stack.start_frontend()
    worker = stack.start_worker("--engine-port", str(free_port()), "--engine-key-file", str(keys))

    def workers() -> list[dict[str, Any]]:
        status, text = http(f"http://127.0.0.1:{port}/v1/rl/workers")
        found: list[dict[str, Any]] = json.loads(text)["workers"] if status == 200 else []
        return [one for one in found if one.get("routes")]

    (found,) = wait_for(workers, "the worker's routes")
    assert {"pause_generation", "resume_generation", "update_weights_from_disk"} <= set(found["routes"])
    assert "set_weight_version" not in found["routes"]
    engine = f"{found['system_url']}/engine"
    assert ask(f"{engine}/pause_generation", {"mode": "keep", "clear_cache": True})["state"] == "paused"
    version = ask(f"{engine}/get_weight_version", {})
    assert (version["status"], version["version"], version["version_declared"]) == ("ok", "0", False)
    assert ask(f"{engine}/resume_generation", {})["state"] == "serving"
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    wait_for(lambda: not workers(), "no routes of a worker that has left")
