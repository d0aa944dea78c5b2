"""Architectures of GGUF files whose tensors in a Hugging Face checkpoint `Geometry` does not know:
what llama.cpp's converter calls them, and what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from worker.models.geometry import Tensor

NORMS = (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"))
_NORMS_BEHIND = (
    ("post_attention_layernorm", "post_attention_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
)
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a weight in a file.

    Attributes:
        tensor: Name of the tensor.
        expert: Expert whose rows it is; None for the whole tensor.
        beside: Tensor whose rows, or elements of a bias, alternate with those of `tensor`.
        below: Tensor whose rows come below those of `tensor`, in the matrix of each expert.
        turns: Whether the matrices of all experts are transposed.
        parts: Tensors of keys, transposed, and of values, head by head, which a file may have
            instead of `tensor`.
        heads: Heads of `parts`.
        keys: Rows of a head that are those of keys.
    """

    tensor: str
    expert: int | None = None
    beside: str | None = None
    below: str | None = None
    turns: bool = False
    parts: tuple[str, ...] = ()
    heads: int = 1
    keys: int = 0

    def of_layer(self, prefix: str) -> Place:
        """The same of a layer."""
        beside, below = (None if name is None else prefix + name for name in (self.beside, self.below))
        parts = tuple(prefix + name for name in self.parts)
        return replace(self, tensor=prefix + self.tensor, beside=beside, below=below, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An architecture, by its differences from Llama.

    Attributes:
        name: ``model_type`` of ``config.json``.
        class_name: transformers' class.
        norms: Norms of a layer, and what the file calls them.
        head_norms: Norms of queries and keys: ``none``, of each ``head``, or of the ``whole``
            projection.
        is_fused: Whether queries, keys and values are one projection.
        has_fused_mlp: Whether gate and up projection are one, which the file calls ``ffn_up``.
        has_biases: Whether queries, keys and values may have biases; the file tells.
        has_sinks: Whether query heads have sinks, and the output projection a bias with the others.
        experts: Prefix of the mixture in a layer of the checkpoint; None for an MLP. Its router is
            ``gate``, its experts are ``experts.N.`` and `parts`.
        joined: Tensors of a mixture whose experts are one tensor for each matrix, by the count of
            experts, the width of hidden states and that of an expert; None for `experts`.
        parts: Gate, up and down projection of an expert.
        gguf_pairs_rows: Whether rows of queries and keys that RoPE rotates together lie side by
            side in the file.
        adds_one: Whether norms are stored with the 1 that the model adds to them.
        rotates_part: Whether RoPE may rotate a part of a head.
        numbers: Other keys of ``config.json`` that are numbers, by the file's key.
        integers: Other keys that are integers, the same.
        optional: Keys of `numbers` and `integers` that may be missing, or 0 as integers, and mean
            None.
        settings: Keys of ``config.json`` that the file does not tell.
        yarn: Parameters of YaRN that the file does not tell.
    """

    name: str
    class_name: str
    norms: tuple[tuple[str, str], ...] = NORMS
    head_norms: Literal["none", "head", "whole"] = "none"
    is_fused: bool = False
    has_fused_mlp: bool = False
    has_biases: bool = False
    has_sinks: bool = False
    experts: str | None = None
    joined: Callable[[int, int, int], Iterator[tuple[Tensor, Place]]] | None = None
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    gguf_pairs_rows: bool = False
    adds_one: bool = False
    rotates_part: bool = False
    numbers: Mapping[str, str] = field(default_factory=dict)
    integers: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    yarn: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_mixture(self) -> bool:
        """Whether MLPs are mixtures of experts."""
        return self.experts is not None or self.joined is not None

    @property
    def keys(self) -> set[str]:
        """Keys of the file, below its architecture's name, that others do not have."""
        return {*self.numbers.values(), *self.integers.values()}

    def config(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of ``config.json`` that follow from the others, `sizes`."""
        count = sizes["num_hidden_layers"]
        found = dict(self.settings)
        if self.name in ("gemma2", "gemma3_text"):
            width = sizes["head_dim"]
            largest = {"gemma2": 46, "gemma3_text": 62}[self.name]  # of 27 B parameters, as llama.cpp tells them
            found["query_pre_attn_scalar"] = (
                sizes["hidden_size"] // sizes["num_attention_heads"] if count == largest else width
            )
            every = {"gemma2": 2, "gemma3_text": 6}[self.name]
            found["layer_types"] = [
                "full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(count)
            ]
        return found

    def tensors(self, config: Mapping[str, Any], has_biases: bool) -> Iterator[tuple[Tensor, Place]]:
        """The tensors of a checkpoint with this ``config.json``, and where the file has them.

        Args:
            config: ``config.json``.
            has_biases: Whether queries, keys and values have biases.
        """
        vocab_size, hidden = config["vocab_size"], config["hidden_size"]
        yield Tensor("model.embed_tokens.weight", (vocab_size, hidden)), Place("token_embd.weight")
        for layer in range(config["num_hidden_layers"]):
            ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
            for tensor, place in self._layer(config, layer, has_biases):
                yield Tensor(ours + tensor.name, tensor.shape), place.of_layer(theirs)
        yield Tensor("model.norm.weight", (hidden,)), Place("output_norm.weight")
        if not config["tie_word_embeddings"]:
            yield Tensor("lm_head.weight", (vocab_size, hidden)), Place("output.weight")

    def _layer(self, config: Mapping[str, Any], layer: int, has_biases: bool) -> Iterator[tuple[Tensor, Place]]:
        for ours, theirs in self.norms:
            yield Tensor(f"{ours}.weight", (config["hidden_size"],)), Place(f"{theirs}.weight")
        yield from self._attention(config, has_biases)
        yield from self._mlp(config, layer)

    def _attention(self, config: Mapping[str, Any], has_biases: bool) -> Iterator[tuple[Tensor, Place]]:
        hidden, width = config["hidden_size"], config["head_dim"]
        queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
        if self.is_fused:
            yield Tensor("self_attn.qkv_proj.weight", (queries + 2 * keys, hidden)), Place("attn_qkv.weight")
        else:
            for letter, rows in (("q", queries), ("k", keys), ("v", keys)):
                yield Tensor(f"self_attn.{letter}_proj.weight", (rows, hidden)), Place(f"attn_{letter}.weight")
                if has_biases:
                    yield Tensor(f"self_attn.{letter}_proj.bias", (rows,)), Place(f"attn_{letter}.bias")
        yield Tensor("self_attn.o_proj.weight", (hidden, queries)), Place("attn_output.weight")
        if self.has_sinks:
            yield Tensor("self_attn.o_proj.bias", (hidden,)), Place("attn_output.bias")
            yield Tensor("self_attn.sinks", (config["num_attention_heads"],)), Place("attn_sinks.weight")
        if self.head_norms != "none":
            for letter, rows in (("q", queries), ("k", keys)):
                size = rows if self.head_norms == "whole" else width
                yield Tensor(f"self_attn.{letter}_norm.weight", (size,)), Place(f"attn_{letter}_norm.weight")

    def _mlp(self, config: Mapping[str, Any], layer: int) -> Iterator[tuple[Tensor, Place]]:
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        if self.has_fused_mlp:
            yield Tensor("mlp.gate_up_proj.weight", (2 * inner, hidden)), Place("ffn_up.weight")
            yield Tensor("mlp.down_proj.weight", (hidden, inner)), Place("ffn_down.weight")
            return
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        names = ("gate", "up", "down")
        if self.joined is not None:
            yield from self.joined(config["num_experts"], hidden, inner)
            return
        if self.experts is None:
            for name, shape in zip(names, shapes, strict=True):
                yield Tensor(f"mlp.{name}_proj.weight", shape), Place(f"ffn_{name}.weight")
            return
        count = config["num_experts"]
        yield Tensor(f"{self.experts}.gate.weight", (count, hidden)), Place("ffn_gate_inp.weight")
        for expert in range(count):
            for part, name, shape in zip(self.parts, names, shapes, strict=True):
                ours = Tensor(f"{self.experts}.experts.{expert}.{part}.weight", shape)
                yield ours, Place(f"ffn_{name}_exps.weight", expert)


def _gpt_oss_experts(count: int, hidden: int, inner: int) -> Iterator[tuple[Tensor, Place]]:
    """The mixture of GPT-OSS."""
    gate, up, down = (f"ffn_{part}_exps" for part in ("gate", "up", "down"))
    yield Tensor("mlp.router.weight", (count, hidden)), Place("ffn_gate_inp.weight")
    yield Tensor("mlp.router.bias", (count,)), Place("ffn_gate_inp.bias")
    both = Place(f"{gate}.weight", beside=f"{up}.weight", turns=True)
    yield Tensor("mlp.experts.gate_up_proj", (count, hidden, 2 * inner)), both
    yield Tensor("mlp.experts.gate_up_proj_bias", (count, 2 * inner)), Place(f"{gate}.bias", beside=f"{up}.bias")
    yield Tensor("mlp.experts.down_proj", (count, inner, hidden)), Place(f"{down}.weight", turns=True)
    yield Tensor("mlp.experts.down_proj_bias", (count, hidden)), Place(f"{down}.bias")


def _granite_experts(count: int, hidden: int, inner: int) -> Iterator[tuple[Tensor, Place]]:
    """The mixture of Granite."""
    both = Place("ffn_gate_exps.weight", below="ffn_up_exps.weight")
    yield Tensor("block_sparse_moe.router.layer.weight", (count, hidden)), Place("ffn_gate_inp.weight")
    yield Tensor("block_sparse_moe.input_linear.weight", (count, 2 * inner, hidden)), both
    yield Tensor("block_sparse_moe.output_linear.weight", (count, hidden, inner)), Place("ffn_down_exps.weight")


MIXTRAL = Layout(
    name="mixtral",
    class_name="MixtralForCausalLM",
    experts="block_sparse_moe",
    parts=("w1", "w3", "w2"),
    gguf_pairs_rows=True,
    settings={"sliding_window": None},
)
"""The file's architecture is ``llama``, with experts."""

LAYOUTS = {
    "gemma2": Layout(
        name="gemma2",
        class_name="Gemma2ForCausalLM",
        norms=(NORMS[0], ("pre_feedforward_layernorm", "ffn_norm"), *_NORMS_BEHIND),
        adds_one=True,
        numbers={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        integers={"sliding_window": "attention.sliding_window"},
        settings={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gemma3": Layout(
        name="gemma3_text",
        class_name="Gemma3ForCausalLM",
        norms=(NORMS[0], ("pre_feedforward_layernorm", "ffn_norm"), *_NORMS_BEHIND),
        head_norms="head",
        adds_one=True,
        numbers={
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        integers={"sliding_window": "attention.sliding_window"},
        optional=("final_logit_softcapping", "rope_local_base_freq"),
        settings={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "glm4": Layout(
        name="glm4",
        class_name="Glm4ForCausalLM",
        norms=(
            *NORMS,
            ("post_self_attn_layernorm", "post_attention_norm"),
            ("post_mlp_layernorm", "post_ffw_norm"),
        ),
        has_fused_mlp=True,
        has_biases=True,
        rotates_part=True,
    ),
    "gpt-oss": Layout(
        name="gpt_oss",
        class_name="GptOssForCausalLM",
        norms=(NORMS[0], ("post_attention_layernorm", "post_attention_norm")),
        has_biases=True,
        has_sinks=True,
        joined=_gpt_oss_experts,
        integers={"sliding_window": "attention.sliding_window"},
        settings={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        yarn={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "granite": Layout(name="granite", class_name="GraniteForCausalLM", gguf_pairs_rows=True, numbers=_GRANITE),
    "granitemoe": Layout(
        name="granitemoe",
        class_name="GraniteMoeForCausalLM",
        joined=_granite_experts,
        gguf_pairs_rows=True,
        numbers=_GRANITE,
    ),
    "olmo2": Layout(name="olmo2", class_name="Olmo2ForCausalLM", norms=_NORMS_BEHIND, head_norms="whole"),
    "olmoe": Layout(
        name="olmoe",
        class_name="OlmoeForCausalLM",
        head_norms="whole",
        experts="mlp",
        settings={"norm_topk_prob": False, "clip_qkv": None},
    ),
    "phi3": Layout(
        name="phi3",
        class_name="Phi3ForCausalLM",
        is_fused=True,
        has_fused_mlp=True,
        rotates_part=True,
        integers={"sliding_window": "attention.sliding_window"},
        optional=("sliding_window",),
    ),
    "smollm3": Layout(
        name="smollm3",
        class_name="SmolLM3ForCausalLM",
        gguf_pairs_rows=True,
        settings={"no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
}
"""Architectures by their name in GGUF files."""
