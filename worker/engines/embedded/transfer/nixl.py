"""KV blocks go straight from one worker's memory into another's, with NIXL.

The reader reads, and the holder's processor takes no part in it. At the end the reader writes a
*note* into the holder's memory, that it may let go; NIXL's own notifications are messages, and the
next read would wait until the holder has looked at the last one, for as long as its steps take. A
holder may let go earlier (a time-out), so a read that has ended proves nothing yet: the reader then
reads the *ticket* of what was held, one number in the holder's memory, which changes before the
memory behind it is used again. Only with the right ticket was everything read in time.

No thread of its own: every call of `KvPort` and `KvRead` comes from the step thread, which polls
while there is something to wait for. Listens on the network devices that it is given alone, which
is loopback unless configured.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from worker.engines.embedded.transfer.layout import Array, KvLayout, descriptors, merged, pieces, slices
from worker.errors import StartupError

logger = logging.getLogger(__name__)

MAX_TICKETS = 4096
"""Prompts that may be held, and reads that may be under way, at once."""

SLICE_BYTES = 16 * 2**20
"""Most that is read at a time: over shared memory a read takes the step thread's time, and
decode rows wait.
"""

READ_TIMEOUT_S = 10.0
"""A read that makes no progress for this long is given up."""

PAUSE_S = 0.00005
"""Pause between looks at a transfer that another thread or device carries out, once it has taken
as long.
"""

LINGER_S = 0.5
"""How long a note to a peer is given to leave: over TCP nothing moves unless somebody polls."""

_TICKET_BYTES = 8
_NOTE_OFFSET = MAX_TICKETS * _TICKET_BYTES
"""From a ticket to where its note is written: the ticket again."""

State = Literal["busy", "done", "expired", "lost"]


@dataclass(frozen=True, slots=True)
class KvHandle:
    """Where the KV of one prompt lies in another worker's memory, and how to reach it.

    Attributes:
        holder: Name of the holder's NIXL agent.
        metadata: How to connect to it, and which memory it has registered.
        memory: ``DRAM`` or ``VRAM``.
        device: Index of the holder's device, 0 for ``DRAM``.
        bases: Address of each layer's keys, then of each layer's values.
        layout: The holder's.
        pages: Of the prompt, in order.
        ticket_address: Where the ticket lies, in ``DRAM``.
        ticket: What must be there, 63 bits.
    """

    holder: str
    metadata: bytes
    memory: str
    device: int
    bases: tuple[int, ...]
    layout: KvLayout
    pages: tuple[int, ...]
    ticket_address: int
    ticket: int


class KvPort:
    """One worker's end: its KV store, registered, the tickets of what it holds, and its
    connections.

    Args:
        tensors: Keys of each layer, then values of each layer: ``[pages, heads, page_size,
            head_dim]``, contiguous.
        layout: Of the store.
        devices: Network devices to listen on, as in ``UCX_NET_DEVICES``.

    Attributes:
        bases: Addresses of the tensors.

    Raises:
        StartupError: NIXL is not installed, or cannot be used here.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], layout: KvLayout, devices: str = "lo") -> None:
        nixl = load_nixl(devices)
        self.layout = layout
        self.name = f"dlw-{secrets.token_hex(8)}"
        self._memory, self._device = _place(tensors[0].device)
        self._itemsize = tensors[0].element_size()
        self.tensors = list(tensors)
        self.bases = tuple(tensor.data_ptr() for tensor in tensors)
        self._slots = torch.zeros(3 * MAX_TICKETS, dtype=torch.int64)
        self._tickets, self._notes, self._landing = np.split(self._slots.numpy(), 3)
        self._free_tickets = list(range(MAX_TICKETS))
        self._free_landing = list(range(MAX_TICKETS))
        self._peers: dict[str, str] = {}
        self._leaving: list[tuple[Any, int, float]] = []
        self._errors = nixl.errors
        failures: tuple[type[Exception], ...] = (RuntimeError, KeyError, *nixl.errors)
        try:
            self._agent = nixl.agent(self.name)
            self._registered = [self._register(self.tensors), self._register([self._slots])]
            self._metadata: bytes = self._agent.get_agent_metadata()
        except failures as error:
            raise StartupError(f"--disaggregation-mode: NIXL cannot be used here: {error}") from error

    def __repr__(self) -> str:
        held, read = (MAX_TICKETS - len(free) for free in (self._free_tickets, self._free_landing))
        return f"KvPort({self.name}: {held} held, {read} being read, {len(self._peers)} peers)"

    @property
    def is_lingering(self) -> bool:
        """Whether a note to a peer may still be on its way, so that `notes` should be called
        again soon.
        """
        return bool(self._leaving)

    def publish(self, pages: Sequence[int]) -> KvHandle | None:
        """Let others read `pages` until `withdraw`; None if too much is held already."""
        if not self._free_tickets:
            return None
        place = self._free_tickets.pop()
        ticket = secrets.randbits(62) + 1
        self._notes[place] = 0
        self._tickets[place] = ticket
        return KvHandle(
            self.name,
            self._metadata,
            self._memory,
            self._device,
            self.bases,
            self.layout,
            tuple(pages),
            self._slots.data_ptr() + place * _TICKET_BYTES,
            ticket,
        )

    def withdraw(self, handle: KvHandle) -> None:
        """Take the ticket back: reads that have not ended by now will find out. Then the
        pages may be written.
        """
        place = (handle.ticket_address - self._slots.data_ptr()) // _TICKET_BYTES
        assert int(self._tickets[place]) == handle.ticket, f"{handle.ticket} is not held: {self!r}"
        self._tickets[place] = 0
        self._free_tickets.append(place)

    def notes(self) -> list[int]:
        """Tickets that readers have sent back since the last call. Also lets everything on its
        way move on.
        """
        try:
            self._agent.get_new_notifs()
        except self._errors as error:
            logger.warning("a peer's connection failed: %s", error)
        self._leaving = [one for one in self._leaving if not self._has_left(*one)]
        places = np.flatnonzero((self._notes == self._tickets) & (self._tickets != 0))
        self._notes[places] = 0
        return [int(ticket) for ticket in self._tickets[places]]

    def read(self, handle: KvHandle, pages: Sequence[int], start: int, stop: int) -> KvRead:
        """Begin to read positions ``[start, stop)`` of what `handle` describes into our own
        `pages`.
        """
        return KvRead(self, handle, pages, start, stop)

    def let_go(self, handle: KvHandle) -> None:
        """Tell the holder that nothing more will be read; if it cannot be told, its time-out
        will do.
        """
        if not self._free_landing:
            return
        place = self._free_landing.pop()
        self._landing[place] = handle.ticket
        try:
            note = self._request("WRITE", handle, self._word(place, handle.ticket_address + _NOTE_OFFSET))
            self._agent.transfer(note)
        except self._errors as error:
            logger.info("%s cannot be told to let go: %s", handle.holder, error)
            self.forget(handle.holder)
            self._free_landing.append(place)
            return
        self._leaving.append((note, place, time.monotonic() + LINGER_S))
        self._leaving = [one for one in self._leaving if not self._has_left(*one)]

    def forget(self, holder: str) -> None:
        """Drop the connection to a peer; the next hand-off from it connects anew."""
        peer = self._peers.pop(holder, None)
        if peer is not None:
            try:
                self._agent.remove_remote_agent(peer)
            except self._errors as error:
                logger.info("%s cannot be disconnected: %s", holder, error)

    def close(self) -> None:
        """Disconnect and deregister. Nothing may be under way."""
        self._leaving = [one for one in self._leaving if not self._has_left(*one[:2], 0.0)]
        for holder in list(self._peers):
            self.forget(holder)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered = []

    def _has_left(self, note: Any, place: int, until: float) -> bool:
        """Whether a note is written, or cannot or need not be any more; then all that it took is
        free again.
        """
        with contextlib.suppress(*self._errors):
            if self._agent.check_xfer_state(note) == "PROC" and time.monotonic() < until:
                return False
        with contextlib.suppress(*self._errors):  # whatever is written late is no one's ticket
            note.release()
        self._free_landing.append(place)
        return True

    def _request(
        self, kind: str, handle: KvHandle, tables: Sequence[Array], memory: tuple[str, str] = ("DRAM", "DRAM")
    ) -> Any:
        """A transfer between our memory and a peer's, not begun."""
        peer = self._peer(handle)
        ours, theirs = (self._agent.get_xfer_descs(*side) for side in zip(tables, memory, strict=True))
        return self._agent.initialize_xfer(kind, ours, theirs, peer)

    def _word(self, place: int, address: int) -> list[Array]:
        """Descriptors of a landing place, and of a ticket or note at a peer."""
        here = self._slots.data_ptr() + (2 * MAX_TICKETS + place) * _TICKET_BYTES
        return [np.array([[one, _TICKET_BYTES, 0]], dtype=np.uint64) for one in (here, address)]

    def _register(self, tensors: Sequence[torch.Tensor]) -> Any:
        memory, device = _place(tensors[0].device)
        spans = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
        if memory == "DRAM":
            spans = merged(spans)  # neighbours on a GPU may be allocations of their own, registered each by itself
        return self._agent.register_memory([(*span, device, "") for span in spans], memory)

    def _peer(self, handle: KvHandle) -> str:
        peer = self._peers.get(handle.holder)
        if peer is None:
            name = self._agent.add_remote_agent(handle.metadata)
            peer = self._peers[handle.holder] = name.decode() if isinstance(name, bytes) else name
        return peer


