"""The sandbox process: what it survives, what it says of it, and how it ends."""

from __future__ import annotations

import json
import os
import queue
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher

from adapters.grammars.compiler import byte_tables
from adapters.grammars.lark import as_grammar
from adapters.grammars.sandbox import GrammarSandbox, SandboxBusy, SandboxUnavailable, Verdict
from adapters.grammars.sandbox import process as sandbox_process
from adapters.grammars.sandbox.driver import Driver
from adapters.grammars.sandbox.jobs import Job, Jobs
from adapters.grammars.sandbox.supervisor import Supervisor
from adapters.grammars.sandbox.verdict import Limits

TABLES = byte_tables([*(bytes([i]) for i in range(256)), b""])
FOREVER_S = 600.0
"""A limit that no test waits for."""


def tables() -> dict[str, Any]:
    return TABLES


def schema(value: Any) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps(value)))


def lark(text: str) -> str:
    return as_grammar(text)


def regex(pattern: str) -> str:
    return str(LLMatcher.grammar_from_regex(pattern))


def rule_chain(length: int) -> str:
    return lark("\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(length)), f'r{length}: "b"']))


def terminal_chain(length: int) -> str:
    return lark("\n".join(["start: T0", *(f'T{i}: "a" T{i + 1}' for i in range(length)), f'T{length}: "b"']))


def definitions_chain(length: int) -> str:
    definitions: dict[str, Any] = {f"d{length}": {"type": "string"}}
    for i in range(length):
        definitions[f"d{i}"] = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
    return schema({"$ref": "#/$defs/d0", "$defs": definitions})


def multiple_of(divisor: int) -> str:
    return schema({"type": "integer", "multipleOf": divisor})


GOOD = regex("[a-z]{1,8}")
OTHER = regex("[0-9]{1,8}")
SLOW = multiple_of(99999989)
ENDLESS: dict[str, Any] = {"timeout_s": FOREVER_S, "memory_bytes": 4 << 30}
"""Limits that `SLOW` does not reach while a test runs."""


RESOLUTION_BYTES = 16 * 1024
"""Less than that is also what the allocator takes for one process and not for the next."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[GrammarSandbox]:
    with GrammarSandbox(tables, max_wait_s=FOREVER_S) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def patient() -> Iterator[GrammarSandbox]:
    """One whose last level never ends."""
    with GrammarSandbox(tables, **ENDLESS, max_wait_s=FOREVER_S) as running:
        running.wait_ready()
        yield running


def verdict(sandbox: GrammarSandbox, grammar: str) -> Verdict:
    return sandbox.submit(grammar).result(100)


def children(sandbox: GrammarSandbox) -> list[psutil.Process]:
    assert sandbox.pid is not None
    return psutil.Process(sandbox.pid).children()


def user_s(process: psutil.Process) -> float:
    """Processor time of a process; none of one that has ended."""
    try:
        return float(process.cpu_times().user)
    except psutil.NoSuchProcess:
        return 0.0


def test_a_grammar_that_compiles_says_what_it_takes(sandbox: GrammarSandbox) -> None:
    verdict(sandbox, GOOD)  # the first one takes the memory that every process takes once, too
    small, large = verdict(sandbox, GOOD), verdict(sandbox, regex("|".join(f"word{i:04}" for i in range(2000))))
    assert (small.outcome, large.outcome) == ("compiled", "compiled")
    assert small.num_bytes > 0
    assert large.num_bytes - small.num_bytes > RESOLUTION_BYTES
    assert verdict(sandbox, GOOD).num_bytes == pytest.approx(small.num_bytes, abs=RESOLUTION_BYTES)


def test_what_a_grammar_takes_as_it_is_used_counts(sandbox: GrammarSandbox) -> None:
    verdict(sandbox, GOOD)
    short, long = verdict(sandbox, regex("[a-z]{1,8}")), verdict(sandbox, regex("[a-z]{1,200}"))
    # both compile to the same size, and a state is one letter
    assert long.num_bytes - short.num_bytes > RESOLUTION_BYTES


CRASHES = {
    "rule chain of 3,000": rule_chain(3000),
    "rule chain of 5,000": rule_chain(5000),
    "terminal chain of 20,000": terminal_chain(20_000),
    "$defs chain of 5,000": definitions_chain(5000),
}


@pytest.mark.parametrize("name", CRASHES)
def test_what_overflows_the_stack_is_a_verdict(sandbox: GrammarSandbox, name: str) -> None:
    pid = sandbox.pid
    found = verdict(sandbox, CRASHES[name])
    assert found.outcome == "stack"
    assert "takes more than 2 MiB of stack to compile" in found.problem
    assert sandbox.pid == pid
    assert verdict(sandbox, GOOD).outcome == "compiled"


def test_what_never_ends_is_stopped_at_its_processor_time() -> None:
    with GrammarSandbox(tables, timeout_s=0.5, max_wait_s=FOREVER_S) as sandbox:
        found = verdict(sandbox, SLOW)
        assert (found.outcome, found.problem) == ("time", "takes more than 0.5 s of processor time to compile")


def test_what_takes_too_much_memory_is_stopped() -> None:
    words = "|".join(f"{i:06}" * 40 for i in range(2000))
    with GrammarSandbox(tables, memory_bytes=16 << 20, max_wait_s=FOREVER_S) as sandbox:
        found = verdict(sandbox, regex(words))
        assert (found.outcome, found.problem) == ("memory", "takes more than 16 MiB of memory to compile")
        assert verdict(sandbox, GOOD).outcome == "compiled"


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (regex("(a"), "unclosed group"),
        (schema({"$ref": "#"}), "no text matches it"),
        (regex("((a{1,200}){1,200}){1,200}"), "too many"),
        (lark("not a grammar"), ""),
    ],
)
def test_llguidances_own_refusals_come_through(sandbox: GrammarSandbox, grammar: str, problem: str) -> None:
    found = verdict(sandbox, grammar)
    assert found.outcome == "refused"
    assert problem in found.problem
    assert 0 < len(found.problem) < 200


def test_bombs_do_not_hold_up_others(patient: GrammarSandbox) -> None:
    bombs = [patient.submit(multiple_of(99999989 - 2 * i), f"client {i % 3}") for i in range(14)]
    assert patient.submit(GOOD, "bystander").result(100).outcome == "compiled"
    assert patient.submit(GOOD, "client 0").result(100).outcome == "compiled"
    assert not any(bomb.done() for bomb in bombs)
    for bomb in bombs:
        assert bomb.cancel()


def test_cancelling_kills_what_runs_and_frees_its_place(patient: GrammarSandbox) -> None:
    bombs = [patient.submit(multiple_of(99999989 - 2 * i), "one client") for i in range(3)]
    assert patient.submit(GOOD).result(100).outcome == "compiled"
    running = children(patient)
    for bomb in bombs:
        assert bomb.cancel()
    assert patient.submit(GOOD, "one client").result(100).outcome == "compiled"
    assert not psutil.wait_procs(running, 60)[1]
    assert patient.counts["cancelled"] == 3


def test_what_is_known_meanwhile_is_not_compiled_again(sandbox: GrammarSandbox) -> None:
    known = Verdict("refused", "somebody else found out")
    assert sandbox.submit(SLOW, None, lambda: known).result(100) is known


def test_a_wall_clock_timeout_does_not_blame_the_grammar() -> None:
    with GrammarSandbox(tables, **ENDLESS, max_wait_s=2.0) as sandbox:
        sandbox.wait_ready()
        with pytest.raises(SandboxBusy, match="not compiled within 2 s"):
            sandbox.submit(SLOW).result(100)
        assert verdict(sandbox, GOOD).outcome == "compiled"


def test_a_child_that_cannot_begin_does_not_blame_the_grammar() -> None:
    """As where the system has no thread left; a stack of one byte is refused by each."""
    with GrammarSandbox(tables, stack_bytes=1) as sandbox:
        with pytest.raises(SandboxBusy, match="starts no process or thread"):
            sandbox.submit(GOOD).result(100)
        assert sandbox.counts == {"busy": 1}


def test_a_child_that_cannot_be_forked_ends_no_other(patient: GrammarSandbox) -> None:
    """Nor the process, which would have to be started again, with the system as it is."""
    bomb = patient.submit(SLOW, "bomb")
    assert patient.submit(GOOD).result(100).outcome == "compiled"
    pid = patient.pid
    assert pid is not None
    while not any(user_s(child) > 0.5 for child in children(patient)):  # which no level ends any more
        time.sleep(0.05)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with pytest.raises(SandboxBusy, match="starts no process or thread"):
        patient.submit(OTHER).result(100)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert patient.submit(OTHER).result(100).outcome == "compiled"
    assert (patient.pid, patient.num_restarts, bomb.done()) == (pid, 0, False)


def test_a_full_queue_refuses_at_once() -> None:
    with GrammarSandbox(tables, **ENDLESS, max_waiting=2, max_wait_s=FOREVER_S) as sandbox:
        bombs = [sandbox.submit(SLOW, "one client") for _ in range(8)]
        refused = [bomb.exception(100) for bomb in bombs[-3:]]
        assert all(isinstance(error, SandboxBusy) for error in refused)
        assert not bombs[0].done()


def test_a_process_that_died_is_replaced_and_nobody_notices(patient: GrammarSandbox) -> None:
    bomb = patient.submit(SLOW, "bomb")
    assert patient.submit(GOOD).result(100).outcome == "compiled"
    pid = patient.pid
    assert pid is not None
    orphans = children(patient)
    os.kill(pid, signal.SIGKILL)
    assert patient.submit(GOOD).result(100).outcome == "compiled"
    assert patient.num_restarts == 1
    assert patient.pid != pid
    assert not psutil.wait_procs(orphans, 60)[1]
    assert not bomb.done()


def test_a_process_that_hangs_is_replaced(patient: GrammarSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_process, "KILL_TIMEOUT_S", 0.1)
    bomb = patient.submit(SLOW, "bomb")
    assert patient.submit(GOOD).result(100).outcome == "compiled"
    assert patient.pid is not None
    os.kill(patient.pid, signal.SIGSTOP)
    bomb.cancel()
    assert patient.submit(GOOD).result(100).outcome == "compiled"
    assert patient.num_restarts == 1


def test_a_process_that_begins_late_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tables of a large vocabulary are more than a socket holds; until they are read, others
    must not wait.
    """
    gate, late = tmp_path / "gate", tmp_path / "python"
    os.mkfifo(gate)
    late.write_text(f'#!/bin/sh\nread line < {gate}\nexec {sys.executable} "$@"\n')
    late.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(late))
    monkeypatch.setattr(sandbox_process, "KILL_TIMEOUT_S", 0.0)
    large = byte_tables([*(bytes([i]) for i in range(256)), *(b"%d" % i for i in range(100_000)), b""])
    outcomes: queue.SimpleQueue[str] = queue.SimpleQueue()
    with GrammarSandbox(lambda: large, max_wait_s=FOREVER_S, observe=lambda o, _: outcomes.put(o)) as sandbox:
        asked, given_up = sandbox.submit(GOOD), sandbox.submit(GOOD)
        given_up.cancel()
        assert outcomes.get(timeout=100) == "cancelled"
        assert sandbox.pid is None
        with open(gate, "w") as opened:
            opened.write("begin\n")
        assert asked.result(100).outcome == "compiled"


