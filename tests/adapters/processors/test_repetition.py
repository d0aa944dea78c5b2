"""n-grams, DRY and loops against transformers and against brute force over the history."""

from __future__ import annotations

import functools
import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import NoRepeatNGramLogitsProcessor
from vocab_for_tests import END, assert_rows_equal, context, plan_after, replayed, run_row, step_by_step, vocabulary

from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.contract import ArgumentError, Bias, Context, Force
from adapters.processors import repetition
from adapters.processors.dry import Dry
from adapters.processors.ngrams import PromptNgrams, draw_base
from adapters.processors.penalties import RepetitionPenalty
from adapters.processors.repetition import LoopStop, NoRepeatNgram
from adapters.processors.suffix_states import SuffixStates
from adapters.processors.suffixes import SuffixAutomaton
from adapters.processors.truncation import Temperature
from adapters.vocabulary import Vocabulary

few = settings(max_examples=examples(50), deadline=None)
PLAIN = Context(Vocabulary(12), end_token_ids=frozenset([9, 7]))
ROW = torch.linspace(-3, 3, 12)
tokens = st.lists(st.integers(0, 3), max_size=14)


# No repeated n-grams


@given(
    prompt=tokens, generated=tokens, n=st.integers(1, 5), over=st.sampled_from(["prompt_and_generated", "generated"])
)
@few
def test_no_repeat_ngram_is_that_of_transformers(prompt, generated, n, over) -> None:
    processor = NoRepeatNgram(NoRepeatNgram.Args(n=n, over=over), PLAIN)
    reference = NoRepeatNGramLogitsProcessor(n)
    expected = []
    for k in range(len(generated) + 1):
        history = (prompt if over == "prompt_and_generated" else []) + generated[:k]
        expected.append(reference(torch.tensor([history], dtype=torch.int64), ROW.unsqueeze(0).clone())[0])
    assert_rows_equal(replayed([processor], PLAIN, prompt, generated, ROW), expected)
    assert_rows_equal(step_by_step([processor], PLAIN, prompt, generated, ROW), expected)


@given(prompt=tokens, generated=tokens, n=st.integers(1, 5), base=st.sampled_from([1, 2**32 + 1, 2**63 + 1]))
@example(prompt=[1, 2, 3, 0], generated=[2, 1], n=3, base=1)  # the hash of 1, 2 is that of 2, 1
@few
def test_no_repeat_ngram_tells_ngrams_of_equal_hashes_apart(prompt, generated, n, base) -> None:
    """To these bases most n-grams of small ids have the same hash as others."""
    with mock.patch.object(repetition, "PromptNgrams", functools.partial(PromptNgrams, base=base)):
        processor = NoRepeatNgram(NoRepeatNgram.Args(n=n), PLAIN)
        reference, expected = NoRepeatNGramLogitsProcessor(n), []
        for k in range(len(generated) + 1):
            history = torch.tensor([prompt + generated[:k]], dtype=torch.int64)
            expected.append(reference(history, ROW.unsqueeze(0).clone())[0])
        assert_rows_equal(step_by_step([processor], PLAIN, prompt, generated, ROW), expected)


@given(prompt=tokens, length=st.integers(0, 4), base=st.sampled_from([1, 3, draw_base()]))
@few
def test_an_index_of_ngrams_finds_what_a_search_finds(prompt, length, base) -> None:
    index = PromptNgrams(np.array(prompt, dtype=np.int64), length, base)
    places = range(max(0, len(prompt) - length))
    for place in places:
        gram, behind, before = prompt[place : place + length], 0, 0
        for i, token in enumerate(prompt[: place + length]):
            before = behind if i == place else before
            behind = index.head(behind, token)
        before = behind if not length else before
        same = [i for i in places if prompt[i : i + length] == gram]
        followers = list(dict.fromkeys(prompt[i + length] for i in same))
        assert index.find(index.window(before, behind)) == (same[0], followers)


