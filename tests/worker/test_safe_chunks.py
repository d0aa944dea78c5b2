"""Chunks end where the frontend withholds no text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines import TokenDelta, TokenLogprob
from worker.text.safe_chunks import MAX_HELD, SafeChunks


class Bytes:
    """Token n is byte n."""

    def __getitem__(self, token_id: int) -> bytes:
        return bytes([token_id])


def chunks_of(text: bytes, stops: list[str]) -> list[bytes]:
    """The chunks of a stream of one byte per token, and what is held back at its end."""
    safe = SafeChunks(Bytes(), stops)  # type: ignore[var-annotated]
    sent = [safe.take(TokenDelta([byte])) for byte in text]
    return [bytes(delta.token_ids) for delta in sent if delta is not None]


@given(st.text(max_size=40))
def test_no_chunk_cuts_a_character(text: str) -> None:
    chunks = chunks_of(text.encode(), [])
    assert not any(chunk.decode().endswith("\ufffd") for chunk in chunks)
    assert b"".join(chunks) == text.encode() or text.endswith("\ufffd")


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_chunk_ends_within_what_may_be_a_stop_string(text: str, stops: list[str]) -> None:
    sent = b""
    for chunk in chunks_of(text.encode(), stops):
        sent += chunk
        so_far = sent.decode()
        begun = [stop[:length] for stop in stops for length in range(1, len(stop))]
        assert not any(so_far.endswith(part) for part in begun)
    rest = text[len(sent) :]
    assert not rest or any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def test_an_ignored_stop_string_does_not_hide_anothers_beginning() -> None:
    assert chunks_of(b"abxyz.", ["ab", "xyz!"]) == [b"ab", b"xyz."]


def test_what_is_held_back_goes_with_the_end() -> None:
    safe = SafeChunks(Bytes(), ["END"])  # type: ignore[var-annotated]
    logprobs = [[TokenLogprob(69, -1.0, 1)]]
    assert safe.take(TokenDelta([69], logprobs=logprobs, num_cached_tokens=3, engine_data={"n": 1})) is None
    last = safe.take(TokenDelta([78], logprobs=logprobs, finish_reason="length", engine_data={"n": 2}))
    assert last is not None
    assert (last.token_ids, last.finish_reason, last.num_cached_tokens) == ([69, 78], "length", 3)
    assert (last.logprobs, last.engine_data) == ([*logprobs, *logprobs], {"n": 2})


def test_what_never_is_text_is_sent_all_the_same() -> None:
    assert [len(chunk) for chunk in chunks_of(b"\xff" * (2 * MAX_HELD), [])] == [MAX_HELD, MAX_HELD]


@pytest.mark.parametrize("stops", [[], ["x"]])
def test_plain_text_is_not_held_back(stops: list[str]) -> None:
    assert chunks_of(b"abc", stops) == [b"a", b"b", b"c"]
