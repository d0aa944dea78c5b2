"""A causal language model's network over a packed batch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from worker.engines.embedded.attention import AttentionStep
from worker.engines.embedded.native.lora import AdaptedLayers, AdaptedRows


class Network(torch.nn.Module, ABC):
    """Embedding, decoder layers and LM head.

    Attributes:
        foreign: Functions of torch that are computed as transformers calls them, so that nothing is
            known of their bits.
        has_layer_norm: Whether torch computes LayerNorm, whose sums are in another order in another
            version of it.
        rope_factors: See `longrope.settle_factors`.
        adapts_with_any_attention: Whether kernels other than native ones may attend in a step with
            adapters.
    """

    foreign: tuple[str, ...] = ()
    has_layer_norm = False
    rope_factors: str | None = None
    adapts_with_any_attention = False

    @abstractmethod
    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        only: int | None = None,
        adapted: AdaptedRows | None = None,
    ) -> torch.Tensor:
        """Last hidden states ``[T, hidden]``.

        Args:
            ids: Token ids ``[T]``.
            positions: Positions ``[T]`` of the tokens in their sequences.
            step: Attention of the batch.
            only: Index of the one layer to compute; None for all.
            adapted: LoRA adapters of the tokens, packed for `adapted_layers`; None if no token has
                one.
        """

    @property
    def adapted_layers(self) -> AdaptedLayers | None:
        """The linear layers that adapters may change; None if its kernels compute no adapters."""
        return None

    @property
    @abstractmethod
    def has_windows(self) -> bool:
        """Whether tokens of some layers attend to a window alone."""

    @property
    def calls_per_layer(self) -> int:
        """Calls of attention in a decoder layer at most, each of which has a KV cache."""
        return 1

    @abstractmethod
    def layer_kinds(self) -> list[int]:
        """Index of a layer of each kind."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 ``[n, vocab_size]``, of hidden states ``[n, hidden]``."""