def test_a_grammar_is_counted_before_anybody_hears_of_it(sandbox: GrammarSandbox) -> None:
    for grammar, outcome in ((GOOD, "compiled"), (regex("(a"), "refused")):
        before = sandbox.counts[outcome]
        seen: queue.SimpleQueue[int] = queue.SimpleQueue()
        future = sandbox.submit(grammar)
        future.add_done_callback(lambda _, outcome=outcome, seen=seen: seen.put(sandbox.counts[outcome]))  # type: ignore[misc]
        assert future.result(100).outcome == outcome
        assert seen.get(timeout=100) == before + 1


def broken_tables() -> dict[str, Any]:
    raise ValueError("no such tokenizer")


@pytest.mark.parametrize("make", [broken_tables, lambda: {"tokens": [5]}])
def test_an_unloadable_tokenizer_is_reported_and_nothing_hangs(make: Any) -> None:
    with GrammarSandbox(make) as sandbox:
        with pytest.raises(SandboxUnavailable):
            sandbox.wait_ready()
        with pytest.raises(SandboxUnavailable):
            sandbox.submit(GOOD).result(100)


def test_a_tokenizer_that_does_not_come_is_the_callers_to_report(caplog: pytest.LogCaptureFixture) -> None:
    read = Future[dict[str, Any]]()
    with GrammarSandbox(read.result) as sandbox:
        read.cancel()
        with pytest.raises(SandboxUnavailable, match="has no tokenizer"):
            sandbox.wait_ready()
    assert not caplog.records


