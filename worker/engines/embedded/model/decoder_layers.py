"""Decoder layers of transformers' modules, as the native kernels compute them.

What an architecture does otherwise than Llama is a field of `native.layers.DecoderLayer`. Most of
it is told by a layer's modules; `TWISTS` says which norms it has where, how RoPE rotates and where
a window is set. Every type in there is compared with transformers' own forward pass by the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from worker.engines.embedded.model.activations import name_of
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear import Linear, Projection, fuse, halves
from worker.engines.embedded.model.llama_weights import Rope
from worker.engines.embedded.model.quantisation import QuantisedWeight
from worker.engines.embedded.model.quantised_experts import given_in, stacked_in
from worker.engines.embedded.model.transformers_modules import Norm
from worker.engines.embedded.native.layers import DecoderLayer, Mixture, Mlp
from worker.engines.embedded.native.lora import DOWN, MLP, OUTPUT, QKV


class NotNative(Exception):
    """A part of the model that the native kernels do not compute."""


@dataclass(frozen=True, slots=True)
class Twists:
    """An architecture's differences from Llama that its modules do not tell.

    Attributes:
        norms: Names of the norms before attention and before the MLP.
        post_norms: Names of the norms of what they add to the hidden states.
        window: Place of the sliding window: none, the configuration, or each layer's attention.
        is_interleaved: Whether RoPE rotates neighbours.
        normalises: Whether a token's weights of experts are always the softmax over its own;
            otherwise ``norm_topk_prob`` says so.
        rotates_windows_alone: Whether layers without a window have no RoPE, if any layer has one.
    """

    norms: tuple[str | None, str | None] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str | None, str | None] = (None, None)
    window: Literal["none", "model", "layer"] = "none"
    is_interleaved: bool = False
    normalises: bool = False
    rotates_windows_alone: bool = False


_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_NORMS_BEHIND = Twists(norms=(None, None), post_norms=_POST_NORMS)
_GEMMA = Twists(norms=("input_layernorm", "pre_feedforward_layernorm"), window="layer")

TWISTS: Mapping[str, Twists] = {
    "cwm": Twists(window="layer"),
    "ernie4_5": Twists(is_interleaved=True),
    "exaone4": replace(_NORMS_BEHIND, window="layer", rotates_windows_alone=True),
    "gemma": Twists(),
    "gemma2": replace(_GEMMA, post_norms=_POST_NORMS),
    "gemma3_text": replace(_GEMMA, post_norms=_POST_NORMS),
    "glm": Twists(is_interleaved=True),
    "glm4": Twists(post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"), is_interleaved=True),
    "gpt_oss": Twists(window="layer", normalises=True),
    "granite": Twists(),
    "granite_swa": Twists(window="layer"),
    "granitemoe": Twists(normalises=True),
    "helium": Twists(is_interleaved=True),
    "llama": Twists(),
    "ministral": Twists(window="layer"),
    "mistral": Twists(window="model"),
    "mixtral": Twists(window="model", normalises=True),
    "olmo2": _NORMS_BEHIND,
    "olmo3": replace(_NORMS_BEHIND, window="layer"),
    "olmoe": Twists(),
    "phi3": Twists(window="model"),
    "qwen2": Twists(window="layer"),
    "qwen3": Twists(window="layer"),
    "qwen3_moe": Twists(window="model"),
    "seed_oss": Twists(),
    "smollm3": Twists(window="layer"),
    "vaultgemma": _GEMMA,
}
"""Architectures by model type. Those of `LlamaNetwork` are computed by it but in variants that it
does not know.
"""

_STATIC_ROPES = ("default", "linear", "yarn", "llama3", "proportional")
"""Kinds of RoPE whose frequencies do not depend on the length of the text."""


@dataclass(frozen=True, slots=True)
class Ropes:
    """The RoPEs of a model.

    Attributes:
        ropes: Different ones, which rotate the same number of elements.
        of_types: Index by the type of a layer; of ``""`` where all layers have one.
        of_layers: Index by layer, None for a layer without RoPE; empty where `of_types` tells.
    """

    ropes: list[Rope]
    of_types: dict[str, int]
    of_layers: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, model: Any) -> Ropes:
        """The RoPEs of transformers' base model; raises `NotNative` if one depends on the text."""
        rotary = model.rotary_emb
        by_type = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}
        own = list(getattr(model, "rotary_embs", ()))  # of different bases, one of which each layer has, 0 for none
        of_layers: tuple[int | None, ...] = ()
        if hasattr(model, "rotary_embs"):
            bases = [each.config.rope_parameters["rope_theta"] for each in own]
            of_layers = tuple(bases.index(base) if base else None for base in model.config.layer_rope_theta)
        ropes = [_rope_of(each, layer_type) for each in own or [rotary] for layer_type in by_type]
        if len({len(rope.frequencies) for rope in ropes}) != 1:
            raise NotNative("RoPE of several widths")
        return cls(ropes, {layer_type: index for index, layer_type in enumerate(by_type)}, of_layers)


