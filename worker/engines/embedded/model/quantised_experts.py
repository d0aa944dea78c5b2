"""Experts of a quantised checkpoint in transformers' module, which has one parameter for all of
them: checkpoints have a weight for each expert and projection, or one for all, stacked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from worker.engines.embedded.model.quantisation import QuantisedWeight, StackedExperts

_NAME = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
"""Projections of an expert by their names in checkpoints, the last three of Mixtral's."""

OneWeight = torch.Tensor | QuantisedWeight
"""A weight ``[outputs, inputs]`` of one expert, dense or packed."""

Expert = Mapping[str, OneWeight]
"""Weights of an expert: ``gate``, ``up`` and ``down``."""

_GIVEN, _STACKED = "given", "stacked"
"""Attributes of a module of experts that has an `Expert` each, or `StackedExperts` by the name of
its parameter.
"""


def place_stacked(network: Any, name: str, weight: StackedExperts, dtype: torch.dtype, keeps: bool) -> None:
    """Put the weights of all experts into `network`, on the ``meta`` device: as they are if
    `keeps`, else dequantised.

    Raises:
        ValueError: they have no place in it.
    """
    parent, _, leaf = name.rpartition(".")
    module = network.get_submodule(parent)
    parameter = module._parameters.get(leaf)
    fits = parameter is not None and parameter.shape == weight.shape
    if not fits or getattr(module, "is_transposed", None) != weight.is_transposed:
        raise ValueError(f"weight {name} of shape {list(weight.shape)} has no place in the model")
    if not keeps:
        module._parameters[leaf] = torch.nn.Parameter(weight.dequantised(dtype), requires_grad=False)
        return
    del module._parameters[leaf]
    setattr(module, leaf, torch.empty(weight.shape, device="meta", dtype=dtype))
    module.__dict__.setdefault(_STACKED, {})[leaf] = weight


def stacked_in(module: Any) -> Mapping[str, StackedExperts]:
    """The stacked experts of a module by the names of parameters; none for those of another."""
    found: Mapping[str, StackedExperts] = module.__dict__.get(_STACKED, {})
    return found


def given_in(module: Any) -> Sequence[Expert]:
    """The experts that a quantised checkpoint has one by one; none for those of another."""
    found: Sequence[Expert] = module.__dict__.get(_GIVEN, ())
    return found


def place_expert(network: Any, name: str, weight: OneWeight) -> bool:
    """Put the weight of an expert into `network`, on the ``meta`` device; False for another weight.

    Raises:
        ValueError: the network has no such expert, or one of another shape.
    """
    matched = _NAME.fullmatch(name)
    if matched is None:
        return False
    module, expert, part = network.get_submodule(matched[1]), int(matched[2]), _PARTS.get(matched[3])
    if part is None or not hasattr(module, "is_transposed"):
        return False
    whole = module.down_proj if part == "down" else module.gate_up_proj
    shape = torch.Size((whole.shape[1] // (1 if part == "down" else 2), whole.shape[2]))
    if expert >= len(whole) or weight.shape != shape:
        raise ValueError(f"weight {name} of shape {list(weight.shape)} has no place in the model")
    module.__dict__.setdefault(_GIVEN, [{} for _ in range(len(whole))])[expert][part] = weight
    return True


def join_experts(network: Any, dtype: torch.dtype, keeps: bool) -> None:
    """Make a module's experts of what `place_expert` has put into it: if `keeps`, they stay one by
    one, for `given_in`, else they are its parameters, dequantised.

    Raises:
        ValueError: an expert is incomplete.
    """
    for name, module in network.named_modules():
        given = given_in(module)
        if not given:
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
            del module.__dict__[_GIVEN]


def _dense(weight: OneWeight, dtype: torch.dtype) -> torch.Tensor:
    return (weight if isinstance(weight, torch.Tensor) else weight.dequantised()).to(dtype)
