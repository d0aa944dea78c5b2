"""JSON in the grammar of a schema: which texts a `GrammarProcessor` lets a model write."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from adapters.processors.grammar import GrammarProcessor, grammar_cache
from adapters.vocabulary import Vocabulary

_NUM_BYTES = 256
_CLOSING = b'"]}0,:1-tfn'
"""Bytes that a walk prefers when it is to end."""


class Writer:
    """The texts that one grammar processor allows, byte by byte.

    Args:
        kind: The processor's class.
        vocabulary: One token for each byte.
        args: Its arguments.
    """

    def __init__(self, kind: type[GrammarProcessor], vocabulary: Vocabulary, **args: Any) -> None:
        made = kind.grammar(kind.Args.model_validate(args), vocabulary)
        self._matcher: LLMatcher = grammar_cache(vocabulary).compiled(made).matcher

    def writes(self, text: str) -> bool:
        """Whether ``text`` is a whole text of the grammar."""
        matcher = self._matcher.deep_copy()
        return _goes_on(matcher, text) and bool(matcher.is_accepting())

    def goes_on(self, text: bytes) -> bool:
        """Whether a text of the grammar begins with ``text``."""
        return _goes_on(self._matcher.deep_copy(), text)

    def writes_value(self, value: Any, *, fractions: bool = False) -> bool:
        """Whether a value can be written, with its members in some order.

        Args:
            value: A JSON value.
            fractions: Integers are written as ``1.0``.
        """
        return any(found.is_accepting() for found in _written(self._matcher.deep_copy(), value, fractions))

    def walk(self, chooser: random.Random, length: int) -> str | None:
        """A random text, whose end is looked for behind ``length`` bytes; None if none came."""
        matcher, found = self._matcher.deep_copy(), bytearray()
        for step in range(length * 4 + 100):
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [byte for byte in range(_NUM_BYTES) if bits >> byte & 1]
            assert not matcher.is_error(), f"{matcher.get_error()} after {bytes(found)!r}"
            ends = matcher.is_accepting()
            assert allowed or ends, f"nothing can follow {bytes(found)!r}"
            if ends and (not allowed or step >= length or chooser.random() < 0.3):
                return found.decode()
            closing = [byte for byte in _CLOSING if byte in allowed]
            byte = closing[0] if closing and (step >= length or chooser.random() < 0.3) else chooser.choice(allowed)
            assert matcher.consume_token(byte)
            found.append(byte)
        return None


def _goes_on(matcher: LLMatcher, text: str | bytes) -> bool:
    for byte in text.encode() if isinstance(text, str) else text:
        if not int.from_bytes(matcher.compute_bitmask(), "little") >> byte & 1:
            return False
        matcher.consume_token(byte)
    return True


def _written(matcher: LLMatcher, value: Any, fractions: bool) -> Iterator[LLMatcher]:
    """Every state behind a way to write ``value``."""
    if isinstance(value, dict) and value:
        if _goes_on(matcher, "{"):
            yield from _members(matcher, dict(value), fractions, "")
    elif isinstance(value, list) and value:
        if _goes_on(matcher, "["):
            yield from _items(matcher, value, fractions, "")
    else:
        copy = matcher.deep_copy()
        if _goes_on(copy, scalar(value, fractions)):
            yield copy


def _members(matcher: LLMatcher, left: dict[str, Any], fractions: bool, comma: str) -> Iterator[LLMatcher]:
    if not left and _goes_on(matcher, "}"):
        yield matcher
    for name in left:
        copy = matcher.deep_copy()
        if _goes_on(copy, f"{comma}{scalar(name)}:"):
            others = {other: value for other, value in left.items() if other != name}
            for behind in _written(copy, left[name], fractions):
                yield from _members(behind, others, fractions, ",")


def _items(matcher: LLMatcher, left: list[Any], fractions: bool, comma: str) -> Iterator[LLMatcher]:
    if not left:
        if _goes_on(matcher, "]"):
            yield matcher
    elif _goes_on(matcher, comma):
        for behind in _written(matcher, left[0], fractions):
            yield from _items(behind, left[1:], fractions, ",")


def scalar(value: Any, fractions: bool = False) -> str:
    """A value without members, as the processors write it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = json.dumps(value, ensure_ascii=False)
    return f"{text}.0" if fractions and isinstance(value, int) and not isinstance(value, bool) else text
