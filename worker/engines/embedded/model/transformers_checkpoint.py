"""Loads checkpoints into transformers' models, quantised ones of GGUF files and of
``python -m worker quantize`` too.

Importing transformers takes longer than anything else at a start, so this module is imported where
there is no packed copy alone.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from worker.engines.embedded.model import llama_weights
from worker.engines.embedded.model.checkpoint_files import eos_token_ids, undecodable_ids
from worker.engines.embedded.model.checkpoint_gate import UNREADABLE
from worker.engines.embedded.model.decoder import DecoderNetwork, decoder_network
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear_names import is_of_experts
from worker.engines.embedded.model.llama import LlamaNetwork
from worker.engines.embedded.model.llama_weights import LlamaWeights
from worker.engines.embedded.model.longrope import settle_factors
from worker.engines.embedded.model.model_facts import ModelFacts
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.model.quantisation import QuantisedWeight, StackedExperts
from worker.engines.embedded.model.quantised_experts import OneWeight, join_experts, place_expert, place_stacked
from worker.engines.embedded.model.stored_weights import Weight, weights_in
from worker.engines.embedded.model.third_party_weights import changes_nothing
from worker.engines.embedded.model.transformers_network import TransformersNetwork
from worker.errors import StartupError, one_line
from worker.models.architectures import CONVERTED
from worker.models.config_json import CONFIG
from worker.models.geometry import Geometry, GeometryError
from worker.models.model_table import LLAMA_LIKE
from worker.models.problems import ModelFileError
from worker.models.quantised import format_of
from worker.models.weight_files import WeightFiles

logger = logging.getLogger(__name__)


def facts_of(
    config: Any,
    network: Network,
    geometry: Geometry | None,
    dtype: torch.dtype,
    directory: Path,
    settings: dict[str, Any],
    weights: str | None,
) -> ModelFacts:
    """Facts of a model, and of the tokenizer beside it.

    Args:
        config: transformers' configuration.
        network: Network of the model.
        geometry: Geometry of the model; None for one that is measured.
        dtype: Data type of activations.
        directory: Directory of the checkpoint.
        settings: ``config.json``.
        weights: Format of the weights, for people; None for their data type.

    Raises:
        StartupError: a file of the checkpoint cannot be read.
    """
    generic = network if isinstance(network, (DecoderNetwork, TransformersNetwork)) else None
    if geometry is None:
        assert generic is not None, "the tensors of a Llama are known"
        geometry = _measured(generic, config, directory)
    if isinstance(network, LlamaNetwork):  # config.json may say so of weights that differ
        geometry = replace(geometry, tie_word_embeddings=network.is_tied)
    vocab_size = geometry.vocab_size
    ends = tuple(token for token in eos_token_ids(directory, settings) if 0 <= token < vocab_size)
    return ModelFacts(
        dtype=dtype,
        geometry=geometry,
        softcap=None if generic is None else generic.calls[0].softcap,
        eos_token_ids=ends,
        undecodable_ids=tuple(token for token in undecodable_ids(directory, vocab_size) if token not in ends),
        weights=weights,
    )


def _measured(network: DecoderNetwork | TransformersNetwork, config: Any, directory: Path) -> Geometry:
    """The sizes that kernels are called with: what transformers' code calls attention with, and the
    LM head's. Raises `StartupError` for those that do not fit each other.
    """
    call, inner = network.calls[0], getattr(config, "intermediate_size", None)
    try:
        return Geometry(
            model_type=config.model_type,
            vocab_size=network.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=inner if type(inner) is int else 4 * config.hidden_size,
            num_hidden_layers=len(network.calls),
            num_attention_heads=call.heads,
            num_key_value_heads=call.kv_heads,
            head_dim=network.head_dim,
            max_position_embeddings=getattr(config, "max_position_embeddings", None),  # type: ignore[arg-type]
        )
    except GeometryError as error:
        raise StartupError(f"--model-path {directory}: {CONFIG}: {error}") from None


def packed(network: Any, kernels: KernelBackend, num_positions: int = 0, context_length: int | None = None) -> Network:
    """The engine's network of transformers' causal language model, of no use afterwards.

    Args:
        network: transformers' causal language model.
        kernels: See `LlamaNetwork`.
        num_positions: See `LlamaNetwork`.
        context_length: See `settle_factors`.

    Raises:
        ModelFileError: it has experts of an interface that does not say where gates are.
    """
    if any(is_of_experts(each) and not hasattr(each, "is_concatenated") for each in network.modules()):
        installed = importlib.metadata.version("transformers")
        raise ModelFileError(f"config.json: mixtures of experts need transformers 5.7 or newer, got {installed}")
    factors = settle_factors(network, context_length)
    found: Network
    if llama_weights.serves(network.config):
        found = LlamaNetwork(LlamaWeights.of(network), kernels, num_positions)
    else:
        longest = getattr(network.config, "max_position_embeddings", None)
        positions = num_positions or context_length or (longest if isinstance(longest, int) else 0)
        found = decoder_network(network, kernels, positions) or TransformersNetwork(network, kernels)
    found.rope_factors = factors
    return found


def load_network(directory: Path, config: Any, dtype: torch.dtype) -> Any:
    """transformers' causal language model of a checkpoint that is not quantised, on the CPU.

    Args:
        directory: Directory of the checkpoint.
        config: Configuration from `checkpoint_gate.read_checked`.
        dtype: Data type of the weights.

    Raises:
        StartupError: it cannot be read or is incomplete.
    """
    network, _ = _loaded(AutoModelForCausalLM, directory, config=config, dtype=dtype, use_safetensors=True)
    return network


def network_of(directory: Path, config: Any, dtype: torch.dtype, weights: Mapping[str, torch.Tensor]) -> Any:
    """transformers' causal language model of other weights than the checkpoint's, on the CPU.

    Args:
        directory: Directory of the checkpoint, for errors.
        config: Configuration from `checkpoint_gate.configuration`.
        dtype: Data type of the weights.
        weights: Weights by the checkpoint's names.

    Raises:
        StartupError: they make no network, one is missing, or a bias has no place in it.
    """
    config.__dict__.pop("quantization_config", None)  # these are dense
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise StartupError(f"--model-path {directory}: transformers has no causal language model of its type") from None
    network, unexpected = _loaded(model_class, directory, None, config=config, dtype=dtype, state_dict=dict(weights))
    for name in unexpected:
        if name.endswith(".bias") and weights[name].any():
            raise StartupError(f"--model-path {directory}: tensor {name} has no place in the model")
    return network


def _loaded(loader: Any, directory: Path, *source: Path | None, **named: Any) -> tuple[Any, list[str]]:
    """transformers' network, from `directory` or another source, and the names without a place."""
    settings: Any = GenerationConfig  # not those of the checkpoint, of which `eos_token_ids` reads what counts
    try:
        network, report = loader.from_pretrained(
            *(source or (directory,)),
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # told below, with their names
            output_loading_info=True,
            generation_config=settings(),
            **named,
        )
    except UNREADABLE as error:
        raise StartupError(f"--model-path {directory}: cannot load it: {one_line(error)}") from error
    for problem in ("missing_keys", "mismatched_keys"):
        if report.get(problem):
            names = sorted(str(name) for name in report[problem])
            raise StartupError(f"--model-path {directory}: weights are incomplete, {problem}: {', '.join(names[:3])}")
    return network, list(report["unexpected_keys"])


