"""Log probabilities that a frontend has no place for as JSON data for ``engine_data``: those of a
prompt, and of the end token that an answer does not show. In vLLM's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from adapters.vocabulary import Vocabulary, byte_index
from worker.engines import LEAST_LOGPROB, TokenLogprob

PROMPT_LOGPROBS = "prompt_logprobs"
"""Key of the log probabilities in ``engine_data``, as Dynamo's own workers have it."""

PROMPT_TOKENS = "prompt_tokens"
"""Key of the prompt's tokens in ``engine_data``: a frontend says how many there are, not which."""

END_TOKEN = "end_token"
"""Key of the end token of an answer in ``engine_data``: ``token_id`` and ``logprobs``."""

TokenText = Callable[[int], bytes]
"""Function from a token id to its UTF-8 bytes, those of the name of a special token."""


def token_text(vocabulary: Vocabulary) -> TokenText | None:
    """The texts of a vocabulary's tokens, None without a tokenizer."""
    if vocabulary.tokenizer is None:
        return None
    index = byte_index(vocabulary)
    return lambda token_id: index[token_id] or vocabulary.decode([token_id]).encode()


def scores_json(
    prompt: Sequence[int], positions: Sequence[Sequence[TokenLogprob] | None], text: TokenText | None
) -> dict[str, Any]:
    """The prompt's tokens and their log probabilities.

    A token that is not whole characters has its ``bytes`` too.

    Args:
        prompt: Token ids of the prompt.
        positions: One entry per token: the token itself, then the top-n; None for the first token.
        text: Texts of tokens, None if there are none.
    """
    name = _naming(text)
    return {
        PROMPT_LOGPROBS: [None if entries is None else _position(entries, name) for entries in positions],
        PROMPT_TOKENS: [{"token_id": token_id, **name(token_id)} for token_id in prompt],
    }


def end_json(entries: Sequence[TokenLogprob], text: TokenText | None) -> dict[str, Any]:
    """The end token that an answer does not show.

    Args:
        entries: The token itself, then the top-n.
        text: Texts of tokens, None if there are none.
    """
    name, token_id = _naming(text), entries[0].token_id
    return {END_TOKEN: {"token_id": token_id, **name(token_id), "logprobs": _position(entries, name)}}


def _naming(text: TokenText | None) -> Callable[[int], dict[str, Any]]:
    if text is None:
        return lambda token_id: {}
    return cache(lambda token_id: _shown(text(token_id)))


def _position(entries: Sequence[TokenLogprob], name: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    return {
        str(one.token_id): {"logprob": max(one.logprob, LEAST_LOGPROB), "rank": one.rank, **name(one.token_id)}
        for one in entries
    }


def _shown(text: bytes) -> dict[str, Any]:
    try:
        return {"decoded_token": text.decode()}
    except UnicodeDecodeError:
        return {"decoded_token": text.decode(errors="replace"), "bytes": list(text)}
