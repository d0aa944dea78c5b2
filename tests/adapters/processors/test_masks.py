"""Allowed and banned tokens and bad words, against transformers and against brute force over the
history.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import NoBadWordsLogitsProcessor, SuppressTokensLogitsProcessor
from vocab_for_tests import (
    END,
    after_rewinding,
    assert_rows_equal,
    context,
    plan_after,
    replayed,
    run_row,
    step_by_step,
    vocabulary,
)

from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.contract import ArgumentError, Context
from adapters.processors.masks import AllowedTokens, BadWords, BannedTokens, WordAutomaton
from adapters.vocabulary import Vocabulary

V, EOS = 37, 5
CONTEXT = Context(Vocabulary(V), end_token_ids=frozenset([EOS]))
few = settings(max_examples=examples(50), deadline=None)
ids = st.lists(st.integers(0, V - 1), min_size=1, max_size=8)
rows = st.lists(st.floats(-30, 30, width=32), min_size=V, max_size=V).map(torch.tensor)
# few tokens, so that words come up, overlap and nest
words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6)
generations = st.lists(st.integers(0, 3), max_size=12)


def allowed(token_ids, facts=CONTEXT, **options):
    return AllowedTokens(AllowedTokens.Args(token_ids=token_ids, **options), facts)


def banned(token_ids, facts=CONTEXT):
    return BannedTokens(BannedTokens.Args(token_ids=token_ids), facts)


def bad_words(facts=CONTEXT, **given_as):
    return BadWords(BadWords.Args(**given_as), facts)


def kept(row):
    return set(torch.nonzero(row > -torch.inf).flatten().tolist())


def after(processor, generated=(), prompt=(1,), facts=CONTEXT):
    chain = ProcessorChain([processor], facts)
    chain.start(prompt, generated)
    return run_row(chain, torch.zeros(facts.vocabulary.size))


# Allowed tokens


@few
@given(ids, rows, st.lists(st.integers(0, V - 1), max_size=4))
def test_allowed_tokens_and_end_tokens_stay_as_they_are(token_ids, row, generated) -> None:
    wanted = torch.full((V,), -torch.inf)
    for token_id in (*token_ids, EOS):
        wanted[token_id] = row[token_id]
    processors = [allowed(token_ids)]
    assert_rows_equal(step_by_step(processors, CONTEXT, [1], generated, row), [wanted] * (len(generated) + 1))


@few
@given(ids, st.sets(st.integers(0, V - 1), max_size=3))
def test_end_tokens_are_allowed_by_allow_end_or_by_being_listed(token_ids, ends) -> None:
    facts = Context(Vocabulary(V), frozenset(ends))
    assert kept(after(allowed(token_ids, facts, allow_end=False), facts=facts)) == set(token_ids)
    assert kept(after(allowed(token_ids, facts), facts=facts)) == {*token_ids, *ends}


def test_without_end_tokens_only_the_listed_ones_are_left() -> None:
    assert kept(after(allowed([0, 31, 36], Context(Vocabulary(V))))) == {0, 31, 36}


def test_padding_cannot_be_allowed() -> None:
    padded = context()
    last = vocabulary().num_tokens - 1
    assert kept(after(allowed([last], padded), facts=padded)) == {last, END}
    with pytest.raises(ArgumentError, match="padding"):
        allowed([last + 1], padded)


def test_masks_that_leave_nothing_fail_the_request() -> None:
    facts = Context(Vocabulary(V))
    chain = ProcessorChain([allowed([3, 4], facts), banned([4, 3, 2], facts)], facts)
    chain.start([1])
    with pytest.raises(ProcessorFailed, match="no token is left") as caught:
        chain.plan()
    assert caught.value.reason == "unsatisfiable"


# Banned tokens


@few
@given(ids, rows, st.lists(st.integers(0, V - 1), max_size=4))
def test_banned_tokens_are_those_that_transformers_suppresses(token_ids, row, generated) -> None:
    wanted = SuppressTokensLogitsProcessor(token_ids)(torch.tensor([[1]]), row.clone().unsqueeze(0))[0]
    processors = [banned(token_ids)]
    expected = [wanted] * (len(generated) + 1)
    assert_rows_equal(step_by_step(processors, CONTEXT, [1], generated, row), expected)
    assert_rows_equal(replayed(processors, CONTEXT, [1], generated, row), expected)


def test_end_tokens_and_padding_may_be_banned() -> None:
    assert EOS not in kept(after(banned([EOS])))
    padded = context()
    assert vocabulary().size - 1 not in kept(after(banned([vocabulary().size - 1], padded), facts=padded))


def test_banning_every_token_is_refused() -> None:
    tokens_only = list(range(vocabulary().num_tokens))
    with pytest.raises(ArgumentError, match="no token of the vocabulary"):
        banned(tokens_only, context())
    assert kept(after(banned(tokens_only[1:], context()), facts=context())) >= {0}


# Bad words


@few
@given(words, generations, rows)
def test_bad_words_are_those_of_transformers(sequences, generated, row) -> None:
    oracle = NoBadWordsLogitsProcessor(sequences)
    expected = [
        oracle(torch.tensor([generated[:k]], dtype=torch.int64), row.clone().unsqueeze(0))[0]
        for k in range(len(generated) + 1)
    ]
    processors = [bad_words(token_ids=sequences)]
    assert_rows_equal(step_by_step(processors, CONTEXT, [0, 1, 2], generated, row), expected)
    assert_rows_equal(replayed(processors, CONTEXT, [0, 1, 2], generated, row), expected)
    assert_rows_equal(after_rewinding(processors, CONTEXT, [0, 1, 2], generated, row), expected)


@few
@given(words, generations)
def test_the_automaton_is_a_search_over_the_history(sequences, history) -> None:
    automaton = WordAutomaton(sequences)
    state = 0
    for token_id in history:
        state = automaton.step(state, token_id)
    ban = automaton.ban(state)
    brute = {w[-1] for w in sequences if len(w) == 1 or history[-(len(w) - 1) :] == w[:-1]}
    assert set(ban.token_ids.tolist() if ban else []) == brute
    if ban:
        assert ban.token_ids.tolist() == sorted(brute)


@few
@given(words, st.integers(0, 2**32 - 1))
def test_no_word_ever_comes_up(sequences, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    chain = ProcessorChain([bad_words(token_ids=sequences)], CONTEXT)
    chain.start([0, 1])
    favourites = torch.zeros(V)
    favourites[:4] = 3.0
    for _ in range(20):
        row = run_row(chain, favourites)
        chain.accept(int(torch.multinomial(row.softmax(0), 1, generator=generator)), chain.position)
    generated = chain.tokens[2:]
    for word in sequences:
        assert all(generated[i : i + len(word)] != word for i in range(len(generated)))


def test_a_word_that_begins_in_the_prompt_is_free() -> None:
    processor = bad_words(token_ids=[[7, 8]])
    assert 8 in kept(after(processor, prompt=[7]))
    assert 8 not in kept(after(processor, [7], prompt=[7]))


@pytest.mark.parametrize("word", ["fox", " fox", "  fox"])
def test_words_are_banned_with_and_without_a_space(word) -> None:
    facts = context()
    encode = vocabulary().encode
    assert encode("fox") != encode(" fox")
    processor = bad_words(facts, words=[word])
    for text in {"fox", " fox", word}:
        *begin, last = encode(text)
        assert last not in kept(after(processor, begin, facts=facts)), text


def test_white_space_is_a_word() -> None:
    row = after(bad_words(context(), words=["\n"]), facts=context())
    assert row.isneginf().nonzero().flatten().tolist() == vocabulary().encode("\n")


def test_a_processor_travels_to_another_process() -> None:
    processor = pickle.loads(pickle.dumps(bad_words(context(), words=["fox", "the lazy dog"])))
    *begin, last = vocabulary().encode(" the lazy dog")
    assert last in plan_after([processor], context(), [1], begin).bans[0].token_ids.tolist()


# Refusals


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"words": ["a"], "token_ids": [[1]]},
        {"words": []},
        {"words": [""]},
        {"words": ["x" * 257]},
        {"words": ["a"] * 1025},
        {"words": "abc"},
        {"token_ids": []},
        {"token_ids": [[]]},
        {"token_ids": [[-1]]},
        {"token_ids": [[2**31]]},
        {"token_ids": [[1.5]]},
        {"token_ids": [["1"]]},
        {"token_ids": [[True]]},
        {"token_ids": [[1] * 129]},
        {"token_ids": [[1]] * 1025},
        {"token_ids": [[1]], "case": False},
    ],
)
def test_bad_words_out_of_bounds(data) -> None:
    with pytest.raises(ValidationError):
        BadWords.Args.model_validate(data)


@pytest.mark.parametrize("kind", [AllowedTokens, BannedTokens])
@pytest.mark.parametrize("token_ids", [[], [-1], [2**31], [1.0], ["1"], [None], [1] * 4097, 3])
def test_id_lists_out_of_bounds(kind, token_ids) -> None:
    with pytest.raises(ValidationError):
        kind.Args(token_ids=token_ids)


@pytest.mark.parametrize("make", [allowed, banned, lambda token_ids: bad_words(token_ids=[[1], token_ids])])
def test_ids_beyond_the_vocabulary_are_refused(make) -> None:
    with pytest.raises(ArgumentError, match=f"between 0 and {V - 1}, got {V}"):
        make([V])


def test_bad_words_that_cannot_be_honoured() -> None:
    with pytest.raises(ArgumentError, match="use banned_tokens"):
        bad_words(token_ids=[[1, 2], [EOS]])
    with pytest.raises(ArgumentError, match="no token of the vocabulary"):
        bad_words(Context(Vocabulary(3)), token_ids=[[0], [1], [2], [1, 2]])
    with pytest.raises(ArgumentError, match="needs a tokenizer"):
        bad_words(words=["a"])


def test_an_end_token_within_a_word_is_fine() -> None:
    assert EOS not in kept(after(bad_words(token_ids=[[3, EOS]]), [3]))
    assert EOS in kept(after(bad_words(token_ids=[[3, EOS]]), [4]))
