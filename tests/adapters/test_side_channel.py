"""Failures cross a process boundary; a dead or full channel never reaches the engine."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket

import torch

from adapters import Failure, create_trtllm_adapters
from adapters.side_channel import FailureChannel, FailureReporter


def raises(_, logits):
    raise RuntimeError("no")


def executor(adapter) -> None:
    """Another process with a pickled copy of the callable."""
    adapter(1, torch.zeros(1, 1, 8), [[1, 2]], None, None)


async def test_a_failure_in_another_process_arrives_under_the_workers_id():
    arrived: asyncio.Queue[Failure] = asyncio.Queue()
    channel = FailureChannel(arrived.put_nowait)
    channel.open()
    try:
        (adapter,) = create_trtllm_adapters([raises], end_id=3, report=channel.reporter("req-é-1"))
        process = multiprocessing.get_context("spawn").Process(target=executor, args=(adapter,))
        process.start()
        failure = await asyncio.wait_for(arrived.get(), 60)
        await asyncio.to_thread(process.join)
        assert process.exitcode == 0
    finally:
        channel.close()
    assert failure == Failure("req-é-1", "function", "raised", "raised RuntimeError at position 2", 2)
    assert adapter.failure is None  # the copy failed, not this one


async def test_what_is_not_a_failure_is_refused_and_counted():
    arrived: list[Failure] = []
    channel = FailureChannel(arrived.append)
    channel.open()
    good = Failure("r", "p", "nan", "m", 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (b"", b"junk", b"[]", b"{}", b'{"request_id": 1}', b"\xff" * 9000):
            sender.sendto(data, channel.path)
    channel.reporter("r")(good)
    while not arrived:
        await asyncio.sleep(0)
    assert arrived == [good]
    assert channel.num_refused == 6
    channel.close()
    channel.close()


async def test_a_reporter_without_a_listener_drops_and_counts():
    channel = FailureChannel(lambda failure: None)
    channel.open()
    reporter, path = channel.reporter("r"), channel.path
    assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0
    channel.close()
    assert not os.path.exists(path)
    reporter(Failure("r", "p", "nan", "m"))
    assert reporter.num_dropped == 1


def test_a_full_socket_never_blocks(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "s"))
        reporter = FailureReporter(str(tmp_path / "s"), "r")
        for _ in range(5000):
            reporter(Failure("r", "p", "nan", "m" * 100))
        assert reporter.num_dropped > 0
