"""The network of architectures that are Llama with a twist, on the native kernels."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import torch

from worker.engines.embedded.attention import AttentionSizes, AttentionStep, NativeAttention, NativeStep, RopeTables
from worker.engines.embedded.model.decoder_layers import TWISTS, ModelLayer, NotNative, Ropes
from worker.engines.embedded.model.embedding import Embedding, has_tied_embeddings
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear import Projection, linears, lm_head, pack_all
from worker.engines.embedded.model.linear_names import linear_shapes
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.model.transformers_attention import AttentionCall
from worker.engines.embedded.model.transformers_modules import Norm
from worker.engines.embedded.native.layers import DecoderLayer, DecoderLayers
from worker.engines.embedded.native.lora import AdaptedLayers, AdaptedRows

logger = logging.getLogger(__name__)

_MOST_TABLES = 16 * 2**20
"""Bytes of cosines and sines that are kept."""


class DecoderNetwork(Network):
    """A network whose layers all run in one call of the native kernels.

    Args:
        network: transformers' causal language model of one of `TWISTS`, of no use afterwards.
        kernels: Backends, which are the native ones.
        num_positions: Positions for which RoPE is computed now, if they are not too many, instead
            of in each step, as it is for positions behind them.

    Raises:
        NotNative: a part of it is not computed natively; `network` is still whole.

    Attributes:
        calls: Constants of attention by layer.
        head_dim: Width of a head in the KV store.
        vocab_size: Width of a row of logits.
    """

    def __init__(self, network: Any, kernels: KernelBackend, num_positions: int = 0) -> None:
        super().__init__()
        config, model = network.config, network.model
        if _own(config, "clip_qkv", None) is not None:
            raise NotNative("clip_qkv")
        self._dtype: torch.dtype = network.dtype
        ropes = Ropes.of(model)
        self._ropes, self._kernels = ropes.ropes, kernels
        self._is_interleaved = TWISTS[config.model_type].is_interleaved
        norm = Norm.of(model.norm, kernels)
        if norm is None:
            raise NotNative(type(model.norm).__name__)
        self._norm = norm
        self.calls = [
            _checked(ModelLayer(layer, index, config, ropes, kernels), kernels)
            for index, layer in enumerate(model.layers)
        ]
        self.head_dim = self.calls[0].key_dim
        self._check_attention(kernels)
        self._shapes, _ = linear_shapes(network)
        self._head = lm_head(Projection.of(network.lm_head))
        if not self._head.fits(kernels):
            raise NotNative("the LM head")
        embedding, is_tied = model.embed_tokens, has_tied_embeddings(network)
        self.vocab_size = self._head.out_features
        self._layers = torch.nn.ModuleList()
        for index in range(len(model.layers)):  # one by one, so that weights are never held twice
            layer = ModelLayer(model.layers[index], index, config, ropes, kernels)
            model.layers[index] = torch.nn.Identity()
            pack_all(layer, kernels)
            self._layers.append(layer)
        network.lm_head = None
        self._head.pack(kernels)
        scale = getattr(embedding, "embed_scale", None)  # only Gemma's embeddings have it, rounded
        if scale is None:
            self._embedding_scale = float(_own(config, "embedding_multiplier", 1.0))
        else:
            self._embedding_scale = float(torch.as_tensor(scale).to(self._dtype))
        self._embed = Embedding(embedding.weight, self._head, is_tied, self._dtype)
        self._logits_divisor = float(_own(config, "logits_scaling", 1.0))
        self._logits_cap: float | None = _own(config, "final_logit_softcapping", None)
        self._tables: RopeTables | None = None
        width = 2 * len(self._ropes[0].frequencies)
        if 0 < 2 * num_positions * len(self._ropes) * width * self._dtype.itemsize <= _MOST_TABLES:
            self._tables = self._rope_tables(torch.arange(num_positions))

    def _check_attention(self, kernels: KernelBackend) -> None:
        if len({(call.heads, call.kv_heads, call.key_dim, call.softcap) for call in self.calls}) != 1:
            raise NotNative("layers with different heads")
        call = self.calls[0]
        sizes = AttentionSizes(
            call.heads, call.kv_heads, self.head_dim, call.softcap, 16, self._dtype, torch.device("cpu")
        )
        if not issubclass(kernels.attentions[0], NativeAttention) or not kernels.attentions[0].supports(sizes):
            raise NotNative(f"heads of width {self.head_dim}")

    @cached_property
    def _native(self) -> DecoderLayers | None:
        return self._native_layers(self._layers)

    def _native_layers(self, modules: torch.nn.ModuleList) -> DecoderLayers | None:
        layers = [layer.native() for layer in modules if isinstance(layer, ModelLayer)]
        found: list[DecoderLayer] = [layer for layer in layers if layer is not None]
        if len(found) < len(layers):
            return None
        call = self.calls[0]
        return DecoderLayers(found, call.heads, call.kv_heads, self.head_dim, self._is_interleaved)

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        only: int | None = None,
        adapted: AdaptedRows | None = None,
    ) -> torch.Tensor:
        """See `Network.hidden`."""
        hidden = self.embedded(ids)
        layers = self._native if only is None else self._native_layers(self._layers[only : only + 1])
        assert isinstance(step, NativeStep) and layers is not None, "native kernels compute it"
        return step.compute_layers(layers, hidden, self._tables_of(positions), adapted)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` before the first layer."""
        rows = self._embed(ids)
        return rows if self._embedding_scale == 1.0 else rows * self._embedding_scale

    @property
    def has_windows(self) -> bool:
        """See `Network.has_windows`."""
        return any(call.window for call in self.calls)

    def layer_kinds(self) -> list[int]:
        """See `Network.layer_kinds`."""
        kinds: dict[object, int] = {}
        for layer in self._layers:
            assert isinstance(layer, ModelLayer)
            kinds.setdefault(layer.kind, layer.index)
        return list(kinds.values())

    @property
    def adapted_layers(self) -> AdaptedLayers | None:
        """See `Network.adapted_layers`."""
        if self._native is None:
            return None
        named = []
        for layer in self._layers:
            assert isinstance(layer, ModelLayer)
            for part, source in layer.linears:
                name = f"model.layers.{layer.index}.{part}"
                rows, columns = self._shapes[name] or (0, 0)
                named.append((name, layer.index, source, (rows, columns)))
        return AdaptedLayers.of(named, [layer.gemm_columns for layer in self._native.layers], self._shapes)

    def _tables_of(self, positions: torch.Tensor) -> RopeTables:
        tables = self._tables
        if tables is None or int(positions.amax()) >= tables.cosine.shape[1]:  # of a trial, for example
            return self._rope_tables(positions)
        return RopeTables(tables.cosine.index_select(1, positions), tables.sine.index_select(1, positions))

    def _rope_tables(self, positions: torch.Tensor) -> RopeTables:
        """Cosines and sines of all RoPEs ``[ropes, T, R]``."""
        tables = [rope.tables(positions, self._dtype) for rope in self._ropes]
        return RopeTables(torch.stack([each.cosine for each in tables]), torch.stack([each.sine for each in tables]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Network.logits`."""
        logits: torch.Tensor = self._head(self._norm(hidden))
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        if self._logits_cap is not None:
            logits = self._kernels.soft_cap(logits, self._logits_cap)
        return logits


def _own(config: Any, key: str, default: Any) -> Any:
    """The value of a key of a configuration's own; `default` for one of another model type, which
    transformers keeps and does not compute with.
    """
    return getattr(config, key) if hasattr(type(config), key) else default


def decoder_network(network: Any, kernels: KernelBackend, num_positions: int) -> DecoderNetwork | None:
    """A `DecoderNetwork`, or None if native kernels do not compute all of the model."""
    if network.config.model_type not in TWISTS or not kernels.reads_quantised:
        return None
    try:
        return DecoderNetwork(network, kernels, num_positions)
    except NotNative as error:
        logger.info("transformers' code computes the model, not the native kernels alone: %s", error)
        return None


def _checked(layer: ModelLayer, kernels: KernelBackend) -> AttentionCall:
    """Constants of a layer's attention. Raises `NotNative` for weights that others compute with."""
    misfit = next((each for each in linears(layer) if not each.fits(kernels)), None)
    if misfit is not None:
        raise NotNative(f"weights of {misfit.in_features} columns")
    width, has_sinks = layer.head_dim, layer.sinks is not None
    return AttentionCall(layer.heads, layer.kv_heads, width, width, layer.scale, layer.window, layer.softcap, has_sinks)
