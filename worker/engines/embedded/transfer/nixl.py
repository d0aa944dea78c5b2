"""The NIXL agent of a worker: registered memory, connections to peers, transfers.

The only module that knows NIXL's Python interface. It uses the UCX backend and no thread of its
own: whatever is under way moves on when the step thread calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from worker.engines.embedded.transfer.layout import Array, merged
from worker.errors import StartupError

logger = logging.getLogger(__name__)


class TransferError(Exception):
    """NIXL could not do what it was asked to."""


class NixlAgent:
    """One NIXL agent.

    Args:
        devices: Network devices to listen on, as in ``UCX_NET_DEVICES``.
        memories: Groups of contiguous tensors that peers may read and write. The tensors of a group
            are on one device.

    Attributes:
        name: Unique name of the agent.
        metadata: Data that a peer needs to connect to it: addresses, and the keys of `memories`.

    Raises:
        StartupError: NIXL is not installed, or cannot be used here.
    """

    def __init__(self, devices: str, memories: Sequence[Sequence[torch.Tensor]]) -> None:
        nixl = load_nixl(devices)
        self.name = f"dlw-{secrets.token_hex(8)}"
        self._peers: dict[str, str] = {}
        self._errors = nixl.errors
        failures: tuple[type[Exception], ...] = (RuntimeError, KeyError, *nixl.errors)
        try:
            self._agent = nixl.agent(self.name)
            self._registered = [self._register(tensors) for tensors in memories]
            self.metadata: bytes = self._agent.get_agent_metadata()
        except failures as error:
            raise StartupError(f"--disaggregation-mode: NIXL cannot be used here: {error}") from error

    def __repr__(self) -> str:
        return f"NixlAgent({self.name}: {len(self._peers)} peers)"

    def poll(self) -> None:
        """Let whatever is under way move on; a peer's failed connection is logged."""
        try:
            self._agent.get_new_notifs()
        except self._errors as error:
            logger.warning("a peer's connection failed: %s", error)

    def prepare(
        self,
        kind: Literal["READ", "WRITE"],
        peer: tuple[str, bytes],
        tables: Sequence[Array],
        memories: tuple[str, str] = ("DRAM", "DRAM"),
    ) -> NixlTransfer:
        """A transfer between our memory and a peer's, not started; connects to the peer if needed.

        Args:
            kind: ``READ`` from the peer, or ``WRITE`` to it.
            peer: Name and metadata of its agent.
            tables: Descriptors ``[n, 3]`` of our side and of the peer's: address, size in bytes,
                device.
            memories: NIXL's name of the memory of either side.

        Raises:
            TransferError: there is no connection, or the memory is not registered.
        """
        with self.errors_translated():
            name = self._connect(*peer)
            ours, theirs = (self._agent.get_xfer_descs(*side) for side in zip(tables, memories, strict=True))
            return NixlTransfer(self, self._agent, self._agent.initialize_xfer(kind, ours, theirs, name))

    def disconnect(self, name: str) -> None:
        """Drop the connection to a peer; the next transfer with it connects anew."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            try:
                self._agent.remove_remote_agent(peer)
            except self._errors as error:
                logger.info("%s cannot be disconnected: %s", name, error)

    def close(self) -> None:
        """Disconnect and deregister. Nothing may be under way."""
        for name in list(self._peers):
            self.disconnect(name)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered = []

    @contextlib.contextmanager
    def errors_translated(self) -> Iterator[None]:
        """NIXL's errors become `TransferError`."""
        try:
            yield
        except self._errors as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    def _register(self, tensors: Sequence[torch.Tensor]) -> Any:
        memory, device = memory_of(tensors[0].device)
        ranges = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
        if memory == "DRAM":
            ranges = merged(ranges)  # neighbours on a GPU may be separate allocations, each registered by itself
        return self._agent.register_memory([(*one, device, "") for one in ranges], memory)

    def _connect(self, name: str, metadata: bytes) -> str:
        peer = self._peers.get(name)
        if peer is None:
            added = self._agent.add_remote_agent(metadata)
            peer = self._peers[name] = added.decode() if isinstance(added, bytes) else added
        return peer


class NixlTransfer:
    """One transfer. Made by `NixlAgent.prepare`.

    Every method raises `TransferError` if NIXL refuses.
    """

    def __init__(self, owner: NixlAgent, api: Any, handle: Any) -> None:
        self._owner = owner
        self._api = api
        self._handle = handle

    def start(self) -> str:
        """Start it; returns its state."""
        with self._owner.errors_translated():
            state: str = self._api.transfer(self._handle)
        return state

    def state(self) -> str:
        """``PROC`` while it is under way, ``DONE``, or ``ERR``."""
        with self._owner.errors_translated():
            state: str = self._api.check_xfer_state(self._handle)
        return state

    def release(self) -> None:
        """Free or cancel it; if that raises, it may still write."""
        with self._owner.errors_translated():
            self._handle.release()


def memory_of(device: torch.device) -> tuple[str, int]:
    """NIXL's name for a device's memory, and the index of the device."""
    return ("DRAM", 0) if device.type == "cpu" else ("VRAM", device.index or 0)


@dataclass(frozen=True, slots=True)
class Nixl:
    """The parts of NIXL that are used.

    Attributes:
        api: NIXL's Python interface.
        errors: Exceptions that its calls raise.
    """

    api: Any
    errors: tuple[type[Exception], ...]

    def agent(self, name: str) -> Any:
        """An agent with the UCX backend, and with no threads."""
        return self.api.nixl_agent(name, self.api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def load_nixl(devices: str) -> Nixl:
    """Import NIXL, which reads its settings from the environment on import and for each agent.

    Raises:
        StartupError: it is not installed, or its libraries cannot be loaded.
    """
    os.environ["UCX_NET_DEVICES"] = devices
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl import _api, _bindings
    except ImportError as error:
        raise StartupError(
            f"--disaggregation-mode needs NIXL, which cannot be imported ({error}): "
            "pip install 'dynamo-logits-worker[disagg]'"
        ) from error
    named = (getattr(_bindings, name) for name in dir(_bindings) if name.endswith("Error"))
    return Nixl(_api, tuple(each for each in named if isinstance(each, type) and issubclass(each, Exception)))