@given(moves=st.lists(st.tuples(st.integers(0, 1), st.integers(-8, 8)), max_size=12), n=st.integers(1, 4))
@few
def test_no_repeat_ngram_forgets_what_is_taken_back(moves, n) -> None:
    processor, history = NoRepeatNgram(NoRepeatNgram.Args(n=n), PLAIN), [0, 1, 0, 1]
    processor.start(history)
    for token, count in moves:
        if count < 0:
            del history[max(4, len(history) + count) :]
            processor.rewind(len(history))
        for i in range(count):
            history.append((token + i // 2) % 3)
            processor.accept(history[-1], len(history) - 1)
        fresh = NoRepeatNgram(NoRepeatNgram.Args(n=n), PLAIN)
        fresh.start(history)
        banned, expected = (
            [] if (edit := one.edit()) is None else edit.token_ids.tolist() for one in (processor, fresh)
        )
        assert sorted(banned) == sorted(expected)


def test_no_repeat_ngram_prepares_the_ids_once() -> None:
    processor = NoRepeatNgram(NoRepeatNgram.Args(n=1), PLAIN)
    processor.start([1, 2])
    first = processor.edit()
    assert processor.edit() is first
    processor.accept(5, 2)
    assert processor.edit().token_ids.tolist() == [1, 2, 5]
    assert first.token_ids.tolist() == [1, 2]
    processor.accept(5, 3)
    processor.rewind(2)
    assert processor.edit().token_ids.tolist() == [1, 2]


def test_no_repeat_ngram_says_when_nothing_is_left() -> None:
    narrow = Context(Vocabulary(3))
    chain = ProcessorChain([NoRepeatNgram(NoRepeatNgram.Args(n=1), narrow)], narrow)
    chain.start([0, 1, 2])
    with pytest.raises(ProcessorFailed, match="every token would repeat"):
        chain.plan()


def test_no_repeat_ngram_never_edits_ids_beyond_the_row() -> None:
    plan = plan_after([NoRepeatNgram(NoRepeatNgram.Args(n=1), PLAIN)], PLAIN, [1, 99], [])
    assert plan.bans[0].token_ids.tolist() == [1]


# The automaton


def brute_followers(history, shortest, depth):
    longest = {}
    for place in range(len(history)):
        length = 0
        while length < min(place, depth) and history[place - 1 - length] == history[len(history) - 1 - length]:
            length += 1
        if length >= shortest:
            longest[history[place]] = max(longest.get(history[place], 0), length)
    return longest


@given(history=st.lists(st.integers(0, 2), max_size=60), shortest=st.integers(1, 3), extra=st.integers(0, 4))
@example(history=[1] * 40, shortest=1, extra=2)
@settings(max_examples=examples(300), deadline=None)
def test_automaton_knows_every_longest_repeat(history, shortest, extra) -> None:
    automaton = SuffixAutomaton(shortest + extra)
    for size in range(len(history) + 1):
        found = [(token, length) for token, length, _ in automaton.followers(shortest)]
        assert len(found) == len(dict(found))
        assert dict(found) == brute_followers(history[:size], shortest, shortest + extra)
        if size < len(history):
            automaton.append(history[size])


@given(st.lists(st.one_of(st.integers(0, 2), st.integers(-6, -1)), max_size=80), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_automaton_takes_back_as_if_it_had_never_been(actions, track_ends) -> None:
    automaton = SuffixAutomaton(4, track_ends=track_ends, num_undoable=1000)
    history = []
    for action in actions:
        if action >= 0:
            automaton.append(action)
            history.append(action)
        elif automaton.rewind(-action):
            del history[action:]
        else:
            assert -action > len(history)
        fresh = SuffixAutomaton(4, track_ends=track_ends)
        for token in history:
            fresh.append(token)
        assert sorted(automaton.followers(1)) == sorted(fresh.followers(1))
        assert automaton.size == len(history)


@given(prompt=st.lists(st.integers(0, 2), max_size=60), rest=st.lists(st.integers(0, 2), max_size=8))
@settings(max_examples=examples(200), deadline=None)
def test_an_automaton_of_a_whole_prompt_equals_token_by_token(prompt, rest) -> None:
    at_once, one_by_one = (SuffixAutomaton(5, track_ends=True) for _ in range(2))
    at_once.extend(prompt)
    for token in prompt:
        one_by_one.append(token)
    for token in [*rest, 0]:
        assert list(at_once.followers(1)) == list(one_by_one.followers(1))
        at_once.append(token)
        one_by_one.append(token)


def test_automaton_takes_back_no_more_than_it_was_told_to_keep() -> None:
    automaton = SuffixAutomaton(4, num_undoable=3)
    for token in [1, 2, 1, 2, 1]:
        automaton.append(token)
    assert not automaton.rewind(4)
    assert automaton.rewind(3)
    assert automaton.size == 2


class CountingStates(SuffixStates):
    visits = 0

    def step(self, state, token_id):
        self.visits += 1
        return super().step(state, token_id)

    def steps(self, state):
        self.visits += 1
        return super().steps(state)

    def num_steps(self, state):
        self.visits += 1
        return super().num_steps(state)


@pytest.mark.parametrize("text", ["loop", "one token", "text"])
@pytest.mark.parametrize("length", [500, 8000])
def test_work_per_token_does_not_grow_with_the_history(text, length) -> None:
    random = torch.Generator().manual_seed(3)
    words = torch.randint(0, 40, (length,), generator=random).tolist()
    history = {"loop": [1, 2, 3, 4, 5], "one token": [1], "text": words}[text] * length
    automaton, states = SuffixAutomaton(20), CountingStates()
    automaton._states = states
    for token in history[:length]:
        automaton.append(token)
        states.visits += len(automaton._undo[-1].steps)
        before = states.visits
        list(automaton.followers(2))
        assert states.visits - before <= 2 * 20
        states.visits = before
    assert states.visits <= 12 * length
    assert len(states) <= 2 * length


# DRY

# Tokens whose bytes have breakers in them, whole, in parts, and not at all.
PIECES = ["a", "b", " the", "\n", ":", "<", "/", " fox", "</think>"]


def piece_ids():
    ids = [vocabulary().encode(piece) for piece in PIECES]
    assert all(len(one) == 1 for one in ids)
    return [one[0] for one in ids]


def dry_oracle(history, multiplier, base, allowed_length, breakers, window):
    """The definition in float64: every place against the end of the history."""
    pieces = vocabulary().token_bytes
    history = history[-window:] if window else history
    texts = [breaker.encode() for breaker in breakers]
    limit = 0
    for k in range(len(history)):
        before = b"".join(pieces[token] for token in history[:k])
        text = before + pieces[history[k]]
        # A breaker may begin outside the window: the test's breakers are at most two tokens long,
        # see below.
        broken = any(text.endswith(t, 0, e) for t in texts for e in range(len(before) + 1, len(text) + 1))
        limit = 0 if broken else limit + 1
    longest = {}
    for place in range(len(history)):
        length = 0
        while length < min(place, limit) and history[place - 1 - length] == history[len(history) - 1 - length]:
            length += 1
        longest[history[place]] = max(longest.get(history[place], 0), length)
    exponent = math.floor(88.72 / math.log(base)) if base > 1 else 0
    return {
        token: -multiplier * base ** min(length - allowed_length, exponent)
        for token, length in longest.items()
        if length >= allowed_length and not any(text in pieces[token] for text in texts)
    }


pieces_lists = st.lists(st.integers(0, len(PIECES) - 1), max_size=25)


@given(
    prompt=pieces_lists,
    generated=pieces_lists,
    base=st.sampled_from([1.0, 1.75, 16.0]),
    allowed_length=st.integers(1, 3),
    breakers=st.sets(st.sampled_from(["\n", ":", "</", "b"])),
    window=st.sampled_from([0, 0, 1, 4, 9, 17]),
)
@settings(max_examples=examples(150), deadline=None)
def test_dry_is_its_formula(prompt, generated, base, allowed_length, breakers, window) -> None:
    if window:
        breakers -= {"</"}  # all others lie within one token, so that the window cannot cut them
    ids, facts = piece_ids(), context()
    prompt, generated = [ids[i] for i in prompt], [ids[i] for i in generated]
    args = Dry.Args(multiplier=0.8, base=base, allowed_length=allowed_length, breakers=sorted(breakers), range=window)
    row = torch.zeros(facts.vocabulary.size)
    expected = []
    for k in range(len(generated) + 1):
        wanted = row.clone()
        for token, penalty in dry_oracle(
            prompt + generated[:k], 0.8, base, allowed_length, sorted(breakers), window
        ).items():
            wanted[token] = penalty
        expected.append(wanted)
    processor = Dry(args, facts)
    assert_rows_equal(replayed([processor], facts, prompt, generated, row), expected)
    assert_rows_equal(step_by_step([processor], facts, prompt, generated, row), expected)


def penalty_in_a_loop(length, **changes):
    arguments = {"multiplier": 1.0, "breakers": [], **changes}
    processor = Dry(Dry.Args(**arguments), PLAIN)
    processor.start([4] * length)
    edit = processor.edit()
    return None if edit is None else dict(zip(edit.token_ids.tolist(), edit.values.tolist(), strict=True))


def test_dry_penalty_stays_finite_however_long_the_repeat() -> None:
    assert penalty_in_a_loop(3, base=2.0) == {4: -1.0}
    assert penalty_in_a_loop(5, base=2.0) == {4: -4.0}
    assert penalty_in_a_loop(101, base=2.0) == {4: -(2.0**98)}
    assert penalty_in_a_loop(400, base=2.0) == {4: pytest.approx(-1e30, rel=1e-6)}
    assert penalty_in_a_loop(400, base=16.0, multiplier=1000.0) == {4: pytest.approx(-1e30, rel=1e-6)}
    assert penalty_in_a_loop(400, base=1.0, allowed_length=1) == {4: -1.0}
    assert penalty_in_a_loop(2000, base=1.01)[4] == pytest.approx(-(1.01**512), rel=1e-6)


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 100.0])
@pytest.mark.parametrize("penalty", [0.01, 1.0, 100.0])
def test_dry_is_no_ban_at_any_temperature(temperature, penalty) -> None:
    """Where a mask leaves the repeated token alone, it is sampled."""
    dry = Dry(Dry.Args(multiplier=1000.0, base=16.0, breakers=[]), PLAIN)
    repetition = RepetitionPenalty(RepetitionPenalty.Args(penalty=penalty), PLAIN)
    chain = ProcessorChain([dry, repetition, Temperature(Temperature.Args(value=temperature), PLAIN)], PLAIN)
    chain.start([4] * 400)
    assert run_row(chain, ROW).isfinite().all()


def test_dry_off() -> None:
    assert penalty_in_a_loop(50, multiplier=0.0) is None
    assert penalty_in_a_loop(2) is None


def test_dry_default_breakers_are_read_in_the_tokens() -> None:
    facts = context()
    ids = vocabulary().encode("Answer: fox fox fox")
    processor = Dry(Dry.Args(allowed_length=1), facts)
    processor.start(ids)
    assert set(processor.edit().token_ids.tolist()) == {ids[-1]}
    processor.start([*ids, *vocabulary().encode(":")])
    assert processor.edit() is None
    assert vocabulary().encode("\n")[0] in processor._breakers.token_ids


def test_dry_special_token_is_a_breaker_by_its_name() -> None:
    facts = context()
    history = [300, 301, END, 300, 301]
    processor = Dry(Dry.Args(breakers=[]), facts)
    processor.start(history)
    assert processor.edit().token_ids.tolist() == [END]
    processor = Dry(Dry.Args(breakers=["<|end|>"]), facts)
    processor.start(history)
    assert processor.edit() is None
    processor.start([*history, END])
    assert processor.edit() is None


def test_dry_without_a_tokenizer_needs_no_breakers() -> None:
    with pytest.raises(ArgumentError, match=r"breakers: .*tokenizer.*; with \[\] none is needed"):
        Dry(Dry.Args(), PLAIN)
    processor = Dry(Dry.Args(breakers=[]), PLAIN)
    processor.start([1, 2, 99, 1, 2])
    assert processor.edit() is None  # 99 is outside the row
    processor.start([1, 2, 3, 1, 2])
    assert isinstance(processor.edit(), Bias)


def test_dry_rewinds_further_than_it_can_take_back() -> None:
    processor = Dry(Dry.Args(breakers=[]), PLAIN)
    processor.start([1, 2, 3, 1])
    for position in range(4, 604):
        processor.accept([2, 3, 1][position % 3], position)
    processor.rewind(5)
    other = Dry(Dry.Args(breakers=[]), PLAIN)
    other.start([1, 2, 3, 1])
    other.accept([2, 3, 1][1], 4)
    assert processor._repeats() == other._repeats()
    processor.accept(2, 5)
    other.accept(2, 5)
    assert processor._repeats() == other._repeats()


# Loops


def is_loop(generated, max_period, copies):
    for period in range(1, max_period + 1):
        tail = generated[-period * copies :]
        if len(tail) == period * copies and tail == tail[-period:] * copies:
            return True
    return False


@given(
    cycle=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    before=st.lists(st.integers(0, 2), max_size=6),
    after=st.lists(st.integers(0, 2), max_size=4),
    max_period=st.integers(1, 5),
    copies=st.integers(2, 4),
    seen=st.integers(0, 8),
)
@settings(max_examples=examples(100), deadline=None)
def test_loop_stop_is_its_definition(cycle, before, after, max_period, copies, seen) -> None:
    history = before + cycle * copies + after
    prompt, generated = history[:seen], history[seen:]
    processor = LoopStop(LoopStop.Args(max_period=max_period, copies=copies), PLAIN)
    forced = torch.full_like(ROW, -torch.inf)
    forced[7] = 0.0
    expected = [forced if is_loop(generated[:k], max_period, copies) else ROW for k in range(len(generated) + 1)]
    assert_rows_equal(replayed([processor], PLAIN, prompt, generated, ROW), expected)
    assert_rows_equal(step_by_step([processor], PLAIN, prompt, generated, ROW), expected)


def test_loop_stop_over_a_long_answer_and_back() -> None:
    processor = LoopStop(LoopStop.Args(max_period=3, copies=3), PLAIN)
    processor.start([])
    noise = [(i * i // 7) % 5 + i % 2 for i in range(3000)]
    for position, token in enumerate(noise):
        processor.accept(token, position)
        assert (processor.edit() == Force(7)) == is_loop(noise[max(0, position - 20) : position + 1], 3, 3)
    for k in (1, 30, 64, 65, 700):
        position = len(noise) - k
        processor.rewind(position)
        for again in itertools.chain(range(position, len(noise))):
            processor.accept(noise[again], again)
            assert (processor.edit() == Force(7)) == is_loop(noise[again - 20 : again + 1], 3, 3)


def test_loop_stop_forces_the_model_s_own_end_token() -> None:
    stops = Context(Vocabulary(12, None, [9, 7]), end_token_ids=frozenset([2, 7, 9]))  # the client stops at 2
    processor = LoopStop(LoopStop.Args(max_period=3, copies=2), stops)
    processor.start([])
    processor.accept(4, 0)
    processor.accept(4, 1)
    assert processor.edit() == Force(7)
    client_only = LoopStop(LoopStop.Args(max_period=3, copies=2), Context(Vocabulary(12), frozenset([2, 5])))
    client_only.start([])
    client_only.accept(4, 0)
    client_only.accept(4, 1)
    assert client_only.edit() == Force(2)


def test_loop_stop_needs_an_end_token() -> None:
    with pytest.raises(ArgumentError, match="end token"):
        LoopStop(LoopStop.Args(), Context(Vocabulary(12)))


# Arguments


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (NoRepeatNgram, {"n": 0}),
        (NoRepeatNgram, {"n": 257}),
        (NoRepeatNgram, {"n": 2.0}),
        (NoRepeatNgram, {"n": True}),
        (NoRepeatNgram, {}),
        (NoRepeatNgram, {"n": 2, "over": "prompt"}),
        (NoRepeatNgram, {"n": 2, "window": 4}),
        (Dry, {"multiplier": -0.1}),
        (Dry, {"multiplier": 1001}),
        (Dry, {"multiplier": math.nan}),
        (Dry, {"base": 0.99}),
        (Dry, {"base": 16.1}),
        (Dry, {"base": math.inf}),
        (Dry, {"allowed_length": 0}),
        (Dry, {"allowed_length": 513}),
        (Dry, {"breakers": [""]}),
        (Dry, {"breakers": ["x" * 65]}),
        (Dry, {"breakers": ["x"] * 33}),
        (Dry, {"breakers": "\n"}),
        (Dry, {"range": -1}),
        (Dry, {"range": 2**31}),
        (LoopStop, {"max_period": 0}),
        (LoopStop, {"max_period": 1025}),
        (LoopStop, {"copies": 1}),
        (LoopStop, {"copies": 1025}),
    ],
)
def test_refused_arguments(kind, arguments) -> None:
    with pytest.raises(ValidationError):
        kind.Args(**arguments)


def test_rows_beside_and_padding_are_left_alone() -> None:
    facts = context()
    row = torch.zeros(facts.vocabulary.size)
    chain = ProcessorChain([NoRepeatNgram(NoRepeatNgram.Args(n=1), facts), Dry(Dry.Args(), facts)], facts)
    chain.start([300, 301, 302, 300, 301])
    result = run_row(chain, row)
    assert torch.isneginf(result).nonzero().flatten().tolist() == [300, 301, 302]
    assert not result[facts.vocabulary.num_tokens :].any()
