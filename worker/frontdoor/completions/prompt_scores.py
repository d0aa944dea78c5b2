"""`WorkerData`: what the worker says beside tokens, in the forms in which clients get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from worker.frontdoor.completions.openai_logprobs import by_text, text_offsets
from worker.frontdoor.nvext import taken_entries
from worker.requests.prompt_scores import END_TOKEN, PROMPT_LOGPROBS, PROMPT_TOKENS

Entry = Mapping[str, Any]


SCORE_BYTES = 512
"""Bytes that count for the log probabilities of a token: those of 64 are read at once."""


def num_scores(chunk: Mapping[str, Any]) -> int:
    """Tokens of the prompt whose log probabilities are in a frontend's chunk."""
    data = (chunk.get("nvext") or {}).get("engine_data") or {}
    return len(data.get(PROMPT_LOGPROBS) or ())


@dataclass(frozen=True, slots=True)
class WorkerData:
    """Part of the worker's data in a chunk that is for the front door.

    Attributes:
        scores: Log probabilities of the prompt, None if they are in another chunk.
        end: The end token of the answer, which it does not show; None if there is none.
    """

    scores: PromptScores | None = None
    end: EndToken | None = None

    @classmethod
    def taken_from(cls, chunk: dict[str, Any]) -> WorkerData:
        """The data of a chunk, which then is without them."""
        positions, tokens, end = taken_entries(chunk, PROMPT_LOGPROBS, PROMPT_TOKENS, END_TOKEN)
        scores = None if positions is None or tokens is None else PromptScores(tokens, positions)
        return cls(scores, None if end is None else EndToken(end))


@dataclass(frozen=True, slots=True)
class EndToken:
    """The end token of an answer.

    Attributes:
        token: ``token_id``, ``decoded_token`` and its ``logprobs`` as those of a prompt's token.
    """

    token: Entry

    def in_openai_form(self, count: int, end: int, *, names_ids: bool = False) -> dict[str, list[Any]]:
        """The form of OpenAI's completions, in which it takes no place in the text.

        Args:
            count: Alternatives.
            end: Length of the text.
            names_ids: Whether the texts of tokens are ``token_id:`` and the id.
        """
        (entries,) = _within([self.token], [self.token["logprobs"]], count)
        assert entries is not None
        logprob, top = _of_position(self.token, entries, names_ids)
        text = _name(self.token["token_id"], self.token, names_ids)
        return {"tokens": [text], "token_logprobs": [logprob], "top_logprobs": [top], "text_offset": [end]}


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The tokens of a prompt and their log probabilities.

    Attributes:
        tokens: ``token_id``, ``decoded_token`` and, for parts of characters, ``bytes`` of each.
        positions: Token id, as text → ``logprob``, ``rank`` and text, of each token itself and of
            its alternatives; None for the first.
    """

    tokens: Sequence[Entry]
    positions: Sequence[Mapping[str, Entry] | None]

    def in_vllm_form(self, count: int) -> list[dict[str, Entry] | None]:
        """A list with null first, then token id → ``logprob``, ``rank`` and ``decoded_token``.

        Args:
            count: Alternatives per token.
        """
        return [
            None
            if entries is None
            else {
                token_id: {"logprob": one["logprob"], "rank": one["rank"], "decoded_token": one.get("decoded_token")}
                for token_id, one in entries.items()
            }
            for entries in _within(self.tokens, self.positions, count)
        ]

    def in_openai_form(self, count: int, text: str, *, names_ids: bool = False) -> dict[str, list[Any]]:
        """The form of OpenAI's completions; the first token's log probability is null.

        Args:
            count: Alternatives per token.
            text: Text of the prompt.
            names_ids: Whether the texts of tokens are ``token_id:`` and the id, whose lengths then
                count in offsets.
        """
        tokens = [_name(one["token_id"], one, names_ids) for one in self.tokens]
        logprobs: list[float | None] = []
        tops: list[dict[str, float | None] | None] = []
        for here, entries in zip(self.tokens, _within(self.tokens, self.positions, count), strict=True):
            logprob, top = (None, None) if entries is None else _of_position(here, entries, names_ids)
            logprobs.append(logprob)
            tops.append(top)
        whole = self.text()
        lead = len(whole) - len(text) if whole.endswith(text) else 0
        offsets = text_offsets(map(_bytes, self.tokens), 0, len(text), lead)
        if names_ids:
            offsets = list(accumulate(map(len, tokens[:-1]), initial=0))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def text(self) -> str:
        """The text of all tokens."""
        return b"".join(map(_bytes, self.tokens)).decode(errors="replace")


def _within(
    tokens: Sequence[Entry], positions: Sequence[Mapping[str, Entry] | None], count: int
) -> list[dict[str, Entry] | None]:
    """The positions with `count` alternatives each, the token itself first."""
    found: list[dict[str, Entry] | None] = []
    for here, entries in zip(tokens, positions, strict=True):
        if entries is None:
            found.append(None)
            continue
        own = str(here["token_id"])
        ranked = sorted(entries.items(), key=lambda item: (item[0] != own, item[1]["rank"]))
        found.append({token_id: one for token_id, one in ranked if token_id == own or one["rank"] <= count})
    return found


def _of_position(here: Entry, entries: Mapping[str, Entry], names_ids: bool) -> tuple[float, dict[str, float | None]]:
    """Log probability of a token, and its entry of ``top_logprobs``."""
    logprob = float(entries[str(here["token_id"])]["logprob"])
    others = ((_name(token_id, one, names_ids), float(one["logprob"])) for token_id, one in entries.items())
    return logprob, by_text(_name(here["token_id"], here, names_ids), logprob, others)


def _name(token_id: int | str, token: Entry, names_ids: bool) -> str:
    """Text of a token in OpenAI's form."""
    return f"token_id:{token_id}" if names_ids else str(token.get("decoded_token", ""))


def _bytes(token: Entry) -> bytes:
    parts = token.get("bytes")
    return str(token.get("decoded_token", "")).encode() if parts is None else bytes(parts)
