"""A stateful processor in Dynamo's convention, as an operator would name it with
``--logits-processor NAME=module:Class``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from dynamo.logits_processing import BaseLogitsProcessor


class Fatigue(BaseLogitsProcessor):
    """Lowers the tokens that the model has found likely so far: its state is made of logits.

    No history of tokens tells the state, so that a continuation can only rebuild it by calling the
    processor with the model's logits at every generated position, once and in order.
    """

    def __init__(self, strength: float = 8.0, decay: float = 0.75) -> None:
        self.strength = strength
        self.decay = decay
        self.likely: torch.Tensor | None = None

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        probabilities = logits.softmax(-1)
        if self.likely is None:
            self.likely = torch.zeros_like(probabilities)
        logits.sub_(self.strength * self.likely)
        self.likely = self.decay * self.likely + probabilities
