"""KV from one process's memory into another's: exact, in time or not at all, and nothing left
over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_peer import LAYOUT, NUM_PAGES, Peer, store

from worker.engines.embedded.transfer.handle import KvHandle
from worker.engines.embedded.transfer.layout import KvLayout, descriptors, pieces, slices
from worker.engines.embedded.transfer.leases import MAX_LEASES
from worker.engines.embedded.transfer.transport import KvRead, KvTransport

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def shared_transport() -> Iterator[KvTransport]:
    transport = KvTransport(store(LAYOUT, NUM_PAGES, None), LAYOUT)
    yield transport
    transport.close()


@pytest.fixture
def transport(shared_transport: KvTransport) -> KvTransport:
    for tensor in shared_transport.tensors:
        tensor.zero_()
    return shared_transport


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
    peer: Peer, transport: KvTransport, source: list[int], target: list[int], start: int, stop: int
) -> None:
    handle = peer.grant(source)
    assert finish(transport.read(handle, target, start, stop)) == "done"
    assert peer.wait_release() == handle.token
    for there, here in zip(peer.tensors, transport.tensors, strict=True):
        got, sent = sequence(here, target), sequence(there, source)
        assert torch.equal(got[:, start:stop], sent[:, start:stop])
        assert not got[:, :start].any()
        assert not got[:, stop:].any()
        others = [page for page in range(NUM_PAGES) if page not in target]
        assert not here[others].any()
    assert not transport.scratch.num_taken


@pytest.mark.parametrize("slice_bytes", [1, 100, 1000])
def test_long_reads_come_in_slices(
    peer: Peer, transport: KvTransport, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.embedded.transfer.transport.SLICE_BYTES", slice_bytes)
    handle = peer.grant([1, 2, 7])
    read = transport.read(handle, [4, 3, 2], 0, 41)
    polls = 1
    while read.poll(0.0) == "busy":
        polls += 1
    assert read.release()
    assert polls > 6
    assert peer.wait_release() == handle.token
    for there, here in zip(peer.tensors, transport.tensors, strict=True):
        assert torch.equal(sequence(here, [4, 3, 2])[:, :41], sequence(there, [1, 2, 7])[:, :41])


def test_what_was_revoked_is_not_taken_for_kv(peer: Peer, transport: KvTransport) -> None:
    with_own_memory = Peer(seed=5)
    try:
        handle = with_own_memory.grant([1, 2])
        with_own_memory.ask("revoke", handle.token)
        assert finish(transport.read(handle, [0, 1], 0, 20)) == "expired"
        again = with_own_memory.grant([1, 2])
        assert finish(transport.read(again, [0, 1], 0, 20)) == "done"
        assert finish(transport.read(replace(handle, token_address=again.token_address), [0, 1], 0, 20)) == "expired"
    finally:
        with_own_memory.end()


def test_a_release_alone_ends_the_lease(peer: Peer, transport: KvTransport) -> None:
    handle = peer.grant([4])
    transport.release(handle)
    assert peer.wait_release() == handle.token
    assert not transport.scratch.num_taken


def test_a_release_of_an_ended_lease_ends_no_other(transport: KvTransport) -> None:
    prefill = Peer(seed=5)
    try:
        old = prefill.grant([1])
        prefill.ask("revoke", old.token)
        new = prefill.grant([2])
        assert new.token_address == old.token_address
        transport.release(old)
        transport.release(new)
        assert prefill.wait_release() == new.token
    finally:
        prefill.end()


def test_a_read_waits_for_nobody(transport: KvTransport) -> None:
    """The prefill worker is busy: it does not look at its connections, as in a long step."""
    prefill = Peer(seed=6)
    try:
        handles = [prefill.grant([number]) for number in range(4)]
        assert finish(transport.read(handles[0], [0], 0, 16)) == "done"  # connects
        prefill.stop()
        for handle in handles[1:]:
            assert finish(transport.read(handle, [1], 0, 16)) == "done"
        prefill.go_on()
        assert {prefill.wait_release() for _ in handles} == {handle.token for handle in handles}
    finally:
        prefill.end()


@pytest.mark.parametrize("connected", [False, True])
def test_a_dead_prefill_worker_is_lost(transport: KvTransport, connected: bool) -> None:
    mortal = Peer(seed=3)
    try:
        first, second = mortal.grant([1]), mortal.grant([2])
        if connected:
            assert finish(transport.read(first, [0], 0, 16)) == "done"
        mortal.kill()
        assert finish(transport.read(second, [1], 0, 16)) == "lost"
        transport.release(second)
    finally:
        mortal.end()
    assert mortal.tensors[0].any()


def test_memory_that_was_not_registered_is_not_read(peer: Peer, transport: KvTransport) -> None:
    handle = peer.grant([0])
    outside = replace(handle, bases=(handle.bases[0] + 2**40, *handle.bases[1:]))
    assert finish(transport.read(outside, [0], 0, 16)) == "lost"
    inside = peer.grant([0])
    assert finish(transport.read(inside, [0], 0, 16)) == "done"
    assert peer.wait_release() == inside.token


def test_a_read_that_is_given_up_releases_the_lease(peer: Peer, transport: KvTransport) -> None:
    handle = peer.grant([1, 2])
    read = transport.read(handle, [0, 1], 0, 32)
    assert read.release()
    assert read.poll(0.0) == "lost"
    assert peer.wait_release() == handle.token


def test_leases_run_out_and_come_back(transport: KvTransport) -> None:
    handles = [transport.grant([0]) for _ in range(MAX_LEASES)]
    assert transport.grant([0]) is None
    assert len({handle.token for handle in handles if handle is not None}) == MAX_LEASES
    for handle in handles:
        assert handle is not None
        transport.revoke(handle)
    assert isinstance(transport.grant([0]), KvHandle)


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
    other = replace(LAYOUT, **{field: value})  # type: ignore[arg-type]
    said = LAYOUT.difference(other)
    assert said is not None
    assert field in said
    assert repr(value) in said
    assert repr(getattr(LAYOUT, field)) in said
    assert LAYOUT.difference(LAYOUT) is None


@settings(max_examples=examples(200), deadline=None)
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
    most = data.draw(st.integers(0, 3 * heads * size * width))
    found = pieces(layout, target, source, start, stop, most)
    assert all(length <= max(most, heads * size * width) for _, _, length in found)
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
