"""Configuration and weights of a GGUF file in Hugging Face's words.

llama.cpp's converter renames weights, and in Llama's it reorders the rows of queries and keys. All
that a file says of its architecture has to be known here: a key or tensor with a meaning that
nobody reads would change the answers in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from worker.models.geometry import BOUNDS, Geometry, GeometryError, Tensor
from worker.models.gguf_file import GgufError, GgufFile, GgufTensor
from worker.models.model_types import GGUF_TYPES
from worker.models.numbers import are_exact

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

_GGUF_NAMES = (
    ("model.embed_tokens.", "token_embd."),
    ("model.norm.", "output_norm."),
    ("lm_head.", "output."),
    ("model.layers.", "blk."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.o_proj.", ".attn_output."),
    (".self_attn.q_norm.", ".attn_q_norm."),
    (".self_attn.k_norm.", ".attn_k_norm."),
    (".self_attn.q_proj.", ".attn_q."),
    (".self_attn.k_proj.", ".attn_k."),
    (".self_attn.v_proj.", ".attn_v."),
    (".mlp.gate.", ".ffn_gate_inp."),
    (".mlp.gate_proj.", ".ffn_gate."),
    (".mlp.up_proj.", ".ffn_up."),
    (".mlp.down_proj.", ".ffn_down."),
)
"""Parts of a weight's name, and what llama.cpp calls them."""

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")

_NUMBERS = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
"""The dtype of tensors that are plain numbers; blocks are dequantised and rounded to `BLOCKS`."""

BLOCKS = "bfloat16"

