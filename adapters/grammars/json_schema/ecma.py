"""Patterns of JSON Schema: regular expressions of ECMA-262 with its flag ``u``, as `Language`."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, product

from adapters.grammars.json_schema.ecma_characters import PatternError
from adapters.grammars.json_schema.ecma_parser import END, START, Anchor, FlatTerm, Group, LookAround, Parser, Term
from adapters.grammars.json_schema.patterns import (
    ANYTHING,
    NOTHING,
    Language,
    alt,
    both,
    cat,
    complement,
    is_nullable,
    length_of,
    spend,
)

MAX_ALTERNATIVES = 256
"""Ways through a pattern whose groups hold anchors."""

MAX_PARTS = 65_536
"""Parts of all these ways together."""

MAX_PATTERN = 4_096
"""Characters of one pattern."""

_RANGES_AT_ONCE = 4
"""Ranges of a set that are put together in the time of reading a character."""


def searched(pattern: str) -> Language:
    """The texts in which ``pattern`` is found, anywhere unless it is anchored.

    Raises:
        PatternError: it is malformed, or needs more than a regular language (a back-reference), a
            word boundary, or a look-around in the middle.
        TooComplex: the `limited` work is used up.
    """
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"expected at most {MAX_PATTERN} characters, got {len(pattern)}")
    found, work = _searched(pattern)
    spend(work)
    return found


@lru_cache(1_024)
def _searched(pattern: str) -> tuple[Language, int]:
    """The texts in which ``pattern`` is found, and the work to tell."""
    parser = Parser(pattern)
    try:
        sequences = _sequences(parser.options())
    except RecursionError:
        raise PatternError("is nested too deeply") from None
    work = len(pattern) + parser.num_ranges // _RANGES_AT_ONCE + sum(map(len, sequences))
    return alt(map(_anchored, sequences)), work


@lru_cache(256)
def whole(pattern: str) -> Language:
    """The texts that ``pattern`` matches from beginning to end."""
    return alt(_anchored((START, *sequence, END)) for sequence in _sequences(Parser(pattern).options()))


def _sequences(options: tuple[tuple[Term, ...], ...]) -> list[tuple[FlatTerm, ...]]:
    """Every way through groups that hold anchors."""
    found = list[tuple[FlatTerm, ...]]()
    for sequence in options:
        ways = list[list[tuple[FlatTerm, ...]]]()
        for part in sequence:
            if isinstance(part, Group):
                ways.append([*([()] if part.low == 0 else []), *_sequences(part.options)])
            else:
                ways.append([(part,)])
        count = len(found)
        for way in ways:
            count = max(count, 1) * len(way)
        if count > MAX_ALTERNATIVES or count * len(ways) > MAX_PARTS:
            raise PatternError("has too many groups with ^, $ or a look-around in them")
        found += [tuple(chain.from_iterable(chosen)) for chosen in product(*ways)]
    return found


def _anchored(sequence: tuple[FlatTerm, ...]) -> Language:
    starts = [index for index, part in enumerate(sequence) if part == START]
    ends = [index for index, part in enumerate(sequence) if part == END]
    first, last = (starts[-1] if starts else -1), (ends[0] if ends else len(sequence))
    if starts and ends and last < first:
        raise PatternError("has $ before ^")
    beyond = (*sequence[: max(first, 0)], *sequence[last + 1 :])
    outside = [part for part in beyond if not isinstance(part, Anchor | LookAround)]
    if not all(map(is_nullable, outside)):
        return NOTHING
    if any(isinstance(part, LookAround) for part in beyond):
        raise PatternError("has a look-around outside of ^ and $")
    inner = sequence[first + 1 : last]
    return _around([*([] if starts else [ANYTHING]), *inner, *([] if ends else [ANYTHING])])


def _around(sequence: list[FlatTerm]) -> Language:
    """Language of a sequence without anchors, whose look-arounds constrain the whole text.

    Raises:
        PatternError: a look-ahead is not at a fixed distance from the beginning, or a look-behind
            from the end.
    """
    found = [cat(part for part in sequence if not isinstance(part, Anchor | LookAround))]
    for index, look in enumerate(sequence):
        if not isinstance(look, LookAround):
            continue
        fixed = sequence[:index] if look.is_ahead else sequence[index + 1 :]
        outside = cat(part for part in fixed if not isinstance(part, Anchor | LookAround))
        length = length_of(outside)
        if length is None:
            raise PatternError("has a look-around in the middle, which is not supported")
        inner = alt(_looked(option, look.is_ahead, at_edge=length == 0) for option in _sequences(look.options))
        seen = cat([outside, inner] if look.is_ahead else [inner, outside])
        found.append(seen if look.holds else complement(seen))
    return both(found)


def _looked(sequence: tuple[FlatTerm, ...], is_ahead: bool, *, at_edge: bool) -> Language:
    """Language of the rest of a text that a look-around matches.

    Args:
        sequence: An alternative of it.
        is_ahead: Whether it looks ahead.
        at_edge: Whether it stands where the text begins, or ends for one that looks behind: there
            ``^`` or ``$`` says nothing.
    """
    near, far = (START, END) if is_ahead else (END, START)
    outward = sequence if is_ahead else sequence[::-1]
    if at_edge and outward[:1] == (near,):
        outward = outward[1:]
    is_whole = outward[-1:] == (far,)
    inner = outward[:-1] if is_whole else outward
    parts = [part for part in inner if not isinstance(part, Anchor | LookAround)]
    if len(parts) < len(inner):
        raise PatternError("has a look-around with ^, $ or another one in it")
    rest = [] if is_whole else [ANYTHING]
    return cat([*parts, *rest] if is_ahead else [*rest, *reversed(parts)])
