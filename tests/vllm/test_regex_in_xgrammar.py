"""Regular expressions that are handed to XGrammar (`plain_regex`), in the XGrammar of vLLM."""

from __future__ import annotations

import re

import torch
import xgrammar
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.trtllm.plain_regex import plain_regex

ALPHABET = 'ab01 -_/.[]{}()"\\\n'
STOP = len(ALPHABET)
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([*ALPHABET, "<stop>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[STOP])
)

CHARS = st.sampled_from(ALPHABET[:-1]).map(re.escape) | st.sampled_from(
    ["[a-b]", "[01_]", r"[\-\]/]", r"\n", r"\x{2E}"]
)
PATTERNS = st.recursive(
    CHARS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}"])).map(lambda it: f"({it[0]}){it[1]}")
    ),
    max_leaves=6,
)


def accepts(matcher: xgrammar.GrammarMatcher, text: str) -> bool:
    """Whether the whole text matches."""
    if not all(matcher.accept_token(ALPHABET.index(char)) for char in text):
        return False
    bits = torch.zeros((1, -(-(STOP + 1) // 32)), dtype=torch.int32)
    if not matcher.fill_next_token_bitmask(bits):  # every token is allowed
        return True
    return bool(int(bits[0, STOP // 32]) >> (STOP % 32) & 1)


@given(pattern=PATTERNS, texts=st.lists(st.text(ALPHABET, max_size=6), min_size=1, max_size=6))
@settings(max_examples=examples(150), deadline=None)
def test_it_means_the_same_there(pattern: str, texts: list[str]) -> None:
    spelled = plain_regex(pattern)
    grammar = COMPILER.compile_regex(spelled)
    there = re.compile(pattern.replace(r"\x{2E}", r"\x2E"))
    for text in texts:
        assert accepts(xgrammar.GrammarMatcher(grammar), text) == bool(there.fullmatch(text)), (spelled, text)