def _rope_of(rotary: Any, layer_type: str) -> Rope:
    """The RoPE of transformers' module for a type of layers; ``""`` for all."""
    kind = rotary.rope_type[layer_type] if layer_type else rotary.rope_type
    if kind not in _STATIC_ROPES:
        raise NotNative(f"RoPE of type {kind}")
    prefix = f"{layer_type}_" if layer_type else ""
    scaling = float(getattr(rotary, f"{prefix}attention_scaling"))
    return Rope(getattr(rotary, f"{prefix}inv_freq").float(), scaling)


class ModelLayer(torch.nn.Module):
    """A decoder layer with the weights of transformers' module.

    Args:
        layer: transformers' layer.
        index: Index of the layer.
        config: transformers' configuration.
        ropes: RoPEs of the model.
        kernels: Backends, which are the native ones.

    Raises:
        NotNative: a part of it is not computed natively.

    Attributes:
        linears: Name within the layer and input of the linear layers outside experts, in the order
            of their columns; see `AdaptedLayers.of`.
    """

    def __init__(self, layer: Any, index: int, config: Any, ropes: Ropes, kernels: KernelBackend) -> None:
        super().__init__()
        self.index = index
        twists = TWISTS[config.model_type]
        attention = layer.self_attn
        self._norms = tuple(_norm(layer, name, kernels) for name in twists.norms)
        self._post_norms = tuple(_norm(layer, name, kernels) for name in twists.post_norms)
        found = [norm for norm in (*self._norms, *self._post_norms) if norm is not None]
        if len({norm.epsilon for norm in found}) != 1:
            raise NotNative("norms with several epsilons")
        self._epsilon = found[0].epsilon
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.head_dim = int(attention.head_dim)
        self._head_norms = tuple(_norm(attention, name, kernels) for name in ("q_norm", "k_norm"))
        self._residual = float(getattr(layer, "residual_multiplier", 1.0))
        self.scale = float(attention.scaling)
        self.softcap: float | None = getattr(attention, "attn_logit_softcapping", None)
        sinks = getattr(attention, "sinks", None)
        self.sinks = None if sinks is None else sinks.detach().float().clone()
        self.window = _window(attention, config, twists)
        self._rope = _rope(attention, index, config, ropes, twists)
        self._qkv = _qkv(attention)
        self._output = fuse(attention.o_proj)
        mlp = getattr(layer, "mlp", None) or layer.block_sparse_moe
        self._mlp = _Mixture(mlp, twists, config) if hasattr(mlp, "experts") else _Mlp.of(mlp)
        self.linears = tuple(_linears(layer))
        self._check_sizes(2 * len(ropes.ropes[0].frequencies))

    def _check_sizes(self, rotary: int) -> None:
        """Raises `NotNative` unless all sizes fit each other: the kernels read what they say."""
        hidden, width, heads, kv_heads = self._qkv.in_features, self.head_dim, self.heads, self.kv_heads
        norms = [norm for norm in (*self._norms, *self._post_norms) if norm is not None]
        of_heads = [None if norm is None else len(norm.weight) for norm in self._head_norms]
        fits = self._qkv.out_features == (heads + 2 * kv_heads) * width and rotary <= width
        fits = fits and (self._output.in_features, self._output.out_features) == (heads * width, hidden)
        fits = fits and all(len(norm.weight) == hidden for norm in norms)
        fits = fits and of_heads in ([None, None], [width, width], [heads * width, kv_heads * width])
        fits = fits and (self.sinks is None or self.sinks.shape == (heads,))
        if not (fits and self._mlp.fits(hidden)):
            raise NotNative("weights that do not fit each other")

    def native(self) -> DecoderLayer | None:
        """This layer for `native.layers`; None if other kernels compute a part of it."""
        qkv, output, mlp = self._qkv.native_parts, self._output.native_parts, self._mlp.native()
        if not qkv or len(output) != 1 or mlp is None:
            return None
        norms, post_norms = ([None if norm is None else norm.weight for norm in each] for each in self._all_norms)
        query, key = self._head_norms
        has_norms = query is not None and key is not None
        return DecoderLayer(
            index=self.index,
            norms=(norms[0], norms[1]),
            post_norms=(post_norms[0], post_norms[1]),
            epsilon=self._epsilon,
            head_norms=(query.weight, key.weight, query.epsilon) if query is not None and key is not None else None,
            has_whole_norms=has_norms and query is not None and len(query.weight) != self.head_dim,
            residual=self._residual,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            window=self.window,
            rope=self._rope,
            activation=self._mlp.activation,
            product=self._mlp.product,
            qkv=qkv,
            output=output[0],
            mlp=mlp,
        )

    @property
    def _all_norms(self) -> tuple[tuple[Norm | None, ...], ...]:
        return self._norms, self._post_norms

    @property
    def kind(self) -> object:
        """Layers of the same one run the same code."""
        return self.window, self._rope, type(self._mlp)