def test_a_process_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with GrammarSandbox(tables) as sandbox, pytest.raises(SandboxUnavailable, match=r"cannot start: .*nonexistent"):
        sandbox.wait_ready()


def test_closing_ends_the_process_and_fails_what_waits() -> None:
    sandbox = GrammarSandbox(tables, **ENDLESS)
    with sandbox:
        sandbox.wait_ready()
        bomb = sandbox.submit(SLOW)
        assert sandbox.submit(GOOD).result(100).outcome == "compiled"
        assert sandbox.pid is not None
        processes = [psutil.Process(sandbox.pid), *children(sandbox)]
    with pytest.raises(SandboxUnavailable, match="is closed"):
        bomb.result(100)
    with pytest.raises(SandboxUnavailable, match="is closed"):
        sandbox.submit(GOOD).result(100)
    assert not psutil.wait_procs(processes, 60)[1]
    sandbox.close()
    assert not sandbox._thread.is_alive()


OWNER = """
import sys
import time
from test_grammar_sandbox import ENDLESS, GOOD, SLOW, GrammarSandbox, tables
sandbox = GrammarSandbox(tables, **ENDLESS)
sandbox.start()
sandbox.submit(SLOW)
sandbox.submit(GOOD).result(100)
print(sandbox.pid, flush=True)
sys.stdin.read()
"""


