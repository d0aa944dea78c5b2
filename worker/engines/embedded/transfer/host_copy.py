"""KV between two processes of one machine: the kernel copies from one's memory into the other's.

One system call moves all pieces, one after the other, and nothing is connected before. NIXL's
shared memory transport uses the same call, but each of its transfers costs as much again as the
copy of a page of a small model. A process is known by its id and the namespace that the id belongs
to; that it is still the one that was meant, a lease's fencing token says.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from worker.engines.embedded.transfer.layout import Array
from worker.engines.embedded.transfer.leases import WORD_BYTES
from worker.engines.embedded.transfer.nixl import TransferError

MAX_PIECES = 1024
"""Pieces that one system call takes (Linux's ``UIO_MAXIOV``)."""

TRANSPORT = "UCX_TLS"
"""Environment variable of an operator who chooses NIXL's transport; nothing is copied past it."""

_DENIED = (errno.EPERM, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process, as others on its machine know it.

    Attributes:
        host: Boot id of the machine, and the namespace of process ids.
        number: Id of the process in that namespace.
    """

    host: str
    number: int


def this_process() -> HostProcess | None:
    """This process; None where `TRANSPORT` is set, or the system does not say where it is."""
    if TRANSPORT in os.environ:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return HostProcess(f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid())
    except OSError:
        return None


class HostCopy:
    """A read from a process of this machine, done when it has been started: piece by piece, in the
    order of the descriptors.

    Args:
        number: Id of the other process.
        ours: Descriptors ``[n, 3]`` of our side: address, size in bytes, and a device, which is not
            looked at.
        theirs: Descriptors of the other side, with the same sizes.
    """

    def __init__(self, number: int, ours: Array, theirs: Array) -> None:
        self._number = number
        self._sides = [np.ascontiguousarray(side[:, :2]) for side in (ours, theirs)]

    def start(self) -> str:
        """Copy everything; returns ``DONE``.

        Raises:
            TransferError: the process is gone, or the memory is not its own.
        """
        ours, theirs = self._sides
        for first in range(0, len(ours), MAX_PIECES):
            self._copy(ours[first : first + MAX_PIECES], theirs[first : first + MAX_PIECES])
        return "DONE"

    def state(self) -> str:
        """``DONE``: nothing is ever under way."""
        return "DONE"

    def release(self) -> None:
        """Do nothing."""

    def _copy(self, ours: Array, theirs: Array) -> None:
        wanted, count = int(ours[:, 1].sum()), len(ours)
        copied = _calls()["READ"](self._number, _address(ours), count, _address(theirs), count, 0)
        if copied != wanted:  # a part, where a piece in the middle is not the process's
            reason = os.strerror(ctypes.get_errno()) if copied < 0 else f"{copied} of {wanted} bytes"
            raise TransferError(f"memory of process {self._number} cannot be copied: {reason}")


def may_copy(number: int, address: int) -> bool:
    """Whether the system lets this process copy from that one; True where it is gone.

    Args:
        number: Id of the other process.
        address: An address in its memory of a word that may be read.
    """
    return _copy_word("READ", number, address, ctypes.c_int64()) >= 0 or ctypes.get_errno() not in _DENIED


def read_word(number: int, address: int) -> int | None:
    """The int64 at an address of another process; None where there is none."""
    word = ctypes.c_int64()
    return word.value if _copy_word("READ", number, address, word) == WORD_BYTES else None


def write_word(number: int, address: int, value: int) -> bool:
    """Write an int64 to an address of another process; whether that could be done."""
    return _copy_word("WRITE", number, address, ctypes.c_int64(value)) == WORD_BYTES


class _Piece(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _copy_word(kind: Literal["READ", "WRITE"], number: int, address: int, word: ctypes.c_int64) -> int:
    ours, theirs = (_Piece(each, WORD_BYTES) for each in (ctypes.addressof(word), address))
    return _calls()[kind](number, ctypes.addressof(ours), 1, ctypes.addressof(theirs), 1, 0)


def _address(array: npt.NDArray[Any]) -> int:
    """Address of an array's memory; ``array.ctypes.data`` makes objects for it."""
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def _calls() -> dict[str, Callable[..., int]]:
    """The C library's calls by kind of transfer."""
    library = ctypes.CDLL(None, use_errno=True)
    calls: dict[str, Callable[..., int]] = {}
    for kind, name in (("READ", "process_vm_readv"), ("WRITE", "process_vm_writev")):
        call = getattr(library, name)
        pieces = (ctypes.c_void_p, ctypes.c_ulong)
        call.argtypes = (ctypes.c_int, *pieces, *pieces, ctypes.c_ulong)
        call.restype = ctypes.c_ssize_t
        calls[kind] = call
    return calls
