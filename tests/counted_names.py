"""Names that count comparisons: work that grows with the square of a list shows in them."""

from __future__ import annotations


class Counted(str):
    """A name that counts how often names are compared."""

    num_comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.num_comparisons += 1
        return super().__eq__(other)
