"""`PromptScores`: what the worker says of a prompt, in the forms in which clients get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.frontdoor.completions.openai_logprobs import by_text, text_offsets
from worker.requests.prompt_scores import PROMPT_LOGPROBS, PROMPT_TOKENS

Entry = Mapping[str, Any]


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

    @classmethod
    def taken_from(cls, chunk: dict[str, Any]) -> PromptScores | None:
        """Those in the worker's data of a chunk, which are taken out; None if there are none."""
        nvext = chunk.get("nvext") or {}
        data = nvext.get("engine_data") or {}
        positions, tokens = data.pop(PROMPT_LOGPROBS, None), data.pop(PROMPT_TOKENS, None)
        if "engine_data" in nvext and not data:
            del nvext["engine_data"]
        if "nvext" in chunk and not nvext:
            del chunk["nvext"]
        return None if positions is None or tokens is None else cls(tokens, positions)

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
            for entries in self._within(count)
        ]

    def in_openai_form(self, count: int, text: str) -> dict[str, list[Any]]:
        """The form of OpenAI's completions; the first token's log probability is null.

        Args:
            count: Alternatives per token.
            text: Text of the prompt.
        """
        tokens = [str(one.get("decoded_token", "")) for one in self.tokens]
        logprobs: list[float | None] = []
        tops: list[dict[str, float | None] | None] = []
        for token, here, entries in zip(tokens, self.tokens, self._within(count), strict=True):
            if entries is None:
                logprobs.append(None)
                tops.append(None)
                continue
            logprobs.append(entries[str(here["token_id"])]["logprob"])
            others = ((str(one.get("decoded_token", "")), one["logprob"]) for one in entries.values())
            tops.append(by_text(token, logprobs[-1], others))
        whole = self.text()
        lead = len(whole) - len(text) if whole.endswith(text) else 0
        offsets = text_offsets(map(_bytes, self.tokens), 0, len(text), lead)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def text(self) -> str:
        """The text of all tokens."""
        return b"".join(map(_bytes, self.tokens)).decode(errors="replace")

    def _within(self, count: int) -> list[dict[str, Entry] | None]:
        """The positions with `count` alternatives each, the token itself first."""
        found: list[dict[str, Entry] | None] = []
        for here, entries in zip(self.tokens, self.positions, strict=True):
            if entries is None:
                found.append(None)
                continue
            own = str(here["token_id"])
            ranked = sorted(entries.items(), key=lambda item: (item[0] != own, item[1]["rank"]))
            found.append({token_id: one for token_id, one in ranked if token_id == own or one["rank"] <= count})
        return found


def _bytes(token: Entry) -> bytes:
    parts = token.get("bytes")
    return str(token.get("decoded_token", "")).encode() if parts is None else bytes(parts)
