"""KV between processes of one machine without NIXL: when, and what is never written to."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transfer_peer import LAYOUT, NUM_PAGES, Peer, numbers, store

from worker.engines.embedded.transfer import host_copy
from worker.engines.embedded.transfer import transport as transports
from worker.engines.embedded.transfer.handle import KvHandle
from worker.engines.embedded.transfer.host_copy import TRANSPORT, HostProcess, copy_from
from worker.engines.embedded.transfer.layout import Array
from worker.engines.embedded.transfer.leases import RELEASE_OFFSET
from worker.engines.embedded.transfer.nixl import TransferError
from worker.engines.embedded.transfer.transport import KvTransport

PATIENCE_S = 60.0

Pieces = npt.NDArray[np.int64]

WAYS = [pytest.param("native", marks=pytest.mark.native), "none"]

SIZE = 3 << 20
"""Bytes of memory that another process fills with numbers of its own."""


@pytest.fixture
def transport() -> Iterator[KvTransport]:
    one = KvTransport(store(LAYOUT, NUM_PAGES, None), LAYOUT)
    yield one
    one.close()


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


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
    handle, sizes = peer.grant([1]), []

    def counted(number: int, ours: Array, theirs: Array, pieces: Pieces, part: tuple[int, int]) -> None:
        sizes.append(part)
        copy_from(number, ours, theirs, pieces, part)

    monkeypatch.setattr(transports, "copy_from", counted)
    read_page(peer, transport, handle)
    assert sizes == [(0, 2 * LAYOUT.layers)]


def test_a_long_prompt_comes_in_slices_that_threads_share(
    peer: Peer, transport: KvTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its pages are in a row on both sides, so that each tensor could be one piece."""
    page = LAYOUT.kv_heads * LAYOUT.page_size * LAYOUT.head_dim * transport.tensors[0].element_size()
    monkeypatch.setattr(transports, "SLICE_BYTES", 4 * page)
    monkeypatch.setattr(transports, "PIECE_BYTES", 2 * page)
    sizes: list[list[int]] = []

    def counted(number: int, ours: Array, theirs: Array, pieces: Pieces, part: tuple[int, int]) -> None:
        sizes.append(np.tile(pieces[:, 2], len(ours))[slice(*part)].tolist())
        copy_from(number, ours, theirs, pieces, part)

    monkeypatch.setattr(transports, "copy_from", counted)
    source, target = list(range(1, 10)), list(range(2, 11))
    handle = peer.grant(source)
    read = transport.read(handle, target, 0, 9 * LAYOUT.page_size)
    assert read.poll(PATIENCE_S) == "done"
    assert read.release()
    assert peer.wait_release() == handle.token
    assert [one for each in sizes for one in each] == [*[2 * page] * 4, page] * (2 * LAYOUT.layers)
    assert all(sum(each) <= 4 * page for each in sizes)
    assert all(
        torch.equal(ours[target], theirs[source]) for ours, theirs in zip(transport.tensors, peer.tensors, strict=True)
    )


@pytest.mark.parametrize("kernels", WAYS)
def test_any_pieces_of_any_tensors(
    peer: Peer, kernels: str, three_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes, and nothing beside them: pieces that are large or many are shared by threads."""
    if kernels == "none":
        monkeypatch.setattr(host_copy, "are_available", lambda: False)
        monkeypatch.setattr(host_copy, "MAX_PIECES", 5)
    source, theirs, chooses = np.uint64(peer.ask("memory", SIZE, 5)), numbers(SIZE, 5), random.Random(0)
    assert peer.process.pid is not None
    for count in (1, 2, 7, 63, 64, 65, 200):
        size = SIZE // 3 // count
        ends = [chooses.sample(range(SIZE // 3 // size), count) for _ in range(2)]
        pieces = np.array([[to * size, of * size, chooses.randint(1, size)] for to, of in zip(*ends, strict=True)])
        ours, expected = np.zeros(SIZE, dtype=np.uint8), np.zeros(SIZE, dtype=np.uint8)
        tensors = np.array([0, SIZE // 3, 2 * (SIZE // 3)], dtype=np.uint64)
        part = chooses.randrange(count), chooses.randint(count, 3 * count)
        for number, (tensor, (to, of, length)) in enumerate(product(tensors.tolist(), pieces.tolist())):
            if part[0] <= number < part[1]:
                expected[tensor + to : tensor + to + length] = theirs[tensor + of : tensor + of + length]
        copy_from(peer.process.pid, tensors + np.uint64(ours.ctypes.data), tensors + source, pieces, part)
        assert np.array_equal(ours, expected), count


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


@pytest.mark.parametrize("kernels", WAYS)
def test_memory_that_is_not_there_is_an_error(peer: Peer, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "none":
        monkeypatch.setattr(host_copy, "are_available", lambda: False)
    handle, ours = peer.grant([0]), np.zeros(4, dtype=np.int64)
    assert handle.process is not None
    here, there = (np.array([each], dtype=np.uint64) for each in (ours.ctypes.data, handle.token_address))
    word, nothing = [0, 0, 8], [8, 8 - handle.token_address, 8]
    for pieces, said in (([nothing, word], "Bad address"), ([word, nothing], "some of it is not there")):
        with pytest.raises(TransferError, match=said):
            copy_from(handle.process.number, here, there, np.array(pieces), (0, 2))
    with pytest.raises(TransferError, match="No such process"):
        copy_from(2**22 + 1, here, here, np.array([word]), (0, 1))


def test_a_peer_that_dies_behind_its_last_piece(
    peer: Peer, transport: KvTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV is not taken for KV whose lease had ended: nobody is there to tell."""
    monkeypatch.setattr(transports, "read_word", lambda number, address: None)
    assert transport.read(peer.grant([1]), [5], 0, LAYOUT.page_size).poll(PATIENCE_S) == "lost"
