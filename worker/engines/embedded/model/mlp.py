"""The gated MLP of a decoder layer."""

from __future__ import annotations

import torch

from worker.engines.embedded.model.linear import Linear


class GatedMlp(torch.nn.Module):
    """``down(activation(gate(x)) * up(x))``, in place of transformers' MLPs.

    Args:
        gate: ``[inner, hidden]``, not packed yet, as are the others.
        up: ``[inner, hidden]``.
        down: ``[hidden, inner]``.
        activation: One of `native.ACTIVATIONS`.
    """

    def __init__(self, gate: Linear, up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        gate.activation = activation
        self._gate, self._up, self._down = gate, up, down

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` to the same."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        result: torch.Tensor = self._down(self._up.mul(rows, self._gate.activated(rows)))
        return result.view(hidden.shape)
