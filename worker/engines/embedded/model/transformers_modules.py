"""Modules of ours in place of those of transformers whose values they have."""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from worker.engines.embedded.model.activations import name_of
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear import Linear, fuse
from worker.engines.embedded.model.linear_names import is_of_experts
from worker.engines.embedded.model.mlp import GatedMlp
from worker.engines.embedded.model.moe import Experts


class Norm(torch.nn.Module):
    """RMSNorm, computed in float32 and rounded once.

    Args:
        weight: ``[K]``.
        epsilon: Epsilon.
        kernels: Backends, one of which computes it.

    Attributes:
        weight: The same, float32.
        epsilon: The same.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, kernels: KernelBackend) -> None:
        super().__init__()
        self._kernel = kernels.rms_norm
        self.epsilon = epsilon
        self.weight = weight

    @classmethod
    def of(cls, norm: Any, kernels: KernelBackend) -> Norm | None:
        """Replacement of transformers' `norm`; None if that has other values."""
        weight = getattr(norm, "weight", None)
        epsilon = next((getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)), None)
        if weight is None or weight.dim() != 1 or not isinstance(epsilon, float):
            return None
        weight = weight.detach().float()
        x = torch.linspace(-3.0, 2.0, weight.numel(), device=weight.device)[None]
        expected = norm(x)
        for each in (weight.clone(), weight + 1.0):  # Gemma's are stored without the 1
            if torch.allclose(torch.rms_norm(x, weight.shape, each, epsilon), expected, 1e-3, 1e-3):
                return cls(each, epsilon, kernels)
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` to the same."""
        return self._kernel(x.float(), self.weight, self.epsilon).to(x.dtype)


def replace_norms(module: torch.nn.Module, kernels: KernelBackend) -> None:
    """Put a `Norm` in place of every RMSNorm inside `module` that has its values."""
    for name, child in list(module.named_children()):
        found = Norm.of(child, kernels) if type(child).__name__.endswith("RMSNorm") else None
        if found is not None:
            setattr(module, name, found)
        else:
            replace_norms(child, kernels)


def replace_linears(module: Any) -> None:
    """Put a `Linear` in place of every linear layer inside `module`, but for those of routers: they
    are not quantised, and their code reads their weights, so `RowFunctions` computes them.
    """
    if type(module).__name__.endswith(("Router", "Gate")):
        return
    for name, child in list(module.named_children()):
        if type(child) is torch.nn.Linear or type(child).__name__ == "FalconLinear":
            setattr(module, name, fuse(child))
        elif type(child) is Conv1D:
            setattr(module, name, Linear(child.weight.detach().T.contiguous(), child.bias))
        else:
            replace_linears(child)


def replace_experts(module: torch.nn.Module) -> None:
    """Put `Experts` in place of all that transformers' interface of experts computes."""
    for name, child in list(module.named_children()):
        if is_of_experts(child):
            setattr(module, name, Experts(child))
        else:
            replace_experts(child)


def replace_mlps(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Put a `GatedMlp` in place of every MLP inside `module`, on `device`, that has its values; its
    rows have type `dtype`.
    """
    for name, child in list(module.named_children()):
        layers: list[Any] = [getattr(child, each, None) for each in ("gate_proj", "up_proj", "down_proj")]
        activation = name_of(child.act_fn) if hasattr(child, "act_fn") else None
        if activation is not None and all(isinstance(each, Linear) for each in layers):
            gate, up, down = layers
            x = torch.linspace(-1.0, 1.0, gate.in_features, device=device, dtype=dtype)[None]
            expected = child(x).float()
            replacement = GatedMlp(gate, up, down, activation)
            if torch.allclose(replacement(x).float(), expected, 1e-2, 1e-3):
                setattr(module, name, replacement)
                continue
            gate.activation = None
        replace_mlps(child, device, dtype)
