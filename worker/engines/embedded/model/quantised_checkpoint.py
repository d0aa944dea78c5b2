"""Loads quantised checkpoints, of GGUF files and of ``python -m worker quantize``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from worker.engines.embedded.model import llama
from worker.engines.embedded.model.quantisation import QuantisedWeight
from worker.errors import StartupError
from worker.models.quantised import CODES, MODEL_TYPES, OFFSETS, SCALES, format_of

UNREADABLE = (
    *(OSError, ValueError, LookupError, ArithmeticError, AttributeError, TypeError, RuntimeError),
    *(SafetensorError, StrictDataclassError),
)
"""What transformers and its libraries raise for a checkpoint that is damaged, or whose config.json
makes no model.
"""


def is_quantised_here(settings: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` says that a checkpoint is as in `worker.models.quantised`."""
    return format_of(settings) is not None


class QuantisedCheckpoint:
    """A quantised checkpoint.

    Args:
        directory: Where it is.
        settings: Its ``config.json``.

    Raises:
        StartupError: its architecture is not served in this form.

    Attributes:
        format: What its weights are held in.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        if settings.get("model_type") not in MODEL_TYPES:
            raise StartupError(
                f"--model-path {directory}: quantised checkpoints of model type {settings.get('model_type')!r} are not "
                f"served, only of {', '.join(MODEL_TYPES)}"
            )
        self.format = str(format_of(settings))
        self._directory = directory

    def network(self, dtype: torch.dtype, keeps_quantised: bool) -> Any:
        """transformers' causal language model, on the CPU.

        Args:
            dtype: Of whatever is not quantised.
            keeps_quantised: Whether quantised weights are a `QuantisedWeight` each, not
                dequantised.

        Raises:
            StartupError: it cannot be read or is incomplete.
        """
        maker: Any = AutoModelForCausalLM
        try:
            config = AutoConfig.from_pretrained(self._directory, local_files_only=True)
            if not llama.serves(config):
                raise ValueError("a variant of its architecture that is not served from a quantised checkpoint")
            with torch.device("meta"):
                network = maker.from_config(config, dtype=dtype)
            network.model.rotary_emb = type(network.model.rotary_emb)(config)
            self._fill(network, _weights(self._directory), dtype, keeps_quantised)
        except UNREADABLE as error:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise StartupError(f"--model-path {self._directory}: cannot load it: {reason}") from error
        if config.tie_word_embeddings:
            _set_weight(network, "lm_head.weight", network.model.embed_tokens.weight)
        missing = [name for name, value in network.named_parameters() if value.is_meta]
        if missing:
            names = ", ".join(sorted(missing)[:3])
            raise StartupError(f"--model-path {self._directory}: weights are incomplete, missing_keys: {names}")
        return network

    def _fill(
        self,
        network: Any,
        weights: Iterable[tuple[str, torch.Tensor | QuantisedWeight]],
        dtype: torch.dtype,
        keeps: bool,
    ) -> None:
        shapes = {name: value.shape for name, value in network.named_parameters(remove_duplicate=False)}
        for name, weight in weights:
            if name not in shapes or weight.shape != shapes[name]:
                raise ValueError(f"weight {name} of shape {list(weight.shape)} has no place in the model")
            if isinstance(weight, QuantisedWeight) and not keeps:
                weight = weight.dequantised()
            _set_weight(network, name, weight.to(dtype) if isinstance(weight, torch.Tensor) else weight)


def _set_weight(network: Any, name: str, weight: torch.Tensor | QuantisedWeight) -> None:
    parent, _, leaf = name.rpartition(".")
    module = network.get_submodule(parent)
    module.__dict__.pop(leaf, None)  # a file may hold a weight twice
    module._parameters.pop(leaf, None)
    if isinstance(weight, torch.Tensor):
        module._parameters[leaf] = torch.nn.Parameter(weight, requires_grad=False)
    else:
        setattr(module, leaf, weight)


def _weights(directory: Path) -> Iterable[tuple[str, torch.Tensor | QuantisedWeight]]:
    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(CODES):
                weight = name.removesuffix(CODES)
                yield (
                    weight,
                    _checked(weight, QuantisedWeight(tensor, tensors[weight + SCALES], tensors.get(weight + OFFSETS))),
                )
            elif not name.endswith((SCALES, OFFSETS)):
                yield name, tensor


def _checked(name: str, weight: QuantisedWeight) -> QuantisedWeight:
    """`weight`, if the kernels can read it. Raises `ValueError`."""
    numbers = [weight.scales, *([] if weight.offsets is None else [weight.offsets])]
    if any(each.ndim != 2 or not each.numel() for each in (weight.codes, *numbers)):
        raise ValueError(f"weight {name} is in no format that is known")
    rows, inner = weight.shape
    groups = weight.scales.shape[1]
    if (
        weight.codes.dtype not in (torch.int8, torch.uint8)
        or any(each.shape != (rows, groups) or each.dtype != weight.scales.dtype for each in numbers)
        or weight.scales.dtype not in (torch.float16, torch.float32)
        or inner % groups
        or (weight.bits == 4 and inner // groups % 8)
    ):
        raise ValueError(f"weight {name} is in no format that is known")
    if not all(each.isfinite().all() for each in numbers):
        raise ValueError(f"weight {name} has a scale that is infinite or not a number")
    return weight