class _Mlp(torch.nn.Module):
    """A gated MLP."""

    product = "mul"

    def __init__(self, gate: Linear, up: Linear, down: Linear, activation: str, product: str = "mul") -> None:
        super().__init__()
        self.activation, self.product = activation, product
        self._gate, self._up, self._down = gate, up, down

    @classmethod
    def of(cls, mlp: Any) -> _Mlp:
        """transformers' gated MLP, whose gate and up projections may be one layer."""
        activation = _activation(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None))
        if hasattr(mlp, "gate_up_proj"):
            gate, up = (Linear(weight) for weight in halves(mlp.gate_up_proj.weight))
        elif hasattr(mlp, "gate_proj"):
            gate, up = fuse(mlp.gate_proj), fuse(mlp.up_proj)
        else:
            raise NotNative("an MLP without a gate")
        return cls(gate, up, fuse(mlp.down_proj), activation)

    def fits(self, hidden: int) -> bool:
        """Whether its sizes fit each other, and hidden states of this width."""
        shapes = {(each.out_features, each.in_features) for each in (self._gate, self._up)}
        return shapes == {(self._down.in_features, hidden)} and self._down.out_features == hidden

    @property
    def inner(self) -> int:
        """Width between its layers."""
        return self._down.in_features

    def native(self) -> Mlp | None:
        """The same for `native.layers`; None if other kernels compute a part of it."""
        parts = [layer.native_parts for layer in (self._gate, self._up, self._down)]
        if any(len(each) != 1 for each in parts):
            return None
        gate, up, down = (each[0] for each in parts)
        return Mlp(gate, up, down)


class _Mixture(torch.nn.Module):
    """A mixture of experts, of transformers' module with a router and its interface of experts."""

    def __init__(self, block: Any, twists: Twists, config: Any) -> None:
        super().__init__()
        router = getattr(block, "router", None) or block.gate
        others = {name for name, _ in block.named_children()} - {"router", "gate", "experts"}
        if others:
            raise NotNative(f"a mixture with {', '.join(sorted(others))}")
        bias = getattr(router, "bias", None)  # clones: what is kept would keep the checkpoint mapped into memory
        bias = None if bias is None else bias.detach().clone()
        self._router = Linear(router.weight, bias, True, is_quantisable=False)
        self._top_k = int(router.top_k)
        self._normalises = twists.normalises or bool(config.norm_topk_prob)
        self._experts = torch.nn.ModuleList(_experts(block.experts))
        first = self._experts[0]
        assert isinstance(first, _Mlp)
        self.activation, self.product = first.activation, first.product

    def fits(self, hidden: int) -> bool:
        """See `_Mlp.fits`."""
        experts = [each for each in self._experts if isinstance(each, _Mlp)]
        fits = all(each.fits(hidden) for each in experts) and len({each.inner for each in experts}) == 1
        router = self._router.out_features, self._router.in_features
        return fits and router == (len(experts), hidden) and 1 <= self._top_k <= len(experts)

    def native(self) -> Mixture | None:
        """The same for `native.layers`; None if other kernels compute a part of it."""
        router = self._router.native_parts
        experts = [each.native() for each in self._experts if isinstance(each, _Mlp)]
        found = [each for each in experts if each is not None]
        if len(router) != 1 or len(found) < len(experts):
            return None
        return Mixture(router[0], found, self._top_k, self._normalises)


