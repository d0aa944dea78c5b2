"""Description of a model beside its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.models.geometry import Geometry


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Description of a model beside its weights.

    Attributes:
        dtype: Data type of activations.
        geometry: Sizes of the model, which fit each other.
        softcap: Scores of attention go through ``softcap * tanh(score / softcap)``; None for none.
        eos_token_ids: Ids that end an answer.
        undecodable_ids: Ids that the tokenizer does not have, and that end no answer.
        weights: Format of the weights, for people; None for `dtype`.
    """

    dtype: torch.dtype
    geometry: Geometry
    softcap: float | None
    eos_token_ids: tuple[int, ...]
    undecodable_ids: tuple[int, ...]
    weights: str | None

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return self.geometry.vocab_size

    @property
    def context_length(self) -> int:
        """Tokens of its longest text."""
        return self.geometry.max_position_embeddings

    @property
    def num_layers(self) -> int:
        """Layers, each of which has a KV cache."""
        return self.geometry.num_hidden_layers

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.geometry.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads of a layer."""
        return self.geometry.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.geometry.head_dim
