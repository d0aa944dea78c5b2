"""UTF-8 characters that are split over tokens: where a text may begin without cutting one.

Byte-level and byte-fallback vocabularies write a character in up to four tokens. Forced text that
began between them would leave half a character in the answer, so whatever forces waits for the end
of the character or, where a number of tokens must not be exceeded, keeps room for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from adapters.contract import Ban
from adapters.vocabulary import Address, Vocabulary, vocabulary_at

MOST_MISSING = 3
"""Most bytes of a begun character that can be missing."""

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
    """Bytes that ``beginning``, as `begun` gives it, lacks of a whole character."""
    return length(beginning[0]) - len(beginning) if beginning else 0


def length(lead: int) -> int:
    """Bytes of a character that begins with ``lead``; 1 if none of several bytes does."""
    return 1 + (0xC2 <= lead <= 0xF4) + (0xE0 <= lead <= 0xF4) + (0xF0 <= lead <= 0xF4)


def seconds(lead: int) -> range:
    """Bytes that may follow ``lead`` (Unicode, table 3-7)."""
    return range({0xE0: 0xA0, 0xF0: 0x90}.get(lead, 0x80), {0xED: 0xA0, 0xF4: 0x90}.get(lead, 0xC0))


class SplitCharacters:
    """The tokens of a vocabulary that begin or end inside a character.

    Args:
        pieces: Bytes by id. Empty where they are not known: then every token ends a character.
        address: Of the vocabulary: a copy in another process is made again there.
    """

    def __init__(self, pieces: Sequence[bytes], address: Address | None = None) -> None:
        self._address = address
        self._inner = {i: piece for i, piece in enumerate(pieces) if piece and 0x80 <= piece[0] < 0xC0}
        self._open = {i: begun(piece) for i, piece in enumerate(pieces) if piece and piece[-1] >= 0x80}
        self._open = {i: beginning for i, beginning in self._open.items() if beginning}
        self._fragments = self._inner | {i: pieces[i] for i in self._open}
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
            piece = self._fragments.get(token_id)
            beginning = b"" if piece is None else begun(beginning + piece)
        return beginning

    def room(self, beginning: bytes, left: int) -> Ban | None:
        """The mask that keeps characters completable within the next ``left`` tokens.

        Masked are the tokens after which more bytes of a character would be missing than tokens
        are left: each missing byte can be a token of its own. Behind a beginning that lacks more
        bytes than that, and with ``left`` 0, every token must leave fewer missing than there are
        now.

        Args:
            beginning: What `open_after` gives for the history.
            left: Tokens before the forced ones, this one included.

        Returns:
            None if nothing is to be masked.
        """
        most = max(left, num_missing(beginning)) - 1
        if not 0 <= most < MOST_MISSING or not self._open:
            return None
        key = beginning, most
        if key not in self._bans:
            if len(self._bans) >= _MOST_BANS:
                self._bans.clear()
            self._bans[key] = self._ban(beginning, most)
        return self._bans[key]

    def _ban(self, beginning: bytes, most: int) -> Ban | None:
        banned = {i for i, own in self._open.items() if num_missing(own) > most}
        if beginning:
            for token_id, piece in self._inner.items():
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
