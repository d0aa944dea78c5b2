"""Loads a model: from the packed copy beside its checkpoint, or else from the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adapters.devices import launching_on
from worker.engines.embedded.attention import AttentionLayer
from worker.engines.embedded.config import EmbeddedConfig, resolve_device, resolve_dtype
from worker.engines.embedded.host import in_own_thread
from worker.engines.embedded.model.checkpoint_files import checkpoint_dtype, has_longrope, read_settings
from worker.engines.embedded.model.hf_model import HfModel
from worker.engines.embedded.model.kernels import KernelBackend, choose_kernels
from worker.engines.embedded.model.kv_format import check_kv_cache_dtype
from worker.engines.embedded.model.linear import Projection
from worker.engines.embedded.model.llama import LlamaNetwork
from worker.engines.embedded.model.llama_weights import LayerWeights, LlamaWeights, Norm, Rope
from worker.engines.embedded.model.model_facts import ModelFacts
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.model.packed_copy import PackedCopy, provenance_of
from worker.engines.embedded.model.quantisation import FORMATS, PackedQuantised
from worker.engines.embedded.model.stored_weights import Weight
from worker.engines.embedded.native import PackedWeight
from worker.engines.embedded.native.quantised import QuantisedPanels
from worker.errors import StartupError, one_line
from worker.models.beside import copies_of
from worker.models.geometry import Geometry
from worker.models.model_table import LLAMA_LIKE
from worker.models.problems import ModelFileError
from worker.models.quantised import format_of
from worker.models.quantization_config import quantization_of
from worker.models.sealed_tensors import SealedTensors
from worker.models.weight_files import INDEX, read_index

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedModel:
    """Contents of a packed copy."""

    facts: ModelFacts
    weights: LlamaWeights

    def check(self, dtype: torch.dtype, rounds_to: str) -> None:
        """Raises `ValueError` unless everything in it fits together, and these settings."""
        self.weights.check(self.facts.geometry, rounds_to)
        if not self.weights.dtype == self.facts.dtype == dtype:
            raise ValueError("it holds another model")


_KINDS = (
    *(PackedModel, ModelFacts, Geometry, LlamaWeights, LayerWeights, AttentionLayer, Norm, Rope, Projection),
    *(PackedWeight, PackedQuantised, QuantisedPanels),
)
"""Classes of what a packed copy holds."""


def load_model(config: EmbeddedConfig, ahead: SealedTensors | None = None) -> HfModel:
    """Load the checkpoint in ``config.model_path``.

    Args:
        config: Settings of the model.
        ahead: A packed copy of the checkpoint that is being read, in case it is of these settings.

    Raises:
        StartupError: it is missing, unreadable, incomplete or of an architecture that is not
            served; or the kernels that were asked for cannot compute here.
    """
    try:
        return in_own_thread(lambda: _load_model(config, ahead))
    finally:
        if ahead is not None:
            ahead.close()


def _load_model(config: EmbeddedConfig, ahead: SealedTensors | None) -> HfModel:
    device = resolve_device(config.device)
    with launching_on(device):
        return _load_on(device, config, ahead)


def _load_on(device: torch.device, config: EmbeddedConfig, ahead: SealedTensors | None) -> HfModel:
    directory = Path(config.model_path)
    copies = copies_of(directory, config.packed_copy)
    provenance = provenance_of(directory, copies)
    settings = read_settings(directory)
    dtype = resolve_dtype(config.dtype, checkpoint_dtype(settings))
    check_kv_cache_dtype(config.kv_cache_dtype, dtype)
    quantisation = config.quantization if config.quantization in FORMATS else None
    third_party = quantization_of(settings)  # accepted by `read_settings`
    format, is_kept, is_final = format_of(settings), True, True
    if third_party is not None:
        format, is_kept, is_final = third_party.name, third_party.is_kept, third_party.is_of_integers
        for note in third_party.notes:
            logger.info("weights in %s: %s", format, note)
    if format is not None and is_final and quantisation is not None:
        reason = f"{directory} is quantised already ({format}); use auto or none"
        raise StartupError(f"--quantization {quantisation}: {reason}")
    is_packed = format is not None and is_kept and config.quantization == "auto"
    is_quantised = is_packed or quantisation is not None
    rounds_to = "none" if config.activation_dtype == "auto" else config.activation_dtype
    if rounds_to != "none" and not is_quantised:
        reason = "needs quantised weights: a quantised model, or --quantization int8"
        raise StartupError(f"--activation-dtype {rounds_to} {reason}")
    kernels = choose_kernels(config.kernels, device, dtype, quantisation, rounds_to, config.numerics)
    if config.activation_dtype == "auto" and is_quantised and kernels.reads_quantised:
        kernels = replace(kernels, rounds_to="int8")
    keeps = is_packed and kernels.reads_quantised
    if format is not None and config.quantization != "none" and not keeps:
        reason = f"{kernels.name} kernels do not read them" if is_kept else "no kernels read them"
        logger.info("weights in %s are dequantised: %s", format, reason)
    copy = None
    if copies is not None and _can_be_kept(directory, settings, kernels):
        copy = PackedCopy(copies, provenance, _name(dtype, kernels, keeps), _KINDS)
    if ahead is not None and (copy is None or copy.path != ahead.path):
        ahead.close()  # before other weights need the memory
        ahead = None
    found = _read(copy, ahead, dtype, kernels) if copy is not None else None
    network: Network
    if found is not None:
        network, facts = LlamaNetwork(found.weights, kernels, found.facts.context_length), found.facts
    else:
        network, facts = _from_checkpoint(directory, settings, device, dtype, kernels, keeps, config.context_length)
        if not provenance.still_holds():
            raise StartupError(f"--model-path {directory}: its files have changed while they were read; start again")
        packed = network.packed() if isinstance(network, LlamaNetwork) else None
        if packed is not None:
            packed.check(facts.geometry, kernels.rounds_to)
        if copy is not None:
            _keep(copy, packed, facts)
    return HfModel(network, facts, device, config.numerics, kernels, config.kv_cache_dtype, found is not None)


def reload_network(config: EmbeddedConfig, model: HfModel) -> Network:
    """The network of the checkpoint again, for the model that was loaded from it.

    Raises:
        StartupError: as `load_model`.
    """
    return model.settled(load_model(config).network)


def network_of(config: EmbeddedConfig, model: HfModel, weights: Mapping[str, Weight]) -> Network:
    """The network of other weights, for the model that was loaded as `config` says.

    Args:
        config: Settings of the model.
        model: The model.
        weights: Every tensor of its checkpoint: dense and of its data type; or, for a checkpoint
            whose weights are kept as they are, quantised as they are.

    Raises:
        StartupError, ModelFileError: transformers makes no network of them.
    """
    from worker.engines.embedded.model import transformers_checkpoint as checkpoint
    from worker.engines.embedded.model.checkpoint_gate import configuration

    directory = Path(config.model_path)
    dense = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
    if len(dense) == len(weights):
        network = checkpoint.network_of(directory, configuration(directory), model.dtype, dense)
    else:
        found = configuration(directory)
        network = checkpoint.filled_network(directory, found, model.dtype, weights.items(), keeps=True)
    with launching_on(model.device):
        network = network.to(model.device).eval()
        return checkpoint.packed(network, model.kernel_backend, model.context_length, config.context_length)


def _from_checkpoint(
    directory: Path,
    settings: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelBackend,
    keeps: bool,
    context_length: int | None,
) -> tuple[Network, ModelFacts]:
    from worker.engines.embedded.model import transformers_checkpoint as checkpoint  # imports transformers
    from worker.engines.embedded.model.checkpoint_gate import UNREADABLE, read_checked

    weights = kernels.quantisation
    quantised = None if format_of(settings) is None else checkpoint.QuantisedCheckpoint(directory, settings)
    third_party = quantization_of(settings)
    config, geometry = read_checked(directory, settings, dtype)
    if third_party is not None:
        from worker.engines.embedded.model.third_party_checkpoint import ThirdPartyCheckpoint

        source = ThirdPartyCheckpoint(directory, third_party)
        network = source.network(config, dtype, keeps)
        weights = third_party.name if source.num_kept else weights
    elif quantised is None:
        network = checkpoint.load_network(directory, config, dtype)
    else:
        network = quantised.network(config, dtype, keeps)
        weights = quantised.format if keeps else None
    network = network.to(device).eval()
    if device.type == "cpu" and not kernels.gemm(torch.zeros(64, 64, dtype=dtype), None).is_packed:
        for parameter in network.parameters():  # weights are kept as they are, and the checkpoint may lie mapped
            parameter.data = parameter.data.clone()
    positions = geometry.max_position_embeddings if geometry is not None else 0
    try:
        packed = checkpoint.packed(network, kernels, positions, context_length)
    except ModelFileError as error:
        raise StartupError(f"--model-path {directory}: {error}") from None
    except UNREADABLE as error:
        raise StartupError(f"--model-path {directory}: config.json: makes no model: {one_line(error)}") from error
    return packed, checkpoint.facts_of(config, packed, geometry, dtype, directory, settings, weights)


def _can_be_kept(directory: Path, settings: dict[str, Any], kernels: KernelBackend) -> bool:
    """Whether there may be a packed copy.

    For the Llama family and native kernels, without RoPE that depends on ``--context-length``, and
    if all weights lie in the directory itself, whose files are compared.
    """
    if not kernels.reads_quantised or settings["model_type"] not in LLAMA_LIKE or has_longrope(settings):
        return False
    try:
        shards = read_index(directory).values() if (directory / INDEX).is_file() else ()
    except ModelFileError:
        return False
    return all("/" not in shard for shard in shards)


def _name(dtype: torch.dtype, kernels: KernelBackend, keeps: bool) -> str:
    held_in = kernels.quantisation or ("quantised" if keeps else "dense")
    rounding = [f"{kernels.rounds_to}-activations"] if kernels.rounds_to != "none" else []
    return "-".join([str(dtype).removeprefix("torch."), held_in, *rounding])


def _read(
    copy: PackedCopy, ahead: SealedTensors | None, dtype: torch.dtype, kernels: KernelBackend
) -> PackedModel | None:
    try:
        found: PackedModel | None = copy.read(ahead)
        if found is not None:
            found.check(dtype, kernels.rounds_to)
    except ValueError as error:
        logger.info("the packed copy %s is made again: %s", copy.path, error)
        return None
    return found


def _keep(copy: PackedCopy, weights: LlamaWeights | None, facts: ModelFacts) -> None:
    if weights is None:
        logger.debug("no packed copy is kept: other kernels compute a part of the model")
        return
    copy.write_beside(PackedModel(facts, weights))