def tensor_shapes(config: Any) -> dict[str, torch.Size]:
    """Shapes of the tensors of transformers' causal language model, by the names of its modules.

    Args:
        config: Configuration from `checkpoint_gate.read_checked`.
    """
    maker: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return {name: value.shape for name, value in maker.from_config(config).state_dict().items()}


class TensorNames:
    """The names of a checkpoint's tensors, as transformers' causal language model takes them.

    Args:
        config: Configuration from `checkpoint_gate.configuration`.
        dtype: Data type of the model.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        maker: Any = AutoModelForCausalLM
        with torch.device("meta"):
            self._network = maker.from_config(config, dtype=dtype)
        self._dtypes = {name: value.dtype for name, value in self._network.state_dict().items()}
        self._modules = {name for name, _ in self._network.named_modules()}
        self._renamings = _renamings(config.model_type)

    def without_place(self, names: Iterable[str]) -> frozenset[str]:
        """Names of tensors that the model has no place for, and of which transformers' own loader
        says nothing: buffers of older versions, layers for drafts.
        """
        unknown = {name for name in names if self._place_of(name) not in self._dtypes and not self._is_expert(name)}
        told = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unknown))
        self._network._adjust_missing_and_unexpected_keys(told)
        return frozenset(unknown - told.unexpected_keys)

    def _place_of(self, name: str) -> str:
        """The name of a tensor in the model, which a checkpoint may have without its prefix."""
        renamed = _renamed_name(name, self._renamings)
        return renamed if renamed in self._dtypes else f"{self._network.base_model_prefix}.{renamed}"

    def _is_expert(self, name: str) -> bool:
        """Whether it is of one expert of a mixture that the model has."""
        mixture, found, _ = name.partition(".experts.")
        return bool(found) and f"{mixture}.experts" in self._modules

    def in_float32(self, names: Iterable[str]) -> frozenset[str]:
        """Names of tensors that are held in float32 whatever the data type of the model is."""
        patterns = [re.compile(pattern) for pattern in self._network._keep_in_fp32_modules_strict or ()]

        def is_kept(place: str) -> bool:
            return self._dtypes.get(place) == torch.float32 or any(pattern.search(place) for pattern in patterns)

        return frozenset(name for name in names if is_kept(self._place_of(name)))


class QuantisedCheckpoint:
    """A quantised checkpoint.

    Args:
        directory: Directory of the checkpoint.
        settings: ``config.json``.

    Raises:
        StartupError: its architecture is not served in this form.

    Attributes:
        format: Format of the weights.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        served = dict.fromkeys((*LLAMA_LIKE, *CONVERTED))
        if settings.get("model_type") not in served:
            raise StartupError(
                f"--model-path {directory}: config.json: quantization_config: quantised checkpoints of model type "
                f"{settings.get('model_type')!r} are not served, only of {', '.join(served)}"
            )
        self.format = str(format_of(settings))
        self._directory = directory

    def network(self, config: Any, dtype: torch.dtype, keeps_quantised: bool) -> Any:
        """transformers' causal language model, on the CPU.

        Args:
            config: Configuration from `checkpoint_gate.read_checked`.
            dtype: Data type of all weights that are not quantised.
            keeps_quantised: Whether quantised weights are a `QuantisedWeight` each, not
                dequantised.

        Raises:
            StartupError: it cannot be read or is incomplete.
        """
        if config.model_type in LLAMA_LIKE and not llama_weights.serves(config):
            raise StartupError(
                f"--model-path {self._directory}: config.json: quantization_config: a variant of its architecture "
                "(hidden_act, partial_rotary_factor) that is not served from a quantised checkpoint"
            )
        weights = _weights(WeightFiles(self._directory, is_quantised=True))
        return filled_network(self._directory, config, dtype, weights, keeps_quantised, changes_nothing)


