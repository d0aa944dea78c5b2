"""Guided decoding as the PyTorch backend does it: a matcher for each sequence, advanced by the
tokens that come out, whose bitmask is applied before the sampler.

XGrammar is not installed where the stand-in runs. Its regular expressions are read by llguidance,
which is the same language for those that the worker hands over.
"""

from __future__ import annotations

import json
import math
from typing import Any

import llguidance
import llguidance.torch
import torch


class Matchers:
    """Makes matchers of a model. Reads its tokenizer as ``_llguidance_tokenizer_info`` does."""

    def __init__(self, backend: str, model: str, vocab_size: int) -> None:
        from transformers import AutoTokenizer

        self.backend = backend
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        text = tokenizer.backend_tokenizer.to_str()
        self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=tokenizer.eos_token_id)

    def create(self, guide: Any) -> Matcher:
        """Raises `ValueError`, which fails the whole forward."""
        grammar = self._grammar(guide)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise ValueError(f"LLGuidance matcher error: {matcher.get_error()}")
        return Matcher(matcher, self._tokenizer.eos_token, self._tokenizer.vocab_size)

    def _grammar(self, guide: Any) -> str:
        made = llguidance.LLMatcher
        if guide.structural_tag is not None or (self.backend == "xgrammar" and guide.regex is None):
            raise ValueError("Unsupported guide type")
        if guide.json_object:
            return made.grammar_from_json_schema('{"type": "object"}')
        if guide.json is not None:
            return made.grammar_from_json_schema(guide.json if isinstance(guide.json, str) else json.dumps(guide.json))
        if guide.regex is not None:
            return made.grammar_from_regex(guide.regex)
        return made.grammar_from_lark(guide.grammar)


class Matcher:
    """The matcher of one sequence."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_token: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_token = eos_token
        self._bits = torch.empty((1, math.ceil(vocab_size / 32)), dtype=torch.int32)
        self.is_terminated = False

    def accept(self, token_id: int) -> None:
        if self.is_terminated:
            return
        if self._matcher.is_stopped():
            self.is_terminated = accepted = token_id == self._eos_token
        else:
            accepted = self._matcher.try_consume_tokens([token_id]) > 0
        if not accepted:
            raise ValueError(f"failed to accept last new token: {token_id}.")

    def mask(self, row: torch.Tensor) -> None:
        """Leaves the tokens that may follow, in place."""
        if self.is_terminated:
            return
        llguidance.torch.fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self._matcher.is_error():
            raise ValueError(f"LLGuidance matcher error: {self._matcher.get_error()}")
        words = self._bits[0, :, None] >> torch.arange(32, dtype=torch.int32)
        row[~(words & 1).bool().flatten()[: len(row)]] = -math.inf
