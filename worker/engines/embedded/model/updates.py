"""Updates of the weights of a model: packed beside the old ones, or all of them loaded again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.host import memory as host_memory
from worker.engines.embedded.model.checkpoint_files import first_line, read_settings
from worker.engines.embedded.model.hf_model import HfModel
from worker.engines.embedded.model.llama_weights import LlamaWeights
from worker.engines.embedded.model.loading import network_of
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.model.quantisation import FORMATS
from worker.engines.embedded.model.requantisation import OTHER, formats_in, formats_of
from worker.engines.embedded.model.stored_weights import Weight, shape_in
from worker.engines.embedded.model.weight_update import HEAD, Given, check_given, without_values
from worker.engines.weights import WeightsRefused
from worker.errors import StartupError
from worker.models.problems import ModelFileError
from worker.models.quantised import CODES, OFFSETS, SCALES, TRANSPOSED, format_of
from worker.models.quantization_config import MXFP4, STACKED_EXPERTS, quantization_of
from worker.models.weight_files import StoredTensor, WeightFiles

logger = logging.getLogger(__name__)


class Updates(Protocol):
    """Makes networks of other weights for one model.

    Attributes:
        shapes: Shapes of the tensors that an update may have, by name.
        ignored: Names of tensors of the checkpoint that the model has no place for, such as buffers
            of older versions: an update may have them, too.
        is_beside: Whether a network may be made while another one computes.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ignored: Collection[str]
    is_beside: bool

    def named(self, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
        """The tensors of an update by the names of `shapes`."""

    def check(self, weights: Mapping[str, Weight]) -> Given:
        """The tensors of an update, as the model holds them. Raises `WeightsRefused`."""

    def network(self, given: Given) -> Network:
        """The network of an update, settled as the model's own. Raises `WeightsRefused`."""

    def drop(self) -> None:
        """Drop the model's weights, and their memory."""


def updates_of(config: EmbeddedConfig, model: HfModel) -> Updates:
    """The updates of a model that was loaded as `config` says.

    Raises:
        StartupError: the checkpoint's files cannot be read any more.
    """
    if model.packed_weights() is not None:
        return PackedUpdates(model)
    try:
        return ReloadedUpdates(config, model)
    except ModelFileError as error:
        raise StartupError(f"--model-path {config.model_path}: {error}") from None


class PackedUpdates:
    """Updates of a Llama on native kernels, of any tensors, packed beside the old ones.

    Args:
        model: The model.
    """

    is_beside = True

    def __init__(self, model: HfModel) -> None:
        geometry, packed = model.geometry, model.packed_weights()
        assert packed is not None, "native kernels compute all of it"
        self.shapes: Mapping[str, tuple[int, ...]] = {tensor.name: tensor.shape for tensor in geometry.tensors()}
        buffers = [f"layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(geometry.num_hidden_layers)]
        self.ignored: Collection[str] = {f"{prefix}{buffer}" for buffer in buffers for prefix in ("", "model.")}
        self._model = model
        self._without_values: LlamaWeights | None = None
        stored, self._formats = model.stored_format, dict[str, str]()
        if stored is not None:
            self._formats = formats_of(packed, stored, geometry.num_key_value_heads * geometry.head_dim)
            if stored not in FORMATS and OTHER in self._formats.values():
                _tell(stored, f"rounded to {OTHER}")

    def named(self, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
        """See `Updates.named`; as at a start, names may be those of a model without a head."""
        if any(name.startswith("model.") for name in weights):
            return weights
        return {self._whole(name): weight for name, weight in weights.items()}

    def check(self, weights: Mapping[str, Weight]) -> Given:
        """See `Updates.check`."""
        return check_given(self.named(weights), self.shapes, self._model.dtype, self._formats)

    def _whole(self, name: str) -> str:
        return f"model.{name}" if f"model.{name}" in self.shapes else name

    def network(self, given: Given) -> Network:
        """See `Updates.network`."""
        old = self._model.packed_weights() or self._without_values
        assert old is not None
        return self._model.updated(old, given)

    def drop(self) -> None:
        """See `Updates.drop`."""
        packed = self._model.packed_weights()
        assert packed is not None
        self._without_values = without_values(packed)
        self._model.drop_network()


class ReloadedUpdates:
    """Updates of any other model: whole ones, which are loaded as the checkpoint was at the start.

    transformers sets global state while it loads, so nothing may compute meanwhile.

    Args:
        config: Settings that the model was loaded with.
        model: The model.

    Raises:
        StartupError, ModelFileError: the checkpoint's files cannot be read any more.
    """

    is_beside = False

    def __init__(self, config: EmbeddedConfig, model: HfModel) -> None:
        from worker.engines.embedded.model import transformers_checkpoint as checkpoint
        from worker.engines.embedded.model.checkpoint_gate import configuration

        directory = Path(config.model_path)
        settings = read_settings(directory)
        found = configuration(directory)
        self._optional = frozenset((HEAD,) if found.tie_word_embeddings else ())
        names = checkpoint.TensorNames(found, model.dtype)
        self.ignored: Collection[str] = ()
        third_party = quantization_of(settings)
        self._formats: dict[str, str] = {}
        self._dequantised: Collection[str] = ()
        self._transposed: Collection[str] = ()
        if format_of(settings) is None:
            files = WeightFiles(directory, quantization=third_party)
            self.ignored = names.without_place(files.plain)
            plain = [name for name in files.plain if name not in self.ignored]
            self.shapes: Mapping[str, tuple[int, ...]] = {name: files.tensors[name].shape for name in plain}
            quantised = {} if files.third_party is None else files.third_party.weights
            self.shapes = {**self.shapes, **{name: weight.shape for name, weight in quantised.items()}}
            if model.stored_format is not None:
                keeps = settings["model_type"] == STACKED_EXPERTS
                self._transposed = [
                    name for name, weight in quantised.items() if keeps and weight.scheme.layout == MXFP4
                ]
                self._formats = dict.fromkeys(self._transposed, "MXFP4")
                self._dequantised = quantised.keys() - set(self._transposed)
                if self._dequantised:
                    _tell(model.stored_format, "not quantised")
        else:
            tensors = WeightFiles(directory, is_quantised=True).tensors
            self.shapes = _shapes_in(tensors)
            if model.stored_format is not None:
                self._formats = formats_in(tensors, model.stored_format)
                self._transposed = [name for name in self._formats if name + TRANSPOSED + CODES in tensors]
                if model.stored_format not in FORMATS and OTHER in self._formats.values():
                    _tell(model.stored_format, f"rounded to {OTHER}")
        self._in_float32 = names.in_float32(self.shapes)
        self._config, self._model = config, model

    def named(self, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
        """See `Updates.named`: names are those of the checkpoint."""
        return weights

    def check(self, weights: Mapping[str, Weight]) -> Given:
        """See `Updates.check`."""
        dtype = self._model.dtype
        given = check_given(weights, self.shapes, dtype, self._formats, self._transposed, self._in_float32)
        missing = sorted(set(self.shapes) - set(given.weights) - self._optional)
        if missing:
            raise WeightsRefused(
                f"tensor {missing[0]}: is missing; an update of a {self._model.geometry.model_type} model on "
                f"{self._model.kernels} kernels must have every tensor of its checkpoint"
            )
        name_of_dtype = str(dtype).removeprefix("torch.")
        return replace(given, formats=dict.fromkeys(self._dequantised, name_of_dtype) | dict(given.formats))

    def network(self, given: Given) -> Network:
        """See `Updates.network`."""
        weights = given.weights
        if not self._formats:
            weights = {name: _dense(weight, self._model.dtype) for name, weight in weights.items()}
        try:
            return self._model.settled(network_of(self._config, self._model, weights))
        except (StartupError, ModelFileError) as error:
            raise WeightsRefused(str(error)) from None
        except torch.OutOfMemoryError as error:
            problem = f"a GPU has no memory for them beside those that compute ({first_line(error)})"
        host_memory.give_back_freed()  # of what was made, which the error refers to no longer
        raise WeightsRefused(f"{problem}; a smaller --kv-cache-memory leaves more")

    def drop(self) -> None:
        """See `Updates.drop`."""
        self._model.drop_network()


def _shapes_in(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a checkpoint in the form of `worker.models.quantised`, by name."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(CODES):
            found[name.removesuffix(CODES).removesuffix(TRANSPOSED)] = shape_in(tensors, name)
        elif not name.endswith((SCALES, OFFSETS)):
            found[name] = tensor.shape
    return found


def _tell(stored: str, kept: str) -> None:
    logger.info("updates of weights in %s will be %s: nothing here rounds to that format", stored, kept)


def _dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantised().to(dtype)
