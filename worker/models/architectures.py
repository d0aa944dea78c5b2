"""What a GGUF file's architecture is in Hugging Face's words: configuration and weights.

llama.cpp's converter renames weights, and in Llama's it reorders the rows of queries and keys. All
that a file says of its architecture has to be known here: a key or tensor with a meaning that
nobody reads would change the answers in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from worker.models.gguf_file import GgufError, GgufFile, GgufTensor

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""Hugging Face's model type by GGUF's architecture."""

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
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
    "tensor_data_layout",
    "vocab_size",
}
"""Keys below the architecture's name that are understood, or mean nothing for the result."""

_DTYPES = (
    ({GGMLQuantizationType.F32}, "float32"),
    ({GGMLQuantizationType.F32, GGMLQuantizationType.F16}, "float16"),
)
"""The dtype of a file that holds these types at most; norms are float32 in every file."""

_ROPE_FREQUENCIES = "rope_freqs.weight"
_LOW_FREQUENCY_FACTOR, _HIGH_FREQUENCY_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192
"""Of every Llama 3.1, 3.2 and 3.3; the file has only the factors that follow from them."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the checkpoint: some rows of a tensor of the file.

    Attributes:
        name: Hugging Face's.
        shape: Its shape.
        tensor: Where its values are.
        rows: Which rows of that, in order.
    """

    name: str
    shape: tuple[int, ...]
    tensor: GgufTensor
    rows: npt.NDArray[np.int64]


