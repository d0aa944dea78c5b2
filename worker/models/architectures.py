"""Configuration and weights of a GGUF file in Hugging Face's words.

All that a file says of its architecture has to be known here: a key or tensor that is not read
would change the answers in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from worker.models.geometry import BOUNDS, Geometry, GeometryError
from worker.models.gguf_file import GgufError, GgufFile
from worker.models.gguf_latent import DEEPSEEK, DEEPSEEK_2, DEEPSEEK_3, LatentLayout, deepseek
from worker.models.gguf_layouts import LAYOUTS, MIXTRAL, Layout
from worker.models.gguf_weights import ROPE_FREQUENCIES, Weight, find_weights, layout_weights, plain_dtype
from worker.models.model_types import GGUF_TYPES, ModelType
from worker.models.numbers import shortest

_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",
}
"""Keys below the architecture's name that are understood, or mean nothing for the result."""

_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Below the architecture's name, by the key of `Geometry`."""

_ALL_LAYOUTS: tuple[Layout, ...] = (*LAYOUTS.values(), MIXTRAL, DEEPSEEK_2, DEEPSEEK_3)
CONVERTED = tuple(sorted({*(kind.name for kind in GGUF_TYPES.values()), *(each.name for each in _ALL_LAYOUTS)}))
"""Model types of the checkpoints that files are converted into."""

_GRANITES = ("granite", "granitemoe")

_LOW_FREQUENCY_FACTOR, _HIGH_FREQUENCY_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192
"""Constants of every Llama 3.1, 3.2 and 3.3; the file has only the factors that follow."""


