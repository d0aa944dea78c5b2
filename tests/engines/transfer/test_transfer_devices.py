"""KV in a GPU's memory: what NIXL is told about it. The GPU and NIXL are stand-ins, the
addresses are checked.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from worker.engines.embedded.plan import PageCopy
from worker.engines.embedded.transfer import nixl
from worker.engines.embedded.transfer.connector import KvConnector
from worker.engines.embedded.transfer.layout import Array, KvLayout
from worker.engines.embedded.transfer.nixl import Nixl
from worker.engines.embedded.transfer.transport import KvTransport

LAYOUT = KvLayout("m", "bfloat16", layers=1, kv_heads=2, head_dim=4, block_size=4, page_size=16)
PAGE_BYTES = 2 * 16 * 4 * 2
NUM_PAGES = 3


class OnCuda:
    """As much of a tensor in a GPU's memory as a transport looks at."""

    def __init__(self, address: int, device: torch.device) -> None:
        self._address, self.device = address, device

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return 2

    def numel(self) -> int:
        return NUM_PAGES * PAGE_BYTES // 2


class RecordingAgent:
    """What NIXL's agent is told; it moves the tokens, which lie in this process's own memory,
    and nothing else.
    """

    done: ClassVar[list[str]] = []
    """Of all agents, what they were told to transfer; tests add what else must come before it."""

    def __init__(self, name: str, config: object) -> None:
        self.registered: list[tuple[str, list[tuple[int, int, int, str]]]] = []
        self.reads: list[tuple[tuple[str, Array], tuple[str, Array]]] = []
        self.writes: list[tuple[tuple[str, Array], tuple[str, Array]]] = []

    def register_memory(self, spans: list[tuple[int, int, int, str]], memory: str) -> object:
        self.registered.append((memory, spans))
        return object()

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return b"peer"

    def get_xfer_descs(self, table: Array, memory: str) -> tuple[str, Array]:
        return memory, table

    def initialize_xfer(self, kind: str, to: Any, of: Any, peer: str) -> Any:
        (self.reads if kind == "READ" else self.writes).append((to, of))
        self.done.append(kind)
        if kind == "WRITE":
            to, of = of, to
        if to[0] == of[0] == "DRAM":
            ctypes.memmove(int(to[1][0, 0]), int(of[1][0, 0]), int(of[1][0, 1]))
        return SimpleNamespace(release=lambda: None)

    def transfer(self, handle: object) -> str:
        return "DONE"

    def check_xfer_state(self, handle: object) -> str:
        return "DONE"

    def get_new_notifs(self) -> None:
        """There are none."""


@dataclass
class Side:
    """A worker whose KV is in a GPU's memory."""

    transport: KvTransport
    agent: RecordingAgent


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been done, in order: transfers, and waits for a GPU."""
    found: list[str] = []
    monkeypatch.setattr(RecordingAgent, "done", found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append(f"wait for {device}"))
    return found


def side_on(index: int, addresses: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> Side:
    agents: list[RecordingAgent] = []

    def make_agent(name: str, config: object) -> RecordingAgent:
        agents.append(RecordingAgent(name, config))
        return agents[-1]

    api = SimpleNamespace(nixl_agent=make_agent, nixl_agent_config=lambda **settings: settings)
    monkeypatch.setattr(nixl, "load_nixl", lambda devices: Nixl(api, ()))
    tensors: Any = [OnCuda(address, torch.device("cuda", index)) for address in addresses]
    transport = KvTransport(tensors, LAYOUT)
    return Side(transport, agents[0])


def test_kv_names_its_device_and_tokens_stay_in_main_memory(monkeypatch: pytest.MonkeyPatch, done: list[str]) -> None:
    size = NUM_PAGES * PAGE_BYTES
    prefill = side_on(3, (1_000_000, 1_000_000 + size), monkeypatch)
    decode = side_on(1, (9_000_000, 5_000_000), monkeypatch)
    # neighbours may be allocations of their own there, so each is registered by itself
    assert prefill.agent.registered[0] == ("VRAM", [(1_000_000, size, 3, ""), (1_000_000 + size, size, 3, "")])
    assert decode.agent.registered[0] == ("VRAM", [(9_000_000, size, 1, ""), (5_000_000, size, 1, "")])
    for side in (prefill, decode):
        memory, ranges = side.agent.registered[1]
        assert (memory, {device for _, _, device, _ in ranges}) == ("DRAM", {0})
    handle = prefill.transport.grant([2])
    assert handle is not None
    assert (handle.memory, handle.device) == ("VRAM", 3)
    read = decode.transport.read(handle, [1], 0, 16)
    assert read.poll(1.0) == "done"
    (to, of), (scratch, token) = decode.agent.reads
    assert (to[0], of[0], scratch[0], token[0]) == ("VRAM", "VRAM", "DRAM", "DRAM")
    assert to[1].tolist() == [[base + PAGE_BYTES, PAGE_BYTES, 1] for base in (9_000_000, 5_000_000)]
    assert of[1].tolist() == [[base + 2 * PAGE_BYTES, PAGE_BYTES, 3] for base in (1_000_000, 1_000_000 + size)]
    assert token[1].tolist() == [[handle.token_address, 8, 0]]
    assert scratch[1][0, 2] == 0
    assert done == ["wait for cuda:1", "READ", "READ", "WRITE"]
    assert prefill.transport.poll() == [handle.token]
    assert prefill.transport.poll() == []


@pytest.mark.parametrize(
    ("num_cached", "prepared"), [(0, ["begin [1]"]), (16, ["begin [1]"]), (20, ["copy 2 to 1"])], ids=str
)
def test_the_gpu_is_done_with_a_page_before_it_is_read_into(
    monkeypatch: pytest.MonkeyPatch, done: list[str], num_cached: int, prepared: list[str]
) -> None:
    prefill, decode = (side_on(index, (1_000_000, 2_000_000), monkeypatch) for index in range(2))
    copies = (PageCopy(source=2, target=1, num_tokens=4),) if num_cached == 20 else ()
    store: Any = SimpleNamespace(
        copy=lambda some: done.extend(f"copy {each.source} to {each.target}" for each in some),
        begin=lambda pages: done.append(f"begin {pages}"),
    )
    transfers: Any = SimpleNamespace(
        queues=SimpleNamespace(
            max_num_seqs=1, is_idle=True, has_slot=lambda request: False, arrive=lambda request: None
        ),
        pin=lambda request: copies,
        complete=lambda request, num_computed: done.append(f"{num_computed} tokens"),
    )
    request: Any = SimpleNamespace(
        id="one",
        pages=[0, 1],
        num_computed=num_cached,
        num_reusable=29,
        prompt_length=30,
        chain=None,
        sequences=(None,),
    )
    handle = prefill.transport.grant([0, 1])
    assert handle is not None
    connector = KvConnector(decode.transport, store, transfers, None)
    connector.receive(request, handle)
    connector.poll()
    assert done == [*prepared, "wait for cuda:1", "READ", "READ", "WRITE", "29 tokens"]
