"""Bans of Unicode scripts, exact for characters that are split over tokens."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeAlias

import numpy as np
import regex
import torch
from pydantic import Field

from adapters.contract import (
    Allow,
    ArgumentError,
    Context,
    Edit,
    ProcessorArgs,
    Reads,
    Stage,
    SteeringProcessor,
    bitmask_of,
)
from adapters.processors.characters import SplitCharacters, begun, num_missing, seconds, split_characters
from adapters.vocabulary import Vocabulary

_Name = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[A-Za-z][A-Za-z _-]*$")]
_Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

_NUM_CODE_POINTS = 0x110000
_SHARED = {"common", "zyyy", "inherited", "zinh", "qaai", "unknown", "zzzz"}
_MOST_MASKS = 256


class BanScripts(SteeringProcessor):
    """Bans every token that writes a character of some Unicode scripts.

    Source: the Script property of the Unicode Character Database (UAX #24), as in
    ``\\p{Script=Han}``. Characters that scripts share (digits, most punctuation, also that of CJK)
    have the script Common and stay.

    A token is judged by its bytes, appended to those of an incomplete character at the end of the
    history. It is banned if it completes any character of a banned script, or ends with an
    incomplete character that can only become one of a banned script; unassigned code points do not
    count as alternatives. Special tokens are never banned.
    """

    name = "ban_scripts"
    stage = Stage.MASK
    reads = Reads.PROMPT_AND_GENERATED

    class Args(ProcessorArgs):
        scripts: Annotated[
            list[_Name],
            Field(min_length=1, max_length=64, description="Unicode script names, as Han, Cyrillic or Latn."),
        ]

    def __init__(self, args: Args, context: Context) -> None:
        scripts = frozenset(map(_canonical, args.scripts))
        if context.vocabulary.tokenizer is None:
            raise ArgumentError("scripts", "scripts need a tokenizer, and this model was loaded without one")
        tables = context.vocabulary.derived("scripts", lambda: _Tables(context.vocabulary))
        self._masks = tables.masks(scripts)
        self._characters = tables.split
        self.reset()

    def reset(self) -> None:
        self._begun = self._characters.open_after(self.prompt)
        self._earlier: list[bytes] = []

    def advance(self, token_id: int, index: int) -> None:
        self._earlier.append(self._begun)
        self._begun = self._characters.after(self._begun, token_id)

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        self._begun = self._earlier[-len(token_ids)]
        del self._earlier[-len(token_ids) :]
        return True

    def edit(self) -> Edit | None:
        return self._masks.after(self._begun)


def _canonical(name: str) -> str:
    """The name as Unicode compares it, lower case without separators.

    Raises:
        ArgumentError: there is no such script, or its characters belong to all scripts.
    """
    plain = re.sub("[^a-z]", "", name.lower())
    if plain in _SHARED:
        raise ArgumentError("scripts", f"{name!r} is not a script: its characters belong to all scripts")
    try:
        characters = _code_points(f"Script={plain}")
    except regex.error as error:
        raise ArgumentError("scripts", f"{name!r} is not a Unicode script") from error
    if not characters:
        raise ArgumentError("scripts", f"no character has the script {name!r}")
    return plain


@lru_cache(maxsize=512)
def _code_points(property_: str) -> tuple[tuple[int, int], ...]:
    """Code point ranges ``[first, end)`` with a property; surrogates are excluded."""
    pattern = regex.compile(rf"\p{{{property_}}}+")
    below, above = _all_characters()
    return tuple(
        (match.start() + offset, match.end() + offset)
        for text, offset in ((below, 0), (above, 0xE000))
        for match in pattern.finditer(text)
    )


@lru_cache(maxsize=1)
def _all_characters() -> tuple[str, str]:
    return "".join(map(chr, range(0xD800))), "".join(map(chr, range(0xE000, _NUM_CODE_POINTS)))


def _flags(ranges: Sequence[tuple[int, int]]) -> _Flags:
    flags = np.zeros(_NUM_CODE_POINTS, dtype=np.bool_)
    for begin, end in ranges:
        flags[begin:end] = True
    return flags


# UTF-8


def _reach(beginning: bytes) -> tuple[int, int]:
    """Range ``[first, end)`` of the code points that ``beginning`` can become."""
    missing = num_missing(beginning)
    low, high = b"\x80" * missing, b"\xbf" * missing
    if len(beginning) == 1:
        follow = seconds(beginning[0])
        low, high = bytes([follow[0]]) + low[1:], bytes([follow[-1]]) + high[1:]
    return ord((beginning + low).decode()), ord((beginning + high).decode()) + 1


# Masks


class _Ranges:
    """A set of code points with fast membership tests that pickles small."""

    def __init__(self, flags: _Flags) -> None:
        self._bounds: list[int] = np.flatnonzero(np.diff(flags, prepend=False, append=False)).tolist()

    def __contains__(self, code_point: int) -> bool:
        return bool(bisect_right(self._bounds, code_point) % 2)

    def meets(self, begin: int, end: int) -> bool:
        """Whether one of ``begin`` to ``end - 1`` is in the set."""
        return begin in self or bisect_right(self._bounds, begin) < bisect_left(self._bounds, end)


class _Judge:
    """Decides which bytes write a banned character.

    Args:
        banned: Characters of the scripts.
        others: All other assigned characters.
    """

    def __init__(self, banned: _Ranges, others: _Ranges) -> None:
        self._banned, self._others = banned, others

    def is_banned(self, data: bytes) -> bool:
        """Whether ``data``, from a character's start, holds a banned one or can only become one."""
        if any(ord(character) in self._banned for character in data.decode(errors="ignore")):
            return True
        beginning = begun(data)
        if not beginning:
            return False
        reach = _reach(beginning)
        return self._banned.meets(*reach) and not self._others.meets(*reach)


class _Masks:
    """Masks of one set of scripts: one per incomplete character that the history may end with.

    Only tokens that begin inside a character depend on it, so all masks but one are made on demand.

    Args:
        allowed: Bitmask int32 after whole characters.
        split: Tokens that begin inside a character.
        judge: Judge of the scripts.
    """

    def __init__(self, allowed: torch.Tensor, split: SplitCharacters, judge: _Judge) -> None:
        self._whole, self._split, self._judge = Allow(allowed), split, judge
        self._made: dict[bytes, Allow] = {b"": self._whole}

    def after(self, beginning: bytes) -> Allow:
        """The mask after an incomplete character."""
        allow = self._made.get(beginning)
        if allow is None:
            if len(self._made) >= _MOST_MASKS:
                self._made = {b"": self._whole}
            allow = self._made[beginning] = Allow(self._make(beginning))
        return allow

    def _make(self, beginning: bytes) -> torch.Tensor:
        bits = np.unpackbits(self._whole.bitmask.numpy().view(np.uint8), bitorder="little")
        for token_id, piece in self._split.inner.items():
            bits[token_id] = not self._judge.is_banned(beginning + piece)
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


class _Tables:
    """The characters of every token, and the masks of recently used script sets.

    Attributes:
        split: Tokens that begin or end inside a character.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.split = split_characters(vocabulary)
        pieces = vocabulary.token_bytes[: vocabulary.num_tokens]
        texts = [piece.decode(errors="ignore") for piece in pieces]
        self._owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        self._characters = np.frombuffer("".join(texts).encode("utf-32-le"), dtype=np.uint32)
        self.masks = lru_cache(maxsize=64)(self._make)

    def _make(self, scripts: frozenset[str]) -> _Masks:
        banned = _flags([r for script in sorted(scripts) for r in _code_points(f"Script={script}")])
        others = _flags(_code_points("Assigned")) & ~banned
        allowed = np.ones(self._vocabulary.num_tokens, dtype=np.bool_)
        allowed[self._owners[banned[self._characters]]] = False
        judge = _Judge(_Ranges(banned), _Ranges(others))
        for token_id, beginning in self.split.ends.items():
            allowed[token_id] &= not judge.is_banned(beginning)
        self._check(allowed)
        bitmask = bitmask_of(np.flatnonzero(allowed).tolist(), self._vocabulary.size)
        return _Masks(bitmask, self.split, judge)

    def _check(self, allowed: _Flags) -> None:
        pieces = self._vocabulary.token_bytes
        if not any(pieces[token_id] for token_id in np.flatnonzero(allowed).tolist()):
            raise ArgumentError("scripts", "these scripts leave no token of this model's vocabulary")
