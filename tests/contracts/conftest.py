from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONS = {"1.2": "1.2.0", "1.3": "1.3.0rc29"}

# answers have a descriptor of their own: TensorRT-LLM prints to standard output when it is imported
SERVER = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    space = {}
    exec(json.loads(line), space)
    print(json.dumps(space["answer"]), file=answers, flush=True)
"""


class StandIn:
    """A process that has the stand-in of one version: evaluates code, and answers with what it
    calls ``answer``.
    """

    def __init__(self, version: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env={
                **os.environ,
                "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests/trtllm_standin",
                "TRTLLM_STANDIN": json.dumps({"version": VERSIONS[version]}),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, code: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(code), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def contract() -> Any:
    return json.loads(Path(__file__).with_name("trtllm.json").read_text())


@pytest.fixture(scope="session", params=list(VERSIONS))
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def ask(version: str) -> Iterator[StandIn]:
    stand_in = StandIn(version)
    yield stand_in
    stand_in.end()
