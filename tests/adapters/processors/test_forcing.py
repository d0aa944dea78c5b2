"""Forced answers, beginnings and ends: every answer that a toy model generates has the form that
was asked for.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from vocab_for_tests import (
    END,
    after_rewinding,
    assert_rows_equal,
    context,
    replayed,
    run_row,
    step_by_step,
    vocabulary,
)

from adapters.chain import ProcessorChain, ProcessorFailed, apply_chain
from adapters.contract import ArgumentError, Context, Force
from adapters.processors.forcing import ForcedPrefix, ForcedSequence, ForceLastPhrase, end_token
from adapters.processors.length import MinTokens
from adapters.processors.masks import AllowedTokens, BannedTokens
from adapters.vocabulary import Vocabulary

V = 16
few = settings(max_examples=examples(50), deadline=None)


class Letters:
    """A tokenizer of one token per letter: a is 0, b is 1, ..."""

    def encode(self, text, *, add_special_tokens):
        return [ord(letter) - ord("a") for letter in text if "a" <= letter < chr(ord("a") + V)]

    def convert_ids_to_tokens(self, ids):
        return [chr(ord("a") + i) for i in ids]

    def decode(self, ids, **_):
        return "".join(self.convert_ids_to_tokens(ids))

    def __len__(self):
        return V - 1


def facts(ends=(10,), max_tokens=None, **more):
    vocabulary = Vocabulary(V, Letters(), ends[:1])  # type: ignore[arg-type]
    return Context(vocabulary, end_token_ids=frozenset(ends), max_tokens=max_tokens, **more)


def chain_of(request, *wanted, scopes=None):
    """A chain of ``(class, arguments)``, begun after the prompt [1, 2]."""
    processors, all_scopes = [], []
    for i, (kind, args) in enumerate(wanted):
        built = kind.build(kind.Args(**args), request)
        processors += built
        all_scopes += [scopes[i] if scopes else "all"] * len(built)
    chain = ProcessorChain(processors, request, scopes=all_scopes, step_budget_s=60)  # type: ignore[arg-type]
    chain.start([1, 2])
    return chain


def toy_logits(history, seed, end_bias=0.0, ends=(10,)):
    """A model: a function of the history."""
    random = np.random.default_rng([seed, *history])
    row = torch.tensor(random.normal(0, 2, V), dtype=torch.float32)
    row[list(ends)] += end_bias
    row[V - 1] = -torch.inf  # padding
    return row


def generate(chain, seed, *, temperature=0.0, end_bias=0.0, ends=(10,), limit=60):
    """The answer, with its end token if it has one."""
    random = torch.Generator().manual_seed(seed)
    most = chain.context.max_tokens or limit
    while chain.position - chain.prompt_length < most:
        row = run_row(chain, toy_logits(chain.tokens, seed, end_bias, ends))
        assert not row.isnan().any()
        if temperature == 0:
            token_id = int(row.argmax())
        else:
            token_id = int(torch.multinomial((row / temperature).softmax(0), 1, generator=random))
        chain.accept(token_id, chain.position)
        if token_id in ends:
            break
    return chain.tokens[chain.prompt_length :]


def forced_at(chain, generated):
    chain.start([1, 2], generated)
    return chain.plan().force


# forced_sequence


@few
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 99), st.booleans())
def test_a_forced_sequence_is_the_whole_answer(token_ids, seed, with_end) -> None:
    chain = chain_of(facts(), (ForcedSequence, {"token_ids": [*token_ids, 10] if with_end else token_ids}))
    assert generate(chain, seed, temperature=5.0) == [*token_ids, 10]
    assert forced_at(chain, [*token_ids, 10, 10]) == 10


def test_a_forced_sequence_as_text_follows_the_position() -> None:
    chain = chain_of(facts(), (ForcedSequence, {"text": "cab"}))
    assert [forced_at(chain, [9] * n) for n in (0, 3, 1, 2, 4, 1)] == [2, 10, 0, 1, 10, 0]


def test_a_forced_sequence_of_max_tokens_needs_no_end_token() -> None:
    assert generate(chain_of(facts(max_tokens=3), (ForcedSequence, {"text": "cab"})), 0) == [2, 0, 1]
    with pytest.raises(ArgumentError, match="takes 4 tokens, the answer at most 3"):
        chain_of(facts(max_tokens=3), (ForcedSequence, {"text": "cabc"}))


def test_the_end_token_is_the_model_s_own_before_others() -> None:
    assert end_token(Context(Vocabulary(V, None, [9, 8]), frozenset([3, 9, 8])), "text") == 8
    assert end_token(Context(Vocabulary(V, None, [12]), frozenset([5, 3])), "text") == 3
    with pytest.raises(ArgumentError, match="no end token"):
        end_token(Context(Vocabulary(V)), "token_ids")


# forced_prefix


@few
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 99))
def test_an_answer_begins_with_its_forced_prefix_then_is_free(token_ids, seed) -> None:
    free = ProcessorChain([], facts())
    free.start([1, 2, *token_ids])
    answer = generate(chain_of(facts(), (ForcedPrefix, {"token_ids": token_ids})), seed)
    assert answer[: len(token_ids)] == token_ids
    assert answer[len(token_ids) :] == generate(free, seed)[: len(answer) - len(token_ids)]


def test_a_forced_prefix_may_fill_the_answer_but_not_exceed_it() -> None:
    assert generate(chain_of(facts(max_tokens=3), (ForcedPrefix, {"text": "cab"})), 0) == [2, 0, 1]
    with pytest.raises(ArgumentError, match="takes 4 tokens"):
        chain_of(facts(max_tokens=3), (ForcedPrefix, {"text": "cabc"}))


def test_a_healed_prefix_ends_with_any_token_extending_its_text() -> None:
    spelled = vocabulary().token_bytes
    chain = chain_of(context(), (ForcedPrefix, {"text": "the quick br", "heal": True}))
    ids = vocabulary().encode("the quick br")
    row = torch.zeros(vocabulary().size)
    for i, token_id in enumerate(ids):
        left = b"".join(spelled[each] for each in ids[i:])
        expected = {other for other, text in enumerate(spelled) if text.startswith(left)} | {token_id}
        options = set(torch.nonzero(run_row(chain, row.clone()) > -torch.inf).flatten().tolist())
        assert options == expected
        for other in options - {token_id}:
            chain.accept(other, chain.position)
            assert chain.plan().is_empty
            chain.rewind(chain.position - 1)
            assert not chain.plan().is_empty
        chain.accept(token_id, chain.position)
    assert len(options) > 1
    assert chain.plan().is_empty


def test_healing_needs_token_texts_and_special_tokens_have_none() -> None:
    with pytest.raises(ArgumentError, match="heal: "):
        chain_of(Context(Vocabulary(V)), (ForcedPrefix, {"token_ids": [3], "heal": True}))
    special = context(end_token_ids=frozenset([5]))
    chain = chain_of(special, (ForcedPrefix, {"token_ids": [END], "heal": True}))
    assert chain.plan().permits(END)
    assert not chain.plan().permits(7)


@pytest.mark.parametrize("kind", [ForcedSequence, ForcedPrefix])
def test_steps_rewinds_and_replays_agree(kind) -> None:
    request = facts()
    (processor,) = kind.build(kind.Args(text="cabbage"), request)
    history, row = [2, 0, 1, 1, 0, 6, 4, 10, 3], toy_logits([0], 0)
    steps = step_by_step([processor], request, [1, 2], history, row)
    assert_rows_equal(replayed([processor], request, [1, 2], history, row), steps)
    assert_rows_equal(after_rewinding([processor], request, [1, 2], history, row), steps)


def test_a_forced_token_that_a_mask_forbids_is_unsatisfiable() -> None:
    chain = chain_of(facts(), (ForcedPrefix, {"text": "cab"}), (BannedTokens, {"token_ids": [0]}))
    assert forced_at(chain, []) == 2
    with pytest.raises(ProcessorFailed, match="forces token 0, which another processor forbids"):
        forced_at(chain, [2])


def test_two_that_force_different_tokens_are_unsatisfiable() -> None:
    chain = chain_of(facts(), (ForcedPrefix, {"text": "ca"}), (ForcedSequence, {"text": "cb"}))
    assert forced_at(chain, []) == 2
    with pytest.raises(ProcessorFailed, match="forces token 1 where forced_prefix forces 0"):
        forced_at(chain, [2])


# force_last_phrase


def assert_ends_with(answer, phrase, ends=(10,)):
    """Free tokens without an end token and without the phrase's first; the phrase; one end
    token.
    """
    free, last, end = answer[: -len(phrase) - 1], answer[-len(phrase) - 1 : -1], answer[-1]
    assert last == phrase
    assert end in ends
    assert phrase[0] not in free
    assert not set(ends) & set(free)


phrases = st.text("abcdefg", min_size=1, max_size=5)


@few
@given(phrases, st.integers(0, 999), st.sampled_from([0.0, 0.7, 1.0, 3.0]), st.integers(-6, 6), st.integers(6, 30))
def test_every_answer_ends_with_the_phrase(text, seed, temperature, end_bias, max_tokens) -> None:
    """Whether the model wants to end at once or never, greedy or hot."""
    chain = chain_of(facts(max_tokens=max_tokens), (ForceLastPhrase, {"text": text}))
    answer = generate(chain, seed, temperature=temperature, end_bias=end_bias)
    assert_ends_with(answer, Letters().encode(text, add_special_tokens=False))
    assert len(answer) <= max_tokens


@few
@given(phrases, st.integers(0, 999), st.sampled_from([(10,), (10, 12), (10, 11, 12, 13)]))
def test_a_greedy_answer_ends_where_it_would_have_ended(text, seed, ends) -> None:
    """Without the phrase's first token, that is."""
    phrase = Letters().encode(text, add_special_tokens=False)
    plain = chain_of(facts(ends), (BannedTokens, {"token_ids": phrase[:1]}))
    *free, _end = generate(plain, seed, end_bias=3.0, ends=ends)
    answer = generate(chain_of(facts(ends), (ForceLastPhrase, {"text": text})), seed, end_bias=3.0, ends=ends)
    assert answer == [*free, *phrase, 10]


