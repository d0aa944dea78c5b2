"""A step that hangs ends the process; one that ends in time, or never begins, does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engine_doubles import ScriptedModel, StartEngine, collect

from worker.engines.embedded.host.watchdog import Watchdog
from worker.sampling import SamplingParams

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

END_S = 60.0
"""When a process counts as one that never ends; a busy machine may need a while for all the
stacks.
"""

PROGRAM = """
import asyncio, ctypes, sys, threading, time
sys.path.insert(0, {here!r})
from engine_doubles import StartEngine, ScriptedModel, collect, config
from worker.engines.embedded import EmbeddedEngine
from worker.sampling.params import SamplingParams

def hang(plan, logits):
    if len(plan.decode):
        print("hangs", flush=True)
        {hang}

async def main():
    engine = EmbeddedEngine(config(step_timeout_s=3.0), ScriptedModel(hang))
    await engine.start()
    await collect(engine, "one", [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "hang",
    ["threading.Event().wait()", "time.sleep(600)", "ctypes.PyDLL(None).sleep(600)"],
    ids=["waits", "sleeps", "keeps the interpreter"],
)
def test_a_hung_step_ends_the_process(hang: str) -> None:
    program = PROGRAM.format(here=str(HERE), hang=hang)
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=HERE.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "hangs\n"
            assert process.wait(timeout=END_S) == 1
            assert "in hang" in process.stderr.read()
        finally:
            process.kill()


def test_only_the_time_within_a_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("worker.engines.embedded.host.watchdog.monotonic", lambda: now[0])
    watchdog = Watchdog(timeout_s=10)

    def take(seconds: float) -> bool:
        now[0] += seconds
        return watchdog.is_hung()

    assert not take(1000)
    assert not watchdog.watch(lambda: take(9))
    assert not take(1000)
    assert watchdog.watch(lambda: take(11))
    assert not take(1000)
    with pytest.raises(KeyError):
        watchdog.watch(lambda: {}["missing"])
    assert not take(1000)


async def test_the_watchdog_leaves_with_the_engine(start_engine: StartEngine) -> None:
    engine = await start_engine(ScriptedModel(), step_timeout_s=60.0)
    await collect(engine, "one", [5, 6, 7], SamplingParams(max_tokens=5))
    assert engine._thread is not None
    thread = engine._thread._watchdog._thread
    assert thread.is_alive()
    await engine.stop()
    assert not thread.is_alive()
