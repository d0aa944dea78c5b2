"""LoRA of the linear layers that transformers' modules call, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from worker.engines.embedded.model.linear import Linear
from worker.engines.embedded.model.linear_names import linear_shapes
from worker.engines.embedded.native import GemmAdapters
from worker.engines.embedded.native.lora import QKV, AdaptedLayers, AdaptedRows


class CalledLinears:
    """The linear layers of transformers' causal language model, as adapters change them.

    An adapter may change a layer that a forward pass calls once, with one row for each token.
    Each is a layer of the packed adapters, with one GEMM.

    Args:
        network: transformers' network, in which nothing has been replaced yet.
    """

    def __init__(self, network: Any) -> None:
        self._prefix: str = network.base_model_prefix
        self._shapes, self._transposed = linear_shapes(network)
        self._linears: dict[str, Linear] = {}
        self._rows: AdaptedRows | None = None

    def find(self, model: Any) -> None:
        """Take the linear layers that have come in place of those of transformers' base model."""
        named = ((f"{self._prefix}.{name}", module) for name, module in model.named_modules())
        self._linears = {name: each for name, each in named if isinstance(each, Linear) and name in self._shapes}

    @contextmanager
    def probing(self, num_tokens: int) -> Iterator[None]:
        """A forward pass of `num_tokens` tokens; layers that it calls otherwise are left out."""
        calls: dict[str, list[int]] = {name: [] for name in self._linears}
        for name, layer in self._linears.items():
            layer.adapters = calls[name].append
        try:
            yield
        finally:
            for layer in self._linears.values():
                layer.adapters = None
        self._linears = {name: layer for name, layer in self._linears.items() if calls[name] == [num_tokens]}

    def layers(self) -> AdaptedLayers | None:
        """See `Network.adapted_layers`; from now on the layers add what `computing` is given."""
        found = {name: layer for name, layer in self._linears.items() if len(layer.native_parts) == 1}
        if not found:
            return None
        for index, layer in enumerate(found.values()):
            layer.adapters = partial(self._adapters_of, index)
        shapes = [(layer.out_features, layer.in_features) for layer in found.values()]
        named = [(name, index, QKV, shapes[index]) for index, name in enumerate(found)]
        return AdaptedLayers.of(named, [((rows,), (), (), ()) for rows, _ in shapes], self._shapes, self._transposed)

    def _adapters_of(self, index: int, num_rows: int) -> GemmAdapters | None:
        return None if self._rows is None else GemmAdapters(self._rows, index)

    @contextmanager
    def computing(self, rows: AdaptedRows | None) -> Iterator[None]:
        """A forward pass over rows with these adapters."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None
