"""Arguments of calls as JSON, whatever the notation in which the model writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import TypeAlias

from adapters.calls import Notation
from adapters.calls.xml_values import TAGS, Kind, Tags, may_be_no_string, value_of
from worker.frontdoor.calls.json_text import JSON_WORDS, PYTHON_WORDS, Emit, json_object, json_value
from worker.frontdoor.calls.marks import held_back
from worker.frontdoor.calls.reader import Cut, Mismatch, Reading, TextReader

Kinds: TypeAlias = Mapping[str, Set[Kind]]
"""Types that the schemas of arguments allow, by the names of the arguments."""


def arguments(notation: Notation, reader: TextReader, emit: Emit, end: str, kinds: Kinds) -> Reading[None]:
    """The arguments of one call, handed on as JSON.

    Args:
        notation: Notation in which they are written.
        reader: Stands before them, and afterwards behind them.
        emit: Takes parts of the JSON.
        end: Text behind the arguments, which stays unread.
        kinds: Types of the arguments, for notations with tags.

    Raises:
        Mismatch: they are not in this notation.
        Cut: the text ends before they do.
    """
    if notation == "json":
        yield from json_object(reader, emit)
    elif notation in ("python", "keywords"):
        yield from _keywords(reader, emit, end, PYTHON_WORDS if notation == "python" else JSON_WORDS)
    else:
        yield from _tagged(reader, emit, end, kinds, TAGS[notation])


def _keywords(reader: TextReader, emit: Emit, end: str, words: Mapping[str, str]) -> Reading[None]:
    separator = ""
    emit("{")
    if (yield from reader.peek()) != end[0]:
        while True:
            key = yield from _until(reader, "=")
            emit(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from json_value(reader, emit, words)
            if (yield from reader.peek()) == end[0]:
                break
            separator = yield from reader.one_of([", "])
    emit("}")


def _tagged(reader: TextReader, emit: Emit, end: str, kinds: Kinds, tags: Tags) -> Reading[None]:
    separator = "{"
    while (yield from _follows(reader, tags.open, end)):
        key = yield from _until(reader, tags.opened)
        emit(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        allowed = kinds.get(key, frozenset[Kind]())
        if (yield from _is_json(reader, allowed)):
            yield from _tagged_json(reader, emit, tags.stop)
        elif allowed == {"string"} or (yield from _is_string(reader, tags.stop, allowed)):
            yield from _tagged_string(reader, emit, tags.stop)
        else:
            emit(_json_of((yield from _until(reader, tags.stop)), allowed))
        yield from reader.one_of([tags.rest])
    emit("{}" if separator == "{" else "}")


def _follows(reader: TextReader, text: str, end: str) -> Reading[bool]:
    """Whether ``text`` follows, which is read, rather than ``end``, which is not."""
    found = yield from reader.one_of([text, end])
    if found == end:
        reader.position -= len(end)
    return found == text


def _is_json(reader: TextReader, kinds: Set[Kind]) -> Reading[bool]:
    """Whether the value that follows is JSON, in which a text may hold the tag behind it."""
    if "string" not in kinds:
        return True
    first = yield from reader.peek()
    return (first == "{" and "object" in kinds) or (first == "[" and "array" in kinds)


def _is_string(reader: TextReader, stop: str, kinds: Set[Kind]) -> Reading[bool]:
    """Whether the text up to ``stop`` is a string, as far as that is certain before its end."""
    while reader.find(stop) < 0:
        if not may_be_no_string(reader.ahead[: len(reader.ahead) - held_back(reader.ahead, stop)], kinds):
            return True
        if reader.ended:
            raise Cut
        yield
    return False


def _tagged_json(reader: TextReader, emit: Emit, stop: str) -> Reading[None]:
    """JSON up to ``stop``, which is handed on as it comes."""
    yield from json_value(reader, emit)
    yield from reader.one_of([stop])


def _tagged_string(reader: TextReader, emit: Emit, stop: str) -> Reading[None]:
    """Text up to ``stop``, as a JSON string that is handed on as it comes."""
    emit('"')
    while (at := reader.find(stop)) < 0:
        if reader.ended:
            raise Cut
        emit(_escaped(reader.take(len(reader.ahead) - held_back(reader.ahead, stop))))
        yield
    emit(_escaped(reader.take(at)) + '"')
    reader.take(len(stop))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str, kinds: Set[Kind]) -> str:
    """The JSON of a value between tags. Raises `Mismatch`."""
    try:
        value = value_of(text, kinds)
    except ValueError:
        raise Mismatch from None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else text


def _until(reader: TextReader, stop: str) -> Reading[str]:
    """The text up to ``stop``, which is read too. Raises `Cut`."""
    while (at := reader.find(stop)) < 0:
        if reader.ended:
            raise Cut
        yield
    found = reader.take(at)
    reader.take(len(stop))
    return found
