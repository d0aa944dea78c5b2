"""Who owns which part of the KV store. The store itself, a row of tokens per layer, belongs to the model.

A running request holds one contiguous range of blocks, enough for its prompt and its longest possible answer, so
that attention reads it in place and a running request never runs out of memory.
"""

from __future__ import annotations


class KvCache:
    """Ranges of blocks, first fit.

    Args:
        num_blocks: Blocks in the store.
        block_size: Tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: list[tuple[int, int]] = [(0, num_blocks)]  # (first, end) of each hole, ascending, never touching
        self._held: dict[int, int] = {}  # first block -> end

    def __repr__(self) -> str:
        return f"KvCache({self.num_free} of {self.num_blocks} blocks free, {len(self._held)} ranges held)"

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return sum(end - first for first, end in self._free)

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return sum(end - first for first, end in self._held.items())

    def allocate(self, num_tokens: int) -> int | None:
        """Hold a range for `num_tokens` tokens; returns its first token, or None while no hole is large enough."""
        wanted = -(-num_tokens // self.block_size)
        for index, (first, end) in enumerate(self._free):
            if end - first >= wanted:
                rest = (first + wanted, end)
                self._free[index : index + 1] = [rest] if rest[0] < end else []
                self._held[first] = first + wanted
                return first * self.block_size
        return None

    def free(self, start: int) -> None:
        """Give back the range whose first token is `start`."""
        first = start // self.block_size
        self._free.append((first, self._held.pop(first)))
        self._free.sort()
        merged = [self._free[0]]
        for hole in self._free[1:]:
            if merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], hole[1])
            else:
                merged.append(hole)
        self._free = merged

    def check_integrity(self, owners: set[int]) -> None:
        """Free + held is the whole store, nothing overlaps, and exactly the ranges in `owners` (first tokens) are held.

        Raises:
            AssertionError: the bookkeeping is broken.
        """
        spans = sorted([*self._free, *self._held.items()])
        edges = [0, *(end for _, end in spans)]
        assert [first for first, _ in spans] == edges[:-1] and edges[-1] == self.num_blocks, f"blocks leaked: {spans}"
        held = {first * self.block_size for first in self._held}
        assert held == owners, f"ranges at {sorted(held)} are held, live requests own {sorted(owners)}"
