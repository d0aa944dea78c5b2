"""A second process with a KV store of its own: leases pages to the tests or reads theirs, as told.

Processes are forked from one that has imported everything, so that each starts at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.engines.embedded.transfer.handle import KvHandle
from worker.engines.embedded.transfer.layout import KvLayout
from worker.engines.embedded.transfer.transport import KvRead, KvTransport

LAYOUT = KvLayout("tiny", "float32", layers=3, kv_heads=2, head_dim=4, block_size=4, page_size=16)
NUM_PAGES = 12

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "worker.engines.embedded.transfer.transport"])


def store(layout: KvLayout, num_pages: int, seed: int | None, device: str = "cpu") -> list[torch.Tensor]:
    """Keys of each layer, then values of each layer; zeros without a seed."""
    shape = (num_pages, layout.kv_heads, layout.page_size, layout.head_dim)
    dtype = getattr(torch, layout.dtype)
    if seed is None:
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * layout.layers)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator).to(device, dtype) for _ in range(2 * layout.layers)]


def numbers(size: int, seed: int) -> npt.NDArray[np.uint8]:
    """Random bytes ``[size]``."""
    return np.random.default_rng(seed).integers(256, size=size, dtype=np.uint8)


class Peer:
    """The process, by its end of a pipe.

    Attributes:
        tensors: The same numbers that the process begins with.
        released: Tokens of leases that were released while a transport of ours waited for the
            process; see `answer_to`.
    """

    def __init__(
        self,
        layout: KvLayout = LAYOUT,
        num_pages: int = NUM_PAGES,
        seed: int | None = 1,
        device: str = "cpu",
        **environ: str,
    ) -> None:
        self.tensors = store(layout, num_pages, seed)
        self.released: list[int] = []
        self._pipe, theirs = _FORKS.Pipe()
        told = (theirs, layout, num_pages, seed, device, environ)
        self.process = _FORKS.Process(target=serve, args=told, daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def ask(self, what: str, *arguments: Any) -> Any:
        """Have the process do something; its answer."""
        self.tell(what, *arguments)
        return self._pipe.recv()

    def tell(self, what: str, *arguments: Any) -> None:
        """The same without waiting for the answer."""
        self._pipe.send((what, arguments))

    def answer_to(self, transport: KvTransport) -> Any:
        """The answer to what was told, while `transport` is polled as a prefill worker's."""
        while not self._pipe.poll(0.0005):
            self.released += transport.poll()
        return self._pipe.recv()

    def grant(self, pages: Sequence[int]) -> KvHandle:
        handle: KvHandle = self.ask("grant", pages)
        return handle

    def wait_release(self) -> int:
        """The token of the next lease that a reader releases."""
        return int(self.ask("wait_release"))

    def stop(self) -> None:
        """It does nothing any more, until `go_on`."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        self.kill()
        self._pipe.close()


def begin_to_read(transport: KvTransport, handle: KvHandle, pages: Sequence[int]) -> tuple[KvRead, str]:
    """A read of which some has come and some has not, if it is `busy`."""
    for tensor in transport.tensors:
        tensor.zero_()
    read = transport.read(handle, pages, 0, len(pages) * transport.layout.page_size)
    state = read.poll(0.0)
    while state == "busy" and not any(tensor.any() for tensor in transport.tensors):
        state = read.poll(0.0)
    return read, state


class Served:
    """What the process can be told: the names of the methods."""

    def __init__(self, transport: KvTransport) -> None:
        self._transport = transport
        self._granted: dict[int, KvHandle] = {}
        self._released: list[int] = []
        self._read: KvRead | None = None
        self._memory = numbers(0, 0)

    def poll(self) -> None:
        """A prefill worker's step thread does so too."""
        self._released += self._transport.poll()

    def grant(self, pages: Sequence[int]) -> KvHandle:
        handle = self._transport.grant(pages)
        assert handle is not None
        self._granted[handle.token] = handle
        return handle

    def revoke(self, token: int) -> None:
        self._transport.revoke(self._granted.pop(token))
        for tensor in self._transport.tensors:
            tensor.fill_(-1)

    def memory(self, size: int, seed: int) -> int:
        """Address of so many bytes; `numbers` has them, too."""
        self._memory = numbers(size, seed)
        return int(self._memory.ctypes.data)

    def wait_release(self) -> int:
        while not self._released:
            self.poll()
        return self._released.pop(0)

    def begin_to_read(self, handle: KvHandle, pages: Sequence[int]) -> str:
        self._read, state = begin_to_read(self._transport, handle, pages)
        return state

    def finish_reading(self) -> tuple[str, list[float]]:
        """How the read ended, and the mean of each tensor."""
        assert self._read is not None
        state = self._read.poll(60.0)
        self._read.release()
        return state, [float(tensor.double().mean()) for tensor in self._transport.tensors]


def serve(
    pipe: Connection, layout: KvLayout, num_pages: int, seed: int | None, device: str, environ: dict[str, str]
) -> None:
    """The process: does what is asked, one after the other, and polls between."""
    os.environ.update(environ, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    served = Served(KvTransport(store(layout, num_pages, seed, device), layout))
    pipe.send("ready")
    while True:
        served.poll()
        if pipe.poll(0.0005):
            what, arguments = pipe.recv()
            pipe.send(getattr(served, what)(*arguments))
