"""transformers' own code over a packed batch, with our attention and linear layers in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from worker.engines.embedded.attention import AttentionStep
from worker.engines.embedded.model.embedding import Embedding, has_tied_embeddings
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear import (
    Linear,
    Projection,
    lm_head,
    pack_all,
    replace_linears,
)
from worker.engines.embedded.model.mlp import GatedMlp
from worker.engines.embedded.model.moe import Experts, Router
from worker.engines.embedded.model.network import Network
from worker.errors import StartupError

_IMPLEMENTATION = "embedded_kv_store"
_STEP_ARGUMENT = "embedded_step"


class TransformersNetwork(Network):
    """Any causal language model that attends through transformers' interface.

    Whatever does more to an element than one addition or multiplication is ours: transformers'
    layers say in which order things are computed.

    Args:
        network: transformers' causal language model; its linear layers, norms, activations and
            experts are replaced.
        kernels: Backends that compute these and attention.

    Raises:
        StartupError: a norm is of a kind that is not known.
    """

    def __init__(self, network: Any, kernels: KernelBackend) -> None:
        super().__init__()
        _register_attention()
        network.set_attn_implementation(_IMPLEMENTATION)
        model = self._model = network.model
        is_tied = has_tied_embeddings(network)
        self._head = lm_head(Projection.of(network.lm_head))
        self._softcap = getattr(network.config, "final_logit_softcapping", None)  # only Gemma's configurations have it
        self._soft_cap = kernels.soft_cap
        _replace_experts(model)
        replace_linears(model)
        _replace_norms(model, kernels)
        _replace_mlps(model)
        mlps = [module for module in model.modules() if isinstance(module, GatedMlp)]
        self.foreign = tuple(sorted({mlp.foreign for mlp in mlps if mlp.foreign}))
        pack_all(self, kernels)
        model.embed_tokens = _ScaledEmbedding(model.embed_tokens, self._head, is_tied)
        self._layer_types: list[str | None] = [None] * len(model.layers)
        if isinstance(model.rotary_emb.rope_type, dict):  # Gemma 3's layers rotate by their type
            self._layer_types = [str(layer_type) for layer_type in network.config.layer_types]
        for parameter in model.parameters() if self._head.gemm.is_packed else ():
            parameter.data = parameter.data.clone()  # what is left would keep the whole checkpoint mapped into memory

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, only: int | None = None
    ) -> torch.Tensor:
        """See `Network.hidden`."""
        hidden = self._model.embed_tokens(ids)[None]
        layers = range(len(self._layer_types)) if only is None else [only]
        ropes: dict[str | None, Any] = {}
        for layer_type in {self._layer_types[index] for index in layers}:
            kind = () if layer_type is None else (layer_type,)
            ropes[layer_type] = self._model.rotary_emb(hidden, positions[None], *kind)
        for index in layers:
            hidden = self._model.layers[index](
                hidden,
                attention_mask=None,
                position_ids=positions[None],
                position_embeddings=ropes[self._layer_types[index]],
                **{_STEP_ARGUMENT: step},
            )
        last: torch.Tensor = self._model.norm(hidden)[0]
        return last

    @property
    def has_windows(self) -> bool:
        """See `Network.has_windows`."""
        return any(_window(layer) for layer in self._model.layers)

    def layer_kinds(self) -> list[int]:
        """See `Network.layer_kinds`: kinds of attention and of MLPs."""
        kinds: dict[object, int] = {}
        for index, layer in enumerate(self._model.layers):
            kinds.setdefault((self._layer_types[index], _window(layer), type(layer.mlp)), index)
        return list(kinds.values())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Network.logits`."""
        logits: torch.Tensor = self._head(hidden)
        return logits if self._softcap is None else self._soft_cap(logits, self._softcap)


def _window(layer: Any) -> int:
    return getattr(layer.self_attn, "sliding_window", None) or 0  # not all types have windows


class _Norm(torch.nn.Module):
    """RMSNorm, computed in float32 and rounded once.

    Args:
        norm: transformers'.
        kernels: Backends, one of which computes it.

    Raises:
        StartupError: transformers' has other values.
    """

    def __init__(self, norm: Any, kernels: KernelBackend) -> None:
        super().__init__()
        self._kernel = kernels.rms_norm
        self._epsilon = float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
        weight = norm.weight.detach().float()
        x = torch.linspace(-3.0, 2.0, weight.numel(), device=weight.device)[None]
        expected = norm(x)
        for self._weight in (weight.clone(), weight + 1.0):  # Gemma's are stored without the 1
            if torch.allclose(torch.rms_norm(x, weight.shape, self._weight, self._epsilon), expected, 1e-3, 1e-3):
                return
        raise StartupError(f"--model-path: its {type(norm).__name__} is not served by the embedded engine")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` to the same."""
        return self._kernel(x.float(), self._weight, self._epsilon).to(x.dtype)


class _ScaledEmbedding(torch.nn.Module):
    """transformers' embedding, which may scale what it looks up."""

    def __init__(self, embedding: Any, head: Linear, is_tied: bool) -> None:
        super().__init__()
        weight = embedding.weight.detach()
        scale = getattr(embedding, "embed_scale", None)  # only Gemma's embeddings have it
        self._scale: torch.Tensor | None = None if scale is None else scale.to(weight.dtype)
        self._lookup = Embedding(weight, head, is_tied, weight.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._lookup(ids)
        return rows if self._scale is None else rows * self._scale


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; the step comes from `TransformersNetwork.hidden`."""
    step: AttentionStep = arguments[_STEP_ARGUMENT]
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return step.attend(module.layer_idx, query, key, value, scaling, sliding_window or 0, softcap)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask: the attention backend makes its own in each step."""


def _register_attention() -> None:
    """Make `_IMPLEMENTATION` known to transformers; harmless when repeated."""
    attention: Callable[..., Any] = _attention
    AttentionInterface.register(_IMPLEMENTATION, attention)
    AttentionMaskInterface.register(_IMPLEMENTATION, _no_mask)


def _replace_experts(model: Any) -> None:
    for layer in model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate = Router(layer.mlp.gate)
            layer.mlp.experts = Experts(layer.mlp.experts)


def _replace_mlps(model: Any) -> None:
    for layer in model.layers:
        mlp = layer.mlp
        if not hasattr(mlp, "experts"):
            layer.mlp = GatedMlp(mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn)


def _replace_norms(module: torch.nn.Module, kernels: KernelBackend) -> None:
    for name, child in list(module.named_children()):
        if type(child).__name__.endswith("RMSNorm"):
            setattr(module, name, _Norm(child, kernels))
        else:
            _replace_norms(child, kernels)
