"""Rows out of a weight that lies packed for a matrix kernel, so that tied embeddings need no
copy of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Lookup = Callable[[torch.Tensor], torch.Tensor]
"""Rows ``[..., K]`` of a weight ``[N, K]`` by their numbers, int64 ``[...]``."""

_COMPARED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight ``[N, K]`` in panels of c rows, word by word: ``words[n // c, w, n % c]`` is word w
    of row n.

    A word is 32 bits: one float32, or two elements of bfloat16.

    Attributes:
        words: int32 ``[panels, words of a row, c]``; rows may be filled up to whole words or more.
        width: K.
        dtype: Of the weight.
        owner: What keeps the memory of `words` from being freed.
    """

    words: torch.Tensor
    width: int
    dtype: torch.dtype
    owner: object = None

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Lookup`."""
        columns = self.words.shape[2]
        return self.words[ids // columns, :, ids % columns].view(self.dtype)[..., : self.width].contiguous()

    def hold(self, weight: torch.Tensor) -> bool:
        """Whether every row is that of `weight`; of a weight with a NaN it cannot be said."""
        parts = torch.split(torch.arange(len(weight)), _COMPARED_AT_ONCE)
        return all(torch.equal(self.rows(part), weight[part]) for part in parts)


def lookup(weight: torch.Tensor, layouts: Iterable[Panels]) -> Lookup | None:
    """Looks rows of `weight` up in the first of `layouts` that holds all of them; None if none
    does.
    """
    return next((panels.rows for panels in layouts if panels.hold(weight)), None)
