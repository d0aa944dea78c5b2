"""What a chain keeps from one position to the next never differs from what a new chain finds."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vocab_for_tests import END, context, run_row, vocabulary

from adapters.catalog import Catalog, Requested, Selection
from adapters.chain import ProcessorChain, ProcessorFailed, plan_rows
from adapters.contract import (
    ALWAYS,
    Ban,
    Bias,
    Context,
    Edit,
    MalformedEdit,
    ProcessorArgs,
    Reads,
    Scale,
    Sparse,
    Stage,
    SteeringProcessor,
    apply_sparse,
    check_edit,
)
from adapters.contract.processor import Processor
from adapters.processors.length import MinTokens
from adapters.vocabulary import Vocabulary

IDS = vocabulary().encode
THINK, ANSWER = IDS("<think>")[0], IDS("</think>")[0]
TOKENS = [*IDS("the quick fox"), *IDS('"abc"'), THINK, ANSWER, END]
PROMPT = IDS("the answer is")
ROW = torch.randn(vocabulary().size, generator=torch.Generator().manual_seed(1))

SOFT = (
    Requested("logit_bias", {"bias": {str(token_id): 1.5 for token_id in TOKENS[:4]}}),
    Requested("repetition_penalty", {"penalty": 1.3}),
    Requested("frequency_penalty", {"penalty": 0.7}),
    Requested("presence_penalty", {"penalty": 0.3, "window": 3}),
    Requested("banned_tokens", {"token_ids": [TOKENS[1]]}),
)
CHAINS = {
    "grammar": (
        *SOFT,
        Requested("min_tokens", {"n": 5}),
        Requested("json_schema", {"schema": {"type": "array", "items": {"type": "string", "maxLength": 9}}}),
    ),
    "thinking": (
        *SOFT,
        Requested("min_tokens", {"n": 4}),
        Requested("thinking_budget", {"tokens": 3, "message": "the end"}),
    ),
    "scopes": (
        *SOFT,
        Requested("min_tokens", {"n": 2}, scope="thinking"),
        Requested("min_tokens", {"n": 3}, scope="answer"),
        Requested("json_schema", {"schema": {"type": "string"}}, scope="answer"),
    ),
}


def begun(name: str) -> ProcessorChain:
    chain = Catalog.default().build_chain(Selection(CHAINS[name]), context())
    chain.start(PROMPT)
    return chain


def edited(chain: ProcessorChain) -> tuple[list[float], str, list[tuple[int, str, int]]]:
    """The row, why there is none, and what the receipt will say."""
    try:
        return run_row(chain, ROW.clone()).tolist(), "", chain.last_edits()
    except ProcessorFailed as failure:
        return [], str(failure), chain.last_edits()


def as_new(chain: ProcessorChain, name: str) -> list[float]:
    """The row, after a check that a new chain with the same history edits it in the same way."""
    new = begun(name)
    for position in range(len(PROMPT), chain.position):
        new.accept(chain.tokens[position], position)
    found = edited(chain)
    assert found == edited(new)
    return found[0]


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.one_of(st.integers(0, 40), st.integers(-4, -1), st.none()), max_size=25))
def test_a_chain_in_use_plans_as_a_new_one(name: str, moves: list[int | None]) -> None:
    """A token that may be sampled, a rewind by so many tokens, or (None) a look at a draft."""
    chain = begun(name)
    for move in moves:
        row = as_new(chain, name)
        likely = [token_id for token_id in TOKENS if row and row[token_id] > -torch.inf]
        tokens = likely or [row.index(max(row)) if row else END]
        if move is None and row:
            chain.peek(tokens[:1] * 2)
        elif move is not None and move >= 0:
            chain.accept(tokens[move % len(tokens)], chain.position)
        else:
            chain.rewind(max(len(PROMPT), chain.position + (move or 0)))
    as_new(chain, name)


class Counted(SteeringProcessor):
    """Bans a token until position 8, and counts how often it is asked."""

    name = "counted"
    stage = Stage.MASK
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def __init__(self, args: ProcessorArgs, context: Context) -> None:
        self.asked = 0
        self._ban = Ban.of([7])

    def edit(self) -> Edit | None:
        self.asked += 1
        return self._ban if self.position < 8 else None

    def same_until(self) -> int:
        return 8 if self.position < 8 else ALWAYS


class AtOddPositions(Counted):
    """Inherits a promise about another edit, which does not bind it."""

    def edit(self) -> Edit | None:
        self.asked += 1
        return self._ban if self.position % 2 else None


def positions_acted(chain: ProcessorChain, stop: int) -> list[int]:
    found = []
    while chain.position < stop:
        if not chain.plan().is_empty:
            found.append(chain.position)
        chain.accept(9, chain.position)
    return found


def of_one(processor: Processor, scope: str = "all") -> ProcessorChain:
    facts = Context(Vocabulary(40), think_start=(30,), think_end=(31,))
    chain = ProcessorChain([processor], facts, scopes=[scope])  # type: ignore[list-item]
    chain.start([1, 2, 3])
    return chain


def test_an_edit_that_stays_the_same_is_not_asked_for_again() -> None:
    processor = Counted(None, Context(Vocabulary(40)))
    chain = of_one(processor)
    assert positions_acted(chain, 12) == [3, 4, 5, 6, 7]
    assert processor.asked == 2
    assert chain.receipt.as_json()["processors"][0]["tokens_masked"] == 5


def test_it_is_asked_for_after_a_rewind_and_a_new_start() -> None:
    processor = Counted(None, Context(Vocabulary(40)))
    chain = of_one(processor)
    positions_acted(chain, 12)
    chain.rewind(6)
    assert positions_acted(chain, 12) == [6, 7]
    chain.start([1] * 7)
    assert positions_acted(chain, 12) == [7]


def test_it_is_asked_for_after_a_failure() -> None:
    processor = Counted(None, Context(Vocabulary(40)))
    chain = of_one(processor)
    chain.plan()
    chain.fail("another", "budget", "took too long")
    assert positions_acted(chain, 5) == [3, 4]
    assert processor.asked == 2


def test_with_a_scope_it_is_asked_at_every_position() -> None:
    processor = Counted(None, Context(Vocabulary(40)))
    assert positions_acted(of_one(processor, "answer"), 12) == [3, 4, 5, 6, 7]
    assert processor.asked == 9


def test_a_promise_is_not_inherited_by_another_edit() -> None:
    processor = AtOddPositions(None, Context(Vocabulary(40)))
    assert positions_acted(of_one(processor), 12) == [3, 5, 7, 9, 11]


def test_a_minimum_ends_where_it_says() -> None:
    facts = Context(Vocabulary(40), frozenset({0}))
    assert positions_acted(of_one(MinTokens(MinTokens.Args(n=4), facts)), 12) == [3, 4, 5, 6]


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.sets(st.integers(0, 11))), max_size=8))
def test_arrays_are_applied_as_tensors_are(asked: list[tuple[int, bool, set[int]]]) -> None:
    """Edits of two rows in any order, of tensors, of arrays, and of both together."""
    rows = torch.linspace(-4, 4, 24).view(2, 12)
    packed: list[tuple[int, Sparse]] = []
    plain: list[tuple[int, Sparse]] = []
    for index, (row, is_packed, chosen) in enumerate(asked):
        ids, values = sorted(chosen), [0.3 + token_id for token_id in sorted(chosen)]
        kind = (Bias, Scale)[index % 2]
        plain.append((row, kind.of(ids, values)))
        packed.append((row, kind(array("q", ids), array("f", values)) if is_packed else plain[-1][1]))
    results = [rows.clone(), rows.clone()]
    for result, edits in zip(results, (packed, plain), strict=True):
        apply_sparse(result, edits)
    assert torch.equal(*results)


def test_an_edit_of_arrays_is_seen_as_tensors() -> None:
    edit = Scale(array("q", [5, 2]), array("f", [0.5, 2.0]))
    assert torch.equal(edit.token_ids, torch.tensor([5, 2]))
    assert torch.equal(edit.factors, torch.tensor([0.5, 2.0]))
    assert Bias(array("q"), array("f")).values.tolist() == []
    checked = check_edit(edit, soft=True, vocab_size=8, num_tokens=8)
    assert isinstance(checked, Scale)
    assert torch.equal(checked.token_ids, edit.token_ids)
    assert torch.equal(checked.factors, edit.factors)


@pytest.mark.parametrize(
    "edit",
    [
        Bias(array("i", [1, 2]), array("f", [1.0, 2.0])),
        Bias(array("q", [1, 2]), array("d", [1.0])),
        Scale(torch.tensor([1]), array("i", [1])),
        Scale(np.array([1]), array("f", [1.0])),  # type: ignore[arg-type]
    ],
)
def test_arrays_of_other_types_are_refused(edit: Edit) -> None:
    with pytest.raises(MalformedEdit, match="expected"):
        check_edit(edit, soft=True, vocab_size=8, num_tokens=8)


class Promises(Counted):
    """Says what it is told to say."""

    def __init__(self, until: object) -> None:
        super().__init__(None, Context(Vocabulary(40)))
        self._until = until

    def same_until(self) -> int:
        return self._until  # type: ignore[return-value]


@pytest.mark.parametrize("until", [None, "9", 9.0, float("nan"), True])
def test_a_promise_that_is_no_position_fails_its_request_alone(until: object) -> None:
    chains = [(0, of_one(Promises(until))), (1, of_one(Promises(9)))]
    planned, failures = plan_rows(chains)
    assert [row for row, _, _ in planned] == [1]
    assert "from same_until, expected a position" in failures[0].message


def advance(self: Processor, token_id: int, index: int) -> None:
    """Takes a token."""


def test_one_with_state_may_not_promise() -> None:
    class Odd(Counted):
        advance = advance

    assert Odd.same_until is SteeringProcessor.same_until
    with pytest.raises(TypeError, match=r"Odder\.same_until: a processor with state has none, and this has advance"):
        type("Odder", (Odd,), {"same_until": Counted.same_until})


class TooShortForFive(MinTokens):
    @property
    def is_too_short(self) -> bool:
        return self.num_generated < 5


def test_a_subclass_says_itself_whether_an_answer_is_too_short() -> None:
    facts = Context(Vocabulary(40), end_token_ids=frozenset({7}))
    assert positions_acted(of_one(TooShortForFive(MinTokens.Args(n=9), facts)), 12) == [3, 4, 5, 6, 7]


def test_edits_are_made_and_matched_by_their_fields() -> None:
    for edit in (Bias.of([1], values=[0.5]), Scale.of([1], factors=[0.5])):
        match edit:
            case Bias(ids, numbers) | Scale(ids, numbers):
                assert (ids.tolist(), numbers.tolist()) == ([1], [0.5])
        assert repr(edit).startswith(f"{type(edit).__name__}(tensor([1])")
