"""Processors that need a second row of logits: after another beginning, or of another model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, TypeAlias

import torch

from adapters.contract.processor import ShapingProcessor
from adapters.contract.scope import Scope
from adapters.contract.stage import Stage

SecondRow: TypeAlias = "Callable[[int], torch.Tensor]"
"""The companion's logits, floating ``[V]``, for the token at an absolute position of the request.

Raises `LookupError` where it has none for that position.
"""


class CompanionProcessor(ShapingProcessor):
    """Combines a row of logits with that of a companion sequence at the same position.

    The companion's tokens are `companion_prompt` and then the answer. The engine computes its
    logits beside the request's own, and sets `second_row`; one that cannot refuses the request.

    Attributes:
        companion_model: Model that computes the companion: the request's ``own``, or the worker's
            ``draft`` model, which has the same vocabulary.
        second_row: The companion's logits by position; None without an engine that computes them.
    """

    stage: ClassVar[Stage] = Stage.GUIDANCE
    scopes: ClassVar[tuple[Scope, ...]] = ("all",)
    once: ClassVar[bool] = True
    companion_model: ClassVar[Literal["own", "draft"]] = "own"
    second_row: SecondRow | None = None

    @property
    @abstractmethod
    def companion_prompt(self) -> Sequence[int]:
        """Token ids with which the companion begins, at least one; the prompt is known."""

    def companion_row(self) -> torch.Tensor:
        """The companion's logits, floating ``[V]``, for the token at `position`.

        Raises:
            LookupError: no engine has computed them.
        """
        if self.second_row is None:
            raise LookupError(f"{self.name} needs a second row of logits, which this engine does not compute")
        return self.second_row(self.position)
