"""Attention over a packed batch with our own KV store: one step's work, laid out once and used by
every layer.

The tokens of all rows lie one after another. Native kernels read each row's pages where they
lie. With torch's, a token's keys are split at the absolute boundaries of the store's pages,
always, and its result is put together from one partial softmax per page, in ascending order. So
it depends on the tokens alone, not on where they lie, nor on which step computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from worker.engines.embedded import native
from worker.engines.embedded.attention.online_softmax import Kernel, Shapes, partial_softmax
from worker.engines.embedded.attention.torch_calls import Layout, lay_out
from worker.engines.embedded.kv_cache import KvStore, SequenceSlice

IMPLEMENTATION = "embedded_kv_store"
STEP_ARGUMENT = "embedded_step"


class AttentionStep:
    """What the layers of one forward pass share: where rows are, where their KV goes, and their
    calls.

    Args:
        store: KV of all layers.
        sequences: The rows, in the order of their tokens.
        places: Page and slot of each token, ``[2, T]``.
        shapes: How calls may be shaped.
    """

    def __init__(
        self, store: KvStore, sequences: Sequence[SequenceSlice], places: torch.Tensor, shapes: Shapes
    ) -> None:
        self._store = store
        self._sequences = sequences
        self._places = (places[0], places[1])
        self._shapes = shapes
        self._layouts: dict[int, Layout] = {}
        self._tiles: native.Tiles | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Store ``key, value [T, Hkv, D]`` and attend with ``query [T, H, D]``; returns ``[T, H,
        D]``.

        A token sees itself and the `window` - 1 tokens before it, or all of them if `window` is 0.
        Scores go through ``softcap * tanh(score / softcap)`` where it is given. Rows behind the
        step's tokens are padding; they get 0.
        """
        count = len(self._places[0])
        if len(query) > count:
            attended = self.attend(layer, query[:count], key[:count], value[:count], scale, window, softcap)
            return torch.nn.functional.pad(attended, (0, 0, 0, 0, 0, len(query) - count))
        keys, values = self._store.keys[layer], self._store.values[layer]
        self._store.write(layer, self._places, key, value)
        if self._shapes.kernel is Kernel.NATIVE:
            return self._attend_natively(layer, query, scale, window, softcap)
        layout = self._layouts.get(window)
        if layout is None:
            layout = lay_out(self._sequences, keys, window, query, softcap is None, self._shapes)
            self._layouts[window] = layout
        if layout.queries is not None:
            query = query.index_select(0, layout.queries)
        outputs, sums = [], []
        wants_sums = layout.several is not None
        start = 0
        for call in layout.calls:
            stop = start + call.entries * call.tokens
            part = partial_softmax(
                call.kernel,
                query[start:stop],
                call.tokens,
                call.view(keys),
                call.view(values),
                call.mask,
                scale,
                softcap,
                self._shapes.query_multiple,
                wants_sums,
            )
            outputs.append(part[0])
            if part[1] is not None:
                sums.append(part[1])
            start = stop
        return _combine(layout, outputs, sums)

    def takes_projections(self, tokens: int) -> bool:
        """Whether `attend_to_projections` computes a step of `tokens` tokens: native kernels do,
        without padding.
        """
        return self._shapes.kernel is Kernel.NATIVE and tokens == len(self._places[0])

    def attend_to_projections(
        self, layer: int, projections: native.Projections, scale: float, window: int
    ) -> torch.Tensor:
        """`attend`, with what comes before it: rotating queries and keys. Returns ``[T, H, D]``."""
        keys, values = self._store.keys[layer], self._store.values[layer]
        query = native.rotate_and_store(projections, keys, values, self._places)
        return self._attend_natively(layer, query, scale, window, None)

    def _attend_natively(
        self, layer: int, query: torch.Tensor, scale: float, window: int, softcap: float | None
    ) -> torch.Tensor:
        keys, values = self._store.keys[layer], self._store.values[layer]
        if self._tiles is None:
            self._tiles = native.Tiles(self._sequences, query.shape[1] // keys.shape[1])
        return native.attend(query, keys, values, self._tiles, scale, window, softcap)


def _combine(layout: Layout, outputs: list[torch.Tensor], sums: list[torch.Tensor]) -> torch.Tensor:
    """One result ``[T, H, D]`` per token of the calls' results ``[n, H, D]`` and log-sum-exps
    ``[n, H]``.
    """
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    combined = output if layout.last is None else output.index_select(0, layout.last)
    if layout.several is None:
        return combined
    count, depth = layout.parts.shape
    sum_all = sums[0] if len(sums) == 1 else torch.cat(sums)
    weights = sum_all.index_select(0, layout.parts.view(-1)).view(count, depth, -1) + layout.absent
    weights = weights.sub_(weights.amax(1, keepdim=True)).exp_()[..., None]
    # one after another, so that places without a page, which weigh 0, change nothing
    total = weights[:, 0].clone()
    result = weights[:, 0] * output.index_select(0, layout.parts[:, 0])
    for part in range(1, depth):
        total += weights[:, part]
        result.addcmul_(weights[:, part], output.index_select(0, layout.parts[:, part]).float())
    return combined.index_copy(0, layout.several, result.div_(total).to(output.dtype))


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    step: AttentionStep = arguments[STEP_ARGUMENT]
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return step.attend(module.layer_idx, query, key, value, scaling, sliding_window or 0, softcap)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are made per step, in `AttentionStep`."""


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; harmless when repeated."""
    attention: Callable[..., Any] = _attention
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
