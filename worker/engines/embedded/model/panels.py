"""Row lookup in packed weights, so that tied embeddings need no copy of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Lookup = Callable[[torch.Tensor], torch.Tensor]
"""Rows ``[..., K]`` of a weight ``[N, K]`` by their indices, int64 ``[...]``."""

_COMPARED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight ``[N, K]``: panels of c rows, ``words[n // c, w, n % c]`` is word w of row n.

    A word is 32 bits: one float32, or two elements of bfloat16, which one instruction multiplies.
    Word w of all c rows of a panel is contiguous because a GEMM loads it as one or more vector
    registers, multiplies it by word w of an input row, and so reads a panel from front to back. A
    row of the weight is then a column of its panel: every c-th word.

    Attributes:
        words: int32 ``[panels, words of a row, c]``; rows may be padded to whole words or more.
        width: K.
        dtype: Data type of the weight.
        owner: Object that keeps the memory of `words` from being freed.
    """

    words: torch.Tensor
    width: int
    dtype: torch.dtype
    owner: object = None

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Lookup`."""
        columns = self.words.shape[2]
        return self.words[ids // columns, :, ids % columns].view(self.dtype)[..., : self.width].contiguous()

    def matches(self, weight: torch.Tensor) -> bool:
        """Whether every row equals that of `weight`, which may be of a narrower data type.

        False for a weight with a NaN.
        """
        parts = torch.split(torch.arange(len(weight)), _COMPARED_AT_ONCE)
        return all(torch.equal(self.rows(part), weight[part].to(self.dtype)) for part in parts)


def lookup(weight: torch.Tensor, layouts: Iterable[Panels]) -> Lookup | None:
    """Row lookup in the first of `layouts` that matches `weight`; None if none does."""
    found = next((panels for panels in layouts if panels.matches(weight)), None)
    if found is None:
        return None
    dtype = weight.dtype  # the weight itself would be kept with the function
    return found.rows if found.dtype == dtype else lambda ids: found.rows(ids).to(dtype)
