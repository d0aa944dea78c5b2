"""A step that hangs ends the process; one that ends in time, or never begins, does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_doubles import ScriptedModel, StartEngine, collect

from worker.engines.embedded.host import watchdog as host_watchdog
from worker.engines.embedded.host.beats import NativeBeats, TimedBeats, open_beats
from worker.engines.embedded.host.watchdog import Watchdog
from worker.sampling import SamplingParams

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1]

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


WITHOUT_COMPILER = """
from worker.engines.embedded.host import watchdog
from worker.engines.embedded.host.beats import TimedBeats
watchdog.open_beats = lambda status: TimedBeats()
"""


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs it."""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=HERE.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("prelude", ["", WITHOUT_COMPILER], ids=["native", "without a compiler"])
@pytest.mark.parametrize(
    "hang",
    ["threading.Event().wait()", "time.sleep(600)", "ctypes.PyDLL(None).sleep(600)"],
    ids=["waits", "sleeps", "keeps the interpreter"],
)
def test_a_hung_step_ends_the_process(hang: str, prelude: str) -> None:
    with running(prelude + PROGRAM.format(here=str(HERE), hang=hang)) as process:
        assert process.stderr is not None
        assert line(process) == "hangs"
        assert process.wait(timeout=END_S) == 1
        assert "in hang" in process.stderr.read()


def test_it_ends_where_nothing_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the disk with its log is full: then, and not when the watch of the watch is over."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(host_watchdog, "_STDERR", full.fileno())
        host_watchdog._end(Watchdog(1.0))
    assert ended == [1]


STOPPED = """
import asyncio, sys, time
sys.path.insert(0, {here!r})
from engine_doubles import StartEngine, ScriptedModel, collect, config
from worker.engines.embedded import EmbeddedEngine
from worker.sampling.params import SamplingParams

def slow(plan, logits):
    if len(plan.decode) == 1 and len(plan.decode[0].tokens) == 10:
        print("in a step", flush=True)
        time.sleep(1.5)

async def main():
    engine = EmbeddedEngine(config(step_timeout_s={limit}), ScriptedModel(slow))
    await engine.start()
    print("idle", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    tokens, _ = await collect(engine, "one", [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    print(len(tokens), flush=True)
    await engine.stop()

asyncio.run(main())
"""


@pytest.mark.parametrize("prelude", ["", WITHOUT_COMPILER], ids=["native", "without a compiler"])
def test_a_process_that_was_stopped_goes_on(prelude: str) -> None:
    """For longer than a step may take: idle, and, but for one that is built without a compiler, in
    a step."""
    limit_s = 4.0
    with subprocess.Popen(
        [sys.executable, "-c", prelude + STOPPED.format(here=str(HERE), limit=limit_s)],
        cwd=HERE.parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None

        def stop() -> None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(2 * limit_s)  # nothing to be awaited: a stopped process says nothing
            process.send_signal(signal.SIGCONT)

        try:
            assert line(process) == "idle"
            stop()
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert line(process) == "in a step"
            if not prelude:
                stop()
            assert line(process) == "20"
            assert process.wait(timeout=END_S) == 0, process.stderr.read()
        finally:
            process.kill()


class Looks:
    """In place of the event that the checks wait for: that much time passes at each look."""

    def __init__(self, now: list[float], passing: list[float]) -> None:
        self._now, self._passing = now, passing

    def wait(self, period_s: float) -> bool:
        if not self._passing:
            return True
        self._now[0] += self._passing.pop(0)
        return False


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    ("passing", "ends"),
    [
        ([1.0] * 8, False),
        ([1.0] * 9, True),
        ([1.0] * 4 + [1000.0] + [1.0] * 3, False),
        ([1000.0, 1.0, 1000.0] + [1.0] * 5, False),
        ([1.0] * 4 + [1000.0] + [1.0] * 5, True),
    ],
)
def test_the_time_for_which_a_process_was_stopped_does_not_count(
    passing: list[float], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def end(_: Watchdog) -> None:
        raise Ended

    monkeypatch.setattr(host_watchdog, "monotonic", lambda: now[0])
    monkeypatch.setattr(host_watchdog, "_end", end)
    checks = host_watchdog.Checks()
    monkeypatch.setattr(host_watchdog, "_checks", checks)
    watchdog = Watchdog(timeout_s=8)
    checks._watchdogs, checks._beats = (watchdog,), TimedBeats()
    checks._stopped = Looks(now, passing)  # type: ignore[assignment]
    if ends:
        with pytest.raises(Ended):
            watchdog.watch(checks._run)
        checks._beats.end()
    else:
        watchdog.watch(checks._run)


async def test_an_engine_that_stops_leaves_the_others_watched(start_engine: StartEngine) -> None:
    first = await start_engine(ScriptedModel(), step_timeout_s=60.0)
    second = await start_engine(ScriptedModel(), step_timeout_s=30.0)
    checks = host_watchdog._checks
    thread = checks._thread
    assert thread is not None
    assert len(checks._watchdogs) == 2
    await first.stop()
    await first.stop()
    assert thread.is_alive()
    assert [one.timeout_s for one in checks._watchdogs] == [30.0]
    await second.stop()
    assert not thread.is_alive()


TWO = """
import ctypes, time
from worker.engines.embedded.host import Watchdog

first, second = Watchdog({first}), Watchdog({second})
first.start()
second.start()
print("started", flush=True)
first.watch(lambda: None)
second.stop()
first.watch(lambda: {hang})
"""


@pytest.mark.parametrize("prelude", ["", WITHOUT_COMPILER], ids=["native", "without a compiler"])
@pytest.mark.parametrize("hang", ["time.sleep(600)", "ctypes.PyDLL(None).sleep(600)"])
def test_a_step_that_hangs_once_another_engine_has_stopped(hang: str, prelude: str) -> None:
    with running(prelude + TWO.format(first=2.0, second=1.0, hang=hang)) as process:
        assert line(process) == "started"
        assert process.wait(timeout=END_S) == 1


@pytest.mark.native_build
def test_the_thread_that_needs_no_interpreter_is_built() -> None:
    assert isinstance(open_beats(1), NativeBeats)


def test_only_the_time_within_a_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(host_watchdog, "monotonic", lambda: now[0])
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
        watchdog.watch(lambda: {}["missing"])  # type: ignore[index]
    assert not take(1000)


async def test_the_watchdog_leaves_with_the_engine(start_engine: StartEngine) -> None:
    engine = await start_engine(ScriptedModel(), step_timeout_s=60.0)
    await collect(engine, "one", [5, 6, 7], SamplingParams(max_tokens=5))
    thread = host_watchdog._checks._thread
    assert thread is not None
    assert thread.is_alive()
    await engine.stop()
    assert not thread.is_alive()