def filled_network(
    directory: Path,
    config: Any,
    dtype: torch.dtype,
    weights: Iterable[tuple[str, Weight]],
    keeps: bool,
    may_skip: Callable[[str, Weight], bool] = lambda name, weight: False,
) -> Any:
    """transformers' causal language model, on the CPU, with these weights.

    Args:
        directory: Directory of the checkpoint.
        config: Configuration that `llama_weights.serves`, or of one of `CONVERTED`.
        dtype: Data type of all weights that are not quantised.
        weights: Weights by the checkpoint's names.
        keeps: Whether quantised weights are a `QuantisedWeight` each, not dequantised.
        may_skip: Whether a weight that has no place in the model may be left out.

    Raises:
        StartupError: they cannot be read, do not fit, or are incomplete.
    """
    maker: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            network = maker.from_config(config, dtype=dtype)
        network.model.rotary_emb = type(network.model.rotary_emb)(config)
        _compute_buffers(network)
        shapes = {name: value.shape for name, value in network.state_dict().items()}
        renamed = _renamed(config.model_type, weights)
        found = (each for each in renamed if each[0] in shapes or not may_skip(*each))
        _fill(network, shapes, found, dtype, keeps)
    except (ModelFileError, *UNREADABLE) as error:
        raise StartupError(f"--model-path {directory}: cannot load it: {one_line(error)}") from error
    if config.tie_word_embeddings:
        _tie(network)
    missing = [name for name, value in network.state_dict().items() if value.is_meta]
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise StartupError(f"--model-path {directory}: weights are incomplete, missing_keys: {names}")
    return network


