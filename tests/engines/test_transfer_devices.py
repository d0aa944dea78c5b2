"""KV in a GPU's memory: what NIXL is told about it. The GPU and NIXL are stand-ins, the
addresses are checked.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.engines.embedded.plan import PageCopy
from worker.engines.embedded.transfer import nixl
from worker.engines.embedded.transfer.connector import KvConnector
from worker.engines.embedded.transfer.layout import Array, KvLayout
from worker.engines.embedded.transfer.nixl import KvPort, Nixl

LAYOUT = KvLayout("m", "bfloat16", layers=1, kv_heads=2, head_dim=4, block_size=4, page_size=16)
PAGE_BYTES = 2 * 16 * 4 * 2
NUM_PAGES = 3


class OnCuda:
    """As much of a tensor in a GPU's memory as a port and an connector look at."""

    def __init__(self, address: int, device: torch.device, done: list[str]) -> None:
        self._address, self.device, self._done = address, device, done

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return 2

    def numel(self) -> int:
        return NUM_PAGES * PAGE_BYTES // 2

    def __getitem__(self, place: object) -> int:
        return 0

    def __setitem__(self, place: object, value: object) -> None:
        self._done.append("write")


class RecordingAgent:
    """What NIXL's agent is told; it moves the tickets, which lie in this process's own memory,
    and nothing else.
    """

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


def port_on(index: int, addresses: tuple[int, ...], done: list[str], monkeypatch: pytest.MonkeyPatch) -> KvPort:
    api = SimpleNamespace(nixl_agent=RecordingAgent, nixl_agent_config=lambda **settings: settings)
    monkeypatch.setattr(nixl, "load_nixl", lambda devices: Nixl(api, ()))
    tensors: Any = [OnCuda(address, torch.device("cuda", index), done) for address in addresses]
    return KvPort(tensors, LAYOUT)


def test_the_device_is_named_wherever_kv_is_and_tickets_stay_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    size = NUM_PAGES * PAGE_BYTES
    holder = port_on(3, (1_000_000, 1_000_000 + size), [], monkeypatch)
    reader = port_on(1, (9_000_000, 5_000_000), [], monkeypatch)
    # neighbours may be allocations of their own there, so each is registered by itself
    assert holder._agent.registered[0] == ("VRAM", [(1_000_000, size, 3, ""), (1_000_000 + size, size, 3, "")])
    assert reader._agent.registered[0] == ("VRAM", [(9_000_000, size, 1, ""), (5_000_000, size, 1, "")])
    for port in (holder, reader):
        memory, spans = port._agent.registered[1]
        assert (memory, {device for _, _, device, _ in spans}) == ("DRAM", {0})
    handle = holder.publish([2])
    assert handle is not None
    assert (handle.memory, handle.device) == ("VRAM", 3)
    read = reader.read(handle, [1], 0, 16)
    assert read.poll(1.0) == "done"
    (to, of), (landing, ticket) = reader._agent.reads
    assert (to[0], of[0], landing[0], ticket[0]) == ("VRAM", "VRAM", "DRAM", "DRAM")
    assert to[1].tolist() == [[base + PAGE_BYTES, PAGE_BYTES, 1] for base in (9_000_000, 5_000_000)]
    assert of[1].tolist() == [[base + 2 * PAGE_BYTES, PAGE_BYTES, 3] for base in (1_000_000, 1_000_000 + size)]
    assert ticket[1].tolist() == [[handle.ticket_address, 8, 0]]
    assert landing[1][0, 2] == 0
    assert len(reader._agent.writes) == 1
    assert holder.notes() == [handle.ticket]
    assert holder.notes() == []


@pytest.mark.parametrize("opened", [True, False])
def test_the_gpu_is_done_with_a_page_before_it_is_read_into(monkeypatch: pytest.MonkeyPatch, opened: bool) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"wait for {device}"))
    port = port_on(1, (1_000_000, 2_000_000), done, monkeypatch)
    connector = KvConnector(port, SimpleNamespace(), None)  # type: ignore[arg-type]
    request: Any = SimpleNamespace(pages=[0, 1], num_computed=0 if opened else 20)
    connector._prepare(request, [] if opened else [PageCopy(source=2, target=1, num_tokens=4)])
    assert done == ["write"] * (2 if opened else 4) + ["wait for cuda:1"]
