"""KV between two processes of one machine: the kernel copies from one's memory into the other's.

The engine's threads move the pieces, and nothing is connected before. NIXL's shared memory
transport uses the same system call, but each of its transfers costs as much again as the copy of a
page of a small model, and one thread copies. A process is known by its id and the namespace that
the id belongs to; that it is still the one that was meant, a lease's fencing token says.
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
import torch

from worker.engines.embedded.native import library
from worker.engines.embedded.native.weights import are_available
from worker.engines.embedded.transfer.layout import Array
from worker.engines.embedded.transfer.leases import WORD_BYTES
from worker.engines.embedded.transfer.nixl import TransferError

Pieces = npt.NDArray[np.int64]

MAX_PIECES = 1024
"""Most pieces of a system call (Linux's ``UIO_MAXIOV``)."""

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


def copy_from(number: int, ours: Array, theirs: Array, pieces: Pieces, part: tuple[int, int]) -> None:
    """Copy pieces of tensors in another process's memory: with native kernels on all of torch's
    threads, else on one.

    Args:
        number: Id of the other process.
        ours: Addresses ``[t]`` of our tensors, in uint64.
        theirs: Addresses ``[t]`` of the other process's.
        pieces: ``[n, 3]`` of every tensor, in bytes: offset in ours, offset in theirs, size.
        part: Numbers of the pieces to copy, the first and one past the last: piece i of tensor j
            has number j * n + i.

    Raises:
        TransferError: the process is gone, or the memory is not its own.
    """
    copy = _copy_on_threads if are_available() else _copy_on_one
    failure = copy(number, ours, theirs, pieces, part)
    if failure:
        reason = os.strerror(failure) if failure > 0 else "some of it is not there"
        raise TransferError(f"memory of process {number} cannot be copied: {reason}")


def _copy_on_threads(number: int, ours: Array, theirs: Array, pieces: Pieces, part: tuple[int, int]) -> int:
    """0, an errno, or -1 where a part is not there."""
    kernels = library(torch.float32)
    addresses = _address(ours), _address(theirs), _address(pieces)
    failure: int = kernels.copy_from_process(number, *addresses, len(pieces), *part, kernels.threads())
    return failure


def _copy_on_one(number: int, ours: Array, theirs: Array, pieces: Pieces, part: tuple[int, int]) -> int:
    """The same."""
    for first in range(*part, MAX_PIECES):
        tensors, rows = np.divmod(np.arange(first, min(first + MAX_PIECES, part[1])), len(pieces))
        chosen = pieces[rows].astype(np.uint64)
        to, of = (np.stack([side[tensors] + chosen[:, i], chosen[:, 2]], 1) for i, side in enumerate((ours, theirs)))
        copied = _calls()["READ"](number, _address(to), len(to), _address(of), len(to), 0)
        if copied != int(chosen[:, 2].sum()):
            return ctypes.get_errno() if copied < 0 else -1
    return 0


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
