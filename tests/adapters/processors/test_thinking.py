"""The thinking budget against a scan of the whole history, and as a simulated model would meet
it.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from vocab_for_tests import assert_rows_equal, context, replayed, step_by_step, tokenizer, vocabulary

from adapters.chain import ProcessorChain
from adapters.contract import ArgumentError, Context, Force
from adapters.processors.thinking import ThinkingBudget
from adapters.vocabulary import Vocabulary
from adapters.vocabulary.text_match import TextMatcher

START, END = [1, 2], [3, 4, 3, 5]
PLAIN = Context(Vocabulary(10), think_start=tuple(START), think_end=tuple(END))
ROW = torch.linspace(-3, 3, 10)


def ends_with(tokens, tag):
    return len(tokens) >= len(tag) and tokens[-len(tag) :] == tag


def partial(section, tag):
    return max(n for n in range(len(tag)) if ends_with(section, tag[:n]) or n == 0)


def oracle(prompt, generated, tokens):
    """The token to force after a history, None if there is none: a scan from the beginning,
    without grace.
    """
    inside, section, used = False, [], 0
    for index, token in enumerate(prompt + generated):
        section.append(token)
        if ends_with(section, START) and (not inside or index < len(prompt)):
            inside, section = True, []
        elif inside and ends_with(section, END):
            used += len(section) - len(END) if index >= len(prompt) else 0
            inside, section = False, []
    if not inside or used + len(section) < tokens:
        return None
    return END[partial(section, END)]


pieces = st.lists(st.sampled_from([START, START, END, END[:2], END[:3], [0], [3], [6, 7], [1]]), max_size=6).map(
    lambda parts: [token for part in parts for token in part]
)


@given(prompt=pieces, generated=pieces, tokens=st.integers(0, 6))
@example(prompt=[1, 2, 3, 4], generated=[3, 5], tokens=2)
@example(prompt=[1, 2, 0, 3, 4, 3, 5], generated=[1, 2, 0, 0, 3, 4, 3, 5, 1, 2], tokens=2)
@settings(max_examples=examples(300), deadline=None)
def test_budget_is_its_definition(prompt, generated, tokens) -> None:
    processor = ThinkingBudget(ThinkingBudget.Args(tokens=tokens), PLAIN)
    expected = []
    for k in range(len(generated) + 1):
        token = oracle(prompt, generated[:k], tokens)
        row = ROW if token is None else torch.full_like(ROW, -torch.inf)
        if token is not None:
            row[token] = 0.0
        expected.append(row)
    assert_rows_equal(replayed([processor], PLAIN, prompt, generated, ROW), expected)
    assert_rows_equal(step_by_step([processor], PLAIN, prompt, generated, ROW), expected)


def answer(processor, facts, prompt, model, count):
    """``count`` tokens: the forced one where there is one, otherwise what the model says next."""
    chain = ProcessorChain([pickle.loads(pickle.dumps(processor))], facts)
    chain.start(prompt)
    model = iter(model)
    for _ in range(count):
        force = chain.plan().force
        chain.accept(next(model) if force is None else force, chain.position)
    return chain.tokens[len(prompt) :]


THINKS = tuple(vocabulary().encode("<think>") + vocabulary().encode("</think>"))
END_OF_TURN = vocabulary().tokenizer.eos_token_id  # type: ignore[union-attr]
FOX, NEWLINE = vocabulary().encode(" fox")[0], vocabulary().encode("\n")[0]


def budget(**arguments):
    return ThinkingBudget(ThinkingBudget.Args(**arguments), context())


def test_single_token_tags_of_the_model() -> None:
    start, end = THINKS
    assert answer(budget(tokens=3), context(), [start], [FOX] * 9, 6) == [FOX, FOX, FOX, end, FOX, FOX]
    assert answer(budget(tokens=3), context(), [start, FOX, FOX], [FOX] * 9, 4) == [FOX, end, FOX, FOX]
    assert answer(budget(tokens=3), context(), [], [FOX, start, *[FOX] * 9], 6) == [FOX, start, FOX, FOX, FOX, end]


def test_zero_closes_a_section_at_once() -> None:
    start, end = THINKS
    assert answer(budget(tokens=0), context(), [start], [FOX] * 9, 2) == [end, FOX]
    assert answer(budget(tokens=0, grace=9), context(), [start], [FOX] * 9, 2) == [end, FOX]
    assert answer(budget(tokens=0), context(), [], [start, FOX, FOX], 3) == [start, end, FOX]
    # Many chat templates open the section with a newline.
    assert answer(budget(tokens=0, grace=9), context(), [start, NEWLINE], [FOX] * 9, 2) == [end, FOX]


def test_a_section_opened_again_has_what_is_left() -> None:
    start, end = THINKS
    said = [FOX, end, start, FOX, FOX, FOX, FOX, start, FOX]
    expected = [FOX, end, start, FOX, FOX, end, FOX, FOX, start, end, FOX]
    assert answer(budget(tokens=3), context(), [start], said, 11) == expected
    assert answer(budget(tokens=3), context(), [start, FOX, FOX, FOX, end, start], said, 3) == [FOX, end, start]


def test_a_model_that_closes_in_time_is_left_alone() -> None:
    start, end = THINKS
    assert answer(budget(tokens=3), context(), [start], [FOX, FOX, FOX], 4) == [FOX, FOX, FOX, end]
    assert answer(budget(tokens=3), context(), [start], [FOX, FOX, end, FOX, FOX], 5) == [FOX, FOX, end, FOX, FOX]


def test_an_earlier_turn_that_was_cut_off_does_not_count() -> None:
    start, end = THINKS
    assert answer(budget(tokens=2), context(), [start, FOX, FOX, FOX, start], [FOX] * 9, 3) == [FOX, FOX, end]


def test_grace_waits_for_the_end_of_a_line() -> None:
    start, end = THINKS
    said = [FOX, NEWLINE, FOX, FOX, NEWLINE, FOX, FOX]
    assert answer(budget(tokens=3, grace=4), context(), [start], said, 7) == [*said[:5], end, FOX]
    assert answer(budget(tokens=3, grace=1), context(), [start], said, 6) == [*said[:4], end, NEWLINE]
    assert answer(budget(tokens=2, grace=4), context(), [start], said, 3) == [FOX, NEWLINE, end]
    # Once the line has ended it is over, though the newline is not the newest token while the tag
    # is being forced.
    tag = vocabulary().encode("</ reason >")
    assert len(tag) > 2
    long = budget(tokens=1, grace=9, start="<think>", end="</ reason >")
    assert answer(long, context(), [start], [NEWLINE, *[FOX] * 9], len(tag) + 2) == [NEWLINE, *tag, FOX]


def test_a_message_is_written_before_the_closing_tag() -> None:
    start, end = THINKS
    message = vocabulary().encode(" the answer is B.\n")
    said = budget(tokens=2, message=" the answer is B.\n")
    count = len(message) + 4
    assert answer(said, context(), [start], [FOX] * 9, count) == [FOX, FOX, *message, end, FOX]
    assert answer(said, context(), [start, FOX, FOX], [FOX] * 9, count - 2) == [*message, end, FOX]
    in_time = [FOX, end, FOX, start]  # a section opened again has one token left
    assert answer(said, context(), [start], [*in_time, *[FOX] * 9], 4 + count - 1)[4:] == [FOX, *message, end, FOX]
    tag = vocabulary().encode("</ reason >")
    begun = budget(tokens=3, message=" the answer is B.\n", start="<think>", end="</ reason >")
    assert answer(begun, context(), [start], [FOX, *tag[:2], *[FOX] * 9], len(tag) + 2) == [FOX, *tag, FOX]


def test_a_message_across_a_migration() -> None:
    start, end = THINKS
    said = budget(tokens=1, message=" the answer is B.\n")
    whole = answer(said, context(), [start], [FOX] * 9, 12)
    for k in range(12):
        chain = ProcessorChain([pickle.loads(pickle.dumps(said))], context())
        chain.start([start], whole[:k])
        assert chain.plan().force == (whole[k] if 0 < k <= whole.index(end) else None)


def test_a_message_does_not_close_the_section() -> None:
    with pytest.raises(ArgumentError, match="message: must not hold the closing tag"):
        budget(tokens=1, message="so </think> now")


def test_a_partial_tag_in_the_prompt_is_continued() -> None:
    tag = vocabulary().encode("</ reason >")
    long = budget(tokens=1, start="<think>", end="</ reason >")
    begun = [THINKS[0], FOX, *tag[:2]]
    assert answer(long, context(), begun, [FOX] * 9, len(tag) - 1) == [*tag[2:], FOX]


TAG = "</ reason >"
SPLITS = ["<", "</", "</ ", "/", " r", " re", "eason", " reason", "son >", " >", ">", ">\n", "n", "ea", " ", "fox"]


@given(
    said=st.lists(st.sampled_from(SPLITS), max_size=25),
    tokens=st.integers(0, 10),
    grace=st.integers(0, 4),
    tag=st.sampled_from([TAG, "<<a>>", "中文!"]),
)
@settings(max_examples=examples(200), deadline=None)
def test_the_closing_tag_is_written_once_however_it_is_split(said, tokens, grace, tag) -> None:
    facts = context()
    model = [token for text in said for token in vocabulary().encode(text)]
    budgeted = ThinkingBudget(ThinkingBudget.Args(tokens=tokens, grace=grace, end=tag), facts)
    count = len(model) + tokens + grace + len(tag.encode()) + 2
    generated = answer(budgeted, facts, [THINKS[0]], model + [FOX] * count, count)
    lengths = [len(text_of(generated[:k])) for k in range(count + 1)]
    thought, found, _ = text_of(generated).partition(tag.encode())
    assert found
    first_of_tag = next(k for k in range(count) if lengths[k + 1] > len(thought))
    assert first_of_tag <= tokens + grace
    closed = next(k for k in range(count + 1) if tag.encode() in text_of(generated[:k]))
    budgeted.start([THINKS[0]])
    for k, token in enumerate(generated):
        edit = budgeted.edit()
        assert not isinstance(edit, Force) or edit.token_id == token
        assert edit is None or k < closed
        budgeted.accept(token, k + 1)


def text_of(tokens):
    return b"".join(vocabulary().token_bytes[token] for token in tokens)


def test_a_section_of_an_earlier_turn_is_not_this_answer_s() -> None:
    start, end = THINKS
    cut_off = [start, FOX, FOX, FOX, END_OF_TURN, FOX]
    assert answer(budget(tokens=2), context(), cut_off, [FOX] * 9, 3) == [FOX, FOX, FOX]
    assert answer(budget(tokens=2), context(), [*cut_off, start, FOX], [FOX] * 9, 3) == [FOX, end, FOX]


@given(st.text("ab", min_size=1, max_size=5), st.lists(st.text("abc", min_size=1, max_size=4), max_size=10))
@settings(max_examples=examples(300), deadline=None)
def test_matcher_is_a_search(pattern, said) -> None:
    words = sorted({*said, "a"})
    matcher = TextMatcher(pattern.encode(), {i: w.encode() for i, w in enumerate(words)})
    text, begin, matched = "", 0, 0
    for word in said:
        before = len(text)
        text += word
        matched, taken = matcher.step(matched, words.index(word))
        found = -1
        while (place := text.find(pattern, begin)) >= 0:
            begin, found = place + len(pattern), max(0, before - place)
        assert taken == found
        rest = text[begin:]
        assert matched == max(n for n in range(len(pattern)) if rest.endswith(pattern[:n]) or n == 0)


def test_tags_are_needed() -> None:
    with pytest.raises(ArgumentError, match=r"start: this model has no thinking tags"):
        ThinkingBudget(ThinkingBudget.Args(tokens=1), Context(Vocabulary(10)))
    with pytest.raises(ArgumentError, match=r"end: this model has no thinking tags"):
        ThinkingBudget(ThinkingBudget.Args(tokens=1), Context(Vocabulary(10), think_start=(1,)))
    with pytest.raises(ArgumentError, match=r"start: .*needs a tokenizer"):
        ThinkingBudget(ThinkingBudget.Args(tokens=1, start="<x>"), PLAIN)
    with pytest.raises(ArgumentError, match=r"grace: .*need a tokenizer"):
        ThinkingBudget(ThinkingBudget.Args(tokens=1, grace=1), PLAIN)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tokens": -1},
        {"tokens": 2**31},
        {"tokens": 1.5},
        {"tokens": 1, "grace": -1},
        {"tokens": 1, "grace": 2**31},
        {"tokens": 1, "start": ""},
        {"tokens": 1, "end": "x" * 257},
        {"tokens": 1, "stop": "x"},
    ],
)
def test_refused_arguments(arguments) -> None:
    with pytest.raises(ValidationError):
        ThinkingBudget.Args(**arguments)


def test_a_tokenizer_of_the_tests_splits_the_tags() -> None:
    assert len(THINKS) == 2
    assert all(len(tokenizer().encode(tag, add_special_tokens=False)) > 2 for tag in (TAG, "<<a>>"))