class Architecture:
    """A file's model. Raises `GgufError` if its architecture is not supported.

    Args:
        file: The open file.

    Attributes:
        config: ``config.json`` without ids of tokens.
        weights: Weights of the checkpoint, in the order of its layers.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._metadata = file.metadata
        self._name = file.metadata.one_of("general.architecture", (*GGUF_TYPES, *LAYOUTS, DEEPSEEK))
        self._experts = file.metadata.integer(f"{self._name}.expert_count", 0, *BOUNDS["num_experts"])
        self._kind: ModelType | Layout
        if self._name == DEEPSEEK:
            self._kind = deepseek(file.metadata)
        elif self._name == "llama" and self._experts:
            self._kind = MIXTRAL
        else:
            self._kind = LAYOUTS.get(self._name) or GGUF_TYPES[self._name]
        self._layout = self._kind if isinstance(self._kind, Layout) else None
        self._is_latent = isinstance(self._kind, LatentLayout)
        self._refuse_unknown_keys()
        self._hidden = self._integer("hidden_size")
        self._heads = self._integer("num_attention_heads")
        least, most = BOUNDS["head_dim"]
        self._head_dim = (
            self._metadata.integer(f"{self._name}.rope.dimension_count", None, least, most)
            if self._is_latent
            else self._integer("head_dim", self._hidden // self._heads)
        )
        self._refuse_variants()
        self.config = self._config()
        self.weights = list(self._weights())
        known = {tensor.name for weight in self.weights for tensor in weight.tensors} | {ROPE_FREQUENCIES}
        unknown = sorted(set(file.tensors) - known)
        if unknown:
            raise GgufError(f"tensor {unknown[0]} has no place in architecture {self._name}")

    def _refuse_unknown_keys(self) -> None:
        prefix = f"{self._name}."
        known = _KEYS if self._layout is None else _KEYS | self._layout.keys
        for key in self._file.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in known:
                raise GgufError(f"{key} is not supported")

    def _refuse_variants(self) -> None:
        if self._is_latent:
            return  # its heads have two widths
        rotates_part = self._layout is not None and self._layout.rotates_part
        for key in ("attention.value_length", *(() if rotates_part else ("rope.dimension_count",))):
            if self._metadata.integer(f"{self._name}.{key}", self._head_dim) != self._head_dim:
                raise GgufError(f"{self._name}.{key} other than the width of a head is not supported")
        if self._experts and not self._kind.is_mixture:
            raise GgufError(f"{self._name}.expert_count {self._experts} is not supported")
        has_rope = f"{self._name}.rope.scaling.finetuned"  # what Granite's files call it
        if self._name in _GRANITES and not self._metadata.flag(has_rope, True):
            raise GgufError(f"{has_rope} must be true: layers without RoPE are not supported in {self._name}")

    def _weights(self) -> Iterator[Weight]:
        geometry = self._geometry()
        if self._layout is None:
            assert isinstance(self._kind, ModelType)
            return find_weights(self._file, self._kind, geometry)
        return layout_weights(self._file, self._layout, self.config)

    def _geometry(self) -> Geometry:
        try:
            return Geometry.of(self.config)
        except GeometryError as error:
            names = {ours: f"{self._name}.{theirs}" for ours, theirs in _GGUF_KEYS.items()}
            raise GgufError(error.named(names)) from None

    def _integer(self, key: str, default: int | None = None) -> int:
        """A size of `Geometry`."""
        least, most = BOUNDS[key]
        return self._metadata.integer(f"{self._name}.{_GGUF_KEYS[key]}", default, least, most)

    def _number(self, key: str, default: float | None = None, most: float = 1e30) -> float:
        return self._metadata.number(f"{self._name}.{key}", default, most=most)

    def _config(self) -> dict[str, Any]:
        config = {
            "architectures": [self._kind.class_name],
            "model_type": self._kind.name,
            "torch_dtype": plain_dtype(self._file, self._layout is not None and self._layout.adds_one),
            "vocab_size": self._file.tensor("token_embd.weight").shape[0],
            "hidden_size": self._hidden,
            "intermediate_size": self._integer("intermediate_size"),
            "num_hidden_layers": self._integer("num_hidden_layers"),
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._heads
            if self._is_latent
            else self._integer("num_key_value_heads", self._heads),
            "head_dim": self._head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._integer("max_position_embeddings"),
            # float32 in the file, a short decimal number in its source
            "rms_norm_eps": float(f"{self._number('attention.layer_norm_rms_epsilon', most=1.0):.6g}"),
            "rope_theta": self._number("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "use_cache": True,
        }
        if self._layout is not None:
            found = config | self._twists(self._layout, config)
            return {key: value for key, value in found.items() if key not in ("rope_theta", "rope_scaling") or value}
        if self._kind.is_mixture:
            config["num_experts"] = self._integer("num_experts")
            config["num_experts_per_tok"] = self._integer("num_experts_per_tok")
            config["moe_intermediate_size"] = self._integer("moe_intermediate_size")
            config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return config

    def _twists(self, layout: Layout, config: dict[str, Any]) -> dict[str, Any]:
        """The keys that the layout has beside `config`, that of Llama."""
        found = layout.config(config)
        for ours, theirs in layout.numbers.items():
            found[ours] = None if self._lacks(layout, ours, theirs) else shortest(self._number(theirs))
        for ours, theirs in layout.integers.items():
            is_optional = ours in layout.optional
            default, least = (0, 0) if is_optional else (None, 1)
            value = self._metadata.integer(f"{self._name}.{theirs}", default, least, most=2**31)
            found[ours] = value or None
        if layout.rotates_part:
            rotated = self._metadata.integer(f"{self._name}.rope.dimension_count", self._head_dim)
            if rotated > self._head_dim or rotated % 2:
                raise GgufError(f"{self._name}.rope.dimension_count must be even and at most {self._head_dim}")
            found["partial_rotary_factor"] = rotated / self._head_dim
        if layout.has_biases:
            found["attention_bias"] = "blk.0.attn_q.bias" in self._file.tensors
        if layout.is_mixture:
            used = self._integer("num_experts_per_tok")
            found |= {"num_experts": self._experts, "num_local_experts": self._experts, "num_experts_per_tok": used}
        if isinstance(layout, LatentLayout):
            found |= layout.latent(self._metadata, self._name, config)
        if layout.yarn or self._is_latent:
            scaling = config["rope_scaling"] or {"rope_type": "default"}
            if scaling["rope_type"] == "yarn":
                scaling = dict(layout.yarn) | scaling
            ropes = scaling | {"rope_theta": config["rope_theta"]}
            found |= {"rope_parameters": ropes, "rope_scaling": None, "rope_theta": None}
        if layout.name == "gemma3_text":
            found |= self._gemma3_ropes(config, found.pop("rope_local_base_freq"))
        return found

    def _lacks(self, layout: Layout, ours: str, theirs: str) -> bool:
        return ours in layout.optional and f"{self._name}.{theirs}" not in self._metadata

    def _gemma3_ropes(self, config: dict[str, Any], local_base: float | None) -> dict[str, Any]:
        """RoPE by type of layer: its scaling is that of layers without a window."""
        scaling = config["rope_scaling"] or {"rope_type": "default"}
        local = {"rope_type": "default", "rope_theta": local_base or 10_000.0}
        full = scaling | {"rope_theta": config["rope_theta"]}
        ropes = {"full_attention": full, "sliding_attention": local}
        return {"rope_parameters": ropes, "rope_scaling": None, "rope_theta": None}

    def _rope_scaling(self) -> dict[str, Any] | None:
        prefix = f"{self._name}.rope.scaling."
        # a factor alone is linear, as in llama.cpp
        default = "linear" if self._metadata.get(f"{prefix}factor") else "none"
        kind = self._metadata.one_of(f"{prefix}type", ("none", "linear", "yarn"), default)
        if ROPE_FREQUENCIES in self._file.tensors:
            if kind != "none":
                raise GgufError(f"{prefix}type {kind} is not supported beside tensor {ROPE_FREQUENCIES}")
            return self._llama3_scaling()
        if kind == "none":
            return None
        factor = self._metadata.number(f"{prefix}factor", least=1e-3, most=1e6)
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            context = self._metadata.integer(f"{prefix}original_context_length", most=2**31)
            scaling["original_max_position_embeddings"] = context
            for key in ("beta_fast", "beta_slow"):
                if f"{prefix}yarn_{key}" in self._metadata:
                    scaling[key] = shortest(self._number(f"rope.scaling.yarn_{key}", most=1e6))
            if isinstance(self._layout, LatentLayout):
                scaling |= self._layout.yarn_scales(self._metadata, self._name)
        return scaling

    def _llama3_scaling(self) -> dict[str, Any]:
        """Recovers Llama 3's scaling from the factors by which the file divides the
        frequencies.
        """
        found = self._file.values(ROPE_FREQUENCIES)
        factor = round(float(found.max()), 3)
        base = self._number("rope.freq_base", 10_000.0)
        wavelengths = 2 * math.pi * base ** (np.arange(0, self._head_dim, 2) / self._head_dim)
        smooth = (_ORIGINAL_CONTEXT / wavelengths - _LOW_FREQUENCY_FACTOR) / (
            _HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR
        )
        smooth = smooth.clip(0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3):
            raise GgufError(f"tensor {ROPE_FREQUENCIES} does not scale frequencies as Llama 3 does")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LOW_FREQUENCY_FACTOR,
            "high_freq_factor": _HIGH_FREQUENCY_FACTOR,
            "original_max_position_embeddings": _ORIGINAL_CONTEXT,
        }
