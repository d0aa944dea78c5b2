"""Embeddings, whose weight may be that of the LM head."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from worker.engines.embedded.model.linear import Linear
from worker.engines.embedded.model.panels import Lookup, lookup
from worker.engines.embedded.model.quantisation import PackedQuantised, QuantisedGemm, QuantisedWeight


def has_tied_embeddings(network: Any) -> bool:
    """Whether output layer and embedding of transformers' causal language model share a weight."""
    return is_tied(network.model.embed_tokens, network.lm_head)


def is_tied(embedding: Any, head: Any) -> bool:
    """Whether transformers' `embedding` and output layer share a weight."""
    if isinstance(embedding.weight, QuantisedWeight) or isinstance(head.weight, QuantisedWeight):
        return embedding.weight is head.weight
    return bool(embedding.weight.data_ptr() == head.weight.data_ptr() and embedding.weight.shape == head.weight.shape)


class Embedding:
    """Row lookup in an embedding's ``weight [N, K]``; in the packed weight of the LM head where it
    is tied, so that the weight is held once.

    Where all layers hold packed copies it keeps none of the memory of the weight, which may be the
    whole checkpoint, mapped into memory.

    Args:
        weight: None for the packed weight of `head`.
        head: The LM head, packed.
        is_tied: Whether `head` has the same weight.
        dtype: Data type of the rows; a weight that is not quantised has it.

    Attributes:
        packed: The weight that is held beside that of `head`; None for none.
    """

    def __init__(
        self,
        weight: torch.Tensor | QuantisedWeight | PackedQuantised | None,
        head: Linear,
        is_tied: bool,
        dtype: torch.dtype,
    ) -> None:
        self.packed: torch.Tensor | PackedQuantised | None = None
        self._rows: Lookup
        quantised = head.gemm if is_tied and isinstance(head.gemm, QuantisedGemm) else None
        if isinstance(weight, (QuantisedWeight, PackedQuantised)) and quantised is None:
            quantised = QuantisedGemm(weight, None)
            self.packed = quantised.packed
        if quantised is not None:
            self._rows = partial(quantised.rows, dtype=dtype)
        elif weight is None:
            [panels] = head.gemm.layouts()
            self._rows = panels.rows
        else:
            assert isinstance(weight, torch.Tensor)
            weight = weight.detach()
            found = lookup(weight, head.gemm.layouts()) if is_tied else None
            if found is None:
                self.packed = weight.clone() if head.gemm.is_packed else weight
                found = partial(functional.embedding, weight=self.packed)
            self._rows = found

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[..., K]`` of indices ``[...]``."""
        return self._rows(ids)