@few
@given(st.integers(0, 9999), st.sampled_from([(10,), (3, 10), (10, 11, 12)]), st.integers(-8, 8))
def test_the_first_token_has_the_probability_of_the_end_tokens(seed, ends, end_bias) -> None:
    row = toy_logits([seed], seed, end_bias, ends)
    chain = chain_of(facts(ends), (ForceLastPhrase, {"text": "ab"}))
    after = run_row(chain, row)
    assert after[list(ends)].eq(-torch.inf).all()
    others = [i for i in range(V) if i != 0 and i not in ends]
    assert torch.equal(after[others], row[others])
    mass, best = float(row[list(ends)].double().logsumexp(0)), float(row[others].max())
    alone = float(row[list(ends)].max()) >= best
    if alone or mass < best:
        assert float(after[0]) == pytest.approx(mass, abs=1e-5)
    else:
        assert best - 1e-5 < float(after[0]) < best
    assert (int(after.argmax()) == 0) == alone
    if len(ends) == 1:
        assert after[0] == row[ends[0]]


def test_without_a_token_but_ends_the_phrase_begins() -> None:
    row = torch.full((V,), -torch.inf)
    row[10], row[0] = -3.0, -50.0
    after = run_row(chain_of(facts(), (ForceLastPhrase, {"text": "ab"})), row)
    assert torch.isfinite(after).nonzero().flatten().tolist() == [0]
    assert after[0] == -3.0


