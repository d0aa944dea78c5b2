"""How many processes of each part a load needs, from what `parts.py`, `stores.py` and
`consumer_group.py` measured. The site's calculator is given the same figures, and has the same
formulas in `docs/calculator.js`; `tests/documents/test_calculator.py` compares them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fleet_model import Load, Worker

RESULTS = Path(__file__).resolve().parent / "results"
DOOR, FRONTEND = "front door", "Dynamo's frontend"

USE = 0.7
"""Share of its time that a part may be busy with the mean load."""

FRONTEND_CORES = 4

GROUP_SIZE, GROUP_TOKENS = 1, {"short": 1, "long": 64}
"""Row of `consumer_group.json` that NATS's own cost is from, and the tokens of its answers."""


def needed(load: Load, worker: Worker) -> int:
    """Workers that keep `USE` of their rows busy on the mean."""
    return math.ceil(load.rate * (load.answer + 1) * _step_s(load, worker) / (worker.slots * USE))


def _step_s(load: Load, worker: Worker) -> float:
    """Seconds of a full worker's step, with its share of prompts."""
    return worker.step_s + worker.slots * (load.prompt / load.answer) / worker.prompt_rate


def figures() -> dict[str, Any]:
    """What is reckoned with: of each part the microseconds of a core for a request and for a token,
    of front doors and frontends the KiB of an open stream, and the shares that are planned with.
    """
    measured = _read("parts.json")
    busiest = max(one["streams"] for one in measured["costs"])
    held = {one["part"]: one["memory_kib"] for one in measured["held"]}
    parts = {
        one["part"]: {"request_us": one["request_us"], "token_us": one["token_us"], "stream_kib": held[one["part"]]}
        for one in measured["costs"]
        if one["streams"] == busiest and one["part"] in (DOOR, FRONTEND)
    }
    for kind in ("etcd", "nats"):
        parts[f"{kind} store"] = {"request_us": _read("stores.json")[kind]["server_us"], "token_us": 0.0}
    group = _read("consumer_group.json")
    short, long = (group[f"{name} {GROUP_SIZE:02}"]["server_us"] for name in GROUP_TOKENS)
    token_us = (long - short) / (GROUP_TOKENS["long"] - GROUP_TOKENS["short"])
    parts["NATS"] = {"request_us": short - token_us, "token_us": token_us}
    return {"use": USE, "frontend_cores": FRONTEND_CORES, "parts": parts}


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def plan(load: Load, worker: Worker) -> dict[str, int]:
    """How many of each serve a load: processes of one core, frontends of `FRONTEND_CORES`."""
    costs = figures()["parts"]

    def cores(part: str) -> float:
        one = costs[part]
        return float(load.rate * (one["request_us"] + load.answer * one["token_us"]) / 1e6 / USE)

    open_streams = load.rate * (load.answer + 1) * _step_s(load, worker)
    return {
        "workers": needed(load, worker),
        "front doors": math.ceil(cores(DOOR)),
        "frontends": math.ceil(cores(FRONTEND) / FRONTEND_CORES),
        "MiB of open streams in the frontends": math.ceil(open_streams * costs[FRONTEND]["stream_kib"] / 1024),
        "cores of an etcd boundary store": math.ceil(cores("etcd store")),
        "cores of a NATS boundary store": math.ceil(cores("nats store")),
        "cores of NATS servers in place of frontends": math.ceil(cores("NATS")),
    }
