"""Newest masks of one vocabulary's grammars, which are likely to be needed again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from llguidance import LLMatcher

from adapters.contract import Allow

MAX_MASKS = 64
"""Masks that a thread keeps: strings of a bounded length have one for each length that is left.

For a vocabulary of 150,000 tokens 38 KB each, and up to 75 KB where few tokens are masked or kept.
"""

Words: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
"""A packed mask, int32 ``[ceil(width / 32)]``."""


class _Known(NamedTuple):
    """An edit and the data that it was computed from: see `ThreadMasks.edit`.

    Attributes:
        found: A bytearray, because it is compared with other memory without a copy.
    """

    complete: bool
    end_ids: tuple[int, ...]
    found: bytearray
    edit: Allow


class GrammarMasks(threading.local):
    """Each thread's own `ThreadMasks`, which it looks up once for a mask.

    Args:
        num_words: Words of a row's mask.
    """

    def __init__(self, num_words: int) -> None:
        self.own = ThreadMasks(num_words)


class ThreadMasks:
    """Computes masks and keeps the edits made of the newest ones.

    Inside a string, one token after another has the same mask, and so has every string without a
    limit, of any request. Finding the edit again is faster than making it, and it is counted once.

    Args:
        num_words: Words of a row's mask. A matcher's masks have one more, for llguidance's own end
            token (`adapters.grammars.compiler.load_tokenizer`).
    """

    def __init__(self, num_words: int) -> None:
        buffer: Words = np.zeros(num_words + 1, dtype=np.int32)
        self._address, self._num_bytes = buffer.ctypes.data, buffer.nbytes
        self._words = buffer[:num_words]
        self._bytes = self._words.data.cast("B")
        self._newest: list[_Known] = []

    def compute(self, matcher: LLMatcher) -> None:
        """Compute the mask of the tokens that ``matcher`` allows next."""
        matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)

    def clear(self) -> None:
        """Clear the mask: no token is allowed."""
        self._words[:] = 0

    def edit(self, complete: bool, end_ids: tuple[int, ...], correct: Callable[[Words, bool], None]) -> Allow:
        """The edit of the mask computed last.

        Args:
            complete: Whether the text is complete.
            end_ids: The request's end tokens.
            correct: Edits a mask in place, by ``complete`` and ``end_ids`` only.
        """
        newest, found = self._newest, self._bytes
        for i, known in enumerate(newest):
            if known.complete == complete and known.end_ids == end_ids and known.found == found:
                if i:
                    newest.insert(0, newest.pop(i))
                return known.edit
        words = self._words.copy()
        correct(words, complete)
        edit = Allow(torch.from_numpy(words))
        newest.insert(0, _Known(complete, end_ids, bytearray(found), edit))
        del newest[MAX_MASKS:]
        return edit
