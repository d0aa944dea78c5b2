"""Masks of grammars allow exactly the tokens that can continue, whatever tokenizer a model has.

Expected masks are made of the vocabulary's own bytes and of plain strings: of a language that is a
set of texts, a token can continue a text if both together begin one of the set.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import MODELS, vocabulary_like

from adapters.chain import ProcessorChain, apply_edits, plan_rows
from adapters.contract import Context
from adapters.grammars.compiler import compile_grammar, walk
from adapters.processors.forcing import ForcedPrefix
from adapters.processors.grammar import Choice, Grammar, GrammarProcessor, JsonSchema, Regex, grammar_cache
from adapters.processors.masks import BannedTokens
from adapters.processors.structural import FORMATS, StructuralTag, ToolCalls
from adapters.vocabulary import Vocabulary

Symbols = tuple[int, ...]
"""An answer: its bytes, and each special token as 256 and its id."""

PROMPT = [1]
NAMES = [name for model in MODELS.values() for name in (*model.special, *model.plain)]


def context_of(name: str) -> Context:
    vocabulary = vocabulary_like(name)
    return Context(vocabulary, end_token_ids=vocabulary.eos_token_ids)


def symbols_of(vocabulary: Vocabulary) -> dict[int, Symbols]:
    """What each token adds to an answer; ids without a token, and byte 255, add nothing."""
    special = vocabulary.special_token_ids - vocabulary.gap_ids
    found: dict[int, Symbols] = {token_id: (256 + token_id,) for token_id in special}
    found |= {i: tuple(text) for i, text in enumerate(vocabulary.token_bytes) if text and text[0] != 0xFF}
    return found


def answer(vocabulary: Vocabulary, text: str, *, named: bool = False) -> Symbols:
    """``text`` as bytes; with ``named``, names of special tokens in it are those tokens."""
    tokenizer: Any = vocabulary.tokenizer
    ids = {tokenizer.convert_ids_to_tokens(i): i for i in vocabulary.special_token_ids} if named else {}
    if not ids:
        return tuple(text.encode())
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text)
    return tuple(symbol for part in parts for symbol in ([256 + ids[part]] if part in ids else part.encode()))


def built(context: Context, *processors: tuple[Any, dict[str, Any]]) -> ProcessorChain:
    found = [one for kind, args in processors for one in kind.build(kind.Args.model_validate(args), context)]
    chain = ProcessorChain(found, context)
    chain.start(PROMPT)
    return chain


def allowed(chain: ProcessorChain) -> set[int]:
    """What a row of equal logits has left."""
    logits = torch.zeros(1, chain.context.vocabulary.size)
    planned, failures = plan_rows([(0, chain)])
    assert not failures, failures
    assert not apply_edits(logits, planned)
    return set(torch.nonzero(logits[0] > -torch.inf).flatten().tolist())


def expected(context: Context, language: Iterable[Symbols], so_far: Symbols) -> set[int]:
    """Tokens that can follow ``so_far``: those of one of the answers, and the ends behind a whole one."""
    rest = {one[len(so_far) :] for one in language if one[: len(so_far)] == so_far}
    found = {
        token_id
        for token_id, symbols in symbols_of(context.vocabulary).items()
        if any(one[: len(symbols)] == symbols for one in rest)
    }
    return (found - context.end_token_ids) | (context.end_token_ids if () in rest else set())


def follow_to_the_end(chain: ProcessorChain, language: set[Symbols], choose: random.Random) -> None:
    """A random way through ``language``; every mask is the expected one."""
    table = symbols_of(chain.context.vocabulary)
    so_far: Symbols = ()
    while True:
        wanted = expected(chain.context, language, so_far)
        if choose.random() < 0.3:
            chain.foresee(16)  # a guess changes nothing
        assert allowed(chain) == wanted, bytes(symbol for symbol in so_far if symbol < 256)
        token_id = choose.choice(sorted(wanted))
        chain.accept(token_id, chain.position)
        if token_id in chain.context.end_token_ids:
            assert so_far in language
            assert allowed(chain) == chain.context.end_token_ids
            return
        so_far += table[token_id]
        if choose.random() < 0.2:
            chain.rewind(chain.position - 1)
            chain.accept(token_id, chain.position)


def segmented(vocabulary: Vocabulary, wanted: Symbols, choose: random.Random) -> list[int]:
    """Tokens that write ``wanted``, in one of all ways."""
    table, found = symbols_of(vocabulary), list[int]()
    while wanted:
        fits = [token_id for token_id, symbols in table.items() if wanted[: len(symbols)] == symbols]
        found.append(choose.choice(fits))
        wanted = wanted[len(table[found[-1]]) :]
    return found


OBJECT = {
    "type": "object",
    "properties": {"name": {"enum": ["the quick", "</think>", "é"]}, "a": {"const": 1}},
    "required": ["name", "a"],
    "additionalProperties": False,
}
OBJECTS = [f'{{"name":"{name}","a":1}}' for name in ("the quick", "</think>", "é")]
LANGUAGES: list[tuple[type[GrammarProcessor], dict[str, Any], list[str]]] = [
    (Choice, {"choices": ["</think>"]}, ["</think>"]),
    (Choice, {"choices": ["the quick brown fox"]}, ["the quick brown fox"]),
    (Choice, {"choices": NAMES}, NAMES),
    (Choice, {"choices": ["<tool_call>", "<tool", " <tool_call> "]}, ["<tool_call>", "<tool", " <tool_call> "]),
    (Choice, {"choices": ["😀", "😁", "é", "中", "\n\n", "  x"]}, ["😀", "😁", "é", "中", "\n\n", "  x"]),
    (JsonSchema, {"schema": {"const": "x</think>y"}}, ['"x</think>y"']),
    (JsonSchema, {"schema": {"enum": ["<tag>", "[tag]", "<｜User｜>"]}}, ['"<tag>"', '"[tag]"', '"<｜User｜>"']),
    (JsonSchema, {"schema": OBJECT}, OBJECTS),
    (Regex, {"pattern": "a</think>[0-9]"}, [f"a</think>{digit}" for digit in range(10)]),
    (Regex, {"pattern": "(the |<table>){2}[é中]?"}, [
        a + b + c for a in ("the ", "<table>") for b in ("the ", "<table>") for c in ("", "é", "中")
    ]),
    (Grammar, {"lark": 'start: "the" [" quick"] x\nx: "<think>" | /[ab]{1,2}/ "\\n"'}, [
        f"the{a}{b}" for a in ("", " quick") for b in ("<think>", *(f"{c}\n" for c in "a b aa ab ba bb".split()))
    ]),
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("kind", "args", "texts"), LANGUAGES, ids=lambda value: getattr(value, "name", ""))
def test_a_mask_is_what_can_continue(model: str, kind: type[GrammarProcessor], args: dict[str, Any], texts: list[str]):
    context = context_of(model)
    language = {answer(context.vocabulary, text) for text in texts}
    for seed in range(8):
        follow_to_the_end(built(context, (kind, args)), language, random.Random(seed))


FRAGMENTS = st.sampled_from([*NAMES, " ", "the", "{", '"', "é", "😀", "<", ">", "|", "\n", "▁", "<0x0A>"])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(MODELS)),
    st.lists(st.lists(FRAGMENTS, min_size=1, max_size=4).map("".join), min_size=1, max_size=6),
    st.sampled_from(["choice", "schema", "lark"]),
    st.randoms(use_true_random=False),
)
def test_a_mask_of_any_texts_is_what_can_continue(model: str, texts: list[str], how: str, choose: random.Random):
    context = context_of(model)
    if how == "choice":
        chain = built(context, (Choice, {"choices": texts}))
    elif how == "schema":
        texts = [text.translate(str.maketrans({'"': "'", "\n": " "})) for text in texts]
        chain, texts = built(context, (JsonSchema, {"schema": {"enum": texts}})), [f'"{text}"' for text in texts]
    else:
        escaped = [text.replace('"', '\\"').replace("\n", "\\n") for text in texts]
        chain = built(context, (Grammar, {"lark": "start: " + " | ".join(f'"{text}"' for text in escaped)}))
    follow_to_the_end(chain, {answer(context.vocabulary, text) for text in texts}, choose)