class KvRead:
    """One read under way. Made by `KvPort.read`.

    Attributes:
        num_bytes: Of keys and values.
        seconds: From the start to the end, with all waiting.
    """

    def __init__(self, port: KvPort, handle: KvHandle, pages: Sequence[int], start: int, stop: int) -> None:
        self._port = port
        self._handle = handle
        found = pieces(port.layout, pages, handle.pages, start, stop)
        sides = (port.bases, port._device), (handle.bases, handle.device)
        self._local, self._remote = descriptors(found, sides, port._itemsize)
        self._slices = slices(self._local[:, 1], SLICE_BYTES)
        self._landing: int | None = port._free_landing.pop()
        self._transfer: Any = None
        self._asked_ticket = False
        self._state: State = "busy"
        self.num_bytes = int(self._local[:, 1].sum())
        self._began = self._moved = time.monotonic()
        self.seconds = 0.0

    def poll(self, budget_s: float) -> State:
        """Go on for `budget_s` seconds at most, if the transport does not take longer by itself.

        Returns:
            ``busy`` while there is more to do, ``done`` once everything is here, ``expired`` if the
            holder let go of it before that, ``lost`` if the holder cannot be reached. The holder
            was told where it could be.
        """
        until = time.monotonic() + budget_s
        while self._state == "busy":
            try:
                moved = self._advance()
            except self._port._errors as error:
                logger.warning("reading from %s failed: %s: %s", self._handle.holder, type(error).__name__, error)
                self._fail()
                break
            now = time.monotonic()
            if moved:
                self._moved = now
            elif now - self._moved > READ_TIMEOUT_S:
                logger.warning("reading from %s: no progress for %g s", self._handle.holder, READ_TIMEOUT_S)
                self._fail()
            if now >= until:
                break
            if now - self._moved > PAUSE_S:
                time.sleep(PAUSE_S)  # other threads run meanwhile
        if self._state != "busy" and not self.seconds:
            self.seconds = time.monotonic() - self._began
        return self._state

    def release(self) -> bool:
        """Give the read up, or clean up after it; whether nothing can be written to our pages
        any more.
        """
        if self._transfer is not None:
            try:
                self._transfer.release()
            except self._port._errors:  # it cannot be cancelled, and may write until it ends
                return False
            self._transfer = None
        if self._landing is not None:
            self._port._free_landing.append(self._landing)
            self._landing = None
        if self._state == "busy":
            self._state = "lost"
            self._port.let_go(self._handle)
        return True

    def _advance(self) -> bool:
        """Start the next slice, or look after the one under way; whether anything has moved."""
        if self._transfer is not None:
            status = self._port._agent.check_xfer_state(self._transfer)
        elif self._slices:
            first, last = self._slices.pop(0)
            memory = self._port._memory, self._handle.memory
            status = self._start((self._local[first:last], self._remote[first:last]), memory)
        elif not self._asked_ticket:
            assert self._landing is not None
            self._asked_ticket = True
            self._port._landing[self._landing] = 0
            word = self._port._word(self._landing, self._handle.ticket_address)
            status = self._start(word, ("DRAM", "DRAM"))
        else:
            assert self._landing is not None
            found = int(self._port._landing[self._landing])
            self._state = "done" if found == self._handle.ticket else "expired"
            if self._state == "done":
                self._port.let_go(self._handle)
            return True
        if status == "PROC":
            return False
        if status == "ERR":
            self._fail()
        else:
            self._transfer.release()
            self._transfer = None
        return True

    def _start(self, tables: Sequence[Array], memory: tuple[str, str]) -> str:
        self._transfer = self._port._request("READ", self._handle, tables, memory)
        status: str = self._port._agent.transfer(self._transfer)
        self._moved = time.monotonic()
        return status

    def _fail(self) -> None:
        self._state = "lost"
        self._port.forget(self._handle.holder)


def _place(device: torch.device) -> tuple[str, int]:
    """What NIXL calls a device's memory, and the index of the device."""
    return ("DRAM", 0) if device.type == "cpu" else ("VRAM", device.index or 0)


@dataclass(frozen=True, slots=True)
class Nixl:
    """The parts of NIXL that are used.

    Attributes:
        errors: What its calls raise.
    """

    api: Any
    errors: tuple[type[Exception], ...]

    def agent(self, name: str) -> Any:
        """An agent with the UCX backend, and with no threads."""
        return self.api.nixl_agent(name, self.api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def load_nixl(devices: str) -> Nixl:
    """Import NIXL; it reads its settings from the environment when it is imported and when an agent
    is made.

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
