"""llguidance's compiler within limits, and a trial run of the compiled grammar.

A sandbox process imports this module without torch and without the rest of `adapters`: it may use
the standard library and llguidance only.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

PROBE_STEPS = 48
"""Tokens that a new grammar is advanced by: some compile cheaply and only explode later."""

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
    matcher = LLMatcher(tokenizer, grammar, limits=limits_of(tokenizer.vocab_size), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarRefused(short_reason(matcher.get_error()))
    return matcher


def walk(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Advance ``matcher`` by `PROBE_STEPS` tokens of one path, or to its end.

    Raises:
        GrammarRefused: a step exceeds `limits_of`, or no token of the vocabulary can begin a text
            of the grammar.
    """
    ends = 0
    for token_id in tokenizer.eos_tokens:
        ends |= 1 << token_id
    for step in range(PROBE_STEPS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~ends
        if matcher.is_error():
            raise GrammarRefused(short_reason(matcher.get_error()))
        if not allowed:
            if step == 0 and not matcher.is_accepting():
                raise GrammarRefused("no token of this model can begin a text of it")
            return
        # Spread over the ids, so that the path includes long tokens and rare branches.
        matcher.try_consume_tokens([_next_set_bit(allowed, step * 7919 % tokenizer.vocab_size)])


def _next_set_bit(bits: int, start: int) -> int:
    """Index of the first set bit at ``start`` or above it, of the lowest one if there is none."""
    rest = bits >> start
    if not rest:
        rest, start = bits, 0
    return start + (rest & -rest).bit_length() - 1


def short_reason(error: str) -> str:
    """The first line of llguidance's message, shortened and without the grammar that it quotes."""
    if error.startswith("NoExtension"):
        return "no text matches it"
    lines = error.splitlines() or ["it cannot be compiled"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    line = _QUOTED.sub(lambda found: found[0] if found[1] and len(found[1]) <= 24 else "…", line)
    return line.removeprefix("error: ")[:_REASON]


def hugging_face_tables(tokenizer_json: str, size: int, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """A Hugging Face tokenizer as JSON data for `load_tokenizer`.

    Args:
        tokenizer_json: Its ``tokenizer.json``.
        size: Width of a row of logits.
        eos_token_ids: Ids that end an answer; the tokenizer's own if there are none.
    """
    return {"json": tokenizer_json, "size": size, "eos_token_ids": list(eos_token_ids)}


def byte_tables(
    tokens: Sequence[bytes], special_token_ids: Sequence[int], eos_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Any other tokenizer as JSON data for `load_tokenizer`: the bytes of every id."""
    return {
        "tokens": [base64.b64encode(token).decode() for token in tokens],
        "special_token_ids": list(special_token_ids),
        "eos_token_ids": list(eos_token_ids),
    }


def load_tokenizer(tables: dict[str, Any]) -> LLTokenizer:
    """llguidance's tokenizer of ``tables``; takes about a second for 150,000 tokens.

    Raises:
        ValueError: llguidance cannot read them.
    """
    end = tables["eos_token_ids"] or None
    if "json" in tables:
        return LLTokenizer(tables["json"], n_vocab=tables["size"], eos_token=end)
    return LLTokenizer(TokenizerWrapper(_Bytes(tables)), eos_token=end)


class _Bytes:
    """llguidance's tokenizer interface over the bytes of every id.

    It encodes greedily, which only affects hints about forced text, not used here.
    """

    bos_token_id = None

    def __init__(self, tables: dict[str, Any]) -> None:
        self.special_token_ids: list[int] = tables["special_token_ids"]
        self.eos_token_id = min(tables["eos_token_ids"], default=0)
        special = set(self.special_token_ids)
        texts = [base64.b64decode(token) for token in tables["tokens"]]
        self.tokens = [b"<|%d|>" % i if i in special else text for i, text in enumerate(texts)]
        self._ids = {text: i for i, text in enumerate(texts) if text and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        return list(self._greedy(text))

    def _greedy(self, text: bytes) -> Iterator[int]:
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                found = self._ids.get(text[start:end])
                if found is not None:
                    yield found
                    break
            else:
                end = start + 1
            start = end