def test_end_tokens_that_a_mask_forbids_do_not_begin_the_phrase() -> None:
    chain = chain_of(facts(), (ForceLastPhrase, {"text": "ab"}), (MinTokens, {"n": 5}))
    answer = generate(chain, 3, end_bias=50.0)
    assert_ends_with(answer, [0, 1])
    assert len(answer) == 5 + 3


def test_a_phrase_cannot_begin_with_a_token_that_a_mask_forbids() -> None:
    chain = chain_of(facts(), (ForceLastPhrase, {"text": "ab"}), (BannedTokens, {"token_ids": [0]}))
    row = run_row(chain, toy_logits([1], 1, end_bias=50.0))
    assert row[0] == row[10] == -torch.inf
    assert torch.isfinite(row).any()
    only_the_end = chain_of(facts(), (ForceLastPhrase, {"text": "ab"}), (AllowedTokens, {"token_ids": [10]}))
    with pytest.raises(ProcessorFailed, match="force_last_phrase: left no token"):
        run_row(only_the_end, toy_logits([1], 1))


def test_the_phrase_is_forced_when_there_is_room_for_no_more() -> None:
    chain = chain_of(facts(max_tokens=6), (ForceLastPhrase, {"text": "abc"}))
    assert [forced_at(chain, [9] * n) for n in (0, 1, 2)] == [None, None, 0]
    assert [forced_at(chain, [9, 0, *[1, 2, 10][:n]]) for n in range(4)] == [1, 2, 10, 10]


