"""transformers' own code over a packed batch, with our attention and linear layers in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from worker.engines.embedded.attention import AttentionStep
from worker.engines.embedded.model.called_linears import CalledLinears
from worker.engines.embedded.model.embedding import Embedding, is_tied
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear import Linear, Projection, lm_head, pack_all
from worker.engines.embedded.model.mlp import GatedMlp
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.model.quantisation import QuantisedWeight
from worker.engines.embedded.model.row_functions import RowFunctions, as_they_are
from worker.engines.embedded.model.transformers_attention import (
    CURRENT,
    IMPLEMENTATION,
    Attends,
    AttentionCall,
    AttentionProbe,
    Pass,
    register,
)
from worker.engines.embedded.model.transformers_modules import (
    Norm,
    replace_experts,
    replace_linears,
    replace_mlps,
    replace_norms,
)
from worker.engines.embedded.native.lora import AdaptedLayers, AdaptedRows
from worker.models.problems import ModelFileError

_PROBED_TOKENS = 3


class TransformersNetwork(Network):
    """Any causal language model that attends through transformers' interface, or torch's function.

    transformers' code says in which order things are computed; whatever does more to an element
    than one addition or multiplication is ours: its linear layers, norms, activations and experts
    are replaced, and so are torch's functions in what is left of it (`RowFunctions`).

    Args:
        network: transformers' causal language model, of no use afterwards.
        kernels: Backends that compute these and attention.

    Raises:
        ModelFileError: not all of its layers attend with the same numbers of heads.

    Attributes:
        calls: Calls of attention of a forward pass.
        head_dim: Width of a head in the KV store: the widest of keys and values, and even.
        vocab_size: Width of a row of logits.
    """

    adapts_with_any_attention = True

    def __init__(self, network: Any, kernels: KernelBackend) -> None:
        super().__init__()
        register()
        self._called = CalledLinears(network)
        network.set_attn_implementation(IMPLEMENTATION)
        model, dtype = network.base_model, network.dtype
        self._model = model
        embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
        has_tied_head = is_tied(embedding, head)
        network.config.output_router_logits = False
        self._head = lm_head(Projection.of(head))
        self._rest, self._given = network, _Given()
        setattr(network, network.base_model_prefix, self._given)
        network.set_output_embeddings(self._head)
        replace_experts(model)
        for module in (model, network):
            replace_linears(module)
            replace_norms(module, kernels)
        self._called.find(model)
        device = next(model.parameters()).device
        pack_all(self, kernels, is_quantised=True)
        replace_mlps(model, device, dtype)
        self._layers = _layers(model, network.config.num_hidden_layers)
        self._only: int | None = None
        self._returns_tuple = False
        self._first_calls = [0] * len(self._layers)
        for index, layer in enumerate(self._layers):
            layer.forward = self._skippable(index, layer.forward)
        for module in self.modules():
            if isinstance(module, (Linear, Norm, GatedMlp)):
                module.forward = as_they_are(module.forward)  # type: ignore[method-assign]
        self._functions = RowFunctions(list(self.parameters()), kernels)
        is_quantised = isinstance(getattr(embedding, "weight", None), QuantisedWeight)
        if is_quantised:
            model.set_input_embeddings(_ScaledEmbedding(embedding, self._head, has_tied_head, dtype))
        self.calls = self._probed(device)
        self._functions.settle()
        widest = max(max(call.key_dim, call.value_dim) for call in self.calls)
        self.head_dim = widest + widest % 2
        self.vocab_size = self._head.out_features
        self._routers = self._functions.layers
        self.foreign = tuple(sorted(self._functions.foreign))
        self.has_layer_norm = self._functions.has_layer_norm
        pack_all(self, kernels)
        if not is_quantised and (type(embedding) is torch.nn.Embedding or hasattr(embedding, "embed_scale")):
            model.set_input_embeddings(_ScaledEmbedding(embedding, self._head, has_tied_head, dtype))
        for parameter in model.parameters() if self._head.gemm.is_packed else ():
            parameter.data = parameter.data.clone()  # what is left would keep the whole checkpoint mapped into memory

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        only: int | None = None,
        adapted: AdaptedRows | None = None,
    ) -> torch.Tensor:
        """See `Network.hidden`."""
        with self._called.computing(adapted):
            return self._pass(ids, positions, step, self.head_dim, only)

    @property
    def adapted_layers(self) -> AdaptedLayers | None:
        """See `Network.adapted_layers`."""
        return self._called.layers()

    @property
    def has_windows(self) -> bool:
        """See `Network.has_windows`."""
        return any(call.window for call in self.calls)

    @property
    def calls_per_layer(self) -> int:
        """See `Network.calls_per_layer`."""
        return max(len(self._calls_of(index)) for index in range(len(self._layers)))

    def layer_kinds(self) -> list[int]:
        """See `Network.layer_kinds`: kinds of attention and of modules."""
        kinds: dict[object, int] = {}
        for index, layer in enumerate(self._layers):
            modules = tuple(type(module) for module in layer.modules())
            kinds.setdefault((self._calls_of(index), modules), index)
        return list(kinds.values())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Network.logits`."""
        self._given.hidden = hidden
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with self._functions:
            logits: torch.Tensor = self._rest(input_ids=ids, use_cache=False).logits[0]
        return logits

    def _calls_of(self, layer: int) -> tuple[AttentionCall, ...]:
        ends = [*self._first_calls[1:], len(self.calls)]
        return tuple(self.calls[self._first_calls[layer] : ends[layer]])

    def _pass(
        self, ids: torch.Tensor, positions: torch.Tensor, step: Attends, width: int | None, only: int | None = None
    ) -> torch.Tensor:
        self._only = only
        token = CURRENT.set(Pass(step, width))
        try:
            with self._functions:
                found = self._model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        finally:
            CURRENT.reset(token)
            self._only = None
        last: torch.Tensor = found[0][0]
        return last

    @torch.inference_mode()
    def _probed(self, device: torch.device) -> list[AttentionCall]:
        """The calls of attention, and all linear layers that functions are called with."""
        probe = AttentionProbe()
        ids = torch.zeros(_PROBED_TOKENS, dtype=torch.long, device=device)
        with self._called.probing(_PROBED_TOKENS):
            hidden = self._pass(ids, torch.arange(_PROBED_TOKENS, device=device), probe, None)
        self.logits(hidden)
        calls = probe.calls
        heads = {(call.heads, call.kv_heads) for call in calls}
        if len(heads) != 1 or len({call.softcap for call in calls}) != 1:
            shown = ", ".join(f"{each} over {kv}" for each, kv in sorted(heads)) or "none"
            raise ModelFileError(f"config.json: its layers must attend with the same numbers of heads, got {shown}")
        return calls

    def _skippable(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of a layer; where another one is the only one computed, its input."""

        def computed(*arguments: Any, **named: Any) -> Any:
            current = CURRENT.get()
            if self._only is None or self._only == index:
                if self._only == index:
                    current.next_call = self._first_calls[index]
                else:
                    self._first_calls[index] = current.next_call
                result = forward(*arguments, **named)
                self._returns_tuple = isinstance(result, tuple)
                return result
            hidden = arguments[0] if arguments else named["hidden_states"]
            return (hidden,) if self._returns_tuple else hidden

        return computed


def _layers(model: Any, count: int) -> list[Any]:
    """The decoder layers of transformers' base model."""
    found = (each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == count)
    layers = next(found, None)
    if layers is None:
        raise ModelFileError(f"config.json: num_hidden_layers must be the number of its layers, got {count}")
    return list(layers)


class _HiddenStates(BaseModelOutputWithPast):
    """Last hidden states; all else that a base model may return is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(torch.nn.Module):
    """Replacement of the base model, which returns the hidden states that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)

    @property
    def decoder(self) -> Any:
        """Itself: some models call a part of the base model."""
        return self

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        """See the class."""
        return _HiddenStates(last_hidden_state=self.hidden[None])


class _ScaledEmbedding(torch.nn.Module):
    """transformers' embedding, which may scale what it looks up."""

    def __init__(self, embedding: Any, head: Linear, is_tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        scale = getattr(embedding, "embed_scale", None)  # only Gemma's embeddings have it
        self._scale: torch.Tensor | None = None if scale is None else torch.as_tensor(scale).to(dtype)
        self._lookup = Embedding(embedding.weight, head, is_tied, dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._lookup(ids)
        return rows if self._scale is None else rows * self._scale