def _compute_buffers(network: Any) -> None:
    """Give buffers that no checkpoint has their values, such as the scale of Gemma's embeddings,
    while all parameters are on the ``meta`` device.
    """
    stored = network.state_dict()
    for name, module in network.named_modules():
        of_none = [leaf for leaf, value in module._buffers.items() if value.is_meta and f"{name}.{leaf}" not in stored]
        for leaf in of_none:
            module._buffers[leaf] = torch.empty_like(module._buffers[leaf], device="cpu")
        if of_none:
            network._init_weights(module)


def _renamed(model_type: str, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """Weights by the names of transformers' modules, as its own loader renames them."""
    renamings = _renamings(model_type)
    for name, weight in weights:
        yield _renamed_name(name, renamings), weight


def _renamings(model_type: str) -> list[Any]:
    mapping: Any = get_checkpoint_conversion_mapping
    return [each for each in mapping(model_type) or [] if isinstance(each, WeightRenaming)]


def _renamed_name(name: str, renamings: Iterable[Any]) -> str:
    for each in renamings:
        name, _ = each.rename_source_key(name)
    return name


def _fill(
    network: Any,
    shapes: Mapping[str, torch.Size],
    weights: Iterable[tuple[str, Weight]],
    dtype: torch.dtype,
    keeps: bool,
) -> None:
    in_float32 = tuple(network._keep_in_fp32_modules_strict or ())
    for name, weight in weights:
        if isinstance(weight, StackedExperts):
            place_stacked(network, name, weight, dtype, keeps)
            continue
        if place_expert(network, name, weight):
            continue
        if name not in shapes or weight.shape != shapes[name]:
            raise ValueError(f"weight {name} of shape {list(weight.shape)} has no place in the model")
        if isinstance(weight, QuantisedWeight) and not keeps:
            weight = weight.dequantised()
        if isinstance(weight, torch.Tensor):
            weight = weight.to(torch.float32 if name.endswith(in_float32) else dtype)
        _set_weight(network, name, weight)
    join_experts(network, dtype, keeps)


def _set_weight(network: Any, name: str, weight: Weight) -> None:
    parent, _, leaf = name.rpartition(".")
    module = network.get_submodule(parent)
    if leaf in module._buffers:
        module._buffers[leaf] = weight
        return
    module.__dict__.pop(leaf, None)  # a file may hold a weight twice
    module._parameters.pop(leaf, None)
    if isinstance(weight, torch.Tensor):
        module._parameters[leaf] = torch.nn.Parameter(weight, requires_grad=False)
    else:
        setattr(module, leaf, weight)


def _tie(network: Any) -> None:
    """Tie embeddings as transformers does: not those of which a checkpoint has both, unlike."""
    head, embedding = network.lm_head.weight, network.model.embed_tokens.weight
    if getattr(head, "is_meta", False) or _are_equal(head, embedding):
        _set_weight(network, "lm_head.weight", embedding)


def _are_equal(one: OneWeight, other: OneWeight) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if one.layout != other.layout:
        return False
    parts = ((one.codes, other.codes), (one.scales, other.scales), (one.offsets, other.offsets))
    return all(mine is None or its is None or torch.equal(mine, its) for mine, its in parts)


def _weights(files: WeightFiles) -> Iterable[tuple[str, Weight]]:
    for file in files.files:
        yield from weights_in(load_file(files.directory / file))
