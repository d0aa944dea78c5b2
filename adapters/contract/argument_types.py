"""Bounded argument types: every value that a request gives is bounded on both sides."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_LIST = 4096
"""Most entries of a list argument."""

MAX_TEXT = 4096
"""Most characters of a text argument."""

MAX_INT = 2**31 - 1
"""Largest integer argument: positions, counts and ids fit in an int32 everywhere."""

TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LIST)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_INT)]
