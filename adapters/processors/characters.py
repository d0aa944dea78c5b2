"""UTF-8 characters split over tokens: where forced text may begin without cutting one.

Byte-level and byte-fallback vocabularies write a character in up to four tokens. Forced text
between them would leave an incomplete character in the answer, so forcing processors wait for its
end or, under a token limit, reserve room for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from adapters.contract import Ban
from adapters.vocabulary import Address, Vocabulary, vocabulary_at

MOST_MISSING = 3
"""Most bytes that an incomplete character can lack."""

_MOST_BANS = 512


def begun(data: bytes) -> bytes:
    """The incomplete character at the end of ``data``; ``b""`` if it is complete or invalid."""
    for count in range(1, min(MOST_MISSING, len(data)) + 1):
        lead = data[-count]
        if 0x80 <= lead < 0xC0:
            continue
        if count < length(lead) and (count == 1 or data[-count + 1] in seconds(lead)):
            return data[-count:]
        return b""
    return b""


def num_missing(beginning: bytes) -> int:
    """Bytes missing from the incomplete character ``beginning`` (from `begun`)."""
    return length(beginning[0]) - len(beginning) if beginning else 0


def length(lead: int) -> int:
    """Length in bytes of a character with lead byte ``lead``, else 1."""
    return 1 + (0xC2 <= lead <= 0xF4) + (0xE0 <= lead <= 0xF4) + (0xF0 <= lead <= 0xF4)


def seconds(lead: int) -> range:
    """Second bytes that may follow ``lead`` (Unicode, table 3-7)."""
    return range({0xE0: 0xA0, 0xF0: 0x90}.get(lead, 0x80), {0xED: 0xA0, 0xF4: 0x90}.get(lead, 0xC0))


class SplitCharacters:
    """The tokens of a vocabulary that begin or end inside a character.

    Args:
        pieces: Bytes by id. Empty if unknown: then every token ends a character.
        address: Address of the vocabulary, from which pickles are rebuilt in another process.

    Attributes:
        inner: Bytes of the tokens that begin inside a character, by id.
        ends: Incomplete character at the end of each token that has one, by id.
    """

    def __init__(self, pieces: Sequence[bytes], address: Address | None = None) -> None:
        self._address = address
        self.inner = {i: piece for i, piece in enumerate(pieces) if piece and 0x80 <= piece[0] < 0xC0}
        ending = {i: begun(piece) for i, piece in enumerate(pieces) if piece and piece[-1] >= 0x80}
        self.ends = {i: beginning for i, beginning in ending.items() if beginning}
        self._fragments = self.inner | {i: pieces[i] for i in self.ends}
        self._bans: dict[tuple[bytes, int], Ban | None] = {}

    def __reduce__(self) -> tuple[object, ...]:
        if self._address is not None:
            return _split_characters_at, self._address
        return SplitCharacters, (_sparse(self._fragments),)

    def open_after(self, tokens: Sequence[int], begin: int = 0, end: int | None = None) -> bytes:
        """The incomplete character at the end of ``tokens[begin:end]``, ``b""`` if none."""
        end = len(tokens) if end is None else end
        beginning = b""
        for token_id in tokens[max(begin, end - MOST_MISSING) : end]:
            beginning = self.after(beginning, token_id)
        return beginning

    def after(self, beginning: bytes, token_id: int) -> bytes:
        """The incomplete character after ``beginning`` and a token."""
        piece = self._fragments.get(token_id)
        return b"" if piece is None else begun(beginning + piece)

    def room(self, beginning: bytes, left: int) -> Ban | None:
        """The mask that keeps characters completable within the next ``left`` tokens.

        Masks the tokens after which a character would lack more bytes than tokens are left, since
        each missing byte can take one token. If the character already lacks more than that, and
        with ``left`` 0, every token must reduce the number of missing bytes.

        Args:
            beginning: Incomplete character at the end of the history (`open_after`).
            left: Tokens before the forced ones, including this one.

        Returns:
            None if nothing is to be masked.
        """
        most = max(left, num_missing(beginning)) - 1
        if not 0 <= most < MOST_MISSING or not self.ends:
            return None
        key = beginning, most
        if key not in self._bans:
            if len(self._bans) >= _MOST_BANS:
                self._bans.clear()
            self._bans[key] = self._ban(beginning, most)
        return self._bans[key]

    def _ban(self, beginning: bytes, most: int) -> Ban | None:
        banned = {i for i, own in self.ends.items() if num_missing(own) > most}
        if beginning:
            for token_id, piece in self.inner.items():
                banned.discard(token_id)
                if num_missing(begun(beginning + piece)) > most:
                    banned.add(token_id)
        return Ban.of(banned) if banned else None


def _sparse(pieces: dict[int, bytes]) -> list[bytes]:
    return [pieces.get(i, b"") for i in range(max(pieces, default=-1) + 1)]


def split_characters(vocabulary: Vocabulary) -> SplitCharacters:
    """The split characters of a vocabulary, made once."""
    return vocabulary.derived(
        "split characters",
        lambda: SplitCharacters(() if vocabulary.tokenizer is None else vocabulary.token_bytes, vocabulary.address),
    )


def _split_characters_at(*address: object) -> SplitCharacters:
    return split_characters(vocabulary_at(*address))  # type: ignore[arg-type]
