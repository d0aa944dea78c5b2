"""KV from one process's memory into another's: exact, in time or not at all, and nothing left
over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_peer import LAYOUT, NUM_PAGES, Peer, store

from worker.engines.embedded.transfer import nixl
from worker.engines.embedded.transfer.layout import KvLayout, descriptors, pieces, slices
from worker.engines.embedded.transfer.nixl import KvHandle, KvPort, KvRead

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    one = Peer()
    yield one
    one.end()


@pytest.fixture(scope="module")
def shared_port() -> Iterator[KvPort]:
    port = KvPort(store(LAYOUT, NUM_PAGES, None), LAYOUT)
    yield port
    port.close()


@pytest.fixture
def port(shared_port: KvPort) -> KvPort:
    for tensor in shared_port.tensors:
        tensor.zero_()
    return shared_port


def finish(read: KvRead) -> str:
    state = read.poll(PATIENCE_S)
    assert read.release()
    return state


def sequence(tensor: torch.Tensor, pages: list[int]) -> torch.Tensor:
    """The tokens of `pages` in order, ``[heads, tokens, head_dim]``."""
    return torch.cat([tensor[page] for page in pages], dim=1)


@pytest.mark.parametrize(("start", "stop"), [(0, 48), (0, 47), (0, 1), (5, 9), (16, 32), (12, 40), (47, 48), (3, 48)])
@pytest.mark.parametrize(
    ("source", "target"), [([0, 1, 2], [5, 6, 7]), ([9, 2, 11], [0, 1, 4]), ([3, 4, 1], [7, 8, 2])]
)
def test_exactly_the_positions_asked_for(
    peer: Peer, port: KvPort, source: list[int], target: list[int], start: int, stop: int
) -> None:
    handle = peer.hold(source)
    assert finish(port.read(handle, target, start, stop)) == "done"
    assert peer.wait_note() == handle.ticket
    for there, here in zip(peer.tensors, port.tensors, strict=True):
        got, sent = sequence(here, target), sequence(there, source)
        assert torch.equal(got[:, start:stop], sent[:, start:stop])
        assert not got[:, :start].any()
        assert not got[:, stop:].any()
        others = [page for page in range(NUM_PAGES) if page not in target]
        assert not here[others].any()
    assert len(port._free_landing) == nixl.MAX_TICKETS


@pytest.mark.parametrize("slice_bytes", [1, 100, 1000])
def test_long_reads_come_in_slices(peer: Peer, port: KvPort, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "SLICE_BYTES", slice_bytes)
    handle = peer.hold([1, 2, 7])
    read = port.read(handle, [4, 3, 2], 0, 41)
    polls = 1
    while read.poll(0.0) == "busy":
        polls += 1
    assert read.release()
    assert polls > 6
    assert peer.wait_note() == handle.ticket
    for there, here in zip(peer.tensors, port.tensors, strict=True):
        assert torch.equal(sequence(here, [4, 3, 2])[:, :41], sequence(there, [1, 2, 7])[:, :41])


def test_what_was_withdrawn_is_not_taken_for_kv(peer: Peer, port: KvPort) -> None:
    with_own_memory = Peer(seed=5)
    try:
        handle = with_own_memory.hold([1, 2])
        with_own_memory.ask("withdraw", handle.ticket)
        assert finish(port.read(handle, [0, 1], 0, 20)) == "expired"
        again = with_own_memory.hold([1, 2])
        assert finish(port.read(again, [0, 1], 0, 20)) == "done"
        assert finish(port.read(replace(handle, ticket_address=again.ticket_address), [0, 1], 0, 20)) == "expired"
    finally:
        with_own_memory.end()


def test_a_note_alone_lets_the_holder_go(peer: Peer, port: KvPort) -> None:
    handle = peer.hold([4])
    port.let_go(handle)
    assert peer.wait_note() == handle.ticket
    assert len(port._free_landing) == nixl.MAX_TICKETS


def test_a_note_for_what_is_held_no_more_is_nobodys(port: KvPort) -> None:
    holder = Peer(seed=5)
    try:
        old = holder.hold([1])
        holder.ask("withdraw", old.ticket)
        new = holder.hold([2])
        assert new.ticket_address == old.ticket_address
        port.let_go(old)
        port.let_go(new)
        assert holder.wait_note() == new.ticket
    finally:
        holder.end()


def test_a_read_waits_for_nobody(port: KvPort) -> None:
    """The holder is busy: it does not look at its connections, as in a long step."""
    holder = Peer(seed=6)
    try:
        handles = [holder.hold([number]) for number in range(4)]
        assert finish(port.read(handles[0], [0], 0, 16)) == "done"  # connects
        holder.stop()
        for handle in handles[1:]:
            assert finish(port.read(handle, [1], 0, 16)) == "done"
        holder.go_on()
        assert {holder.wait_note() for _ in handles} == {handle.ticket for handle in handles}
    finally:
        holder.end()


@pytest.mark.parametrize("connected", [False, True])
def test_a_dead_holder_is_lost(port: KvPort, connected: bool) -> None:
    mortal = Peer(seed=3)
    try:
        first, second = mortal.hold([1]), mortal.hold([2])
        if connected:
            assert finish(port.read(first, [0], 0, 16)) == "done"
        mortal.kill()
        assert finish(port.read(second, [1], 0, 16)) == "lost"
        port.let_go(second)
    finally:
        mortal.end()
    assert mortal.tensors[0].any()


def test_memory_that_was_not_registered_is_not_read(peer: Peer, port: KvPort) -> None:
    handle = peer.hold([0])
    outside = replace(handle, bases=(handle.bases[0] + 2**40, *handle.bases[1:]))
    assert finish(port.read(outside, [0], 0, 16)) == "lost"
    inside = peer.hold([0])
    assert finish(port.read(inside, [0], 0, 16)) == "done"
    assert peer.wait_note() == inside.ticket


def test_a_read_that_is_given_up_tells_the_holder(peer: Peer, port: KvPort) -> None:
    handle = peer.hold([1, 2])
    read = port.read(handle, [0, 1], 0, 32)
    assert read.release()
    assert read.poll(0.0) == "lost"
    assert peer.wait_note() == handle.ticket


def test_tickets_run_out_and_come_back(port: KvPort) -> None:
    handles = [port.publish([0]) for _ in range(nixl.MAX_TICKETS)]
    assert port.publish([0]) is None
    assert len({handle.ticket for handle in handles if handle is not None}) == nixl.MAX_TICKETS
    for handle in handles:
        assert handle is not None
        port.withdraw(handle)
    assert isinstance(port.publish([0]), KvHandle)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("dtype", "bfloat16"),
        ("layers", 4),
        ("kv_heads", 1),
        ("head_dim", 8),
        ("block_size", 8),
        ("numerics", "exact, native kernels"),
    ],
)
def test_a_difference_names_both_values(field: str, value: object) -> None:
    other = replace(LAYOUT, **{field: value})
    said = LAYOUT.difference(other)
    assert said is not None
    assert field in said
    assert repr(value) in said
    assert repr(getattr(LAYOUT, field)) in said
    assert LAYOUT.difference(LAYOUT) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_cover_each_element_once(data: st.DataObject) -> None:
    size, heads, width = (data.draw(st.integers(1, limit)) for limit in (6, 3, 3))
    layout = KvLayout("m", "float32", 1, heads, width, 1, size)
    count = data.draw(st.integers(1, 5))
    target, source = (data.draw(st.permutations(range(8)))[:count] for _ in range(2))
    stop = data.draw(st.integers(1, count * size))
    start = data.draw(st.integers(0, stop - 1))
    there = torch.arange(8 * heads * size * width).view(8, heads, size, width)
    here = torch.full_like(there, -1)
    found = pieces(layout, target, source, start, stop)
    for to, of, length in found:
        assert (here.view(-1)[to : to + length] == -1).all()
        here.view(-1)[to : to + length] = there.view(-1)[of : of + length]
    got, sent = sequence(here, list(target)), sequence(there, list(source))
    assert torch.equal(got[:, start:stop], sent[:, start:stop])
    assert (here != -1).sum() == (stop - start) * heads * width
    local, remote = descriptors(found, (([1000, 5000], 0), ([7000, 9000], 3)), 4)
    assert local[:, 1].sum() == remote[:, 1].sum() == 2 * 4 * (stop - start) * heads * width
    assert local.tolist() == [[base + 4 * to, 4 * size, 0] for base in (1000, 5000) for to, _, size in found]
    assert remote.tolist() == [[base + 4 * of, 4 * size, 3] for base in (7000, 9000) for _, of, size in found]


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 100))
def test_slices_are_consecutive_and_small(sizes: list[int], limit: int) -> None:
    ranges = slices(np.array(sizes, dtype=np.uint64), limit)
    assert [index for first, last in ranges for index in range(first, last)] == list(range(len(sizes)))
    assert all(sum(sizes[first:last]) <= limit or last - first == 1 for first, last in ranges)
