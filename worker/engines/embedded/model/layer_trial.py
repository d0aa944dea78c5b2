"""Trial of whole layers at start: a prompt in one piece against the same prompt cut and mixed.

`numerics` and batch-invariant kernels decide about GEMMs and attention. All else that a layer
computes is tried here: a layer of each kind of the loaded model, at its real widths and with the
threads that serve, and the LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from worker.engines.embedded.model.batch_packing import Batch
from worker.engines.embedded.model.network import Network

_ELEMENTS = 2**16
"""Elements of a trial's narrowest rows: torch gives a thread half as many at least."""

_FEWEST, _MOST = 64, 512
_CUTS = (1, 2, 3, 6, 13, 46)


@dataclass(frozen=True, slots=True)
class LayerTrial:
    """The trial of a network.

    Attributes:
        network: Network whose kernels and tilings are settled.
        compute: Hidden states ``[T, hidden]`` of a batch behind the embedding and one layer.
        page_size: Tokens per page.
        ids: Tokens of the prompt.
    """

    network: Network
    compute: Callable[[Batch, int], torch.Tensor]
    page_size: int
    ids: Sequence[int]

    def difference(self) -> str | None:
        """The part that has other bits in another batch; None if none has."""
        for layer in self.network.layer_kinds():
            whole = self._rows(layer, True, (0, len(self.ids)))
            if not (self._is_equal_in_pieces(layer, whole) and self._is_equal_in_a_mix(layer, whole)):
                return f"layer {layer}"
        rows = whole[-2:]
        together, alone = self.network.logits(rows), self.network.logits(rows[-1:].clone())
        return None if torch.equal(together[-1:], alone) else "the LM head"

    def _pages(self, is_ascending: bool) -> list[int]:
        """One half of the store's pages, or the other one backwards."""
        count = num_trial_pages(self.ids, self.page_size)
        return list(range(count // 2) if is_ascending else range(count - 1, count // 2 - 1, -1))

    def _rows(self, layer: int, is_ascending: bool, *pieces: tuple[int, int]) -> torch.Tensor:
        batch, pages = Batch(), self._pages(is_ascending)
        for start, stop in pieces:
            batch.append(pages, start, self.ids[start:stop], self.page_size)
        return self.compute(batch, layer)

    def _is_equal_in_pieces(self, layer: int, whole: torch.Tensor) -> bool:
        """Compare with prefill in chunks, each of which reads the KV of those before."""
        cuts = [0, *(cut for cut in _CUTS if cut < len(self.ids)), len(self.ids)]
        return all(
            torch.equal(self._rows(layer, False, (start, stop)), whole[start:stop]) for start, stop in pairwise(cuts)
        )

    def _is_equal_in_a_mix(self, layer: int, whole: torch.Tensor) -> bool:
        """Compare with a mixed batch: single tokens beside a chunk, on the KV of the pieces."""
        count = len(self.ids)
        singles = sorted({count - 1, count // 2, count // 3, 0})
        pieces = [*((at, at + 1) for at in singles), (count // 4, min(count, count // 4 + 7))]
        expected = torch.cat([whole[start:stop] for start, stop in pieces])
        return torch.equal(self._rows(layer, False, *pieces), expected)


def num_trial_pages(ids: Sequence[int], page_size: int) -> int:
    """Pages of the KV store that a trial needs: it stores the prompt twice."""
    return 2 * -(-len(ids) // page_size)


def trial_ids(width: int, context_length: int, vocab_size: int) -> list[int]:
    """Random tokens for a trial of a network whose hidden states have about `width` elements."""
    count = min(max(_FEWEST, min(_MOST, _ELEMENTS // width)), context_length)
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
