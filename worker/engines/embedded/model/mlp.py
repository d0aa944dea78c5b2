"""The gated MLP of a decoder layer."""

from __future__ import annotations

from typing import Any

import torch

from worker.engines.embedded.model.activations import name_of
from worker.engines.embedded.model.linear import Linear


class GatedMlp(torch.nn.Module):
    """``down(activation(gate(x)) * up(x))``, in place of transformers' MLPs.

    Args:
        gate: ``[inner, hidden]``, not packed yet, as are the others.
        up: ``[inner, hidden]``.
        down: ``[hidden, inner]``.
        activation: transformers'.

    Attributes:
        foreign: The activation's class if it is none of ours; then transformers computes it, and
            nothing is known of its bits.
    """

    def __init__(self, gate: Linear, up: Linear, down: Linear, activation: Any) -> None:
        super().__init__()
        name = gate.activation = name_of(activation)
        self.foreign = type(activation).__name__ if name is None else None
        self._gate, self._up, self._down = gate, up, down
        self._activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` to the same."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        gated = self._activation(self._gate(rows)) if self.foreign else self._gate.activated(rows)
        result: torch.Tensor = self._down(self._up.mul(rows, gated))
        return result.view(hidden.shape)
