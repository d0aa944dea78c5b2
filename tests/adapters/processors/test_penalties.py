"""Penalties against transformers and against the formulas in float64, over any history."""

from __future__ import annotations

import pickle
from array import array
from collections import Counter

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import RepetitionPenaltyLogitsProcessor
from vocab_for_tests import after_rewinding, assert_rows_equal, replayed, run_row, step_by_step

from adapters.chain import ProcessorChain
from adapters.contract import Bias, Context, Scale
from adapters.processors.penalties import FrequencyPenalty, Occurrences, PresencePenalty, RepetitionPenalty
from adapters.vocabulary import Vocabulary

V = 12
CONTEXT = Context(Vocabulary(V))
few = settings(max_examples=examples(50), deadline=None)
tokens = st.lists(st.integers(0, V - 1), max_size=14)
rows = st.lists(st.floats(-30, 30, width=32), min_size=V, max_size=V).map(torch.tensor)
openai = st.floats(-2, 2)


def make(kind, penalty):
    return kind(kind.Args(penalty=penalty), CONTEXT)


def assert_follows(processor, prompt, generated, row, reference):
    """Step by step and replayed at every k; ``reference(prompt, generated so far)`` is a row in
    float64.
    """
    steps = step_by_step([processor], CONTEXT, prompt, generated, row)
    assert_rows_equal(replayed([processor], CONTEXT, prompt, generated, row), steps)
    assert_rows_equal(after_rewinding([processor], CONTEXT, prompt, generated, row), steps)
    for k, after in enumerate(steps):
        wanted = reference(prompt, generated[:k])
        torch.testing.assert_close(after.double(), wanted, rtol=1e-6, atol=1e-5)


@few
@given(tokens, tokens, rows, st.floats(0.01, 100))
def test_repetition_penalty_is_that_of_transformers(prompt, generated, row, penalty) -> None:
    oracle = RepetitionPenaltyLogitsProcessor(penalty)
    expected = [
        oracle(torch.tensor([prompt + generated[:k]], dtype=torch.int64), row.clone().unsqueeze(0))[0]
        for k in range(len(generated) + 1)
    ]
    processors = [make(RepetitionPenalty, penalty)]
    assert_rows_equal(step_by_step(processors, CONTEXT, prompt, generated, row), expected)
    assert_rows_equal(replayed(processors, CONTEXT, prompt, generated, row), expected)
    assert_rows_equal(after_rewinding(processors, CONTEXT, prompt, generated, row), expected)


@few
@given(tokens, tokens, rows, openai)
def test_frequency_penalty_counts_generated_tokens(prompt, generated, row, penalty) -> None:
    def reference(prompt, generated):
        wanted = row.double()
        for token_id, count in Counter(generated).items():
            wanted[token_id] -= count * penalty
        return wanted

    assert_follows(make(FrequencyPenalty, penalty), prompt, generated, row, reference)


@few
@given(tokens, tokens, rows, openai)
def test_presence_penalty_counts_generated_tokens_once(prompt, generated, row, penalty) -> None:
    def reference(prompt, generated):
        wanted = row.double()
        wanted[list(set(generated))] -= penalty
        return wanted

    assert_follows(make(PresencePenalty, penalty), prompt, generated, row, reference)


@few
@given(tokens, tokens, rows)
def test_together_they_are_the_formula_of_openai(prompt, generated, row) -> None:
    chain = ProcessorChain([make(FrequencyPenalty, 0.7), make(PresencePenalty, -0.3)], CONTEXT)
    chain.start(prompt, generated)
    counts = Counter(generated)
    wanted = [z - counts[i] * 0.7 + (counts[i] > 0) * 0.3 for i, z in enumerate(row.tolist())]
    torch.testing.assert_close(run_row(chain, row), torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "neutral"), [(RepetitionPenalty, 1.0), (FrequencyPenalty, 0.0), (PresencePenalty, 0.0)]
)
def test_the_neutral_value_asks_for_nothing(kind, neutral) -> None:
    processor = make(kind, neutral)
    processor.start([1, 2])
    processor.accept(3, 2)
    assert processor.edit() is None


@pytest.mark.parametrize("kind", [FrequencyPenalty, PresencePenalty])
def test_the_prompt_does_not_count(kind) -> None:
    processor = make(kind, 1.0)
    processor.start([1, 2])
    assert processor.edit() is None


def test_masked_logits_stay_masked() -> None:
    chain = ProcessorChain([make(RepetitionPenalty, 0.5), make(FrequencyPenalty, -2.0)], CONTEXT)
    chain.start([1], [2])
    row = torch.zeros(V)
    row[1:3] = -torch.inf
    assert run_row(chain, row)[:4].tolist() == [0, -torch.inf, -torch.inf, 0]


