"""KV goes straight from one worker's memory into another's, with NIXL.

The decode worker reads, and the prefill worker's processor takes no part in it. A read ends with
the lease's fencing token (see `leases`), which proves that all of the KV was read in time; then the
reader releases the lease by a write into the prefill worker's memory. NIXL's own notifications
would be messages, and the next read would wait until the prefill worker has looked at the last one,
for as long as its steps take.

No thread of its own: every call of `KvTransport` and `KvRead` comes from the step thread, which
polls while there is something to wait for. Listens on the network devices that it is given alone,
which is loopback unless configured.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from worker.engines.embedded.transfer.handle import KvHandle
from worker.engines.embedded.transfer.host_copy import (
    HostProcess,
    copy_from,
    may_copy,
    read_word,
    this_process,
    write_word,
)
from worker.engines.embedded.transfer.layout import Array, KvLayout, descriptors, pieces, slices
from worker.engines.embedded.transfer.leases import (
    MAX_LEASES,
    RELEASE_OFFSET,
    WORD_BYTES,
    LeaseTable,
    ScratchWord,
    ScratchWords,
)
from worker.engines.embedded.transfer.nixl import NixlAgent, NixlTransfer, TransferError, memory_of

logger = logging.getLogger(__name__)

SLICE_BYTES = 16 * 2**20
"""Most that is read at a time: over shared memory a read takes the step thread's time, and
decode rows wait.
"""

PIECE_BYTES = 2**20
"""Most that one thread copies of a neighbour's pages in a row: threads share what is larger."""

READ_TIMEOUT_S = 10.0
"""A read that makes no progress for this long is given up."""

PAUSE_S = 0.00005
"""Pause between looks at a transfer that another thread or device carries out, once it has taken
as long.
"""

RELEASE_TIMEOUT_S = 0.5
"""Time for a release to reach its peer: over TCP nothing moves unless the transport is polled."""

State = Literal["busy", "done", "expired", "lost"]


@dataclass(frozen=True, slots=True)
class Release:
    """The release of a lease, on its way to the worker that granted it.

    Attributes:
        transfer: Writes `word` there.
        word: Holds the fencing token.
        deadline: Time at which it is given up, by `time.monotonic`.
    """

    transfer: NixlTransfer
    word: ScratchWord
    deadline: float