def test_the_process_dies_with_its_owner() -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", OWNER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, "PYTHONPATH": paths}) as owner:
        assert owner.stdout is not None
        process = psutil.Process(int(owner.stdout.readline()))
        while not (children := process.children()):  # there is none where a grammar goes on to the next level
            time.sleep(0.01)
        owner.kill()
    everybody = [process, *children]
    assert not psutil.wait_procs(everybody, 60)[1]


def test_a_process_whose_owner_has_gone_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """As where a start is ended by Ctrl-C."""
    process = sandbox_process.SandboxProcess(tables)
    try:
        process.channel.shutdown(socket.SHUT_RD)
        while process.unsent:
            select.select([], [process.channel], [])
            process.flush()
        assert process._child.wait(60) == 0
    finally:
        process.end()
    assert capfd.readouterr().err == ""


def test_the_process_is_small(sandbox: GrammarSandbox) -> None:
    """It has one thread, so that forking is safe, and neither torch nor numpy."""
    assert sandbox.pid is not None
    process = psutil.Process(sandbox.pid)
    assert process.num_threads() == 1
    files = {Path(mapped.path).name for mapped in process.memory_maps()}
    assert not any(name.startswith(("libtorch", "libopenblas", "libc10")) for name in files)


def test_a_late_job_that_failed_with_the_process_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killing the first late job loses the process, and with it the second one."""
    jobs = Jobs(Limits(1.0, 2**30, 2**20), 8, 10.0, None)
    supervisor = Supervisor(tables, jobs)
    driver = Driver(jobs, supervisor)
    late = [Job(object(), deadline=time.monotonic() - 1) for _ in range(2)]
    for job in late:
        jobs.add(job)
    assert jobs.start_next() is not None
    monkeypatch.setattr(supervisor, "start_if_due", lambda: None)
    monkeypatch.setattr(supervisor, "write", lambda _: supervisor.fail("does not answer"))
    try:
        driver._turn()
    finally:
        supervisor.end()
        driver.inbox.close_sockets()
    assert isinstance(late[0].future.exception(0), SandboxBusy)
    assert isinstance(late[1].future.exception(0), SandboxUnavailable)
    assert jobs.counts == {"busy": 1, "unavailable": 1}
