"""Mixture of experts; a token's experts are summed in ascending order."""

from __future__ import annotations

from typing import Any

import torch

from worker.engines.embedded.model.activations import name_of
from worker.engines.embedded.model.linear import Linear, halves
from worker.engines.embedded.model.mlp import GatedMlp
from worker.engines.embedded.model.quantisation import QuantisedWeight
from worker.engines.embedded.model.quantised_experts import given_in, stacked_in
from worker.engines.embedded.model.row_functions import as_they_are
from worker.models.problems import ModelFileError


class Experts(torch.nn.Module):
    """Replaces experts of transformers' interface, with the same weights.

    Args:
        experts: transformers'.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        name = "gate_up_proj" if experts.has_gate else "up_proj"
        is_plain = experts.has_gate and not experts.has_bias and _has_default_gate(experts)
        activation = name_of(experts.act_fn) if is_plain else None
        self._experts = torch.nn.ModuleList()
        given = given_in(experts)
        for expert in given:
            if activation is None:
                raise ModelFileError("config.json: quantised experts need a gate that is an activation alone")
            parts = {part: Linear(expert[part]) for part in ("gate", "up", "down")}
            self._experts.append(GatedMlp(**parts, activation=activation))
        for index in range(0 if given else len(getattr(experts, name))):
            up, down = (_weight(experts, each, index) for each in (name, "down_proj"))
            if activation is not None:
                gate_rows, up_rows = halves(up)
                self._experts.append(GatedMlp(Linear(gate_rows), Linear(up_rows), Linear(down), activation))
            else:
                biases = [
                    getattr(experts, f"{each}_bias")[index] if experts.has_bias else None
                    for each in (name, "down_proj")
                ]
                self._experts.append(_Expert(Linear(up, biases[0]), Linear(down, biases[1]), experts))

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum ``[n, hidden]`` of each token's `experts`, indices ``[n, top_k]``; one
        past the last expert is none.
        """
        total = torch.zeros_like(hidden)
        for expert in sorted(set(experts.flatten().tolist()) - {len(self._experts)}):
            tokens, ranks = torch.where(experts == expert)
            result = self._experts[expert](hidden[tokens]) * weights[tokens, ranks, None]
            _add(total, tokens, result.to(total.dtype))
        return total


@as_they_are
def _add(total: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows to different tokens of `total`."""
    total.index_add_(0, tokens, rows)


class _Expert(torch.nn.Module):
    """An expert with biases, or with transformers' own gate."""

    def __init__(self, up: Linear, down: Linear, experts: Any) -> None:
        super().__init__()
        self._up, self._down = up, down
        self._gate = experts._apply_gate if experts.has_gate else experts.act_fn

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._down(self._gate(self._up(hidden)))
        return result


def _weight(experts: Any, name: str, index: int) -> torch.Tensor | QuantisedWeight:
    """``[N, K]`` of one expert."""
    stacked = stacked_in(experts).get(name)
    if stacked is not None:
        return stacked.of(index)
    weight: torch.Tensor = getattr(experts, name)[index].detach()
    return weight.T.contiguous() if experts.is_transposed else weight


def _has_default_gate(experts: Any) -> bool:
    return bool(type(experts)._apply_gate.__name__ == "_default_apply_gate" and experts.is_concatenated)
