"""Who owns which segment of the KV store. The store itself belongs to the model."""

from __future__ import annotations

import heapq


class KvCache:
    """Segments, lowest free one first.

    Args:
        num_segments: Segments in the store.
        segment_size: Tokens per segment.
    """

    def __init__(self, num_segments: int, segment_size: int) -> None:
        self.num_segments = num_segments
        self.segment_size = segment_size
        self._free = list(range(num_segments))
        self._held: set[int] = set()

    def __repr__(self) -> str:
        return f"KvCache({self.num_free} of {self.num_segments} segments free)"

    @property
    def num_free(self) -> int:
        """Segments that no request holds."""
        return len(self._free)

    def allocate(self, num_tokens: int) -> list[int] | None:
        """Hold segments for `num_tokens` tokens; None while there are not enough."""
        wanted = -(-num_tokens // self.segment_size)
        if wanted > len(self._free):
            return None
        segments = [heapq.heappop(self._free) for _ in range(wanted)]
        self._held.update(segments)
        return segments

    def free(self, segments: list[int]) -> None:
        """Give segments back."""
        for segment in segments:
            self._held.remove(segment)
            heapq.heappush(self._free, segment)

    def check_integrity(self, owned: list[int]) -> None:
        """Free + held is the whole store and exactly the segments in `owned` are held. Raises `AssertionError`."""
        assert sorted([*self._free, *self._held]) == list(range(self.num_segments)), f"segments leaked: {self!r}"
        assert sorted(owned) == sorted(self._held), f"{sorted(self._held)} are held, live requests own {sorted(owned)}"
