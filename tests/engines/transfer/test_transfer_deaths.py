"""A reader that is killed while it reads: its lease times out, and the next reader is served.

On one machine the kernel copies for the reader; over TCP the worker that is read from answers,
and has answers for a dead peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transfer_peer import Peer, store
from transfer_peer import begin_to_read as begin

from worker.engines.embedded.transfer.handle import KvHandle
from worker.engines.embedded.transfer.layout import KvLayout
from worker.engines.embedded.transfer.transport import KvTransport

LARGE = KvLayout("large", "float32", layers=8, kv_heads=4, head_dim=64, block_size=16, page_size=256)
NUM_PAGES = 16
"""Of 256 KiB in each of 16 tensors: 64 MiB, several slices."""

NETWORKS = {"one machine": {}, "NIXL's shared memory": {"UCX_TLS": "all"}, "TCP": {"UCX_TLS": "tcp"}}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    chosen: dict[str, str] = NETWORKS[request.param]
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    return chosen


@pytest.fixture
def transport(network: dict[str, str]) -> Iterator[KvTransport]:
    one = KvTransport(store(LARGE, NUM_PAGES, None), LARGE)
    yield one
    one.close()


@pytest.fixture
def start_peer(network: dict[str, str]) -> Iterator[Callable[[int | None], Peer]]:
    started: list[Peer] = []

    def start(seed: int | None) -> Peer:
        started.append(Peer(LARGE, NUM_PAGES, seed, **network))
        return started[-1]

    yield start
    for one in started:
        one.end()


def grant(transport: KvTransport) -> KvHandle:
    handle = transport.grant(range(NUM_PAGES))
    assert handle is not None
    return handle


def begin_to_read(reader: Peer, transport: KvTransport, handle: KvHandle) -> None:
    reader.tell("begin_to_read", handle, range(NUM_PAGES))
    assert reader.answer_to(transport) == "busy"


def test_a_reader_killed_while_it_reads(transport: KvTransport, start_peer: Callable[[int | None], Peer]) -> None:
    for number, tensor in enumerate(transport.tensors):
        tensor.fill_(number + 1)
    first, second = grant(transport), grant(transport)
    victim, heir = start_peer(None), start_peer(None)
    begin_to_read(victim, transport, first)
    begin_to_read(heir, transport, second)
    victim.kill()
    transport.revoke(first)  # what the connector does when a lease times out
    third = grant(transport)
    for handle in (second, third):
        if handle is third:
            begin_to_read(heir, transport, third)
        heir.tell("finish_reading")
        state, means = heir.answer_to(transport)
        assert state == "done"
        assert means == [number + 1.0 for number in range(2 * LARGE.layers)]
        while handle.token not in heir.released:
            heir.released += transport.poll()
    assert first.token not in victim.released + heir.released


def test_a_prefill_worker_killed_while_it_is_read(
    transport: KvTransport, start_peer: Callable[[int | None], Peer]
) -> None:
    prefill = start_peer(1)
    handle = prefill.grant(range(NUM_PAGES))
    read, state = begin(transport, handle, range(NUM_PAGES))
    assert state == "busy"
    prefill.kill()
    assert read.poll(60.0) == "lost"
    assert read.release()
    transport.release(handle)
    other = start_peer(2)
    again, _ = begin(transport, other.grant([0, 1]), [2, 3])
    assert again.poll(60.0) == "done"
    assert again.release()
    assert all(torch.equal(here[2:4], there[:2]) for here, there in zip(transport.tensors, other.tensors, strict=True))
