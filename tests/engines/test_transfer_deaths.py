"""A reader that is killed while it reads: the holder lives, its hold ends in time, and the next
reader is served.

Over shared memory the kernel copies for the reader; over TCP the holder answers, and has answers
for a dead peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transfer_peer import Peer, store
from transfer_peer import begin_to_read as begin

from worker.engines.embedded.transfer.layout import KvLayout
from worker.engines.embedded.transfer.nixl import KvHandle, KvPort

LARGE = KvLayout("large", "float32", layers=8, kv_heads=4, head_dim=64, block_size=16, page_size=256)
NUM_PAGES = 16
"""Of 256 KiB in each of 16 tensors: 64 MiB, several slices."""

TRANSPORTS = {"shared memory": {}, "TCP": {"UCX_TLS": "tcp"}}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    chosen: dict[str, str] = TRANSPORTS[request.param]
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    return chosen


@pytest.fixture
def port(transport: dict[str, str]) -> Iterator[KvPort]:
    one = KvPort(store(LARGE, NUM_PAGES, None), LARGE)
    yield one
    one.close()


@pytest.fixture
def start_peer(transport: dict[str, str]) -> Iterator[Callable[[int | None], Peer]]:
    started: list[Peer] = []

    def start(seed: int | None) -> Peer:
        started.append(Peer(LARGE, NUM_PAGES, seed, **transport))
        return started[-1]

    yield start
    for one in started:
        one.end()


def publish(port: KvPort) -> KvHandle:
    handle = port.publish(range(NUM_PAGES))
    assert handle is not None
    return handle


def begin_to_read(reader: Peer, port: KvPort, handle: KvHandle) -> None:
    reader.tell("begin_to_read", handle, range(NUM_PAGES))
    assert reader.answer_to(port) == "busy"


def test_a_reader_killed_while_it_reads(port: KvPort, start_peer: Callable[[int | None], Peer]) -> None:
    for number, tensor in enumerate(port.tensors):
        tensor.fill_(number + 1)
    first, second = publish(port), publish(port)
    victim, heir = start_peer(None), start_peer(None)
    begin_to_read(victim, port, first)
    begin_to_read(heir, port, second)
    victim.kill()
    port.withdraw(first)  # what the connector does when nobody has come in time
    third = publish(port)
    for handle in (second, third):
        if handle is third:
            begin_to_read(heir, port, third)
        heir.tell("finish_reading")
        state, means = heir.answer_to(port)
        assert state == "done"
        assert means == [number + 1.0 for number in range(2 * LARGE.layers)]
        while handle.ticket not in heir.notes:
            heir.notes += port.notes()
    assert first.ticket not in victim.notes + heir.notes


def test_a_holder_killed_while_it_is_read(port: KvPort, start_peer: Callable[[int | None], Peer]) -> None:
    holder = start_peer(1)
    handle = holder.hold(range(NUM_PAGES))
    read, state = begin(port, handle, range(NUM_PAGES))
    assert state == "busy"
    holder.kill()
    assert read.poll(60.0) == "lost"
    assert read.release()
    port.let_go(handle)
    other = start_peer(2)
    again, _ = begin(port, other.hold([0, 1]), [2, 3])
    assert again.poll(60.0) == "done"
    assert again.release()
    assert all(torch.equal(here[2:4], there[:2]) for here, there in zip(port.tensors, other.tensors, strict=True))