def test_ids_that_are_no_tokens_are_left_out() -> None:
    """Prompts may hold placeholders of images; an engine that lags shows -1."""
    processor = make(RepetitionPenalty, 2.0)
    processor.start([1, V, 10**9, -1])
    assert processor.edit().token_ids.tolist() == [1]
    processor.accept(V + 3, 4)
    processor.accept(-1, 5)
    processor.accept(2, 6)
    assert processor.edit().token_ids.tolist() == [1, 2]
    processor.rewind(5)
    assert processor.edit().token_ids.tolist() == [1]


def test_a_prompt_token_stays_penalised_if_its_copy_is_rewound() -> None:
    processor = make(RepetitionPenalty, 2.0)
    processor.start([1, 1])
    processor.accept(1, 2)
    processor.rewind(2)
    assert processor.edit().token_ids.tolist() == [1]


@pytest.mark.parametrize("kind", [RepetitionPenalty, FrequencyPenalty, PresencePenalty])
def test_edits_that_were_handed_out_do_not_change(kind) -> None:
    """Draft tokens: the plans of several positions are made before the first is used."""
    processor = make(kind, 2.0)
    processor.start([1])
    edits, copies = [], []
    for position, token_id in enumerate([3, 3, 5, 3, 6] * 30, start=1):
        processor.accept(token_id, position)
        edit = processor.edit()
        assert processor.edit() is edit
        edits.append(edit)
        copies.append((edit.token_ids.tolist(), _values(edit).tolist()))
    processor.rewind(1)
    assert [(edit.token_ids.tolist(), _values(edit).tolist()) for edit in edits] == copies


@pytest.mark.parametrize("kind", [RepetitionPenalty, FrequencyPenalty, PresencePenalty])
@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 4), tokens, st.lists(st.sampled_from([0, 1, 2, -1, -2, -3, None]), min_size=5, max_size=20))
def test_an_edit_that_is_kept_is_never_stale(kind, window, prompt, operations) -> None:
    """Tokens, how many to forget, or None to start again with another prompt; after each, the edit
    is that of a new processor.
    """
    processor = windowed(kind, 1.5, window)
    processor.start(prompt)
    for operation in operations:
        if operation is None:
            prompt = prompt[1:]
            processor.start(prompt)
        elif operation < 0:
            processor.rewind(max(len(prompt), processor.position + operation))
        else:
            processor.accept(operation, processor.position)
        new = windowed(kind, 1.5, window)
        new.start(prompt)
        for position, each in enumerate(processor.generated, start=len(prompt)):
            new.accept(each, position)
        assert _by_id(processor.edit()) == _by_id(new.edit())


def _by_id(edit):
    return {} if edit is None else dict(zip(edit.token_ids.tolist(), _values(edit).tolist(), strict=True))


def _values(edit):
    assert isinstance(edit, Bias | Scale)
    values = edit.values if isinstance(edit, Bias) else edit.factors
    assert values.dtype == torch.float32
    assert values.shape == edit.token_ids.shape
    return values


@few
@given(st.lists(st.one_of(st.none(), st.integers(0, 200)), max_size=400))
def test_occurrences_are_a_counter(operations) -> None:
    """None takes the newest occurrence back."""
    value = np.float32(0.3)
    seen, history = Occurrences(float(value), by_count=True), []
    for token_id in operations:
        if token_id is not None:
            seen.add(token_id)
            history.append(token_id)
        elif history:
            seen.remove(history.pop())
    counts = Counter(history)
    assert seen.ids().tolist() == list(dict.fromkeys(history))
    each = np.array([counts[i] for i in dict.fromkeys(history)], np.float32)
    assert seen.values().tolist() == (each * value).tolist()
    assert len(seen) == len(counts)


def test_ids_are_added_to_a_counter_that_was_asked_before() -> None:
    seen = Occurrences(1.0, by_count=False)
    assert seen.ids().tolist() == []
    seen.set(array("q", [7, 3]), [1, 1])
    assert seen.ids().tolist() == [7, 3]


def test_a_long_history_is_not_scanned_again() -> None:
    """Work per token is counted, not timed: the prompt is read once, and no step asks for the
    history.
    """

    class Watched(RepetitionPenalty):
        asked = 0

        @property
        def prompt(self):
            self.asked += 1
            return super().prompt

        @property
        def generated(self):
            raise AssertionError("a step asked for the whole history")

    processor = Watched(Watched.Args(penalty=1.5), CONTEXT)
    processor.start([1] * 1000)
    for position in range(1000, 2000):
        processor.accept(position % V, position)
        processor.edit()
    assert processor.asked == 1