def _experts(experts: Any) -> Iterator[_Mlp]:
    """The experts of transformers' interface of experts."""
    is_clamped = hasattr(experts, "limit")
    if is_clamped and (float(experts.limit), float(experts.alpha)) != (7.0, 1.702):
        raise NotNative(f"experts clamped to {experts.limit} with a factor of {experts.alpha}")
    gate_name = type(experts)._apply_gate.__name__
    if not is_clamped and gate_name != "_default_apply_gate":
        raise NotNative(f"experts gated by {gate_name}")
    activation = "clamped" if is_clamped else _activation(experts.act_fn)
    product = "mul_clamped" if is_clamped else "mul"
    given = given_in(experts)
    for expert in given:
        gate, up, down = (Linear(expert[part]) for part in ("gate", "up", "down"))
        yield _Mlp(gate, up, down, activation, product)
    if given:
        return
    biases = (getattr(experts, "gate_up_proj_bias", None), getattr(experts, "down_proj_bias", None))
    for index in range(len(experts.gate_up_proj)):
        both_bias, down_bias = (None if each is None else each[index].detach().clone() for each in biases)
        columns = experts.gate_up_proj.shape[2 if experts.is_transposed else 1]
        parts = (slice(None, None, 2), slice(1, None, 2)) if not experts.is_concatenated else _halves(columns)
        gate, up = (
            Linear(_rows(experts, "gate_up_proj", index, part), None if both_bias is None else both_bias[part].clone())
            for part in parts
        )
        yield _Mlp(gate, up, Linear(_rows(experts, "down_proj", index), down_bias), activation, product)


def _rows(experts: Any, name: str, index: int, rows: slice = slice(None)) -> torch.Tensor | QuantisedWeight:
    """Rows of the weight ``[N, K]`` of an expert."""
    stacked = stacked_in(experts).get(name)
    if stacked is not None:
        return stacked.of(index, rows)
    weight: torch.Tensor = getattr(experts, name)[index].detach()
    return (weight.T if experts.is_transposed else weight)[rows]


def _halves(count: int) -> tuple[slice, slice]:
    return slice(0, count // 2), slice(count // 2, count)


def _activation(function: Any) -> str:
    name = None if function is None else name_of(function)
    if name is None:
        raise NotNative(f"activation {type(function).__name__}")
    return name


def _norm(module: Any, name: str | None, kernels: KernelBackend) -> Norm | None:
    """The RMSNorm of that name; None for no name, and for a module that has none of it."""
    norm = getattr(module, name, None) if name else None
    if norm is None:
        return None
    found = Norm.of(norm, kernels)
    if found is None:
        raise NotNative(f"{type(norm).__name__}")
    return found


def _window(attention: Any, config: Any, twists: Twists) -> int:
    if twists.window == "none":
        return 0
    if twists.window == "layer" and getattr(attention, "is_sliding", True) is False:
        return 0
    return int((config if twists.window == "model" else attention).sliding_window or 0)


def _rope(attention: Any, index: int, config: Any, ropes: Ropes, twists: Twists) -> int | None:
    """Index of a layer's RoPE."""
    if not getattr(attention, "use_rope", True):
        return None
    if twists.rotates_windows_alone and attention.sliding_window is not None and not attention.is_sliding:
        return None
    if ropes.of_layers:
        return ropes.of_layers[index]
    return ropes.of_types.get("", 0) if "" in ropes.of_types else ropes.of_types[config.layer_types[index]]


_INPUTS = (
    ("self_attn", ("qkv_proj", "q_proj", "k_proj", "v_proj"), QKV),
    ("self_attn", ("o_proj",), OUTPUT),
    ("mlp", ("gate_up_proj", "gate_proj", "up_proj"), MLP),
    ("mlp", ("down_proj",), DOWN),
)
"""Modules with linear layers, names of these in the order of their columns, and their input."""


def _linears(layer: Any) -> Iterator[tuple[str, int]]:
    """See `ModelLayer.linears`."""
    for part, names, source in _INPUTS:
        module = getattr(layer, part, None)
        for name in names:
            if isinstance(getattr(module, name, None), torch.nn.Linear):
                yield f"{part}.{name}", source


def _qkv(attention: Any) -> Linear:
    if hasattr(attention, "qkv_proj"):
        return fuse(attention.qkv_proj)
    return Linear.of(Projection.of(attention.q_proj, attention.k_proj, attention.v_proj))
