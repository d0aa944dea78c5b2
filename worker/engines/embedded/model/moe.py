"""A mixture of experts, as Qwen3's: a token's result is the sum over its experts, in the order
of their numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from worker.engines.embedded.model.linear import Linear


class Router(torch.nn.Module):
    """Stands in for transformers' router of the same weights."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self._linear = Linear(router.weight)
        self._top_k = int(router.top_k)
        self._normalises = bool(router.norm_topk_prob)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits ``[n, experts]``, and weights and numbers of the chosen experts ``[n, top_k]``."""
        logits: torch.Tensor = self._linear(hidden)
        weights, numbers = logits.float().softmax(-1).topk(self._top_k, -1)
        if self._normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), numbers


class Experts(torch.nn.Module):
    """Stands in for transformers' experts of the same weights ``[experts, 2 * width, hidden]``
    and back.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        pairs = [gate_up.chunk(2) for gate_up in experts.gate_up_proj]
        self._gates = torch.nn.ModuleList(Linear(gate) for gate, _ in pairs)
        self._ups = torch.nn.ModuleList(Linear(up) for _, up in pairs)
        self._downs = torch.nn.ModuleList(Linear(down) for down in experts.down_proj)

    def forward(self, hidden: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum ``[n, hidden]`` of what the experts `numbers` ``[n, top_k]`` make of
        each token.
        """
        total = torch.zeros_like(hidden)
        for number in sorted(set(numbers.flatten().tolist())):
            tokens, places = torch.where(numbers == number)
            chosen = hidden[tokens]
            gate, up, down = self._gates[number], self._ups[number], self._downs[number]
            made = down(up.mul(chosen, gate.silu(chosen))) * weights[tokens, places, None]
            total.index_add_(0, tokens, made.to(total.dtype))
        return total
