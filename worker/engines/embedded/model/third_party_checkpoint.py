"""Loads checkpoints that other programs quantised into transformers' models.

As `transformers_checkpoint`, it is imported where there is no packed copy alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from worker.engines.embedded.model import llama_weights
from worker.engines.embedded.model.quantisation import QuantisedWeight, StackedExperts
from worker.engines.embedded.model.stored_weights import Weight
from worker.engines.embedded.model.third_party_weights import ThirdPartyWeights, changes_nothing
from worker.engines.embedded.model.transformers_checkpoint import filled_network, network_of
from worker.errors import StartupError
from worker.models.problems import ModelFileError
from worker.models.quantization_config import STACKED_EXPERTS, Quantization
from worker.models.weight_files import WeightFiles

logger = logging.getLogger(__name__)


class ThirdPartyCheckpoint:
    """A checkpoint that another program quantised.

    Args:
        directory: Directory of the checkpoint, which `checkpoint_gate.read_checked` has accepted.
        quantization: Quantisation of its weights.

    Attributes:
        num_kept: Number of weights that are kept as they are; known once there is a network.
    """

    def __init__(self, directory: Path, quantization: Quantization) -> None:
        self._directory, self._name = directory, quantization.name
        self._files = WeightFiles(directory, quantization=quantization)
        self.num_kept = 0

    def network(self, config: Any, dtype: torch.dtype, keeps_quantised: bool) -> Any:
        """transformers' causal language model, on the CPU.

        A linear layer whose weight is kept has a `QuantisedWeight`: in its place, in the Llama
        family, else beside it, as ``quantised``. Experts that are kept are `StackedExperts`.

        Args:
            config: Configuration from `checkpoint_gate.read_checked`.
            dtype: Data type of all weights that are not kept.
            keeps_quantised: Whether weights that native kernels read are kept.

        Raises:
            StartupError: it cannot be read or is incomplete.
        """
        weights = ThirdPartyWeights(self._files, dtype)
        keeps_experts = keeps_quantised and config.model_type == STACKED_EXPERTS
        found = weights.read(keeps_quantised, keeps_experts)
        try:
            if llama_weights.serves(config) or keeps_experts:
                counted = self._counted(found)
                network = filled_network(self._directory, config, dtype, counted, keeps_quantised, changes_nothing)
            else:
                plain = {name: weight for name, weight in found if not isinstance(weight, StackedExperts)}
                network = self._filled(config, dtype, plain)
        except ModelFileError as error:
            raise StartupError(f"--model-path {self._directory}: {error}") from None
        self._log(weights, keeps_quantised)
        return network

    def _counted(self, weights: Iterator[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        for name, weight in weights:
            self.num_kept += not isinstance(weight, torch.Tensor)
            yield name, weight

    def _filled(self, config: Any, dtype: torch.dtype, weights: Mapping[str, torch.Tensor | QuantisedWeight]) -> Any:
        """The network of any model type: transformers fuses and renames dequantised weights."""
        dense = {
            name: weight.dequantised().to(dtype) if isinstance(weight, QuantisedWeight) else weight
            for name, weight in weights.items()
        }
        quantised = self._files.third_party.weights if self._files.third_party else {}
        network = network_of(self._directory, config, dtype, dense)
        for name, module in network.named_modules():
            weight = weights.get(f"{name}.weight")
            if isinstance(module, Conv1D) and f"{name}.weight" in quantised:
                raise ModelFileError(
                    f"config.json: quantization_config: weights of {config.model_type} lie transposed; they are not "
                    "served quantised by other programs"
                )
            is_linear = type(module) is torch.nn.Linear and isinstance(weight, QuantisedWeight)
            if is_linear and torch.equal(module.weight, dense[f"{name}.weight"]):
                module.quantised = weight
                self.num_kept += 1
        return network

    def _log(self, weights: ThirdPartyWeights, keeps: bool) -> None:
        reasons = dict(weights.dequantised) if keeps else {}
        rest = weights.num_quantised - self.num_kept - weights.dequantised.total()
        if keeps and rest:
            reasons["the model's own code, or its experts, computes with them"] = rest
        for reason, count in reasons.items():
            logger.info("%d of %d weights in %s are dequantised: %s", count, weights.num_quantised, self._name, reason)
        found = self._files.third_party
        scales = [] if found is None else [("the KV cache", found.kv_scales), ("activations", found.activation_scales)]
        for what, names in scales:
            if names:
                logger.info("scales of %s are not used: %d tensors, as %s", what, len(names), names[0])
