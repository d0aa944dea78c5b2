"""Mixture of experts, as Qwen3's; a token's experts are summed in ascending order."""

from __future__ import annotations

from typing import Any

import torch

from worker.engines.embedded.model.activations import softmax, sums
from worker.engines.embedded.model.linear import Linear
from worker.engines.embedded.model.mlp import GatedMlp


class Router(torch.nn.Module):
    """Replaces transformers' router, with the same weights."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self._linear = Linear(router.weight, is_quantisable=False)
        self._top_k = int(router.top_k)
        self._normalises = bool(router.norm_topk_prob)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits ``[n, experts]``, and weights and indices of the top-k experts ``[n, top_k]``."""
        logits: torch.Tensor = self._linear(hidden)
        weights, experts = softmax(logits.float()).topk(self._top_k, -1)
        if self._normalises:
            weights = weights / sums(weights)
        return logits, weights.to(logits.dtype), experts


class Experts(torch.nn.Module):
    """Replaces transformers' experts, with the same weights: gate and up, and down projections."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._experts = torch.nn.ModuleList()
        for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
            gate, up = gate_up.chunk(2)
            self._experts.append(GatedMlp(Linear(gate), Linear(up), Linear(down), experts.act_fn))

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum ``[n, hidden]`` of each token's `experts`, indices ``[n, top_k]``."""
        total = torch.zeros_like(hidden)
        for expert in sorted(set(experts.flatten().tolist())):
            tokens, ranks = torch.where(experts == expert)
            result = self._experts[expert](hidden[tokens]) * weights[tokens, ranks, None]
            total.index_add_(0, tokens, result.to(total.dtype))
        return total