class Architecture:
    """A file's model. Raises `GgufError` if its architecture is not supported.

    Args:
        file: The open file.

    Attributes:
        config: Of ``config.json``, without ids of tokens.
        weights: Of the checkpoint, in the order of its layers.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._name = file.metadata.get("general.architecture")
        if self._name not in MODEL_TYPES:
            raise GgufError(f"architecture {self._name!r} is not supported, only {', '.join(MODEL_TYPES)}")
        self._refuse_unknown_keys()
        self._hidden = self._integer("embedding_length")
        self._heads = self._integer("attention.head_count")
        self._kv_heads = self._integer("attention.head_count_kv", self._heads)
        self._head_dim = self._integer("attention.key_length", self._hidden // self._heads)
        self._experts = self._integer("expert_count", 0, least=0)
        self._refuse_variants()
        self._vocabulary = self._tensor("token_embd.weight").shape[0]
        self.config = self._config()
        self.weights = list(self._weights())
        self._refuse_unknown_tensors()

    def _refuse_unknown_keys(self) -> None:
        prefix = f"{self._name}."
        for key in self._file.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in _KEYS:
                raise GgufError(f"{key} is not supported")
        parts = self._file.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise GgufError(f"it is one of {parts} parts; join them with llama-gguf-split")

    def _refuse_variants(self) -> None:
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._integer(key, self._head_dim) != self._head_dim:
                raise GgufError(f"{self._name}.{key} other than the width of a head is not supported")
        if self._experts and self._name != "qwen3moe":
            raise GgufError(f"{self._name}.expert_count {self._experts} is not supported")

    def _value(self, key: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"{self._name}.{key}", default)
        if value is None:
            raise GgufError(f"it lacks {self._name}.{key}")
        return value

    def _integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or value < least:
            raise GgufError(f"{self._name}.{key} must be an integer of at least {least}, got {value!r}")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise GgufError(f"{self._name}.{key} must be a number above 0, got {value!r}")
        return float(value)

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._file.tensors:
            raise GgufError(f"it lacks tensor {name}")
        return self._file.tensors[name]

    def _config(self) -> dict[str, Any]:
        kind = MODEL_TYPES[str(self._name)]
        config = {
            "architectures": [_CLASSES[kind]],
            "model_type": kind,
            "torch_dtype": self._dtype(),
            "vocab_size": self._vocabulary,
            "hidden_size": self._hidden,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._integer("context_length"),
            # float32 in the file, a short decimal number in its source
            "rms_norm_eps": float(f"{self._number('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": self._number("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "use_cache": True,
        }
        if kind == "qwen3_moe":
            config["num_experts"] = self._integer("expert_count")
            config["num_experts_per_tok"] = self._integer("expert_used_count")
            config["moe_intermediate_size"] = self._integer("expert_feed_forward_length")
            config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return config

    def _dtype(self) -> str:
        """The file's own if it holds plain numbers; dequantised blocks are rounded to bfloat16."""
        kinds = {tensor.kind for tensor in self._file.tensors.values()}
        return next((dtype for holds, dtype in _DTYPES if kinds <= holds), "bfloat16")

    def _rope_scaling(self) -> dict[str, Any] | None:
        if _ROPE_FREQUENCIES in self._file.tensors:
            return self._llama3_scaling()
        kind = self._value("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise GgufError(f"{self._name}.rope.scaling.type {kind!r} is not supported, only linear and yarn")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._integer("rope.scaling.original_context_length")
        return scaling

    def _llama3_scaling(self) -> dict[str, Any]:
        """Recovers Llama 3's scaling from the factors by which the file divides the
        frequencies.
        """
        found = self._file.values(_ROPE_FREQUENCIES)
        factor = round(float(found.max()), 3)
        base = self._number("rope.freq_base", 10_000.0)
        wavelengths = 2 * math.pi * base ** (np.arange(0, self._head_dim, 2) / self._head_dim)
        smooth = (_ORIGINAL_CONTEXT / wavelengths - _LOW_FREQUENCY_FACTOR) / (
            _HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR
        )
        smooth = smooth.clip(0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3):
            raise GgufError(f"tensor {_ROPE_FREQUENCIES} does not scale frequencies as Llama 3 does")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LOW_FREQUENCY_FACTOR,
            "high_freq_factor": _HIGH_FREQUENCY_FACTOR,
            "original_max_position_embeddings": _ORIGINAL_CONTEXT,
        }

    def _weights(self) -> Iterator[Weight]:
        hidden = self._hidden
        yield self._weight("model.embed_tokens.weight", "token_embd.weight", self._vocabulary, hidden)
        for layer in range(self.config["num_hidden_layers"]):
            yield from self._layer(f"model.layers.{layer}.", f"blk.{layer}.")
        yield self._weight("model.norm.weight", "output_norm.weight", hidden)
        if not self.config["tie_word_embeddings"]:
            yield self._weight("lm_head.weight", "output.weight", self._vocabulary, hidden)

    def _layer(self, ours: str, theirs: str) -> Iterator[Weight]:
        hidden, width = self._hidden, self._head_dim
        yield self._weight(f"{ours}input_layernorm.weight", f"{theirs}attn_norm.weight", hidden)
        yield self._weight(f"{ours}post_attention_layernorm.weight", f"{theirs}ffn_norm.weight", hidden)
        parts = [("weight", (hidden,)), ("bias", ())] if self._name == "qwen2" else [("weight", (hidden,))]
        for letter, heads in (("q", self._heads), ("k", self._kv_heads), ("v", self._kv_heads)):
            for part, columns in parts:
                names = f"{ours}self_attn.{letter}_proj.{part}", f"{theirs}attn_{letter}.{part}"
                weight = self._weight(*names, heads * width, *columns)
                yield self._unpermuted(weight, heads) if self._name == "llama" and letter != "v" else weight
        yield self._weight(f"{ours}self_attn.o_proj.weight", f"{theirs}attn_output.weight", hidden, self._heads * width)
        if self._name in ("qwen3", "qwen3moe"):
            for letter in "qk":
                yield self._weight(f"{ours}self_attn.{letter}_norm.weight", f"{theirs}attn_{letter}_norm.weight", width)
        yield from self._experts_of(ours, theirs) if self._experts else self._mlp(ours, theirs)

    def _mlp(self, ours: str, theirs: str) -> Iterator[Weight]:
        hidden, inner = self._hidden, self.config["intermediate_size"]
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield self._weight(f"{ours}mlp.{name}_proj.weight", f"{theirs}ffn_{name}.weight", rows, columns)

    def _experts_of(self, ours: str, theirs: str) -> Iterator[Weight]:
        hidden, inner, count = self._hidden, self.config["moe_intermediate_size"], self._experts
        yield self._weight(f"{ours}mlp.gate.weight", f"{theirs}ffn_gate_inp.weight", count, hidden)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            whole = self._weight("", f"{theirs}ffn_{name}_exps.weight", count, rows, columns)
            for expert in range(count):
                yield Weight(
                    f"{ours}mlp.experts.{expert}.{name}_proj.weight",
                    (rows, columns),
                    whole.tensor,
                    np.arange(expert * rows, (expert + 1) * rows),
                )

    def _weight(self, ours: str, theirs: str, *shape: int) -> Weight:
        tensor = self._tensor(theirs)
        if tensor.shape != shape:
            raise GgufError(f"tensor {theirs} must be of shape {list(shape)}, got {list(tensor.shape)}")
        return Weight(ours, shape, tensor, np.arange(tensor.num_rows))

    def _unpermuted(self, weight: Weight, heads: int) -> Weight:
        """Undoes llama.cpp's order of a head's rows, which pairs those that RoPE turns together."""
        rows = weight.rows.reshape(heads, self._head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        return Weight(weight.name, weight.shape, weight.tensor, rows)

    def _refuse_unknown_tensors(self) -> None:
        known = {weight.tensor.name for weight in self.weights} | {_ROPE_FREQUENCIES}
        unknown = sorted(set(self._file.tensors) - known)
        if unknown:
            raise GgufError(f"tensor {unknown[0]} has no place in architecture {self._name}")
