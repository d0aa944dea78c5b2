"""Leases on KV pages, and the 64-bit words of main memory by which workers agree on them.

The prefill worker grants a lease on the pages of a prompt. Each lease has a *fencing token*, a
random number in the prefill worker's memory that is revoked before the pages are used again: a
decode worker reads it after the KV, and only where it still finds the token was all of the KV read
in time. Beside it is a word that the decode worker writes the token to, to release the lease.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

MAX_LEASES = 4096
"""Leases that may be granted, and reads and releases that may be under way, at once."""

WORD_BYTES = 8

RELEASE_OFFSET = MAX_LEASES * WORD_BYTES
"""Distance from a fencing token's address to that of the word to which a reader writes it."""


class LeaseTable:
    """The leases that a worker has granted.

    Args:
        words: int64 ``[2 * MAX_LEASES]``, in main memory that readers can reach: fencing tokens, 0
            where no lease is, then the tokens that readers have written to release them.
    """

    def __init__(self, words: torch.Tensor) -> None:
        self._address = words.data_ptr()
        self._tokens, self._released = np.split(words.numpy(), 2)
        self._free = list(range(MAX_LEASES))

    def __len__(self) -> int:
        return MAX_LEASES - len(self._free)

    def grant(self) -> tuple[int, int] | None:
        """A new lease: its fencing token, 63 bits, and its address; None if there are too many."""
        if not self._free:
            return None
        index = self._free.pop()
        token = secrets.randbits(62) + 1
        self._released[index] = 0
        self._tokens[index] = token
        return token, self._address + index * WORD_BYTES

    def revoke(self, token: int, address: int) -> None:
        """End a lease; a read that has not ended by now finds that out from the token."""
        index = (address - self._address) // WORD_BYTES
        assert int(self._tokens[index]) == token, f"there is no lease {token} at {address}"
        self._tokens[index] = 0
        self._free.append(index)

    def take_released(self) -> list[int]:
        """Tokens of the leases that readers have released since the last call."""
        found = np.flatnonzero((self._released == self._tokens) & (self._tokens != 0))
        self._released[found] = 0
        return [int(token) for token in self._tokens[found]]


@dataclass(frozen=True, slots=True)
class ScratchWord:
    """A word of main memory that a remote word is read into or written from.

    Attributes:
        address: Address of the word.
        cell: int64 ``[1]``, a view of it.
    """

    address: int
    cell: npt.NDArray[np.int64]


class ScratchWords:
    """The scratch words of a worker.

    Args:
        words: int64, in main memory that is registered for transfers.
    """

    def __init__(self, words: torch.Tensor) -> None:
        cells, address = words.numpy(), words.data_ptr()
        self._num_words = len(cells)
        self._free = [
            ScratchWord(address + index * WORD_BYTES, cells[index : index + 1]) for index in range(len(cells))
        ]

    @property
    def num_taken(self) -> int:
        """Words in use."""
        return self._num_words - len(self._free)

    def take(self) -> ScratchWord | None:
        """A word; None if all are in use."""
        return self._free.pop() if self._free else None

    def give_back(self, word: ScratchWord) -> None:
        """Free a word, which is not read or written any more."""
        self._free.append(word)
