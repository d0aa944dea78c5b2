"""JSON values read as they come, and never handed on up to the middle of an escape or a scalar."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from worker.frontdoor.calls.reader import Cut, Mismatch, Reading, TextReader

Emit = Callable[[str], None]
"""Takes the next part of the JSON text."""

JSON_WORDS: Mapping[str, str] = {"true": "true", "false": "false", "null": "null"}
PYTHON_WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}

_SPACE = re.compile(r"[ \t\r\n]+")
_CHARACTERS = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_HIGH = re.compile(r"\\u[dD][89abAB]")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:[.][0-9]+)?(?:[eE][+-]?[0-9]+)?")
_IN_NUMBER = frozenset("+-.0123456789eE")
_IN_WORD = frozenset("abcdefghijklmnopqrstuvwxyzNTF")


def json_value(reader: TextReader, emit: Emit, words: Mapping[str, str] = JSON_WORDS) -> Reading[None]:
    """One JSON value (RFC 8259), handed on to ``emit`` as it comes.

    All that has been handed on at any time ends between two characters of a string or behind a
    token: no escape, pair of surrogates, number or word is cut.

    Args:
        reader: Stands before the value, and afterwards behind it.
        emit: Takes the parts.
        words: Spelling of the three words, and what they are in JSON.

    Raises:
        Mismatch: it is no JSON.
        Cut: the text ends before the value does.
    """
    open_brackets: list[str] = []
    while True:
        first = yield from _next(reader, emit)
        if first in "{[":
            emit(reader.take(1))
            open_brackets.append("}" if first == "{" else "]")
            if (yield from _next(reader, emit)) != open_brackets[-1]:
                if first == "{":
                    yield from _key(reader, emit)
                continue
        elif first == '"':
            yield from json_string(reader, emit)
        else:
            yield from _scalar(reader, emit, words)
        while open_brackets and (yield from _next(reader, emit)) == open_brackets[-1]:
            emit(reader.take(1))
            open_brackets.pop()
        if not open_brackets:
            return
        emit((yield from reader.one_of([","])))
        if open_brackets[-1] == "}":
            yield from _key(reader, emit)


def json_object(reader: TextReader, emit: Emit) -> Reading[None]:
    """One JSON object; see `json_value`."""
    if (yield from reader.peek()) != "{":
        raise Mismatch
    yield from json_value(reader, emit)


def json_string(reader: TextReader, emit: Emit) -> Reading[None]:
    """One JSON string; see `json_value`."""
    emit((yield from reader.one_of(['"'])))
    while True:
        following = yield from reader.peek()
        if following == '"':
            emit(reader.take(1))
            return
        if following == "\\":
            emit((yield from _escape(reader)))
        elif not (characters := reader.matched(_CHARACTERS)):
            raise Mismatch
        else:
            emit(characters)


def _key(reader: TextReader, emit: Emit) -> Reading[None]:
    yield from _next(reader, emit)
    yield from json_string(reader, emit)
    yield from _next(reader, emit)
    emit((yield from reader.one_of([":"])))


def _next(reader: TextReader, emit: Emit) -> Reading[str]:
    """The next character behind white space, which is handed on."""
    while (yield from reader.peek()) in " \t\r\n":
        emit(reader.matched(_SPACE))
    return (yield from reader.peek())


def _escape(reader: TextReader) -> Reading[str]:
    """An escape; two of them for a pair of surrogates."""
    first = yield from _one_escape(reader)
    if _HIGH.match(first) and (yield from reader.peek()) == "\\":
        first += yield from _one_escape(reader)
    return first


def _one_escape(reader: TextReader) -> Reading[str]:
    while not (found := reader.matched(_ESCAPE)):
        if not _ESCAPE_BEGUN.fullmatch(reader.ahead):
            raise Mismatch
        if reader.ended:
            raise Cut
        yield
    return found


def _scalar(reader: TextReader, emit: Emit, words: Mapping[str, str]) -> Reading[None]:
    """A number or a word, whole: it ends where a character follows that cannot be of it."""
    of_number = (yield from reader.peek()) in "-0123456789"
    alphabet = _IN_NUMBER if of_number else _IN_WORD
    text = ""
    while (yield from reader.peek()) in alphabet:
        text += reader.take(1)
    if of_number and _NUMBER.fullmatch(text):
        emit(text)
    elif text in words:
        emit(words[text])
    else:
        raise Mismatch
