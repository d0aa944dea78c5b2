"""llguidance's compiler within limits, and a trial run of the compiled grammar.

A sandbox process imports this module without torch and without the rest of `adapters`: it may use
the standard library and llguidance only.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

PROBE_STEPS = 48
"""Tokens that a new grammar is advanced by: some compile cheaply and only explode later."""

MAX_TOKEN_BYTES = 1024
"""Longest token that llguidance's trie can hold, bytes; a longer one is never allowed."""

UNWRITABLE = "no token of this model goes on with a text of it"

_MARK = b"\xff"
_UNFORCED = json.dumps({"name": "no forcing", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'})

_REASON = 160
_QUOTED = re.compile(r'"([^"]*)"?|\(at .*')


def limits_of(vocab_size: int) -> LLParserLimits:
    """llguidance's limits, chosen by measurement: ``docs/decisions/0009-grammar-sandbox.md``.

    Args:
        vocab_size: A step tries the tokens of the vocabulary, so the limits grow with it.
    """
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=200_000,  # about 14 ms
        step_max_items=min(50_000, max(10_000, vocab_size // 2)),
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=500_000,
        verbose_errors=False,  # an error must not repeat the grammar
    )


class GrammarRefused(ValueError):
    """A grammar is malformed, matches nothing or exceeds a limit; the message is one short line."""


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of ``grammar``, which is in llguidance's JSON form.

    Raises:
        GrammarRefused: it is malformed, or matches no text.
    """
    matcher = LLMatcher(tokenizer, _unforced(grammar), limits=limits_of(tokenizer.vocab_size), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarRefused(short_reason(matcher.get_error()))
    return matcher


def _unforced(grammar: str) -> str:
    """``grammar``, so that the model chooses the tokens of a text that is forced.

    An option of one grammar holds for all that are compiled with it: another one is added to their
    list, which the last bracket closes.
    """
    head, bracket, tail = grammar.rpartition("]")
    return f"{head}, {_UNFORCED}{bracket}{tail}"


def walk(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Advance ``matcher`` by `PROBE_STEPS` tokens of one path, or to its end.

    Raises:
        GrammarRefused: a step exceeds `limits_of`, no token of the vocabulary can go on with a text
            of the grammar, or a token that a mask allows does not continue it.
    """
    row = (1 << tokenizer.eos_token) - 1
    for step in range(PROBE_STEPS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & row
        if matcher.is_error():
            raise GrammarRefused(short_reason(matcher.get_error(), UNWRITABLE))
        if not allowed:  # the text is complete, and nothing can follow
            return
        # Spread over the ids, so that the path includes long tokens and rare branches.
        token_id = _next_set_bit(allowed, step * 7919 % tokenizer.vocab_size)
        if not matcher.consume_token(token_id):
            reason = short_reason(matcher.get_error())
            raise GrammarRefused(f"token {token_id} is allowed and cannot be taken: {reason}")


def _next_set_bit(bits: int, start: int) -> int:
    """Index of the first set bit at ``start`` or above it, of the lowest one if there is none."""
    rest = bits >> start
    if not rest:
        rest, start = bits, 0
    return start + (rest & -rest).bit_length() - 1


def short_reason(error: str, no_extension: str = "no text matches it") -> str:
    """The first line of llguidance's message, shortened and without the grammar that it quotes.

    Args:
        error: The message.
        no_extension: Text for llguidance's report that no token is allowed.
    """
    if error.startswith("NoExtension"):
        return no_extension
    lines = error.splitlines() or ["it cannot be compiled"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    line = _QUOTED.sub(lambda found: found[0] if found[1] and len(found[1]) <= 24 else "…", line)
    return line.removeprefix("error: ")[:_REASON]


def byte_tables(tokens: Sequence[bytes]) -> dict[str, Any]:
    """The bytes of every id (`Vocabulary.token_bytes`) as JSON data, for `tokens_of`."""
    return {"tokens": [base64.b64encode(token).decode() for token in tokens]}


def tokens_of(tables: dict[str, Any]) -> list[bytes]:
    """Bytes of every id from `byte_tables`."""
    return [base64.b64decode(token) for token in tables["tokens"]]


def load_tokenizer(tokens: Sequence[bytes]) -> LLTokenizer:
    """llguidance's tokenizer over the bytes of every id; takes half a second for 150,000 tokens.

    It knows what `Vocabulary.token_bytes` says and nothing else: a token is the text of its bytes,
    and one without bytes is no text, and can only be named by its id. Masks have a word of 32 bits
    more than ``tokens`` take, whose first bit is an end token of llguidance's own: each request
    has its own tokens that end an answer.

    Raises:
        ValueError: llguidance reads a token in another way.
    """
    row = -(-len(tokens) // 32) * 32
    texts = [token if is_text(token) else b"" for token in tokens] + [b""] * (row - len(tokens))
    tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(texts)))
    _check_agreement(tokenizer, texts)
    return tokenizer


def is_text(token: bytes) -> bool:
    """Whether llguidance can take a token's bytes as text.

    Byte 255 marks ids there, and is in no UTF-8 text.
    """
    return bool(token) and not token.startswith(_MARK) and len(token) <= MAX_TOKEN_BYTES


def _check_agreement(tokenizer: LLTokenizer, texts: Sequence[bytes]) -> None:
    ids = range(len(texts))
    if tokenizer.decode_bytes(list(ids)) == b"".join(text or b"<[%d]>" % i for i, text in enumerate(texts)) and (
        [tokenizer.eos_token] == tokenizer.eos_tokens == [len(texts)] and not any(map(tokenizer.is_special_token, ids))
    ):
        return
    wrong = [i for i in ids if tokenizer.decode_bytes([i]) != (texts[i] or b"<[%d]>" % i)]
    raise ValueError(f"llguidance {version('llguidance')} reads the tokens {wrong[:5]} of this model otherwise")


class _Tokens:
    """llguidance's tokenizer interface over the bytes of every id.

    It encodes nothing: what a grammar forces is not encoded there (`_unforced`).
    """

    bos_token_id = None
    special_token_ids = ()

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.tokens = [*texts, b""]
        self.eos_token_id = len(texts)

    def __call__(self, text: bytes) -> list[int]:
        return []
