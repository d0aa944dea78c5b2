"""transformers' attention over the paged KV cache: its interface, and torch's function for modules
that do without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

IMPLEMENTATION = "embedded_kv_store"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of attention in a forward pass; the KV store has a layer for each.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads.
        key_dim: Width of queries and keys.
        value_dim: Width of values.
        scale: Factor of the scores.
        window: Tokens that a token attends to, itself among them; 0 for all before it.
        softcap: Scores go through ``softcap * tanh(score / softcap)``; None for none.
        has_sinks: Whether a query head has a score with no value behind it.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float | None
    has_sinks: bool


class Attends(Protocol):
    """Attention of one forward pass."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""


@dataclass(slots=True)
class Pass:
    """A forward pass.

    Attributes:
        step: Attention of the pass.
        width: Width of a head in the KV store; None for any.
        next_call: Number of the next call of attention.
    """

    step: Attends
    width: int | None
    next_call: int = 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """The next call, of ``[1, heads, T, D]``; returns ``[1, T, heads, D]`` of the values' D."""
        value_dim = value.shape[-1]
        query, key, value = (self._padded(each[0].transpose(0, 1)) for each in (query, key, value))
        layer, self.next_call = self.next_call, self.next_call + 1
        attended = self.step.attend(layer, query, key, value, scale, window, softcap, sinks)
        return attended[None, ..., :value_dim].contiguous()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        missing = 0 if self.width is None else self.width - rows.shape[-1]
        return functional.pad(rows, (0, missing)) if missing else rows


CURRENT: ContextVar[Pass] = ContextVar("forward pass")
"""The forward pass in which transformers' code runs."""


@dataclass(slots=True)
class AttentionProbe:
    """Notes the calls of a forward pass, and computes nothing.

    Attributes:
        calls: The calls, in their order.
    """

    calls: list[AttentionCall] = field(default_factory=list)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`; the values of the first key heads."""
        heads, kv_heads = query.shape[1], key.shape[1]
        widths = query.shape[2], value.shape[2]
        self.calls.append(AttentionCall(heads, kv_heads, *widths, scale, window, softcap, sinks is not None))
        return value[:, :1].expand(-1, heads, -1)


_UNSAID: Any = object()
"""Default of an argument, which may be None."""


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = _UNSAID,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; the forward pass is `CURRENT`."""
    if sliding_window is _UNSAID:  # transformers' mask has the module's
        sliding_window = getattr(module, "sliding_window", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    with torch._C.DisableTorchFunction():
        return CURRENT.get().attend(query, key, value, scale, sliding_window or 0, softcap, s_aux), None


def scaled_dot_product_attention(
    _: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's attention of causal models that do without transformers' interface, as
    `RowFunctions` replaces it.
    """
    return attention(None, query, key, value, None, scale)[0].transpose(1, 2)


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask: the attention backend makes its own in each step."""


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; harmless when repeated."""
    function: Callable[..., Any] = attention
    AttentionInterface.register(IMPLEMENTATION, function)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
