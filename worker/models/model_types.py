"""The register of architectures whose tensors are known before transformers is asked; what serves a
model type says `model_table`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """An architecture, by its differences from Llama.

    Attributes:
        name: ``model_type`` of ``config.json``.
        class_name: transformers' class, ``architectures`` of ``config.json``.
        gguf: ``general.architecture`` of GGUF files that are converted; None for none.
        has_whole_heads: Whether ``hidden_size`` must be a multiple of ``num_attention_heads``.
        derives_head_dim: Whether heads are ``hidden_size / num_attention_heads`` wide unless
            ``head_dim`` says so.
        takes_null_head_dim: Whether a ``head_dim`` of null is one that is left out, for
            transformers.
        attention_biases: Projections with a bias: ``none``; ``qkv``, always those of queries, keys
            and values; or ``configured``, all four if ``attention_bias`` is set.
        reads_mlp_bias: Whether the MLP has biases if ``mlp_bias`` is set.
        has_head_norms: Whether queries and keys have an RMSNorm per head.
        num_norms: RMSNorms of a layer, 2 or 4.
        is_mixture: Whether MLPs are mixtures of experts.
        window: Sliding window of the layers of a Llama-like model: ``none``, one for all, or one
            for some layers.
        gguf_pairs_rows: Whether llama.cpp's converter puts the rows of queries and keys that RoPE
            rotates together side by side.
        softcaps: The keys of soft caps that transformers applies. (Its Gemma 3 stores
            ``attn_logit_softcapping`` and applies it nowhere.)
    """

    name: str
    class_name: str
    gguf: str | None = None
    has_whole_heads: bool = False
    derives_head_dim: bool = False
    takes_null_head_dim: bool = False
    attention_biases: Literal["none", "qkv", "configured"] = "none"
    reads_mlp_bias: bool = False
    has_head_norms: bool = False
    num_norms: int = 2
    is_mixture: bool = False
    window: Literal["none", "model", "layer"] = "none"
    gguf_pairs_rows: bool = False
    softcaps: tuple[str, ...] = ()


SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Keys of soft caps: of the scores of attention, of logits."""

_REGISTER = (
    ModelType(
        name="llama",
        class_name="LlamaForCausalLM",
        gguf="llama",
        has_whole_heads=True,
        derives_head_dim=True,
        takes_null_head_dim=True,
        attention_biases="configured",
        reads_mlp_bias=True,
        gguf_pairs_rows=True,
    ),
    ModelType(
        name="mistral",
        class_name="MistralForCausalLM",
        derives_head_dim=True,
        takes_null_head_dim=True,
        window="model",
    ),
    ModelType(
        name="qwen2",
        class_name="Qwen2ForCausalLM",
        gguf="qwen2",
        derives_head_dim=True,
        attention_biases="qkv",
        window="layer",
    ),
    ModelType(
        name="qwen3",
        class_name="Qwen3ForCausalLM",
        gguf="qwen3",
        attention_biases="configured",
        has_head_norms=True,
        window="layer",
    ),
    ModelType(
        name="gemma2",
        class_name="Gemma2ForCausalLM",
        has_whole_heads=True,
        attention_biases="configured",
        num_norms=4,
        softcaps=SOFTCAPS,
    ),
    ModelType(
        name="gemma3_text",
        class_name="Gemma3ForCausalLM",
        has_whole_heads=True,
        attention_biases="configured",
        has_head_norms=True,
        num_norms=4,
        softcaps=("final_logit_softcapping",),
    ),
    ModelType(
        name="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        gguf="qwen3moe",
        derives_head_dim=True,
        attention_biases="configured",
        has_head_norms=True,
        is_mixture=True,
    ),
)

MODEL_TYPES = {each.name: each for each in _REGISTER}
"""Architectures by name."""

GGUF_TYPES = {each.gguf: each for each in _REGISTER if each.gguf is not None}
"""Architectures by their name in GGUF files."""

_UNKNOWN = ModelType(name="", class_name="")


def model_type_of(name: object) -> ModelType:
    """The architecture of that name; one without peculiarities if it is not in the register."""
    return MODEL_TYPES.get(name, _UNKNOWN) if isinstance(name, str) else _UNKNOWN
