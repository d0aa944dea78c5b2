"""Tokens of whole batches are drawn by the native kernels in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adapters.sampling.weights import rounding, weight_bits
from worker.engines.embedded.native.libraries import address
from worker.engines.embedded.native.paths import library
from worker.engines.embedded.native.scoring import Score, Scores


@dataclass(frozen=True, slots=True)
class ControlColumns:
    """Temperature and truncation of rows, all ``[R]``: `sampling.truncation.Controls` by column.

    Attributes:
        divisors: float32, of the logits.
        log_min_ps: float64, logarithms of min-p; -inf where it is off.
        top_ks: int64, 0 where it is off.
        shares: float64, of the weight that a prefix has; 0 for its first token, 1 for all.
    """

    divisors: torch.Tensor
    log_min_ps: torch.Tensor
    top_ks: torch.Tensor
    shares: torch.Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """The findings of `Drawer.draw`, for each row.

    Attributes:
        ids: Token; 0 where the highest logit, divided, is not finite.
        highest: Highest logit, not divided; NaN where a row holds NaN.
        scores: Log probability and rank of the token among those that could be drawn, and the most
            likely of them, where they are wanted and the highest logit is finite; NaN, 1 and none
            elsewhere. Empty if none are wanted.
        kept: Tokens that could be drawn, packed int32 ``[R, ceil(V / 32)]``, of the same rows, and
            undefined elsewhere; None if they are not wanted.
    """

    ids: list[int]
    highest: list[float]
    scores: list[Score]
    kept: torch.Tensor | None


class Drawer:
    """Draws tokens of whole batches, each row by controls of its own, with several threads.

    The log probability of a token is that among all that could be drawn, in float64: the logarithm
    of its weight less that of their sum.

    Args:
        width: V, of a row.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._offset, _ = rounding(weight_bits(width))
        self._memory = torch.empty(0, dtype=torch.uint8)

    def draw(
        self,
        logits: torch.Tensor,
        controls: ControlColumns,
        uniforms: Sequence[float],
        counts: Sequence[int] | None = None,
        *,
        keeps: bool = False,
    ) -> Drawn:
        """The token of each row, by the rules of `sampling.truncation`.

        Args:
            logits: float32 ``[R, V]`` on the CPU.
            controls: Controls of the rows.
            uniforms: A random number in [0, 1) for each row.
            counts: Number of the most likely tokens of each row whose log probabilities are wanted
                beside the drawn one's; below 0 for a row of which nothing is; None: of all.
            keeps: Whether the tokens that could be drawn are wanted of the same rows.
        """
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        kernels, rows = library(torch.float32), len(logits)
        needed = torch.get_num_threads() * kernels.drawing_memory(self._width)
        if len(self._memory) < needed:  # what is not written costs nothing
            self._memory = torch.empty(needed, dtype=torch.uint8)
        numbers = torch.tensor(uniforms, dtype=torch.float64)
        ids, highest = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        scores = None if counts is None else Scores(counts, self._width)
        kept = torch.empty(rows, -(-self._width // 32), dtype=torch.int32) if keeps else None
        drawing = kernels.drawing_t(
            logits=logits.data_ptr(),
            rows=rows,
            stride=logits.stride(0),
            width=self._width,
            offset=self._offset,
            divisors=controls.divisors.data_ptr(),
            log_min_ps=controls.log_min_ps.data_ptr(),
            top_ks=controls.top_ks.data_ptr(),
            shares=controls.shares.data_ptr(),
            uniforms=numbers.data_ptr(),
            ids=ids.data_ptr(),
            highest=highest.data_ptr(),
            memory=self._memory.data_ptr(),
            kept=address(kept),
            **({} if scores is None else scores.fields),
        )
        kernels.draw_tokens(drawing, kernels.threads())
        return Drawn(ids.tolist(), highest.tolist(), [] if scores is None else scores.found(), kept)