def test_there_must_be_room_for_the_phrase_and_the_end() -> None:
    assert generate(chain_of(facts(max_tokens=4), (ForceLastPhrase, {"text": "abc"})), 0) == [0, 1, 2, 10]
    with pytest.raises(ArgumentError, match="takes 4 tokens, the answer at most 3"):
        chain_of(facts(max_tokens=3), (ForceLastPhrase, {"text": "abc"}))
    chain = chain_of(facts(max_tokens=6), (ForceLastPhrase, {"text": "abc"}))
    with pytest.raises(ProcessorFailed, match="take 4 tokens, 3 are left"):
        forced_at(chain, [9, 9, 9])


@few
@given(phrases, st.lists(st.integers(0, 9), max_size=12))
def test_the_phrase_is_a_function_of_the_history(text, history) -> None:
    request = facts(max_tokens=40)
    processors = ForceLastPhrase.build(ForceLastPhrase.Args(text=text), request)
    row = toy_logits([7], 7)
    steps = step_by_step(processors, request, [1, 2], history, row)
    assert_rows_equal(replayed(processors, request, [1, 2], history, row), steps)
    assert_rows_equal(after_rewinding(processors, request, [1, 2], history, row), steps)
    phrase = [*Letters().encode(text, add_special_tokens=False), 10]
    for n, after in enumerate(steps):
        done = n - history.index(phrase[0]) if phrase[0] in history[:n] else 0
        forced = torch.isfinite(after).nonzero().flatten().tolist()
        assert forced == [phrase[min(done, len(phrase) - 1)]] if done else len(forced) > 1


def test_the_prompt_does_not_begin_the_phrase() -> None:
    chain = chain_of(facts(), (ForceLastPhrase, {"text": "ab"}))
    chain.start([0, 0, 1])
    assert chain.plan().force is None


def test_the_last_phrase_of_an_answer_accounts_for_its_thinking() -> None:
    request = facts(max_tokens=10, think_start=(13,), think_end=(14,))
    chain = chain_of(request, (ForceLastPhrase, {"text": "abc"}), scopes=["answer"])
    thinking = [13, 0, 9, 9]  # the first token of the phrase may be thought
    assert forced_at(chain, [*thinking, 14]) is None
    assert forced_at(chain, [*thinking, 14, 9]) == 0
    chain.rewind(chain.position - 1)
    assert chain.plan().force is None
    chain.accept(9, chain.position)
    assert chain.plan().force == 0
    assert forced_at(chain, [*thinking, 14, 9, 0, 1]) == 2
    with pytest.raises(ProcessorFailed, match="3 are left"):
        forced_at(chain, [*thinking, 9, 9, 14])
    chain.rewind(chain.prompt_length)
    assert chain.plan().force is None


def test_thinking_does_not_end_before_the_phrase_of_the_answer() -> None:
    request = facts(think_start=(13,), think_end=(14,))
    chain = chain_of(request, (ForceLastPhrase, {"text": "abc"}), scopes=["answer"])
    chain.start([1, 13])
    row = toy_logits([1], 1)
    after = run_row(chain, row)
    assert (after != row).nonzero().flatten().tolist() == [10]
    assert after[10] == -torch.inf


