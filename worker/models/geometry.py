"""A model's geometry: its sizes, how they fit together, and the tensors that follow from them.

Kernels get pointers and these sizes, and read what they say. So every way to a model, a Hugging
Face checkpoint, a GGUF file, a quantised checkpoint and a packed copy, makes a `Geometry`, which
refuses sizes that are absurd or do not fit each other, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from worker.models.model_types import ModelType, model_type_of
from worker.models.problems import shown

BOUNDS = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "head_dim": (2, 2**12),
    "max_position_embeddings": (2, 2**31),
    "num_experts": (0, 2**14),
    "num_experts_per_tok": (0, 2**14),
    "moe_intermediate_size": (0, 2**22),
    "decoder_sparse_step": (1, 2**31),
}
"""The least and the most of each size, far beyond those of published models."""

_OF_MIXTURES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers")


class GeometryError(ValueError):
    """A size is impossible, or does not fit another.

    Args:
        text: The message, with ``{0}``, ``{1}`` for the names of `keys`.
        keys: Keys of ``config.json``.
    """

    def __init__(self, text: str, *keys: str) -> None:
        super().__init__(text.format(*keys))
        self._text, self._keys = text, keys

    def named(self, names: Mapping[str, str]) -> str:
        """The message with other names for the keys, those of a GGUF file."""
        return self._text.format(*(names.get(key, key) for key in self._keys))


def check_fit(config: Mapping[str, Any]) -> None:
    """Raises `GeometryError` if sizes of a ``config.json`` do not fit each other, as far as they
    are given. Each has its type and range.
    """
    kind = model_type_of(config.get("model_type"))
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    kv_heads, width = config.get("num_key_value_heads"), config.get("head_dim")
    if heads and kv_heads and heads % kv_heads:
        raise GeometryError(
            f"{{0}} must be a multiple of {{1}} {kv_heads}, got {heads}", "num_attention_heads", "num_key_value_heads"
        )
    if heads and hidden and hidden % heads and kind.has_whole_heads:
        raise GeometryError(
            f"{{0}} must be a multiple of {{1}} {heads}, got {hidden}", "hidden_size", "num_attention_heads"
        )
    if width and width % 2:
        raise GeometryError(f"{{0}}, the width of a head, must be even, as RoPE turns pairs, got {width}", "head_dim")
    if heads and hidden and not width and kind.derives_head_dim and (hidden < heads or hidden // heads % 2):
        raise GeometryError(
            f"{{0}} by {{1}}, the width of a head, must be even, as RoPE turns pairs, got {hidden // heads}",
            *("hidden_size", "num_attention_heads"),
        )


@dataclass(frozen=True, slots=True)
class Tensor:
    """A weight that a model has.

    Attributes:
        name: Name in a Hugging Face checkpoint.
        shape: Shape.
    """

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a decoder-only model, in the words of its ``config.json``.

    Raises:
        GeometryError: a size is out of `BOUNDS`, or does not fit another.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key, (least, most) in BOUNDS.items():
            value = getattr(self, key)
            if type(value) is not int or not least <= value <= most:
                raise GeometryError(f"{{0}} must be an integer from {least} to {most}, got {shown(value)}", key)
        check_fit({each.name: getattr(self, each.name) for each in fields(self)})
        if self.num_experts_per_tok > self.num_experts:
            raise GeometryError(
                f"{{0}} must be at most {{1}} {self.num_experts}, got {self.num_experts_per_tok}",
                *("num_experts_per_tok", "num_experts"),
            )
        if self.num_experts and not (self.num_experts_per_tok and self.moe_intermediate_size):
            raise GeometryError("{0} and {1} must be at least 1", "num_experts_per_tok", "moe_intermediate_size")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The geometry of a ``config.json`` in which nothing is left to a default but `head_dim`
        and `num_key_value_heads`; other keys are ignored.

        Raises:
            GeometryError: a size is missing, impossible, or does not fit another.
        """
        found = {each.name: config[each.name] for each in fields(cls) if config.get(each.name) is not None}
        if not model_type_of(found.get("model_type")).is_mixture:
            found = {key: value for key, value in found.items() if key not in _OF_MIXTURES}
        heads = found.get("num_attention_heads")
        found.setdefault("num_key_value_heads", heads)
        if "head_dim" not in found and type(heads) is int and heads > 0 and type(found.get("hidden_size")) is int:
            found["head_dim"] = found["hidden_size"] // heads
        if "mlp_only_layers" in found:
            found["mlp_only_layers"] = tuple(found["mlp_only_layers"])
        for each in fields(cls):
            if each.default is MISSING and each.name not in found:
                raise GeometryError("{0} is missing", each.name)
        return cls(**found)

    @property
    def _kind(self) -> ModelType:
        return model_type_of(self.model_type)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return bool(
            self.num_experts and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every weight that the model has, in the order of its layers."""
        hidden = self.hidden_size
        yield Tensor("model.embed_tokens.weight", (self.vocab_size, hidden))
        for layer in range(self.num_hidden_layers):
            for name, shape in self._layer(layer):
                yield Tensor(f"model.layers.{layer}.{name}", shape)
        yield Tensor("model.norm.weight", (hidden,))
        if not self.tie_word_embeddings:
            yield Tensor("lm_head.weight", (self.vocab_size, hidden))

    def _layer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.hidden_size
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self._kind.num_norms == 4:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        yield from ((f"{norm}.weight", (hidden,)) for norm in norms)
        yield from self._attention()
        if self.is_sparse(layer):
            yield "mlp.gate.weight", (self.num_experts, hidden)
            for expert in range(self.num_experts):
                yield from self._mlp(f"mlp.experts.{expert}.", self.moe_intermediate_size, False)
        else:
            yield from self._mlp("mlp.", self.intermediate_size, self.mlp_bias and self._kind.reads_mlp_bias)

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, width = self.hidden_size, self.head_dim
        queries, keys = self.num_attention_heads * width, self.num_key_value_heads * width
        biases = self._kind.attention_biases
        is_biased = self.attention_bias and biases == "configured"
        for letter, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield from _linear(f"self_attn.{letter}_proj", rows, hidden, is_biased or biases == "qkv")
        yield from _linear("self_attn.o_proj", hidden, queries, is_biased)
        if self._kind.has_head_norms:
            yield from ((f"self_attn.{letter}_norm.weight", (width,)) for letter in "qk")

    def _mlp(self, prefix: str, inner: int, is_biased: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.hidden_size
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield from _linear(f"{prefix}{name}_proj", rows, columns, is_biased)


def _linear(name: str, rows: int, columns: int, is_biased: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if is_biased:
        yield f"{name}.bias", (rows,)
