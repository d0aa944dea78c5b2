"""The process of a worker whose runtime is ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging
from worker.runtimes.direct.process import run

class Worker:
    def shut_down(self):
        pass

    async def run(self):
        logging.getLogger("worker.runtimes.openengine.runtime").info("serving m at 127.0.0.1:%d", 50051)
        logging.getLogger("worker.engines").debug("a detail")
        logging.getLogger("some.library").info("a remark")
        logging.getLogger("some.library").warning("a warning")

run(Worker())
"""


def test_the_log_names_the_port() -> None:
    """Without Dynamo's runtime nobody else says which lines are written."""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        "INFO worker.runtimes.openengine.runtime: serving m at 127.0.0.1:50051",
        "WARNING some.library: a warning",
    ]