def test_the_row_of_tensorrt_llm_gets_the_same() -> None:
    row = toy_logits([4], 4)
    batched = run_row(chain_of(facts(), (ForceLastPhrase, {"text": "ab"})), row)
    assert apply_chain(chain_of(facts(), (ForceLastPhrase, {"text": "ab"})), row)
    assert torch.equal(row, batched)


def test_with_a_real_tokenizer_and_in_another_process() -> None:
    request = context(max_tokens=40)
    built = ForceLastPhrase.build(ForceLastPhrase.Args(text="\nthe fox sleeps."), request)
    processors = pickle.loads(pickle.dumps(built))
    chain = ProcessorChain(processors, request, step_budget_s=60)
    chain.start(vocabulary().encode("A."))
    random = torch.Generator().manual_seed(0)
    while chain.tokens[-1] != END:
        row = torch.randn(vocabulary().size, generator=random)
        row[vocabulary().num_tokens :] = -torch.inf
        chain.accept(int(run_row(chain, row).argmax()), chain.position)
    assert chain.position - chain.prompt_length <= 40
    assert vocabulary().decode(chain.tokens).endswith("\nthe fox sleeps.<|end|>")


# Refusals


@pytest.mark.parametrize("kind", [ForcedSequence, ForcedPrefix])
@pytest.mark.parametrize(
    "data",
    [
        {},
        {"text": "a", "token_ids": [1]},
        {"text": ""},
        {"text": "a" * 4097},
        {"text": 1},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [2**31]},
        {"token_ids": [1.5]},
        {"token_ids": ["1"]},
        {"token_ids": [1] * 4097},
        {"token_ids": [1], "times": 2},
    ],
)
def test_phrases_out_of_bounds(kind, data) -> None:
    with pytest.raises(ValidationError):
        kind.Args.model_validate(data)


@pytest.mark.parametrize("data", [{}, {"text": ""}, {"text": "a" * 4097}, {"text": None}, {"token_ids": [1]}])
def test_last_phrases_out_of_bounds(data) -> None:
    with pytest.raises(ValidationError):
        ForceLastPhrase.Args.model_validate(data)


@pytest.mark.parametrize(
    ("kind", "args", "problem"),
    [
        (ForcedSequence, {"token_ids": [V]}, "between 0 and 15, got 16"),
        (ForcedSequence, {"token_ids": [1, V - 1]}, "padding"),
        (ForcedSequence, {"token_ids": [1, 10, 2]}, "token 1, id 10, would end the answer"),
        (ForcedPrefix, {"token_ids": [V - 1]}, "padding"),
        (ForcedPrefix, {"token_ids": [1, 10]}, "would end the answer"),
        (ForceLastPhrase, {"text": "ak"}, "would end the answer"),
        (ForceLastPhrase, {"text": "ap"}, "padding"),
    ],
)
def test_phrases_that_cannot_be_honoured(kind, args, problem) -> None:
    with pytest.raises(ArgumentError, match=problem) as caught:
        kind.build(kind.Args(**args), facts())
    assert caught.value.argument in args


@pytest.mark.parametrize("kind", [ForcedSequence, ForceLastPhrase])
def test_an_end_token_is_needed(kind) -> None:
    with pytest.raises(ArgumentError, match="no end token"):
        kind.build(kind.Args(text="ab"), Context(Vocabulary(V, Letters())))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ForcedSequence, ForcedPrefix, ForceLastPhrase])
def test_text_needs_a_tokenizer_and_tokens(kind) -> None:
    ends = frozenset([10])
    with pytest.raises(ArgumentError, match="needs a tokenizer"):
        kind.build(kind.Args(text="ab"), Context(Vocabulary(V), ends))
    with pytest.raises(ArgumentError, match="text: 'aB' cannot be written in tokens of this model"):
        kind.build(kind.Args(text="aB"), Context(Vocabulary(V, Letters()), ends))  # type: ignore[arg-type]


def test_edits_are_prepared() -> None:
    processor = ForcedPrefix(ForcedPrefix.Args(text="ab"), facts())
    processor.start([1])
    assert processor.edit() is processor.edit()
    assert processor.edit() == Force(0)
