"""Arguments between tags, as Qwen3-Coder and GLM write them: text for strings, JSON for all else.

A string never holds the tag behind it; a text within an array or an object may. Where a schema
allows strings beside other types, the text is that of another type if it can be, and a string
otherwise; a string that would be read as something else cannot be written, so that what was written
is always known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from typing import Any, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["null", "boolean", "number", "string", "array", "object"]


class Tags(NamedTuple):
    """Texts around the key and the value of each argument.

    Attributes:
        open: Text before the key.
        opened: Text between the key and the value.
        stop: Text behind the value, which no string holds.
        rest: Text behind `stop`.
    """

    open: str
    opened: str
    stop: str
    rest: str

    @property
    def close(self) -> str:
        """All that is behind the value."""
        return self.stop + self.rest


TagNotation: TypeAlias = Literal["xml", "pairs", "tight_pairs"]
"""Notations of arguments between tags."""

TAGS: dict[str, Tags] = {
    "xml": Tags("<parameter=", ">\n", "\n</parameter>", "\n"),
    "pairs": Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n"),
    "tight_pairs": Tags("<arg_key>", "</arg_key><arg_value>", "</arg_value>", ""),
}
"""Tags by notation."""

_PATTERNS: dict[Kind, str] = {
    "null": "null",
    "boolean": "true|false",
    "number": r"-?(?:0|[1-9][0-9]*)(?:[.][0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}

_WORDS: dict[Kind, tuple[str, ...]] = {"null": ("null",), "boolean": ("true", "false")}


def no_strings(kinds: Set[Kind]) -> str | None:
    """Regular expression of the texts that are no string where ``kinds`` are allowed, which Python
    and Rust read alike; None if every text is a string.
    """
    return "|".join(f"(?:{pattern})" for kind, pattern in _PATTERNS.items() if kind in kinds) or None


def may_be_no_string(text: str, kinds: Set[Kind]) -> bool:
    """Whether a text that begins with ``text`` may be no string where ``kinds`` are allowed: it is
    certain at the first character that `no_strings` does not have there.
    """
    first = text[:1]
    return (
        ("array" in kinds and first in ("", "["))
        or ("object" in kinds and first in ("", "{"))
        or ("number" in kinds and not text.strip("+-.0123456789eE"))
        or any(word.startswith(text) for kind in kinds for word in _WORDS.get(kind, ()))
    )


def value_of(text: str, kinds: Set[Kind]) -> Any:
    """The value that is written as ``text``.

    Args:
        text: A whole text between the tags.
        kinds: Types that the schema of the argument allows.

    Raises:
        ValueError: it is no value of such a type, or nested too deep.
    """
    other = no_strings(kinds)
    if "string" in kinds and (other is None or re.fullmatch(other, text) is None):
        return text
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deep") from None