class KvTransport:
    """One worker's end of KV transfers: its KV store, the leases on it, its reads elsewhere.

    Args:
        tensors: Keys of each layer, then values of each layer: ``[pages, heads, page_size,
            head_dim]``, contiguous.
        layout: Layout of the store.
        devices: Network devices to listen on, as in ``UCX_NET_DEVICES``.

    Attributes:
        tensors: The same.
        layout: The same.
        bases: Addresses of the tensors, in uint64.
        memory: NIXL's name of their memory, ``DRAM`` or ``VRAM``, and `device_index` of its device.
        agent: The NIXL agent.
        scratch: Words for reads and releases.

    Raises:
        StartupError: NIXL is not installed, or cannot be used here.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], layout: KvLayout, devices: str = "lo") -> None:
        self.layout = layout
        self.tensors = list(tensors)
        self.memory, self.device_index = memory_of(tensors[0].device)
        self.bases = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
        words = torch.zeros(3 * MAX_LEASES, dtype=torch.int64)
        self._leases = LeaseTable(words[: 2 * MAX_LEASES])
        self.scratch = ScratchWords(words[2 * MAX_LEASES :])
        self._releases: list[Release] = []
        self.agent = NixlAgent(devices, [self.tensors, [words]])
        self._process = this_process() if self.memory == "DRAM" else None
        self._neighbours: dict[HostProcess, bool] = {}  # whether the system lets us copy from them

    def __repr__(self) -> str:
        return f"KvTransport({len(self._leases)} leases, {self.scratch.num_taken} words in use, {self.agent!r})"

    @property
    def is_releasing(self) -> bool:
        """Whether a release may still be on its way, so that `poll` should be called again soon."""
        return bool(self._releases)

    def grant(self, pages: Sequence[int]) -> KvHandle | None:
        """Lease `pages` to the holder of the handle, until `revoke`; None if there are too many."""
        lease = self._leases.grant()
        if lease is None:
            return None
        token, address = lease
        return KvHandle(
            agent=self.agent.name,
            metadata=self.agent.metadata,
            memory=self.memory,
            device=self.device_index,
            bases=tuple(self.bases.tolist()),
            layout=self.layout,
            pages=tuple(pages),
            token_address=address,
            token=token,
            process=self._process,
        )

    def revoke(self, handle: KvHandle) -> None:
        """End a lease; a read under way will find out. Then the pages may be written."""
        self._leases.revoke(handle.token, handle.token_address)

    def poll(self) -> list[int]:
        """Let whatever is under way move on; returns the tokens of leases that readers released."""
        self.agent.poll()
        self._drop_ended_releases()
        return self._leases.take_released()

    def read(self, handle: KvHandle, pages: Sequence[int], start: int, stop: int) -> KvRead:
        """Begin to read positions ``[start, stop)`` of what `handle` describes into `pages`."""
        device = self.tensors[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a read is in no stream of torch's: kernels that write here must have ended
        number = self.neighbour(handle)
        if number is not None:
            return NeighbourRead(self, handle, number, pages, start, stop)
        return NixlRead(self, handle, pages, start, stop)

    def neighbour(self, handle: KvHandle) -> int | None:
        """Process id of a handle's worker, if it is on this machine and we may copy from and into
        its memory.
        """
        process = handle.process
        if process is None or self._process is None or process.host != self._process.host or handle.memory != "DRAM":
            return None
        if process not in self._neighbours:
            self._neighbours[process] = may_copy(process.number, handle.token_address)
        return process.number if self._neighbours[process] else None

    def release(self, handle: KvHandle, *, is_granted: bool = False) -> None:
        """Tell a lease's granter that we read no more; if that fails, the lease ends by itself.

        Args:
            handle: Handle of the lease.
            is_granted: Whether its fencing token was found in the granter's memory a moment ago.
        """
        address = handle.token_address + RELEASE_OFFSET
        number = self.neighbour(handle)
        if number is not None:  # another process may have it by now, and must not be written to
            if is_granted or read_word(number, handle.token_address) == handle.token:
                write_word(number, address, handle.token)
            return
        word = self.scratch.take()
        if word is None:
            return
        word.cell[0] = handle.token
        try:
            transfer = self.agent.prepare("WRITE", (handle.agent, handle.metadata), word_tables(word, address))
            transfer.start()
        except TransferError as error:
            logger.info("a lease of %s cannot be released: %s", handle.agent, error)
            self.agent.disconnect(handle.agent)
            self.scratch.give_back(word)
            return
        self._releases.append(Release(transfer, word, time.monotonic() + RELEASE_TIMEOUT_S))
        self._drop_ended_releases()

    def close(self) -> None:
        """Disconnect and deregister. No read may be under way."""
        for one in self._releases:
            self._has_ended(one, now=one.deadline)
        self._releases = []
        self.agent.close()

    def _drop_ended_releases(self) -> None:
        now = time.monotonic()
        self._releases = [one for one in self._releases if not self._has_ended(one, now)]

    def _has_ended(self, release: Release, now: float) -> bool:
        """Whether a release is written, or given up; then all that it took is free again."""
        with contextlib.suppress(TransferError):
            if release.transfer.state() == "PROC" and now < release.deadline:
                return False
        with contextlib.suppress(TransferError):  # a word that is written late is no lease's token
            release.transfer.release()
        self.scratch.give_back(release.word)
        return True


class KvRead:
    """One read under way. Made by `KvTransport.read`.

    Attributes:
        num_bytes: Size of the keys and values.
        seconds: Time from the start to the end, with all waiting.
    """

    def __init__(self, transport: KvTransport, handle: KvHandle) -> None:
        self._transport = transport
        self._handle = handle
        self._state: State = "busy"
        self.num_bytes = 0
        self._began = self._moved = time.monotonic()
        self.seconds = 0.0

    def poll(self, budget_s: float) -> State:
        """Go on for `budget_s` seconds at most, if the transport does not take longer by itself.

        Returns:
            ``busy`` while there is more to do, ``done`` once everything is here, ``expired`` if the
            lease had ended before that, ``lost`` if its granter cannot be reached. The lease was
            released where it could be.
        """
        until = time.monotonic() + budget_s
        while self._state == "busy":
            try:
                moved = self._advance()
            except TransferError as error:
                logger.warning("reading from %s failed: %s", self._handle.agent, error)
                self._fail()
                break
            now = time.monotonic()
            if moved:
                self._moved = now
            elif now - self._moved > READ_TIMEOUT_S:
                logger.warning("reading from %s: no progress for %g s", self._handle.agent, READ_TIMEOUT_S)
                self._fail()
            if now >= until:
                break
            if now - self._moved > PAUSE_S:
                time.sleep(PAUSE_S)  # other threads run meanwhile
        if self._state != "busy" and not self.seconds:
            self.seconds = time.monotonic() - self._began
        return self._state

    def release(self) -> bool:
        """Give the read up, or clean up after it; whether it cannot write to our pages any more."""
        if not self._clean_up():
            return False
        if self._state == "busy":
            self._state = "lost"
            self._transport.release(self._handle)
        return True

    def _advance(self) -> bool:
        """Start the next slice, or look at the one under way; whether anything has moved.

        Raises:
            TransferError: the granter cannot be reached.
        """
        raise NotImplementedError

    def _clean_up(self) -> bool:
        """Free what the read took, once nothing writes to our pages; whether that is so."""
        return True

    def _check(self, token: int) -> None:
        """End the read, of which all is here; `token` is what the lease's was behind that."""
        if token != self._handle.token:
            self._state = "expired"
            return
        self._state = "done"
        self._transport.release(self._handle, is_granted=True)

    def _fail(self) -> None:
        self._state = "lost"
        self._transport.agent.disconnect(self._handle.agent)


