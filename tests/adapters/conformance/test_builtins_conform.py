"""Every built-in keeps the contract."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builtin_examples import EXAMPLES

from adapters.processors import BUILTINS
from adapters.testing import Subject
from adapters.testing.reference_runs import reference_runs, restarted
from adapters.trtllm import ChainAdapter

pytestmark = [pytest.mark.logits_processor(builtin, EXAMPLES.get(builtin.name, ())) for builtin in BUILTINS]


@pytest.mark.slow
def test_builtin(processor_check: Callable[[], None]) -> None:
    processor_check()


def test_every_builtin_has_an_example() -> None:
    names = {builtin.name for builtin in BUILTINS}
    assert names <= EXAMPLES.keys()


_OTHER_PROCESS = """
import pickle, sys
import torch
for name, blob, shown, logits, expected in pickle.load(sys.stdin.buffer):
    pickle.loads(blob)("request", logits, [shown])
    assert torch.equal(logits[0, 0], expected), name
    print(name)
"""


@pytest.mark.slow
def test_every_builtin_goes_on_in_another_process() -> None:
    jobs = []
    for builtin in BUILTINS:
        subject = Subject(builtin, EXAMPLES[builtin.name])
        run, index = reference_runs(subject)[0], 4
        blob = pickle.dumps(ChainAdapter(restarted(subject, run, index)))
        logits = run.logits[index].clone().view(1, 1, -1)
        jobs.append((builtin.name, blob, run.history(index), logits, run.outcomes[index].dense()))
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS],
        input=pickle.dumps(jobs),
        capture_output=True,
        timeout=100,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == [builtin.name for builtin in BUILTINS]
