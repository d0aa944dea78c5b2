"""KV between processes of one machine without NIXL: when, and what is never written to."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transfer_peer import LAYOUT, NUM_PAGES, Peer, store

from worker.engines.embedded.transfer import host_copy
from worker.engines.embedded.transfer import transport as transports
from worker.engines.embedded.transfer.handle import KvHandle
from worker.engines.embedded.transfer.host_copy import TRANSPORT, HostCopy, HostProcess
from worker.engines.embedded.transfer.layout import Array
from worker.engines.embedded.transfer.leases import RELEASE_OFFSET
from worker.engines.embedded.transfer.nixl import TransferError
from worker.engines.embedded.transfer.transport import KvTransport

PATIENCE_S = 60.0


@pytest.fixture
def transport() -> Iterator[KvTransport]:
    one = KvTransport(store(LAYOUT, NUM_PAGES, None), LAYOUT)
    yield one
    one.close()


def read_page(peer: Peer, transport: KvTransport, handle: KvHandle) -> None:
    read = transport.read(handle, [5], 0, LAYOUT.page_size)
    assert read.poll(PATIENCE_S) == "done"
    assert read.release()
    assert peer.wait_release() == handle.token
    pairs = zip(transport.tensors, peer.tensors, strict=True)
    assert all(torch.equal(ours[5], theirs[1]) for ours, theirs in pairs)


def test_a_neighbour_is_read_without_a_connection(peer: Peer, transport: KvTransport) -> None:
    read_page(peer, transport, peer.grant([1]))
    assert repr(transport.agent).endswith("0 peers)")
    assert not transport.scratch.num_taken


def test_a_page_takes_one_call(peer: Peer, transport: KvTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, copy = peer.grant([1]), HostCopy._copy
    sizes: list[int] = []

    def counted(self: HostCopy, ours: Array, theirs: Array) -> None:
        sizes.append(len(ours))
        copy(self, ours, theirs)

    monkeypatch.setattr(HostCopy, "_copy", counted)
    read_page(peer, transport, handle)
    assert sizes == [2 * LAYOUT.layers + 1], "its keys and values, then the fencing token"


@pytest.mark.parametrize("most", [1, 4, 6])
def test_more_pieces_than_a_call_takes(
    peer: Peer, transport: KvTransport, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(host_copy, "MAX_PIECES", most)
    read_page(peer, transport, peer.grant([1]))


def test_nixl_reads_where_the_system_denies_it(
    peer: Peer, transport: KvTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "may_copy", lambda number, address: False)
    read_page(peer, transport, peer.grant([1]))
    assert repr(transport.agent).endswith("1 peers)")


def test_nixl_reads_from_another_machine(peer: Peer, transport: KvTransport) -> None:
    handle = peer.grant([1])
    assert handle.process is not None
    assert handle.process.number == peer.process.pid
    read_page(peer, transport, replace(handle, process=HostProcess("another", handle.process.number)))
    read_page(peer, transport, replace(peer.grant([1]), process=None))
    assert repr(transport.agent).endswith("1 peers)")


def test_an_operator_who_names_a_transport_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSPORT, "tcp")
    assert host_copy.this_process() is None


def test_a_process_without_the_token_is_not_written_to(transport: KvTransport) -> None:
    handle = transport.grant([0])
    assert handle is not None
    word = ctypes.c_int64.from_address(handle.token_address + RELEASE_OFFSET)
    transport.release(replace(handle, token=handle.token ^ 1))
    assert word.value == 0
    transport.release(handle)
    assert word.value == handle.token
    assert transport.poll() == [handle.token]


def test_memory_that_is_not_there_is_an_error(peer: Peer) -> None:
    handle, ours = peer.grant([0]), np.zeros(4, dtype=np.int64)
    assert handle.process is not None
    here = np.array([[ours.ctypes.data, 8, 0], [ours.ctypes.data + 8, 8, 0]], dtype=np.uint64)
    for addresses, said in (((8, 8), "Bad address"), ((handle.token_address, 8), "8 of 16 bytes")):
        there = np.array([[each, 8, 0] for each in addresses], dtype=np.uint64)
        with pytest.raises(TransferError, match=said):
            HostCopy(handle.process.number, here, there).start()
