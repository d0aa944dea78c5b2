"""Experts of a quantised checkpoint, which has a weight for each expert and projection, in
transformers' module, which has one for all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from worker.engines.embedded.model.stored_weights import Weight

_NAME = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")

Expert = Mapping[str, Weight]
"""Weights of an expert: ``gate``, ``up`` and ``down``."""


def place_expert(network: Any, name: str, weight: Weight) -> bool:
    """Put the weight of an expert into `network`, on the ``meta`` device; False for another weight.

    Raises:
        ValueError: the network has no such expert, or one of another shape.
    """
    matched = _NAME.fullmatch(name)
    if matched is None:
        return False
    module, expert, part = network.get_submodule(matched[1]), int(matched[2]), matched[3]
    whole = module.down_proj if part == "down" else module.gate_up_proj
    shape = torch.Size((whole.shape[1] // (1 if part == "down" else 2), whole.shape[2]))
    if expert >= len(whole) or weight.shape != shape:
        raise ValueError(f"weight {name} of shape {list(weight.shape)} has no place in the model")
    module.__dict__.setdefault("given", [{} for _ in range(len(whole))])[expert][part] = weight
    return True


def join_experts(network: Any, dtype: torch.dtype, keeps: bool) -> None:
    """Make a module's experts of what `place_expert` has put into it: if `keeps`, they stay one by
    one under ``given``, else they are its parameters, dequantised.

    Raises:
        ValueError: an expert is incomplete.
    """
    for name, module in network.named_modules():
        given = module.__dict__.get("given")
        if given is None:
            continue
        missing = next((index for index, each in enumerate(given) if len(each) < 3), None)
        if missing is not None:
            raise ValueError(f"weights are incomplete, those of {name}.{missing}")
        whole = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
        for leaf, parts in whole.items():
            shape = module._parameters.pop(leaf).shape
            if keeps:
                setattr(module, leaf, torch.empty(shape, device="meta", dtype=dtype))
                continue
            joined = torch.empty(shape, dtype=dtype)
            for index, expert in enumerate(given):
                torch.cat([_dense(expert[part], dtype) for part in parts], out=joined[index])
            module._parameters[leaf] = torch.nn.Parameter(joined, requires_grad=False)
        if not keeps:
            del module.__dict__["given"]


def _dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    return (weight if isinstance(weight, torch.Tensor) else weight.dequantised()).to(dtype)