def test_pickling_keeps_the_state() -> None:
    processor = make(FrequencyPenalty, 0.5)
    processor.start([1])
    for position, token_id in enumerate([4, 4, 2], start=1):
        processor.accept(token_id, position)
    copy = pickle.loads(pickle.dumps(processor))
    copy.accept(4, 4)
    assert dict(zip(copy.edit().token_ids.tolist(), copy.edit().values.tolist(), strict=True)) == {4: -1.5, 2: -0.5}
    assert processor.edit().values.tolist() == [-1.0, -0.5]


@pytest.mark.parametrize(
    ("kind", "penalty"),
    [
        *((RepetitionPenalty, value) for value in (0, 0.0099, -1, 100.1)),
        *((kind, value) for kind in (FrequencyPenalty, PresencePenalty) for value in (-2.01, 2.01)),
        *(
            (kind, value)
            for kind in (RepetitionPenalty, FrequencyPenalty, PresencePenalty)
            for value in (float("nan"), float("inf"), "1", None, True)
        ),
    ],
)
def test_penalties_are_bounded(kind, penalty) -> None:
    with pytest.raises(ValidationError):
        kind.Args(penalty=penalty)


# Over a window

windows = st.integers(1, 9)


def windowed(kind, penalty, window):
    return kind(kind.Args(penalty=penalty, window=window), CONTEXT)


@few
@given(tokens, tokens, rows, st.floats(0.01, 100), windows)
def test_a_repetition_penalty_window_spans_prompt_and_answer(prompt, generated, row, penalty, window) -> None:
    oracle = RepetitionPenaltyLogitsProcessor(penalty)
    expected = [
        oracle(torch.tensor([(prompt + generated[:k])[-window:]], dtype=torch.int64), row.clone().unsqueeze(0))[0]
        for k in range(len(generated) + 1)
    ]
    processors = [windowed(RepetitionPenalty, penalty, window)]
    assert_rows_equal(step_by_step(processors, CONTEXT, prompt, generated, row), expected)
    assert_rows_equal(replayed(processors, CONTEXT, prompt, generated, row), expected)
    assert_rows_equal(after_rewinding(processors, CONTEXT, prompt, generated, row), expected)


@few
@given(tokens, tokens, rows, openai, windows)
def test_a_window_of_the_others_holds_the_newest_of_the_answer(prompt, generated, row, penalty, window) -> None:
    def frequency(prompt, generated):
        wanted = row.double()
        for token_id, count in Counter(generated[-window:]).items():
            wanted[token_id] -= count * penalty
        return wanted

    def presence(prompt, generated):
        wanted = row.double()
        wanted[list(set(generated[-window:]))] -= penalty
        return wanted

    assert_follows(windowed(FrequencyPenalty, penalty, window), prompt, generated, row, frequency)
    assert_follows(windowed(PresencePenalty, penalty, window), prompt, generated, row, presence)


def test_an_edit_stays_as_it_was_when_the_window_moves_on() -> None:
    processor = windowed(FrequencyPenalty, 1.0, 2)
    processor.start([1])
    for position, token_id in enumerate([3, 4], 1):
        processor.accept(token_id, position)
    first = processor.edit()
    kept = first.token_ids.tolist()
    for position, token_id in enumerate([5, 6, 7], 3):
        processor.accept(token_id, position)
    assert first.token_ids.tolist() == kept
    assert sorted(processor.edit().token_ids.tolist()) == [6, 7]


def test_ids_that_are_no_tokens_fill_a_window_too() -> None:
    processor = windowed(RepetitionPenalty, 2.0, 2)
    processor.start([1, V, 10**9, -1])
    assert processor.edit() is None
    processor.accept(2, 4)
    processor.accept(V + 3, 5)
    assert processor.edit().token_ids.tolist() == [2]
    processor.accept(3, 6)
    assert processor.edit().token_ids.tolist() == [3]


def test_a_rewound_occurrence_is_penalised_no_more() -> None:
    """One of several, after the edit with all of them was made."""
    made = FrequencyPenalty(FrequencyPenalty.Args(penalty=0.5), Context(Vocabulary(10)))
    made.start([1])
    for position in (1, 2, 3):
        made.accept(7, position)
    values = []
    for position in (4, 3, 2):
        made.rewind(position)
        edit = made.edit()
        assert isinstance(edit, Bias)
        values.append(edit.values.tolist())
    assert values == [[-1.5], [-1.0], [-0.5]]
