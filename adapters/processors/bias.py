"""Logit bias: a constant added to the logits of given tokens."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator

from adapters.contract import ALWAYS, Bias, Context, Edit, ProcessorArgs, Reads, Stage, SteeringProcessor
from adapters.processors.arguments import MAX_LIST

MAX_BIAS = 100.0
"""Largest bias, OpenAI's."""

_ID = r"^(0|[1-9][0-9]{0,9})$"

Key = Annotated[str, Field(pattern=_ID)]
Value = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


class LogitBias(SteeringProcessor):
    """Adds a fixed bias to the logits of some tokens.

    Source: OpenAI API reference, ``logit_bias``: z_t + b_t before sampling, at every position. The
    sum is finite, so -100 makes a token practically impossible but is no ban; ``banned_tokens`` is.
    """

    name = "logit_bias"
    stage = Stage.BIAS
    reads = Reads.NOTHING

    class Args(ProcessorArgs):
        bias: dict[Key, Value] = Field(
            min_length=1,
            max_length=MAX_LIST,
            description="Bias by token id; ids are decimal without sign or leading zeros.",
        )

        @field_validator("bias", mode="before")
        @classmethod
        def _ids_as_text(cls, bias: Any) -> Any:
            """JSON has text keys only; Python callers may write ids."""
            if not isinstance(bias, dict):
                return bias
            keys = [_as_text(key) for key in bias]
            if len(set(keys)) < len(keys):
                raise ValueError("a token id is given twice")
            return dict(zip(keys, bias.values(), strict=True))

    def __init__(self, args: Args, context: Context) -> None:
        biases = sorted((int(key), value) for key, value in args.bias.items())
        ids = [token_id for token_id, _ in biases]
        context.check_ids("bias", ids)
        self._edit = Bias.of(ids, [value for _, value in biases])

    def edit(self) -> Edit | None:
        return self._edit

    def same_until(self) -> int:
        return ALWAYS


def _as_text(key: Any) -> Any:
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    if isinstance(key, str) and not re.fullmatch(_ID, key):
        raise ValueError(f"expected a token id in decimal, got {key[:20]!r}")
    return key
