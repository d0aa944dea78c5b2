"""What drafts are made of, how long they are, and the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.embedded.speculation import Proposer, SpeculativeConfig
from worker.engines.embedded.speculation.config import REFUSED
from worker.engines.embedded.speculation.draft_length import Acceptance, StepCosts, can_pay, draft_lengths
from worker.engines.embedded.speculation.ngram import NgramProposer
from worker.engines.embedded.speculation.suffix import Corpus, SuffixProposer
from worker.engines.embedded.speculation.verification import (
    accepted_mask,
    last_accepted,
    required_logit_indices,
    rewind,
)
from worker.errors import StartupError

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def longest_repeat(history: Sequence[int]) -> int:
    """Length of the longest suffix that also ends earlier, by definition."""
    for length in range(len(history) - 1, 0, -1):
        suffix = list(history[-length:])
        if any(list(history[end - length : end]) == suffix for end in range(length, len(history))):
            return length
    return 0


def follows(history: Sequence[int], draft: Sequence[int], length: int) -> bool:
    """Whether `draft` is what followed an earlier place of the last `length` tokens."""
    suffix = list(history[-length:])
    return any(
        list(history[end - length : end]) == suffix and list(history[end : end + len(draft)]) == list(draft)
        for end in range(length, len(history))
    )


@given(TOKENS, st.integers(1, 3), st.integers(0, 2), st.integers(1, 8))
def test_an_ngram_draft_follows_the_longest_known_ngram(
    history: list[int], shortest: int, more: int, limit: int
) -> None:
    draft = NgramProposer(shortest, shortest + more).propose(history, limit)
    length = min(longest_repeat(history), shortest + more)
    if length < shortest:
        assert not draft
    else:
        assert 0 < len(draft) <= limit
        assert follows(history, draft, length)


def test_of_equal_ngrams_the_latest_counts() -> None:
    assert NgramProposer(1, 2).propose([5, 1, 7, 5, 2, 8, 5], 2) == [2, 8]


@given(TOKENS, st.integers(1, 4), st.integers(1, 8))
def test_a_suffix_draft_follows_the_longest_repetition(history: list[int], shortest: int, limit: int) -> None:
    draft = SuffixProposer(shortest).propose(history, limit)
    length = longest_repeat(history)
    if length < shortest:
        assert not draft
    else:
        assert 0 < len(draft) <= limit
        assert follows(history, draft, length)


@pytest.mark.parametrize("make", [lambda: NgramProposer(1, 3), lambda: SuffixProposer(1, Corpus(100))])
@given(first=TOKENS, cut=st.integers(0, 60), second=TOKENS)
@settings(max_examples=50)
def test_a_history_that_was_cut_off_gives_what_a_new_one_gives(
    make: Any, first: list[int], cut: int, second: list[int]
) -> None:
    used: Proposer = make()
    history = first[:cut] + second
    for known in (first, first[:cut]):
        used.propose(known, 4)
    assert list(used.propose(history, 4)) == list(make().propose(history, 4))


@given(st.lists(TOKENS, max_size=4), TOKENS)
def test_a_corpus_continues_with_an_earlier_answer(answers: list[list[int]], history: list[int]) -> None:
    corpus = Corpus(10_000)
    for answer in answers:
        corpus.add(answer)
    draft = list(SuffixProposer(3, corpus).propose(history, 4))
    known = [history, *answers]
    if draft:
        suffix = history[-3:]
        assert any(
            text[end - 3 : end] == suffix and text[end : end + len(draft)] == draft
            for text in known
            for end in range(3, len(text))
        )


def test_a_corpus_forgets_its_older_half() -> None:
    corpus = Corpus(40)
    proposer = SuffixProposer(2, corpus)
    for number in range(8):
        corpus.add([100 * number + index for index in range(8)])
        assert len(corpus.automaton.tokens) <= 40
    assert list(proposer.propose([700, 701], 3)) == [702, 703, 704]
    assert list(proposer.propose([0, 1], 3)) == []


# -- lengths


def test_a_draft_is_as_long_as_its_tokens_are_likely_to_pay() -> None:
    costs = StepCosts()
    costs.learn(1, 0.010)
    costs.learn(9, 0.018)  # each further token costs a tenth of the step
    assert draft_lengths([0.9, 0.5, 0.05], [8, 8, 8], 1, costs) == [8, 3, 0]
    assert (
        draft_lengths([0.8], [8], 8, costs)[0] < draft_lengths([0.8], [8], 1, costs)[0]
    )  # beside seven other rows it saves a smaller part
    assert draft_lengths([], [], 4, costs) == []


def test_a_large_batch_of_dear_tokens_does_not_ask_for_drafts() -> None:
    costs = StepCosts()
    for tokens in (1, 64):
        costs.learn(tokens, 0.010 + 0.001 * tokens)  # a further token costs a part of 1 / (10 + tokens)
    assert can_pay(1, costs)
    assert can_pay(60, costs)
    costs.learn(65, 0.200)
    assert not can_pay(64, costs)


def test_free_tokens_are_always_drafted_and_dear_ones_never() -> None:
    free, dear = StepCosts(), StepCosts()
    for tokens in (1, 7):
        free.learn(tokens, 0.010)
        dear.learn(tokens, 0.010 * tokens)
    assert draft_lengths([0.01], [6], 1, free) == [6]
    assert draft_lengths([0.99], [6], 1, dear) == [0]


@given(st.lists(st.integers(0, 6), min_size=20, max_size=60))
def test_acceptance_is_a_rate(counts: list[int]) -> None:
    acceptance = Acceptance(3.0, 5.0)
    for number in counts:
        acceptance.count(6, number)
        assert 0 <= acceptance.rate <= 1


# -- settings


def test_settings_from_json_and_from_data() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}'
    config = SpeculativeConfig.parse(text)
    assert (config.method, config.num_speculative_tokens, config.prompt_lookup_max) == ("ngram", 3, 5)
    assert SpeculativeConfig.parse({"method": "suffix"}).method == "suffix"
    assert SpeculativeConfig.parse(None) == SpeculativeConfig()


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ("{", "must be JSON"),
        ("[1]", "must be a JSON object, got list"),
        ('{"metod": "ngram"}', "unknown key 'metod'; known are chain, method"),
        ('{"method": "telepathy"}', "method must be one of none, ngram, suffix, draft_model, got 'telepathy'"),
        ('{"method": 3}', "method must be a text, got 3"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens must be an integer from 1 to 64, got 0"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens must be an integer from 1 to 64, got True"),
        ('{"prompt_lookup_min": 5}', "prompt_lookup_min 5 is above prompt_lookup_max 4"),
        ('{"method": "draft_model"}', "model is given with the method draft_model"),
        ('{"method": "ngram", "model": "m"}', "model is given with the method draft_model"),
        *((f'{{"method": "{name}"}}', f"method '{name}' is not served: it needs heads") for name in REFUSED),
    ],
)
def test_wrong_settings_are_named(given_: str, said: str) -> None:
    with pytest.raises(StartupError, match=r"^--speculative-config") as caught:
        SpeculativeConfig.parse(given_)
    assert said in str(caught.value)


# -- Megatron-Core's worked examples (core 0.17.1, `test_simple_text_generation_controller`)


def test_rows_of_logits_that_are_needed() -> None:
    lengths = [3, 3, 3, 2, 4]
    assert required_logit_indices(lengths, [False, False, False, True, True]) == [*range(9), 10, 14]
    assert required_logit_indices([2, 4], [True, True]) == [1, 5]


def test_the_longest_agreeing_prefix_is_accepted() -> None:
    lengths = [3, 3, 3, 1, 1]
    inputs = [5, 6, 7, 13, 14, 15, 26, 27, 28, 32, 44]
    sampled = [6, 99, 8, 14, 15, 16, 99, 28, 29, 33, 45]
    mask = accepted_mask(inputs, sampled, lengths)
    assert [int(one) for one in mask] == [1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1]
    assert last_accepted(mask, lengths) == [1, 5, 6, 9, 10]


def test_what_agrees_behind_a_gap_is_rejected() -> None:
    mask = accepted_mask([5, 6, 7], [9, 7, 8], [3])
    assert last_accepted(mask, [3]) == [0]


def test_rewinding_releases_a_block_where_it_crosses_its_beginning() -> None:
    assert rewind(offset=2, num_blocks=3, num_rejected=2, block_size=4) == (0, 3)
    assert rewind(offset=1, num_blocks=4, num_rejected=3, block_size=4) == (2, 3)
