"""Minimum length and the two boosts of the end, against transformers and against the formulas in
float64.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import ExponentialDecayLengthPenalty, MinNewTokensLengthLogitsProcessor
from vocab_for_tests import END, assert_rows_equal, context, replayed, run_row, step_by_step, vocabulary

from adapters.chain import ProcessorChain, apply_edits, plan_rows
from adapters.contract import ArgumentError, Context, Reads
from adapters.processors.length import ExponentialDecayLength, GenLength, MinTokens, sentence_ends
from adapters.vocabulary import Vocabulary

V = 12
ENDS = [3, 7]
CONTEXT = Context(Vocabulary(V), end_token_ids=frozenset(ENDS))
few = settings(max_examples=examples(50), deadline=None)
prompts = st.lists(st.integers(0, V - 1), min_size=1, max_size=4)
generations = st.lists(st.integers(0, V - 1), max_size=10)
logits = st.one_of(st.floats(-30, 30, width=32), st.just(-float("inf")))
rows = st.lists(logits, min_size=V, max_size=V).map(torch.tensor)
finite_rows = st.lists(st.floats(-30, 30, width=32), min_size=V, max_size=V).map(torch.tensor)


def make(kind, facts=CONTEXT, **args):
    (processor,) = kind.build(kind.Args(**args), facts)
    return processor


def by_transformers(oracle, prompt, generated, row):
    return [
        oracle(torch.tensor([prompt + generated[:k]], dtype=torch.int64), row.clone().unsqueeze(0))[0]
        for k in range(len(generated) + 1)
    ]


# min_tokens


@few
@given(prompts, generations, rows, st.integers(0, 12))
def test_min_tokens_is_that_of_transformers(prompt, generated, row, n) -> None:
    expected = by_transformers(MinNewTokensLengthLogitsProcessor(len(prompt), n, ENDS), prompt, generated, row)
    processors = [make(MinTokens, n=n)]
    assert_rows_equal(step_by_step(processors, CONTEXT, prompt, generated, row), expected)
    assert_rows_equal(replayed(processors, CONTEXT, prompt, generated, row), expected)


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    facts = Context(Vocabulary(V), end_token_ids=frozenset(ENDS), max_tokens=4)
    assert make(MinTokens, facts, n=4) is not None
    with pytest.raises(ArgumentError, match="at most 4, the most tokens of the answer, got 5"):
        make(MinTokens, facts, n=5)


def test_the_least_length_of_a_chain_is_that_of_its_scopes() -> None:
    think, answer = 10, 11
    facts = Context(Vocabulary(V), frozenset(ENDS), think_start=(think,), think_end=(answer,))

    def shortness(scope, tokens):
        chain = ProcessorChain([make(MinTokens, facts, n=2)], facts, scopes=[scope])
        chain.start([1])
        seen = [chain.is_too_short]
        for position, token in enumerate(tokens, start=1):
            chain.accept(token, position)
            seen.append(chain.is_too_short)
        return seen

    tokens = [think, 5, 5, 5, answer, 6, 6, 6]
    assert shortness("all", tokens) == [True, True] + [False] * 7
    assert shortness("thinking", tokens) == [False, True, True] + [False] * 6
    assert shortness("answer", tokens) == [True] * 7 + [False] * 2
    assert not ProcessorChain([], facts).is_too_short


def test_min_tokens_without_end_tokens_asks_for_nothing() -> None:
    processor = make(MinTokens, Context(Vocabulary(V)), n=5)
    processor.start([1])
    assert processor.edit() is None


# gen_length


@few
@given(prompts, generations, finite_rows, st.floats(-1000, 1000), st.one_of(st.integers(0, 10), st.floats(0, 10)))
def test_gen_length_is_the_formula(prompt, generated, row, boost, power) -> None:
    processors = [make(GenLength, boost=boost, power=power)]
    steps = step_by_step(processors, CONTEXT, prompt, generated, row)
    assert_rows_equal(replayed(processors, CONTEXT, prompt, generated, row), steps)
    for n, after in enumerate(steps):
        wanted = row.double()
        wanted[ENDS] += boost * n**power / 10**power
        torch.testing.assert_close(after.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("boost", "n"), [(1000, 100), (1000, 6000), (-1000, 6000)])
def test_gen_length_stays_finite(boost, n) -> None:
    processor = make(GenLength, boost=boost, power=10)
    processor.start([1], shared=[1] * (1 + n))
    wanted = boost * (n / 10) ** 10
    assert processor.edit().values.tolist() == pytest.approx([max(-1e30, min(wanted, 1e30))] * 2)


def test_gen_length_waits_for_the_end_of_a_sentence() -> None:
    facts = context()
    encode = vocabulary().encode
    generated = [*encode("the fox sleeps.\n"), *encode("However, the dog"), *encode(".")]
    row = torch.zeros(vocabulary().size)
    processors = [make(GenLength, facts, boost=2.0, complete_sentences=True)]
    steps = step_by_step(processors, facts, encode("the answer."), generated, row)
    assert_rows_equal(replayed(processors, facts, encode("the answer."), generated, row), steps)
    texts = [vocabulary().decode(generated[:n]) for n in range(len(generated) + 1)]
    for n, (after, text) in enumerate(zip(steps, texts, strict=True)):
        ended = n > 0 and text.endswith((".", "\n"))
        assert float(after[END]) == pytest.approx(2.0 * (n / 10) ** 2 if ended else 0.0)
    assert sum(float(after[END]) > 0 for after in steps) >= 2


def test_what_ends_a_sentence() -> None:
    class Pieces:
        """A tokenizer of whole pieces, in bytes."""

        pieces = (".", " .", "!", "?\n", "\n", '."', ".)", ". ", "\u3002", "\uff01", "a", ".a", " ", ",", '"', "<end>")

        def __len__(self):
            return len(self.pieces)

    facts = Vocabulary(20, Pieces())  # type: ignore[arg-type]
    facts.__dict__["token_bytes"] = [piece.encode() for piece in Pieces.pieces] + [b""] * 4
    assert sentence_ends(facts) == frozenset(range(10))
    assert sentence_ends(facts) is sentence_ends(facts)


def test_complete_sentences_need_a_tokenizer() -> None:
    with pytest.raises(ArgumentError, match="tokenizer") as caught:
        make(GenLength, boost=1.0, complete_sentences=True)
    assert caught.value.argument == "complete_sentences"


def test_only_complete_sentences_read_tokens() -> None:
    assert make(GenLength, boost=1.0).reads is Reads.NOTHING
    assert make(GenLength, context(), boost=1.0, complete_sentences=True).reads is Reads.GENERATED


def test_gen_length_travels_to_another_process() -> None:
    processor = make(GenLength, context(), boost=1.0, complete_sentences=True)
    processor.start([1])
    processor.accept(vocabulary().encode(".")[0], 1)
    copy = pickle.loads(pickle.dumps(processor))
    assert copy.edit().values.tolist() == processor.edit().values.tolist()


def test_gen_length_without_end_tokens_asks_for_nothing() -> None:
    processor = make(GenLength, Context(Vocabulary(V)), boost=5, power=0)
    processor.start([1], shared=[1, 2])
    assert processor.edit() is None


# exponential_decay_length


@few
@given(prompts, generations, finite_rows, st.integers(0, 12), st.floats(1, 100))
def test_exponential_decay_is_that_of_transformers(prompt, generated, row, start, factor) -> None:
    oracle = ExponentialDecayLengthPenalty((start, factor), ENDS, len(prompt))
    expected = by_transformers(oracle, prompt, generated, row)
    processors = [make(ExponentialDecayLength, start=start, factor=factor)]
    steps = step_by_step(processors, CONTEXT, prompt, generated, row)
    assert_rows_equal(replayed(processors, CONTEXT, prompt, generated, row), steps)
    for after, wanted in zip(steps, expected, strict=True):
        torch.testing.assert_close(after, wanted, rtol=1e-6, atol=0)


def test_exponential_decay_leaves_masks_and_never_makes_nan() -> None:
    row = torch.zeros(V)
    row[3], row[7] = -torch.inf, 5.0
    processor = make(ExponentialDecayLength, start=0, factor=100)
    shared = [1]
    processor.start([1], shared=shared)
    for _ in range(200):
        shared.append(0)
        after = row.clone()
        processor.shape(after)
        assert after[3] == -torch.inf
        assert float(after[7]) == pytest.approx(5.0 * min(100.0 ** min(len(shared) - 1, 20), 1e30))
        assert after[[0, 1, 2, 4, 5, 6, 8, 9, 10, 11]].eq(0).all()
    huge = torch.full((V,), 1e30)
    processor.shape(huge)
    assert huge.isfinite().all()


@few
@given(st.lists(st.tuples(generations, st.integers(0, 5), st.floats(1, 3)), min_size=1, max_size=5), rows)
def test_exponential_decay_does_not_mix_rows(requests, row) -> None:
    ends = [ENDS, [0], [], [1, 2, 11]]
    chains = []
    for i, (generated, start, factor) in enumerate(requests):
        facts = Context(Vocabulary(V), end_token_ids=frozenset(ends[i % 4]))
        chains.append(ProcessorChain([make(ExponentialDecayLength, facts, start=start, factor=factor)], facts))
        chains[-1].start([1], generated)
    batch = row.repeat(len(chains), 1)
    planned, failures = plan_rows(list(enumerate(chains)))
    assert not failures
    assert not apply_edits(batch, planned)
    for after, chain in zip(batch, chains, strict=True):
        assert torch.equal(after, run_row(chain, row))
        assert not after.isnan().any()


# Refusals


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        *((MinTokens, {"n": n}) for n in (-1, 2**31, 1.0, "1", None, True)),
        (MinTokens, {}),
        *((GenLength, {"boost": boost}) for boost in (-1000.1, 1000.1, float("nan"), "1", None)),
        *((GenLength, {"boost": 1, "power": power}) for power in (-0.1, 10.1, float("inf"), "2")),
        (GenLength, {"boost": 1, "complete_sentences": 1}),
        (GenLength, {"boost": 1, "boost_token": 3}),
        *((ExponentialDecayLength, {"start": start, "factor": 2}) for start in (-1, 2**31, 1.5, "1")),
        *((ExponentialDecayLength, {"start": 1, "factor": factor}) for factor in (0.99, 100.1, float("nan"), "2")),
        (ExponentialDecayLength, {"start": 1}),
    ],
)
def test_arguments_are_bounded(kind, args) -> None:
    with pytest.raises(ValidationError):
        kind.Args(**args)