_ROPE_FREQUENCIES = "rope_freqs.weight"
_LOW_FREQUENCY_FACTOR, _HIGH_FREQUENCY_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192
"""Constants of every Llama 3.1, 3.2 and 3.3; the file has only the factors that follow."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the checkpoint: some rows of a tensor of the file.

    Attributes:
        name: Hugging Face's.
        shape: Shape of the weight.
        tensor: Tensor that holds its values.
        rows: Indices of its rows in the tensor, in order.
    """

    name: str
    shape: tuple[int, ...]
    tensor: GgufTensor
    rows: npt.NDArray[np.int64]

    @property
    def dtype(self) -> str:
        """Data type that holds its values: exactly, if they are plain numbers."""
        return _NUMBERS.get(self.tensor.kind, BLOCKS)


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
        self._name = file.metadata.one_of("general.architecture", GGUF_TYPES)
        self._kind = GGUF_TYPES[self._name]
        self._refuse_unknown_keys()
        self._hidden = self._integer("hidden_size")
        self._heads = self._integer("num_attention_heads")
        self._head_dim = self._integer("head_dim", self._hidden // self._heads)
        self._experts = self._integer("num_experts", 0)
        self._refuse_variants()
        self.config = self._config()
        self.weights = list(self._weights(self._geometry()))
        self._refuse_unknown_tensors()

    def _refuse_unknown_keys(self) -> None:
        prefix = f"{self._name}."
        for key in self._file.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in _KEYS:
                raise GgufError(f"{key} is not supported")
        parts = self._metadata.integer("split.count", 1, least=0)
        if parts not in (0, 1):
            raise GgufError(f"split.count: it is one of {parts} parts; join them with llama-gguf-split")

    def _refuse_variants(self) -> None:
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._metadata.integer(f"{self._name}.{key}", self._head_dim) != self._head_dim:
                raise GgufError(f"{self._name}.{key} other than the width of a head is not supported")
        if self._experts and not self._kind.is_mixture:
            raise GgufError(f"{self._name}.expert_count {self._experts} is not supported")

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

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._file.tensors:
            raise GgufError(f"it lacks tensor {name}")
        return self._file.tensors[name]

    def _config(self) -> dict[str, Any]:
        config = {
            "architectures": [self._kind.class_name],
            "model_type": self._kind.name,
            "torch_dtype": self._dtype(),
            "vocab_size": self._tensor("token_embd.weight").shape[0],
            "hidden_size": self._hidden,
            "intermediate_size": self._integer("intermediate_size"),
            "num_hidden_layers": self._integer("num_hidden_layers"),
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._integer("num_key_value_heads", self._heads),
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
        if self._kind.is_mixture:
            config["num_experts"] = self._integer("num_experts")
            config["num_experts_per_tok"] = self._integer("num_experts_per_tok")
            config["moe_intermediate_size"] = self._integer("moe_intermediate_size")
            config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return config

    def _dtype(self) -> str:
        """Data type of the model by default: the narrowest that holds all plain numbers of the
        file exactly; `BLOCKS` where there are blocks.
        """
        kinds = {tensor.kind for tensor in self._file.tensors.values()}
        if not kinds <= set(_NUMBERS):
            return BLOCKS
        narrow = kinds - {GGMLQuantizationType.F32}
        if len(narrow) != 1:
            return "float32"
        dtype = _NUMBERS[narrow.pop()]
        return dtype if all(self._fits(tensor, dtype) for tensor in self._file.tensors.values()) else "float32"

    def _fits(self, tensor: GgufTensor, dtype: str) -> bool:
        """Whether each value of a tensor is one of `dtype`, bit by bit."""
        if tensor.kind != GGMLQuantizationType.F32:
            return True
        return all(are_exact(rows, dtype) for rows in self._file.rows(tensor, np.arange(tensor.num_rows)))

    def _rope_scaling(self) -> dict[str, Any] | None:
        if _ROPE_FREQUENCIES in self._file.tensors:
            return self._llama3_scaling()
        prefix = f"{self._name}.rope.scaling."
        kind = self._metadata.one_of(f"{prefix}type", ("none", "linear", "yarn"), "none")
        if kind == "none":
            return None
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._number("rope.scaling.factor", most=1e6)}
        if kind == "yarn":
            context = self._metadata.integer(f"{prefix}original_context_length", most=2**31)
            scaling["original_max_position_embeddings"] = context
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

    def _weights(self, geometry: Geometry) -> Iterator[Weight]:
        for ours in geometry.tensors():
            expert = _EXPERT.fullmatch(ours.name)
            if expert is not None:
                yield self._expert(ours, expert, geometry.num_experts)
                continue
            theirs = ours.name
            for part, its in _GGUF_NAMES:
                theirs = theirs.replace(part, its)
            tensor = self._shaped(theirs, *ours.shape)
            rows = np.arange(tensor.num_rows)
            if self._kind.gguf_pairs_rows and theirs.endswith((".attn_q.weight", ".attn_k.weight")):
                rows = self._unpermuted(rows)
            yield Weight(ours.name, ours.shape, tensor, rows)

    def _expert(self, ours: Tensor, matched: re.Match[str], count: int) -> Weight:
        """An expert's rows of the tensor that holds those of all experts of a layer."""
        layer, number, part = matched.groups()
        (rows, columns), expert = ours.shape, int(number)
        whole = self._shaped(f"blk.{layer}.ffn_{part}_exps.weight", count, rows, columns)
        return Weight(ours.name, ours.shape, whole, np.arange(expert * rows, (expert + 1) * rows))

    def _shaped(self, name: str, *shape: int) -> GgufTensor:
        tensor = self._tensor(name)
        if tensor.shape != shape:
            raise GgufError(f"tensor {name} must be of shape {list(shape)}, got {list(tensor.shape)}")
        return tensor

    def _unpermuted(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Undoes llama.cpp's order of a head's rows, which pairs those that RoPE turns together."""
        return rows.reshape(-1, self._head_dim // 2, 2).swapaxes(1, 2).reshape(-1)

    def _refuse_unknown_tensors(self) -> None:
        known = {weight.tensor.name for weight in self.weights} | {_ROPE_FREQUENCIES}
        unknown = sorted(set(self._file.tensors) - known)
        if unknown:
            raise GgufError(f"tensor {unknown[0]} has no place in architecture {self._name}")
