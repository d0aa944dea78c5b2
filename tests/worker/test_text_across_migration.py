"""A decoder that starts anew after any chunk makes the same text: chunks end with characters."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from worker.engines import TokenDelta
from worker.text.safe_chunks import SafeChunks

TEXTS = ["plain", "é", "日本", "😀", "a😀b", "\ufffd", "e\u0301"]
PIECES = [bytes([byte]) for byte in range(256)] + [b"", *(text.encode() for text in TEXTS), b"x\xe2\x82", b"\xacy"]
NOTHING, LAST = 256, len(PIECES) - 1


def decoded(ids: Sequence[int]) -> str:
    return b"".join(PIECES[token_id] for token_id in ids).decode(errors="replace")


class FrontendDecoder:
    """As ai-dynamo's frontend decodes; 1.4.2 makes a new one of prompt and answer to migrate."""

    def __init__(self, context: Sequence[int]) -> None:
        self._ids = list(context)
        self._prefix, self._read = max(0, len(self._ids) - 5), len(self._ids)

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        prefix, text = decoded(self._ids[self._prefix : self._read]), decoded(self._ids[self._prefix :])
        if len(text.encode()) <= len(prefix.encode()) or text.endswith("\ufffd"):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text.encode()[len(prefix.encode()) :].decode()


def chunks_of(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The chunks of an answer whose deltas have these sizes, in turn."""
    safe = SafeChunks(PIECES)  # type: ignore[var-annotated]
    chunks = []
    start = turn = 0
    while start < len(ids):
        delta = TokenDelta(list(ids[start : start + sizes[turn % len(sizes)]]))
        start, turn = start + len(delta.token_ids), turn + 1
        whole = safe.take(delta)
        if whole is not None:
            chunks.append(whole.token_ids)
    last = safe.take(TokenDelta(finish_reason="length"))
    assert last is not None
    return [*chunks, last.token_ids]


characters = st.characters(codec="utf-8").map(lambda letter: list(letter.encode()))
tokens = st.one_of(characters, st.integers(0, LAST).map(lambda token_id: [token_id]))
answers = st.lists(tokens, max_size=30).map(lambda parts: [token_id for part in parts for token_id in part])


@given(answers, st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_a_decoder_restarted_after_a_chunk_makes_the_same_text(ids: list[int], sizes: list[int]) -> None:
    prompt = [ord(letter) for letter in "prompt"]
    undisturbed = FrontendDecoder(prompt)
    expected = "".join(undisturbed.step(token_id) for token_id in ids)
    sent: list[int] = []
    text = ""
    for chunk in chunks_of(ids, sizes):
        decoder = FrontendDecoder([*prompt, *sent])  # migrated after every chunk
        text += "".join(decoder.step(token_id) for token_id in chunk)
        sent += chunk
    assert sent == ids
    assert text == expected


def test_what_is_whole_is_sent_at_once() -> None:
    assert chunks_of(list("a€b".encode()), [1]) == [[97], [0xE2, 0x82, 0xAC], [98], []]
    assert chunks_of([LAST - 1, LAST], [1]) == [[LAST - 1, LAST], []]
    assert chunks_of([NOTHING, 97, 0xE2, NOTHING, 0x82, 0xAC], [1])[2:] == [[0xE2, NOTHING, 0x82, 0xAC], []]
