"""Regular languages as terminals of llguidance's Lark dialect, over the text that JSON writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from adapters.grammars.json_schema.patterns import (
    ANYTHING,
    Alt,
    Both,
    Cat,
    Chars,
    Language,
    Not,
    Ranges,
    Repeat,
    common,
    others,
    ranges_of,
)

_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_PLAIN = others(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))


def terminal(language: Language, *, raw: bool = False) -> str:
    """The JSON strings of its texts, as an expression of a terminal in Lark.

    A character stands for itself; a quotation mark, a backslash and control characters are escaped.

    Args:
        language: The texts.
        raw: The texts themselves, not the JSON strings that they are.
    """
    match language:
        case Both(parts):
            asked = [f"~{_inside(part.inner, raw)}" if isinstance(part, Not) else _inside(part, raw) for part in parts]
            whole = [_quoted(ANYTHING, raw)] if all(isinstance(part, Not) for part in parts) else []
            return " & ".join([*whole, *asked])
        case Not(inner):
            return f"{_quoted(ANYTHING, raw)} & ~{_inside(inner, raw)}"
        case Alt(options) if any(isinstance(option, Both | Not) for option in options):
            return " | ".join(f"({terminal(option, raw=raw)})" for option in options)
    return _quoted(language, raw)


def listed_terminal(values: Iterable[str]) -> str:
    """The JSON strings of ``values``, as `terminal` writes them."""
    options = ["".join(map(_literal_char, value)) for value in values]
    return f'/"{options[0]}"/' if len(options) == 1 else f'/"(?:{"|".join(options)})"/'


def literal(text: str) -> str:
    """Regular expression that matches exactly ``text``."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)


def literal_terminal(text: str) -> str:
    """Expression of a terminal that is ``text``."""
    return f"/{literal(text)}/"


def _literal_char(char: str) -> str:
    return char if char.isascii() and char.isalnum() else _char_regex(((ord(char), ord(char)),))


def _inside(language: Language, raw: bool) -> str:
    return f"({terminal(language, raw=raw)})" if isinstance(language, Both | Not | Alt) else _quoted(language, raw)


def _quoted(language: Language, raw: bool) -> str:
    return f"/{_regex(language, _class) or '(?:)'}/" if raw else f'/"{_regex(language, _char_regex)}"/'


def _regex(language: Language, write: Callable[[Ranges], str]) -> str:
    match language:
        case Chars(ranges):
            return write(ranges)
        case Cat(parts):
            return "".join(_regex(part, write) for part in parts)
        case Alt(options):
            found = "|".join(_regex(option, write) for option in options)
            return f"(?:{found})" if options else r"[^\x00-\x{10FFFF}]"
        case Repeat(inner, low, high):
            return f"(?:{_regex(inner, write)}){_times(low, high)}"
    raise AssertionError(language)


def _times(low: int, high: int | None) -> str:
    usual = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
    return usual or (f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}")


@lru_cache(1_024)
def _char_regex(ranges: Ranges) -> str:
    options = list[str]()
    plain = common(ranges, _PLAIN)
    if plain:
        options.append(_class(plain))
    short = [letter for code, letter in _SHORT.items() if any(low <= code <= high for low, high in ranges)]
    if short:
        options.append(r"\x5C" + _class(ranges_of((ord(letter), ord(letter)) for letter in short)))
    control = [code for code in range(0x20) if any(low <= code <= high for low, high in ranges)]
    if len(control) == 0x20:
        options.append(r"\x5Cu00[01][0-9a-fA-F]")
    else:
        options += [rf"\x5Cu00{code >> 4}{_hex_digit(code & 15)}" for code in control]
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _hex_digit(value: int) -> str:
    digit = f"{value:x}"
    return digit if digit.isdigit() else f"[{digit}{digit.upper()}]"


def _class(ranges: Sequence[tuple[int, int]]) -> str:
    if any(0xD800 <= end <= 0xDFFF for pair in ranges for end in pair):
        ranges = common(tuple(ranges), others(((0xD800, 0xDFFF),)))
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    return f"[{''.join(_char(low) if low == high else f'{_char(low)}-{_char(high)}' for low, high in ranges)}]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else rf"\x{{{code:X}}}"
