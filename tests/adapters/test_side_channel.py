"""Failures and steps cross a process boundary; a dead or full channel never reaches the engine."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import threading
import time

import pytest
import torch
from system_faults import no_descriptors

from adapters import Failure, create_trtllm_adapters
from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.masks import BannedTokens
from adapters.trtllm import ChainAdapter, Step
from adapters.trtllm.side_channel import ACCEPT_PAUSE_S, MAX_MESSAGE, Reporter, SideChannel
from adapters.vocabulary import Vocabulary

PROMPT = [1, 2]


def raises(_, logits):
    raise RuntimeError("no")


def executor(adapter) -> None:
    """Another process with a pickled copy of the callable."""
    adapter(1, torch.zeros(1, 1, 8), [PROMPT], None, None)


def dies(adapter) -> None:
    executor(adapter)
    os._exit(9)


class Worker:
    """A channel, and what arrived."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.steps: list[tuple[str, Step]] = []
        self.something = asyncio.Event()
        self.channel = SideChannel(self.fail, self.step)

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.something.set()

    def step(self, request_id: str, step: Step) -> None:
        self.steps.append((request_id, step))
        self.something.set()

    async def __aenter__(self) -> Worker:
        self.channel.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.channel.close()
        self.channel.close()


def chain() -> ProcessorChain:
    context = Context(Vocabulary(8))
    made = ProcessorChain([BannedTokens(BannedTokens.Args(token_ids=[4, 5]), context)], context)
    made.start(PROMPT)
    return made


async def run(target, adapter) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=(adapter,))
    process.start()
    await asyncio.to_thread(process.join)
    return process.exitcode


async def test_a_process_without_descriptors_rests(caplog: pytest.LogCaptureFixture) -> None:
    """A connection that cannot be accepted stays readable; its messages are read once it can be."""
    async with Worker() as worker:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            with no_descriptors():
                client.connect(worker.channel.path)
                began_s = time.monotonic()
                for _ in range(50):  # as with each output
                    worker.channel.poll()
                    await asyncio.sleep(0.01)
                num_pauses = (time.monotonic() - began_s) / ACCEPT_PAUSE_S
            assert 1 <= caplog.text.count("cannot accept a connection: Too many open files") <= num_pauses + 1
            message = {"request_id": "a", "position": 3, "edits": [], "seconds": [], "logprobs": None}
            client.send(json.dumps(message).encode())
            await asyncio.wait_for(worker.something.wait(), 60)
        assert worker.steps == [("a", Step(3, (), (), None))]


@pytest.mark.slow
async def test_a_failure_in_another_process_has_the_workers_request_id() -> None:
    async with Worker() as worker:
        (adapter,) = create_trtllm_adapters([raises], end_id=3, report=worker.channel.reporter("req-é-1"))
        assert await run(executor, adapter) == 0
        await asyncio.wait_for(worker.something.wait(), 60)
    assert worker.failures == [Failure("req-é-1", "function", "raised", "raised RuntimeError at position 2", 2)]
    assert adapter.failure is None  # the copy failed, not this one


async def test_a_step_of_a_dying_process_arrives_and_fills_the_receipt() -> None:
    async with Worker() as worker:
        adapter = ChainAdapter(chain(), end_id=3)
        adapter.watch = worker.channel.reporter("r").step
        assert await run(dies, adapter) == 9
        await asyncio.wait_for(worker.something.wait(), 60)
    ((request_id, step),) = worker.steps
    assert (request_id, step.position, step.edits) == ("r", 2, ((0, "masked", 2),))
    adapter.chain.record(6, step.edits)
    (record,) = adapter.chain.receipt.records
    assert (record.steps_active, record.tokens_masked, record.first_position) == (1, 2, 2)
    assert adapter.chain.tokens == [1, 2, 6]


async def test_polling_takes_what_was_sent_before() -> None:
    async with Worker() as worker:
        reporter = worker.channel.reporter("r")
        for position in range(40):
            reporter.step(Step(position, logprobs=((1, -0.5, 1),)))
        reporter(Failure("x", "p", "nan", "m", 41))
        worker.channel.poll()
        assert [step.position for _, step in worker.steps] == list(range(40))
        assert worker.steps[0][1].logprobs == ((1, -0.5, 1),)
        assert worker.failures == [Failure("r", "p", "nan", "m", 41)]
        assert reporter.num_dropped == 0


JUNK = [b"junk", b"[]", b"{}", b'{"request_id": 1}', b'{"position": 1}', b"\xff" * 9000]
BAD_STEP = b'{"request_id": "r", "position": 1, "asked": [[1]], "seconds": [], "logprobs": null}'


async def test_what_is_neither_is_refused_and_counted() -> None:
    async with Worker() as worker:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
            sender.connect(worker.channel.path)
            for data in [*JUNK, BAD_STEP]:
                sender.send(data)
            worker.channel.reporter("r")(Failure("r", "p", "nan", "m", 1))
            worker.channel.poll()
        assert worker.failures == [Failure("r", "p", "nan", "m", 1)]
        assert worker.channel.num_refused == len(JUNK) + 1
        worker.channel.poll()  # the sender is gone


async def test_a_reporter_without_a_listener_drops_and_counts() -> None:
    async with Worker() as worker:
        path, reporter = worker.channel.path, worker.channel.reporter("r")
        assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0
        reporter.step(Step(1))
        assert reporter.num_dropped == 0
    assert not os.path.exists(path)
    reporter.step(Step(2))  # the connection of before is broken
    reporter(Failure("r", "p", "nan", "m"))
    assert reporter.num_dropped == 2


def test_a_worker_that_hears_nothing_costs_a_bounded_wait(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.trtllm.side_channel.SEND_TIMEOUT_S", 0.3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(tmp_path / "s"))
        deaf.listen()
        reporter = Reporter(str(tmp_path / "s"), "r")
        began_s, num_sent = time.monotonic(), 0
        while not reporter.num_dropped:
            reporter.step(Step(num_sent))
            num_sent += 1
        assert time.monotonic() - began_s > 0.3
        began_s = time.monotonic()
        for position in range(100):  # for all of them together
            reporter.step(Step(position))
        assert reporter.num_dropped == 101
        assert time.monotonic() - began_s < 5
        hears, _ = deaf.accept()
        with hears:
            for _ in range(num_sent - 1):
                hears.recv(MAX_MESSAGE)
            reporter.step(Step(0))
            assert reporter.num_dropped == 101


def test_a_worker_that_is_busy_for_a_while_misses_nothing(tmp_path) -> None:
    """Its requests would fail: each token needs the report of its step."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        reporter, number = Reporter(str(tmp_path / "s"), "r"), 2000
        sends = threading.Thread(target=lambda: [reporter.step(Step(position)) for position in range(number)])  # type: ignore[func-returns-value]
        sends.start()
        hears, _ = listener.accept()
        with hears:
            time.sleep(0.5)
            found = [json.loads(hears.recv(MAX_MESSAGE))["position"] for _ in range(number)]
        sends.join()
    assert found == list(range(number))
    assert reporter.num_dropped == 0


async def test_a_long_temporary_directory_is_no_obstacle(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    async with Worker() as worker:
        worker.channel.reporter("r").step(Step(1))
        worker.channel.poll()
        assert worker.steps == [("r", Step(1))]