class NixlRead(KvRead):
    """A read with NIXL, which moves a slice while this process does other things."""

    def __init__(self, transport: KvTransport, handle: KvHandle, pages: Sequence[int], start: int, stop: int) -> None:
        super().__init__(transport, handle)
        size = transport.tensors[0].element_size()
        found = pieces(transport.layout, pages, handle.pages, start, stop, SLICE_BYTES // size)
        sides = (transport.bases, transport.device_index), (handle.bases, handle.device)
        self._ours, self._theirs = descriptors(found, sides, size)
        self._slices = slices(self._ours[:, 1], SLICE_BYTES)
        self.num_bytes = int(self._ours[:, 1].sum())
        self._word = transport.scratch.take()
        assert self._word is not None, f"too many reads: {transport!r}"
        self._transfer: NixlTransfer | None = None
        self._asked_token = False

    def _clean_up(self) -> bool:
        if self._transfer is not None:
            try:
                self._transfer.release()
            except TransferError:  # it cannot be cancelled, and may write until it ends
                return False
            self._transfer = None
        if self._word is not None:
            self._transport.scratch.give_back(self._word)
            self._word = None
        return True

    def _advance(self) -> bool:
        assert self._word is not None
        if self._transfer is not None:
            status = self._transfer.state()
        elif self._slices:
            first, last = self._slices.pop(0)
            tables = [self._ours[first:last], self._theirs[first:last]]
            status = self._start(tables, (self._transport.memory, self._handle.memory))
        elif not self._asked_token:
            self._asked_token = True
            self._word.cell[0] = 0
            status = self._start(word_tables(self._word, self._handle.token_address), ("DRAM", "DRAM"))
        else:
            self._check(int(self._word.cell[0]))
            return True
        if status == "PROC":
            return False
        if status == "ERR":
            self._fail()
        else:
            assert self._transfer is not None
            self._transfer.release()
            self._transfer = None
        return True

    def _start(self, tables: Sequence[Array], memories: tuple[str, str]) -> str:
        peer = self._handle.agent, self._handle.metadata
        self._transfer = self._transport.agent.prepare("READ", peer, tables, memories)
        status = self._transfer.start()
        self._moved = time.monotonic()
        return status


class NeighbourRead(KvRead):
    """A read from a process of this machine, whose memory the engine's threads copy.

    Args:
        number: Id of the process.
    """

    def __init__(
        self, transport: KvTransport, handle: KvHandle, number: int, pages: Sequence[int], start: int, stop: int
    ) -> None:
        super().__init__(transport, handle)
        self._number = number
        size = transport.tensors[0].element_size()
        found = pieces(transport.layout, pages, handle.pages, start, stop, PIECE_BYTES // size)
        self._pieces = np.array(found, dtype=np.int64) * size
        self._bases = transport.bases, np.array(handle.bases, dtype=np.uint64)
        sizes = np.tile(self._pieces[:, 2], len(handle.bases))
        self._slices = slices(sizes, SLICE_BYTES)
        self.num_bytes = int(sizes.sum())

    def _advance(self) -> bool:
        copy_from(self._number, *self._bases, self._pieces, self._slices.pop(0))
        if not self._slices:  # all is here, if the token behind it is the lease's
            token = read_word(self._number, self._handle.token_address)
            if token is None:
                raise TransferError(f"process {self._number} is gone")
            self._check(token)
        return True


def word_tables(word: ScratchWord, address: int) -> list[Array]:
    """Descriptors of a scratch word, and of the word at a peer's `address`."""
    return [np.array([[each, WORD_BYTES, 0]], dtype=np.uint64) for each in (word.address, address)]
