"""KV between two processes, one of which has it in a GPU's memory, or both."""

from __future__ import annotations

import pytest
import torch
from transfer_peer import NUM_PAGES, Peer, store

from worker.engines.embedded.transfer.layout import KvLayout
from worker.engines.embedded.transfer.transport import KvTransport

PATIENCE_S = 60.0
LAYOUT = KvLayout("tiny", "bfloat16", layers=3, kv_heads=2, head_dim=64, block_size=16, page_size=64)


@pytest.mark.parametrize(("theirs", "ours"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize(("start", "stop"), [(0, 192), (0, 47), (63, 130)])
def test_exactly_the_positions_asked_for(theirs: str, ours: str, start: int, stop: int) -> None:
    peer = Peer(LAYOUT, device=theirs)
    transport = KvTransport(store(LAYOUT, NUM_PAGES, None, ours), LAYOUT)
    try:
        handle = peer.grant([9, 2, 11])
        read = transport.read(handle, [0, 1, 4], start, stop)
        assert read.poll(PATIENCE_S) == "done"
        assert read.release()
        for there, here in zip(peer.tensors, transport.tensors, strict=True):
            got = torch.cat([here[page] for page in (0, 1, 4)], 1).cpu()
            sent = torch.cat([there[page] for page in (9, 2, 11)], 1)
            assert torch.equal(got[:, start:stop], sent[:, start:stop])
            assert not got[:, :start].any()
            assert not got[:, stop:].any()
    finally:
        transport.close()
        peer.end()
