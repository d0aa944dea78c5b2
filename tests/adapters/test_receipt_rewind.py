"""A receipt counts the tokens that were kept, however many were dropped in between."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain, receipts
from adapters.chain.receipts import ProcessorRecord, Receipt
from adapters.contract import Ban, Context, Edit, Force, ProcessorArgs, Reads, Stage, SteeringProcessor
from adapters.vocabulary import Vocabulary

CONTEXT = Context(Vocabulary(80), end_token_ids=frozenset({1}))
PROMPT = [2, 3, 4]


class Bans(SteeringProcessor):
    """Bans as many tokens as were generated."""

    name = "bans"
    stage = Stage.MASK
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def edit(self) -> Edit | None:
        return Ban.of(range(20, 20 + self.num_generated)) if self.num_generated else None


class Forces(SteeringProcessor):
    """Forces a token at every third position."""

    name = "forces"
    stage = Stage.FORCE
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def edit(self) -> Edit | None:
        return Force(5) if self.position % 3 == 0 else None


def begun() -> ProcessorChain:
    chain = ProcessorChain([Bans(None, CONTEXT), Forces(None, CONTEXT)], CONTEXT, attribution=True)
    chain.start(PROMPT)
    return chain


def accept(chain: ProcessorChain, count: int) -> None:
    for _ in range(count):
        plan = chain.plan()
        chain.accept(9 if plan.force is None else plan.force, chain.position)


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=6))
def test_dropped_tokens_are_not_counted(moves: list[tuple[int, int]]) -> None:
    chain = begun()
    for forward, back in moves:
        accept(chain, forward)
        chain.peek([9, 9])
        chain.rewind(max(len(PROMPT), chain.position - back))
    straight = begun()
    accept(straight, chain.position - len(PROMPT))
    assert chain.receipt.as_json() == straight.receipt.as_json()


def test_a_chain_that_begins_again_counts_from_nothing() -> None:
    chain = begun()
    accept(chain, 5)
    chain.start(PROMPT)
    assert chain.receipt.as_json() == begun().receipt.as_json()


@settings(max_examples=examples(100))
@given(st.integers(0, 20), st.integers(0, 20))
def test_an_earlier_receipt_is_read_while_it_counts_on(kept: int, more: int) -> None:
    chain = begun()
    accept(chain, kept + more)
    earlier = begun()
    accept(earlier, kept)
    assert chain.receipt.before(len(PROMPT) + kept).as_json() == earlier.receipt.as_json()


STEPS = st.lists(
    st.tuples(st.sampled_from(["", "biased", "masked", "forced"]), st.integers(0, 9), st.integers(0, 3)), max_size=9
)


@settings(max_examples=examples(200))
@given(STEPS, st.integers(0, 9), st.booleans())
def test_a_record_of_earlier_has_what_was_counted_before(
    steps: list[tuple[str, int, int]], kept: int, backtracks: bool
) -> None:
    """Tokens that were taken back, too; and so has one that is rewound."""

    def counted(count: int) -> ProcessorRecord:
        record = ProcessorRecord("any", 1, rollbacks=0 if backtracks else None)
        for position, (did, masked, number) in enumerate(steps[:count]):
            if backtracks:
                record.add_rollbacks(position, number)
            if did:
                record.add(position, did, masked)
        return record

    found, expected = counted(len(steps)), counted(kept).as_json()
    assert found.before(kept).as_json() == expected
    found.rewind(kept)
    assert found.as_json() == expected


@pytest.mark.parametrize("kept", [0, 2, 5, 9])
def test_log_probabilities_of_earlier_are_those_before(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MAX_ATTRIBUTED", 5)
    receipt = Receipt([], attribution=True)
    for position in range(7):
        receipt.add_logprob(position, -0.5 * position)
    expected = [(position, -0.5 * position) for position in range(min(kept, 5))]
    assert receipt.before(kept).logprobs == expected
    receipt.rewind(kept)
    assert receipt.logprobs == expected


def test_a_receipt_of_earlier_is_not_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each delta of an answer has one: all of its positions were added again, one by one."""
    chain = begun()
    accept(chain, 40)
    added = list[int]()
    monkeypatch.setattr(ProcessorRecord, "add", lambda record, at, *_: added.append(at))
    chain.receipt.before(len(PROMPT) + 30)
    assert added == []
