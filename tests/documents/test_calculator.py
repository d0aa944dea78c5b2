"""The site's calculator gives the numbers of `benchmarks/fleet_plan.py`, from the same figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from document_pages import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from fleet_model import Load, Worker
from fleet_plan import figures, plan

PROGRAM = """
const { plan } = require(process.argv[1]);
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(given.cases.map((one) => plan(given.figures, one.load, one.worker))));
"""
LOADS = [(10_000 / 60, 512, 128), (1_000_000 / 60, 512, 128), (0.1, 1, 1), (777.7, 4096, 16), (50.0, 33, 2048)]
WORKERS = [Worker(), Worker(0.0037, 123_456.0, 7), Worker(0.5, 900.0, 512)]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the page's script with")
def test_the_page_and_the_simulation_say_the_same() -> None:
    pairs = [(Load(rate, 1, prompt, answer), worker) for rate, prompt, answer in LOADS for worker in WORKERS]
    cases = [
        {
            "load": {"rate": load.rate, "prompt": load.prompt, "answer": load.answer},
            "worker": {"step_s": worker.step_s, "slots": worker.slots, "prompt_rate": worker.prompt_rate},
        }
        for load, worker in pairs
    ]
    given = json.dumps({"figures": figures(), "cases": cases})
    command = ["node", "-e", PROGRAM, str(ROOT / "docs" / "calculator.js")]
    said = subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == [plan(load, worker) for load, worker in pairs]


def test_more_load_never_needs_less() -> None:
    worker, before = Worker(), dict.fromkeys(plan(Load(1, 1), Worker()), 0)
    for rate in (1, 10, 100, 1000, 10_000):
        found = plan(Load(rate, 1), worker)
        assert all(found[part] >= before[part] for part in found)
        before = found
