"""A whole answer is put together of its chunks in proportion to their number, not to its square."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.frontdoor.answers import ParsedAnswer
from worker.frontdoor.chat_stream import assembled
from worker.frontdoor.messages.message import whole_message
from worker.frontdoor.returned_tokens import join_returned, joined_nvext

MANY = 1000


class Piece(str):
    """Text that counts the characters that are copied where it is put behind others."""

    num_copied = 0

    def __radd__(self, other: str) -> str:
        Piece.num_copied += len(other)
        return "".join((other, self))


class Pieces(list[Any]):
    """The same for items of lists."""

    def __radd__(self, other: list[Any]) -> list[Any]:
        Piece.num_copied += len(other)
        return [*other, *self]


class Bytes(bytes):
    """The same for bytes."""

    def __radd__(self, other: bytes) -> bytes:
        Piece.num_copied += len(other)
        return b"".join((other, self))


@pytest.fixture(autouse=True)
def _uncounted() -> None:
    Piece.num_copied = 0


def parsed_answer() -> ParsedAnswer:
    async def made() -> ParsedAnswer:
        return ParsedAnswer(None, 0)  # type: ignore[arg-type]

    return asyncio.run(made())


def call_of(text: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "id": "a", "function": {"name": None, "arguments": Piece(text)}}]}


def chunk_of(**choice: Any) -> dict[str, Any]:
    return {"id": "a", "choices": [{"index": 0, **choice}]}


def events_of(kind: str, name: str) -> Iterator[dict[str, Any]]:
    block = {"type": "tool_use", "input": {}} if name == "partial_json" else {"type": kind, name: ""}
    yield {"type": "message_start", "message": {}}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    for _ in range(MANY):
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "a", name: Piece("1")}}


@pytest.mark.parametrize(
    "chunk",
    [
        chunk_of(delta={"content": Piece("1")}),
        chunk_of(delta={"reasoning_content": Piece("1")}),
        chunk_of(delta=call_of("1")),
        chunk_of(logprobs={"content": Pieces([1])}),
        chunk_of(token_ids=Pieces([1]), prompt_token_ids=Pieces([1])),
        chunk_of(train_logprobs={key: Pieces([1]) for key in ("raw", "tempered", "processed", "log_mass")}),
        {**chunk_of(), "nvext": {"completion_token_ids": Pieces([1])}},
    ],
)
def test_chunks_of_a_chat_are_copied_once(chunk: dict[str, Any]) -> None:
    assert str(assembled([chunk] * MANY)).count("1") >= MANY
    assert Piece.num_copied < 20 * MANY


@pytest.mark.parametrize("name", ["text", "thinking", "partial_json"])
def test_events_of_a_message_are_copied_once(name: str) -> None:
    (block,) = whole_message(events_of(name, name))["content"]
    assert str(block).count("1") == MANY
    assert Piece.num_copied < 20 * MANY


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=5))
def test_chunks_stay_as_they_are(parts: list[list[int]]) -> None:
    """What has been joined shares no list with them, not even with the first."""
    chunks = [{**chunk_of(token_ids=part, logprobs={"content": part}), "nvext": None} for part in parts]
    given_parts = [list(part) for part in parts]
    choice: dict[str, Any] = {}
    extension: dict[str, Any] | None = None
    for part in parts:
        join_returned(choice, {"token_ids": part})
        extension = joined_nvext(extension, {"completion_token_ids": part})
    (found,) = assembled(chunks)["choices"]
    assert parts == given_parts
    whole = [one for part in parts for one in part]
    assert choice["token_ids"] == found["token_ids"] == (found["logprobs"] or {"content": []})["content"] == whole
    assert extension == {"completion_token_ids": whole}


@given(st.lists(st.sampled_from([b"a", b"\n", b"b\n", b"\nc", b"\n\n"])), st.sets(st.integers(0, 20)))
def test_events_are_the_same_however_they_come(pieces: list[bytes], reads: set[int]) -> None:
    answer, found = parsed_answer(), list[bytes]()
    for number, piece in enumerate(pieces):
        answer.take(piece)
        found += answer.taken_events() if number in reads else []
        assert answer.num_bytes == len(answer.body)
    found += answer.taken_events()
    assert [*found, answer.body] == b"".join(pieces).split(b"\n\n")


def test_a_body_is_joined_once() -> None:
    answer = parsed_answer()
    for _ in range(MANY):
        answer.take(Bytes(b"1"))
        answer.taken_events()
    assert answer.num_bytes == MANY
    assert answer.body == b"1" * MANY
    assert Piece.num_copied < 20 * MANY
