"""What drafts are made of, how long they are, and the settings."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from effort import examples
from engine_doubles import ScriptedModel, request
from growth import num_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.embedded import Plan
from worker.engines.embedded.plan import Chunk, Output
from worker.engines.embedded.speculation import Proposer, SpeculativeConfig, Speculator, ngram
from worker.engines.embedded.speculation.acceptance import Acceptance, ProposerAcceptance
from worker.engines.embedded.speculation.config import REFUSED
from worker.engines.embedded.speculation.draft_length import StepCosts, can_pay, draft_lengths
from worker.engines.embedded.speculation.ngram import NgramProposer
from worker.engines.embedded.speculation.prediction import PredictionProposer
from worker.engines.embedded.speculation.speculator import MAX_CORPORA
from worker.engines.embedded.speculation.suffix import Corpus, SuffixProposer
from worker.engines.embedded.speculation.verification import (
    accepted_mask,
    last_accepted,
    required_logit_indices,
    rewind,
)
from worker.errors import StartupError
from worker.sampling import SamplingParams

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def longest_repeat(history: Sequence[int]) -> int:
    """Length of the longest suffix that also ends earlier, by definition."""
    for length in range(len(history) - 1, 0, -1):
        suffix = list(history[-length:])
        if any(list(history[end - length : end]) == suffix for end in range(length, len(history))):
            return length
    return 0


def follows(history: Sequence[int], draft: Sequence[int], length: int) -> bool:
    """Whether `draft` is what followed an earlier place of the last `length` tokens, and where the
    history ends goes on with itself.
    """
    suffix, text = list(history[-length:]), [*history, *draft]
    return any(
        text[end - length : end] == suffix and text[end : end + len(draft)] == list(draft)
        for end in range(length, len(history))
    )


@given(TOKENS, st.integers(1, 3), st.integers(0, 2), st.integers(1, 8))
def test_an_ngram_draft_follows_the_longest_known_ngram(
    history: list[int], shortest: int, more: int, limit: int
) -> None:
    with patch(f"{ngram.__name__}._LEAST_SLOTS", 2**14):  # in which no two n-grams of these have one key
        found = NgramProposer(shortest, shortest + more).propose(history, limit)
    draft = found.tokens
    length = min(longest_repeat(history), shortest + more)
    if length < shortest:
        assert not draft
    else:
        assert len(draft) == limit
        assert follows(history, draft, length)
        assert length <= found.matched <= longest_repeat(history)
        assert follows(history, draft, found.matched)


@given(TOKENS, st.integers(1, 3), st.integers(0, 2), st.integers(1, 60))
def test_ngrams_with_one_key_are_not_taken_for_each_other(
    history: list[int], shortest: int, more: int, known: int
) -> None:
    """Read at once or token by token, in tables of a few slots."""
    with patch(f"{ngram.__name__}._LEAST_SLOTS", 16):
        proposer = NgramProposer(shortest, shortest + more)
        for count in range(min(known, len(history)), len(history) + 1):
            found = proposer.propose(history[:count], 4)
            assert bool(found.tokens) == (found.matched > 0)
            assert found.matched <= longest_repeat(history[:count])
            assert follows(history[:count], found.tokens, found.matched) or not found.tokens


def test_most_of_a_long_repetition_is_found() -> None:
    """Few n-grams of a long text have the key of another one."""
    source = random.Random(1)
    text = [source.randrange(50_000) for _ in range(3_000)]
    proposer, num_found = NgramProposer(2, 4), 0
    for count in range(len(text) + 4, 2 * len(text)):
        found = proposer.propose([*text, *text][:count], 4).tokens
        num_found += found == [*text, *text, *text][count - len(text) :][:4]
    assert num_found > 0.9 * len(text)


def test_of_equal_ngrams_the_latest_counts() -> None:
    assert NgramProposer(1, 2).propose([5, 1, 7, 5, 2, 8, 5], 2).tokens == [2, 8]


@given(TOKENS, st.integers(1, 4), st.integers(1, 8))
def test_a_suffix_draft_follows_the_longest_repetition(history: list[int], shortest: int, limit: int) -> None:
    found = SuffixProposer(shortest).propose(history, limit)
    draft = found.tokens
    length = longest_repeat(history)
    if length < shortest:
        assert not draft
    else:
        assert len(draft) == limit
        assert follows(history, draft, length)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_an_answer_that_is_its_prediction_is_drafted_whole(prompt: list[int], answer: list[int], limit: int) -> None:
    proposer = PredictionProposer(answer, len(prompt))
    for count in range(len(answer) + 1):
        found = proposer.propose([*prompt, *answer[:count]], limit)
        assert found.tokens == answer[count : count + limit]
        assert found.matched == count


@given(
    kept=st.lists(st.integers(0, 99), min_size=2, max_size=20, unique=True),
    place=st.integers(0, 20),
    dropped=st.integers(0, 5),
    added=st.lists(st.integers(100, 109), max_size=5),
)
def test_behind_an_edit_two_tokens_find_the_prediction_again(
    kept: list[int], place: int, dropped: int, added: list[int]
) -> None:
    place = min(place, len(kept))
    behind = kept[place + dropped :]
    answer = [*kept[:place], *added, *behind]
    proposer, num_found = PredictionProposer(kept, 0), 0
    for count in range(len(answer) + 1):
        num_behind = count - place - len(added)
        found = proposer.propose(answer[:count], 8).tokens
        if num_behind >= 2:
            assert found == behind[num_behind : num_behind + 8]
            num_found += 1
    assert num_found == max(len(behind) - 1, 0)


def test_of_equal_places_the_next_one_counts() -> None:
    proposer = PredictionProposer([1, 2, 5, 1, 2, 6, 1, 2, 7], 0)
    assert proposer.propose([1, 2, 5, 8, 1, 2], 2).tokens == [6, 1]  # not 5 again
    assert proposer.propose([1, 2, 5, 8, 1, 2, 6, 1, 2, 7, 9, 1, 2], 1).tokens == [5]  # from the beginning on


@pytest.mark.parametrize(
    "make",
    [lambda: NgramProposer(1, 3), lambda: SuffixProposer(1, Corpus(100)), lambda: PredictionProposer([0, 1, 2] * 9, 0)],
)
@given(first=TOKENS, cut=st.integers(0, 60), second=TOKENS)
@settings(max_examples=examples(50))
def test_a_history_that_was_cut_off_gives_what_a_new_one_gives(
    make: Any, first: list[int], cut: int, second: list[int]
) -> None:
    used: Proposer = make()
    history = first[:cut] + second
    for known in (first, first[:cut]):
        used.propose(known, 4)
    assert used.propose(history, 4) == make().propose(history, 4)
    used = make()
    used.propose(first, 4)
    shorter = history[: max(0, len(first) - 1)]  # which may end with another token
    assert used.propose(shorter, 4) == make().propose(shorter, 4)


def test_only_a_token_that_was_taken_back_is_followed_again() -> None:
    """A rewind of a long answer held up a step for as long as it takes to follow all of it."""
    answer = list(range(1000, 5000))
    proposer = PredictionProposer([*range(100), *answer[:50]], 0)
    proposer.propose(answer, 4)
    assert num_lines(lambda: proposer.propose(answer[:-1], 4)) < 50
    assert num_lines(lambda: proposer.propose([*answer[:-3], 7], 4)) < 50
    assert proposer.propose([*answer[:-3], 7, 8], 2).tokens == [9, 10]


@given(st.lists(TOKENS, max_size=4), TOKENS)
def test_a_corpus_continues_with_an_earlier_answer(answers: list[list[int]], history: list[int]) -> None:
    corpus = Corpus(10_000)
    for answer in answers:
        corpus.add(answer)
    draft = list(SuffixProposer(3, corpus).propose(history, 4).tokens)
    if draft:
        suffix = history[-3:]
        assert follows(history, draft, 3) or any(
            text[end - 3 : end] == suffix and text[end : end + len(draft)] == draft
            for text in answers
            for end in range(3, len(text))
        )


def test_a_corpus_forgets_its_older_half() -> None:
    corpus = Corpus(40)
    proposer = SuffixProposer(2, corpus)
    for number in range(8):
        corpus.add([100 * number + index for index in range(8)])
        assert len(corpus.automaton.tokens) <= 40
    assert list(proposer.propose([700, 701], 3).tokens) == [702, 703, 704]
    assert list(proposer.propose([0, 1], 3).tokens) == []


def test_a_draft_ends_with_the_answer_that_it_is_of() -> None:
    corpus = Corpus(100)
    corpus.add([10, 11, 12])
    corpus.add([20, 21, 22])
    assert list(SuffixProposer(2, corpus).propose([5, 10, 11], 4).tokens) == [12]
    assert list(SuffixProposer(2, corpus).propose([5, 11, 12], 4).tokens) == []


def test_a_history_is_looked_up_again_once_a_corpus_dropped_some() -> None:
    corpus = Corpus(40)
    for number in range(1, 5):
        corpus.add([100 * number + index for index in range(8)])
    proposers = {first: SuffixProposer(2, corpus) for first in (400, 700)}
    found = {first: list(one.propose([5, first, first + 1], 2).tokens) for first, one in proposers.items()}
    assert found == {400: [402, 403], 700: []}
    before = corpus.automaton
    corpus.add([700 + index for index in range(8)])
    assert corpus.automaton is not before
    for first, one in proposers.items():
        assert list(one.propose([5, first, first + 1], 2).tokens) == [first + 2, first + 3]


def answered(speculator: Speculator, salt: str | None, answer: list[int], finish_reason: Any = "stop") -> None:
    """Let it remember the answer to the prompt [1, 2, 3]."""
    one = request(ScriptedModel(), "one", [1, 2, 3], SamplingParams(max_tokens=50))
    one.cache_salt, one.tokens = salt, [*one.tokens, *answer]
    speculator.remember(one, Output("one", finish_reason=finish_reason))


def drafted(speculator: Speculator, salt: str | None, prompt: list[int]) -> list[int]:
    one = request(ScriptedModel(), "other", prompt, SamplingParams(max_tokens=50))
    one.cache_salt = salt
    (draft,) = speculator.draft(Plan((one,), (), (one,)))
    return list(draft)


def test_answers_are_drafted_for_requests_of_their_salt_alone() -> None:
    speculator = Speculator(SpeculativeConfig(method="suffix", num_speculative_tokens=3), clock=lambda: 0.0)
    answered(speculator, "a", [10, 11, 12, 13, 14])
    answered(speculator, "a", [20, 21, 22, 23, 24], "cancelled")
    answered(speculator, None, [30, 31, 32, 33, 34], "length")
    assert [drafted(speculator, salt, [5, 10, 11]) for salt in ("a", "b", None)] == [[12, 13, 14], [], []]
    assert [drafted(speculator, salt, [5, 30, 31]) for salt in ("a", "b", None)] == [[], [], [32, 33, 34]]
    assert drafted(speculator, "a", [5, 20, 21]) == []  # it was not answered
    assert drafted(speculator, "a", [5, 1, 2]) == []  # of the prompt


def test_answers_of_the_salts_used_last_are_kept() -> None:
    speculator = Speculator(SpeculativeConfig(method="suffix", num_speculative_tokens=3), clock=lambda: 0.0)
    for number in range(MAX_CORPORA):
        answered(speculator, str(number), [10, 11, 12, 13, 14])
    assert drafted(speculator, "0", [5, 10, 11]) == [12, 13, 14]
    answered(speculator, "another", [10, 11, 12, 13, 14])
    assert drafted(speculator, "0", [5, 10, 11]) == [12, 13, 14]
    assert drafted(speculator, "1", [5, 10, 11]) == []


def test_forgetting_looks_at_each_answer_once() -> None:
    """Of answers of a token each there are many: a step would wait while each one that is dropped
    has all others counted again.
    """

    class Looked(deque[Sequence[int]]):
        num_looked = 0

        def __iter__(self) -> Iterator[Sequence[int]]:
            for each in super().__iter__():
                self.num_looked += 1
                yield each

    corpus = Corpus(200)
    corpus._answers = looked = Looked()
    for number in range(400):
        corpus.add([number])
    assert looked.num_looked <= 400


# -- lengths


def known(seconds: Mapping[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_tokens, taken in seconds.items():
        costs.learn(num_tokens, taken)
    return costs


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.01, 0.02, 0.03, 0.05])), min_size=1, max_size=40))
def test_no_step_is_faster_for_being_larger(steps: list[tuple[int, float]]) -> None:
    costs = StepCosts()
    for num_tokens, seconds in steps:
        costs.learn(num_tokens, seconds)
        assert costs._counts == sorted(costs._seconds)
        for count, lowest in zip(costs._counts, costs._lowest, strict=True):
            assert lowest == min(each for other, each in costs._seconds.items() if other >= count)


def test_a_step_is_learnt_at_once_whatever_is_known() -> None:
    """All numbers of tokens were sorted for each step: a millisecond in an old worker."""
    costs = known({count: 0.001 * count for count in range(1, 2001)})
    assert num_lines(lambda: costs.learn(1000, 1.01)) < 50
    assert num_lines(lambda: costs.learn(2001, 3.0)) < 50


@given(
    rates=st.lists(st.floats(0, 1), max_size=3),
    limit=st.integers(0, 4),
    num_tokens=st.integers(1, 5),
    seconds=st.lists(st.floats(0.01, 0.1), min_size=1, max_size=20),
)
def test_draft_lengths_give_the_most_tokens_per_second(
    rates: list[float], limit: int, num_tokens: int, seconds: list[float]
) -> None:
    costs = known({num_tokens + index: one for index, one in enumerate(sorted(seconds))})

    def speed(lengths: Sequence[int]) -> float:
        expected = sum(
            rate**place for rate, length in zip(rates, lengths, strict=True) for place in range(1, length + 1)
        )
        return (num_tokens + expected) / costs.seconds(num_tokens + sum(lengths))

    found = draft_lengths(rates, [limit] * len(rates), num_tokens, costs)
    best = max(map(speed, itertools.product(range(limit + 1), repeat=len(rates))))
    assert speed(found) == pytest.approx(best)


def test_a_draft_is_as_long_as_its_tokens_are_likely_to_pay() -> None:
    costs = known({1: 0.010, 25: 0.034})  # a token more costs a tenth of the step
    sure, likely, hopeless = draft_lengths([0.9, 0.5, 0.05], [8, 8, 8], 1, costs)
    assert sure > likely > hopeless == 0
    assert draft_lengths([0.8], [8], 8, costs)[0] < draft_lengths([0.8], [8], 1, costs)[0]
    assert draft_lengths([], [], 4, costs) == []


def test_a_large_batch_of_dear_tokens_does_not_ask_for_drafts() -> None:
    costs = known({count: 0.010 + 0.001 * count for count in range(1, 65)})
    assert can_pay(1, costs)
    assert can_pay(40, costs)
    assert not can_pay(64, known({64: 0.100, 65: 0.120, 80: 0.140}))


def test_free_tokens_are_always_drafted_and_dear_ones_never() -> None:
    assert draft_lengths([0.01], [6], 1, known({1: 0.010, 7: 0.010})) == [6]
    assert draft_lengths([0.99], [6], 1, known({1: 0.010, 7: 0.070})) == [0]


def test_tokens_that_nothing_is_known_of_are_tried() -> None:
    assert draft_lengths([0.6], [6], 1, StepCosts()) == [6]
    assert 0 < draft_lengths([0.6], [6], 1, known({1: 0.010}))[0] <= 6
    assert draft_lengths([0.9] * 32, [6] * 32, 32, known({32: 0.050})) != [0] * 32


def test_a_step_that_was_disturbed_is_soon_forgotten() -> None:
    costs = known({1: 0.010, 4: 0.500, 7: 0.014})
    assert costs.seconds(4) == 0.014  # a larger step was faster
    for _ in range(8):
        costs.learn(7, 0.012)
    costs.learn(7, 0.100)
    assert costs.seconds(7) < 0.025
    assert [costs.seconds(count) for count in (1, 4, 7, 9)] == sorted(costs.seconds(count) for count in (1, 4, 7, 9))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6), st.integers(0, 6)), max_size=60))
def test_acceptance_is_a_rate(drafts: list[tuple[int, int, int]]) -> None:
    proposer = ProposerAcceptance(0.6)
    acceptance = Acceptance(proposer)
    for matched, drafted, accepted in drafts:
        acceptance.count(matched, drafted, min(drafted, accepted))
        assert 0 <= acceptance.rate(matched) <= 1
        assert 0 <= proposer.rate(matched) <= 1


def test_acceptance_is_learnt_by_match_length_across_requests() -> None:
    proposer = ProposerAcceptance(0.6)
    for _ in range(50):
        first = Acceptance(proposer)
        first.count(2, 6, 0)
        first.count(20, 6, 6)
    later = Acceptance(proposer)
    assert later.rate(2) < 0.1
    assert later.rate(20) > 0.9
    for _ in range(20):
        later.count(2, 6, 6)
    assert later.rate(2) > 0.8  # its own drafts count more than others'


def test_drafts_that_do_not_pay_shrink_to_one_token_trials() -> None:
    now_s = 0.0
    config = SpeculativeConfig(method="ngram", prompt_lookup_min=1)
    speculator = Speculator(config, clock=lambda: now_s)
    model = ScriptedModel()
    rows = tuple(request(model, str(row), [5] * 20, SamplingParams(max_tokens=100)) for row in range(3))
    plan = Plan(rows, (), rows)
    drafted = []
    for _ in range(200):
        drafts = speculator.draft(plan)
        drafted.append(sum(map(len, drafts)))
        tried = replace(plan, drafts=tuple(map(tuple, drafts)))
        now_s += 0.01 + 0.001 * tried.num_tokens
        speculator.learn_cost(tried)
        if any(drafts):
            speculator.learn(tried, [0, 0, 0])
    assert drafted[0] > 1
    assert set(drafted[100:]) == {0, 1}


def test_a_row_is_tried_however_patient_another_one_is() -> None:
    """It was not before the row that had waited the longest, up to 1,024 steps."""
    now_s = 0.0
    speculator = Speculator(SpeculativeConfig(method="ngram", prompt_lookup_min=1), clock=lambda: now_s)
    model = ScriptedModel()
    rows = tuple(request(model, str(row), [5] * 20, SamplingParams(max_tokens=5000)) for row in range(2))
    tried = []
    for step in range(2200):
        asked = rows[:1] if step < 2000 else rows
        plan = Plan(asked, (), asked)
        plan = replace(plan, drafts=tuple(map(tuple, speculator.draft(plan))))
        tried += [step for one, draft in zip(asked, plan.drafts, strict=True) if draft and one is rows[1]]
        now_s += 0.01 + 0.02 * plan.num_tokens
        speculator.learn_cost(plan)
        speculator.learn(plan, [0] * len(asked))
    assert [later - earlier for earlier, later in itertools.pairwise([2000, *tried])] == [32, 65]


def test_only_steps_of_the_model_alone_say_what_a_token_costs() -> None:
    one = request(ScriptedModel(), "one", [1, 2, 3], SamplingParams(max_tokens=5))
    plain, nothing = Plan((one,), (), (one,)), Plan((), (), ())
    others = [replace(plain, companions=nothing), replace(plain, chunks=(Chunk(one, 0, 2),))]
    for plan, counts in ((others[0], []), (others[1], []), (plain, [1])):
        now_s = iter([0.0, 0.5])
        speculator = Speculator(clock=lambda now_s=now_s: next(now_s, 0.5))  # type: ignore[misc]
        speculator.draft(plan)
        speculator.learn_cost(plan)
        assert speculator._costs._counts == counts


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
        ('{"method": "none", "method": "suffix"}', 'the key "method" occurs twice in one object'),
        ('{"metod": "ngram"}', "unknown key 'metod'; known are chain, method"),
        ('{"method": "telepathy"}', "method must be one of none, ngram, suffix, draft_model, got 'telepathy'"),
        ('{"method": 3}', "method must be a text, got 3"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens must be an integer from 1 to 64, got 0"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens must be an integer from 1 to 64, got True"),
        ('{"prompt_lookup_min": 5}', "prompt_lookup_min 5 is above prompt_lookup_max 4"),
        ('{"method": "draft_model"}', "method draft_model needs model, the directory of the draft model"),
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


def test_rewinding_past_a_blocks_beginning_releases_it() -> None:
    assert rewind(offset=2, num_blocks=3, num_rejected=2, block_size=4) == (0, 3)
    assert rewind(offset=1, num_blocks=4, num_rejected=3, block_size=4) == (2, 3)
