"""The chain: order law, history by absolute position, scopes, unsatisfiable, receipts, one row
and many.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import create_trtllm_adapters
from adapters.chain import ProcessorChain, ProcessorFailed, apply_chain, apply_edits, apply_late, plan_rows, replay
from adapters.chain.chain import TIMED_EVERY
from adapters.chain.plan import RowPlan
from adapters.contract import (
    Allow,
    Ban,
    Bias,
    Context,
    Force,
    Reads,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    Unsatisfiable,
    bitmask_of,
)
from adapters.processors.length import MinTokens
from adapters.processors.masks import AllowedTokens
from adapters.processors.penalties import FrequencyPenalty
from adapters.processors.seeded_sampler import SeededSampler
from adapters.processors.truncation import MinP
from adapters.trtllm.native_controls import EmbeddingBias, ThirdPartyCallable
from adapters.vocabulary import Vocabulary

VOCAB = 40
THINK, ANSWER = 38, 39
END = 0
CONTEXT = Context(Vocabulary(VOCAB, None, [END]), frozenset({END}), think_start=(THINK,), think_end=(ANSWER,))
STOPS_AT_THE_TAG = Context(CONTEXT.vocabulary, frozenset({END, ANSWER}), think_start=(THINK,), think_end=(ANSWER,))


class Adds(SteeringProcessor):
    name, stage, reads = "adds", Stage.BIAS, Reads.NOTHING

    def __init__(self, token_id=1, value=1.0) -> None:
        self.bias = Bias.of([token_id], [value])

    def edit(self):
        return self.bias


class Halves(ShapingProcessor):
    name, stage, reads = "halves", Stage.TEMPERATURE, Reads.NOTHING

    def __init__(self, by=2.0) -> None:
        self.by = by

    def shape(self, logits):
        logits.div_(self.by)


class Squares(ShapingProcessor):
    name, stage, reads = "squares", Stage.SOFT, Reads.NOTHING

    def __init__(self) -> None:
        pass

    def shape(self, logits):
        logits.pow_(2)


class Allows(SteeringProcessor):
    name, stage, reads = "allows", Stage.MASK, Reads.NOTHING

    def __init__(self, *token_ids) -> None:
        self.allow = Allow.of(token_ids, VOCAB)

    def edit(self):
        return self.allow


class Bans(SteeringProcessor):
    name, stage, reads = "bans", Stage.MASK, Reads.NOTHING

    def __init__(self, *token_ids) -> None:
        self.ban = Ban.of(token_ids)

    def edit(self):
        return self.ban


class Forces(SteeringProcessor):
    name, stage, reads = "forces", Stage.FORCE, Reads.NOTHING

    def __init__(self, *token_ids) -> None:
        self.ids = token_ids

    def edit(self):
        return Force(self.ids[self.num_generated]) if self.num_generated < len(self.ids) else None


class NoRepeat(SteeringProcessor):
    """Bans every generated token: the simplest processor with state. Counts its own calls of
    `advance`.
    """

    name, stage, reads = "no_repeat", Stage.MASK, Reads.GENERATED

    def __init__(self, cheap=False) -> None:
        self.cheap = cheap
        self.advances = 0

    def reset(self):
        self.seen = {}

    def advance(self, token_id, index):
        assert index == sum(self.seen.values())
        self.advances += 1
        self.seen[token_id] = self.seen.get(token_id, 0) + 1

    def rewind_state(self, token_ids):
        if not self.cheap:
            return False
        for token_id in token_ids:
            self.seen[token_id] -= 1
            if not self.seen[token_id]:
                del self.seen[token_id]
        return True

    def edit(self):
        return Ban.of(self.seen) if self.seen else None


class Drifts(ShapingProcessor):
    """State from logits: adds the running sum of the logits of chosen tokens to token 1."""

    name, stage, reads, observes_logits = "drifts", Stage.SOFT, Reads.GENERATED, True

    def __init__(self) -> None:
        pass

    def reset(self):
        self.sums, self.row = [0.0], None

    def shape(self, logits):
        self.row = logits.clone()
        logits[1] += self.sums[-1]

    def advance(self, token_id, index):
        self.sums.append(self.sums[-1] + float(self.row[token_id]))

    def rewind_state(self, token_ids):
        del self.sums[-len(token_ids) :]
        return True


@pytest.mark.parametrize(
    ("old", "new"),
    [("retract", "rewind_state"), ("taken_back", "rewinds_to"), ("taken_back_at_end", "rewinds_to_at_end")],
)
def test_a_class_with_a_hook_by_its_former_name_is_refused(old, new) -> None:
    with pytest.raises(TypeError, match=rf"^Older\.{old}: this method is called {new}$"):
        type("Older", (SteeringProcessor,), {old: lambda self, token_ids: False})


@pytest.mark.parametrize("name", ["start", "accept", "append", "rewind", "rewind_lazily", "lose"])
def test_a_helper_by_a_name_of_the_base_class_is_refused(name) -> None:
    class Mixin:
        pass

    setattr(Mixin, name, lambda self: None)
    for bases, own in (((SteeringProcessor,), {name: lambda self: None}), ((Mixin, SteeringProcessor), {})):
        with pytest.raises(TypeError, match=rf"^Helped\.{name}: chains call this method of the base class"):
            type("Helped", bases, own)


class TakesTokens(SteeringProcessor):
    """Keeps the answer in what it does not know for an attribute of the base class."""

    name, stage, reads = "takes_tokens", Stage.MASK, Reads.GENERATED

    def __init__(self) -> None:
        """Nothing."""

    def reset(self):
        self._tokens = []

    def advance(self, token_id, index):
        self._tokens.append(token_id)

    def edit(self):
        return Ban.of(set(self._tokens))


class TakesTokensOnce(TakesTokens):
    """Makes its list when it is built."""

    name = "takes_tokens_once"

    def __init__(self) -> None:
        self._tokens = []

    def reset(self):
        """Nothing."""


class TakesCount(TakesTokens):
    """Counts in what it does not know for an attribute of the base class."""

    name = "takes_count"

    def reset(self):
        self._consumed = 0

    def advance(self, token_id, index):
        self._consumed += 1

    def edit(self):
        return Ban.of([4]) if self._consumed >= 3 else None


class TakesCountLate(TakesCount):
    """Begins to count with the first token."""

    name = "takes_count_late"

    def reset(self):
        """Nothing."""


@pytest.mark.parametrize("kind", [TakesTokens, TakesTokensOnce, TakesCount, TakesCountLate])
def test_a_processor_that_takes_a_base_class_attribute_fails(kind) -> None:
    made = ProcessorChain([kind()], CONTEXT)
    with pytest.raises(ProcessorFailed, match=r"changes _\w+, which is an attribute of the base class, at position"):
        made.start([1, 2], [3, 4, 5])


@dataclass(slots=True)
class Slotted(SteeringProcessor):
    """A dataclass with slots, and with state."""

    args: Any = None
    context: Any = None
    count: int = 0

    name, stage, reads = "slotted", Stage.MASK, Reads.GENERATED

    def reset(self):
        self.count = 0

    def advance(self, token_id, index):
        self.count += 1

    def edit(self):
        return Ban.of([4]) if self.count >= 2 else None


def test_a_dataclass_with_slots_is_a_processor() -> None:
    made = pickle.loads(pickle.dumps(chain(Slotted(), generated=[5, 6])))
    assert made.plan().bans[0].token_ids.tolist() == [4]
    made.rewind(4)
    assert made.plan().is_empty


class Raises(SteeringProcessor):
    name, stage, reads = "raises", Stage.SOFT, Reads.NOTHING

    def __init__(self, error) -> None:
        self.error = error

    def edit(self):
        raise self.error


def chain(*processors, scopes=None, prompt=(1, 2, 3), generated=(), context=CONTEXT, **options):
    made = ProcessorChain(processors, context, scopes=scopes, **options)
    made.start(prompt, generated)
    return made


def run(made, logits=None):
    """One row through the batched path. Returns the row, or the forced token."""
    logits = torch.arange(VOCAB, dtype=torch.float32)[None].clone() if logits is None else logits
    planned, failures = plan_rows([(0, made)])
    failures |= apply_edits(logits, planned)
    failures |= apply_late(logits, planned)
    for failure in failures.values():
        raise failure
    forced = planned[0][2].force if planned else None
    return logits[0] if forced is None else forced


def allowed(made):
    return set(run(made).isfinite().nonzero().flatten().tolist())


# The order law


def test_the_order_is_the_laws_not_the_requests() -> None:
    base = torch.arange(VOCAB, dtype=torch.float32)
    expected = base.clone()
    expected[1] += 1
    expected = expected**2 / 2
    for processors in ([Halves(), Squares(), Adds()], [Adds(), Squares(), Halves()], [Squares(), Adds(), Halves()]):
        assert torch.equal(run(chain(*processors)), expected)


def test_within_a_stage_the_request_decides() -> None:
    class SoftAdds(Adds):
        stage = Stage.SOFT

    first = run(chain(SoftAdds(3), Squares()))
    second = run(chain(Squares(), SoftAdds(3)))
    assert first[3] == 16
    assert second[3] == 10


def test_masks_are_and_ed_and_an_empty_chain_asks_for_nothing() -> None:
    assert allowed(chain(Allows(1, 2, 3), Bans(2), Allows(2, 3, 4))) == {3}
    assert plan_rows([(0, chain())]) == ([], {})


def test_a_forced_row_is_not_touched() -> None:
    logits = torch.zeros(1, VOCAB)
    assert run(chain(Forces(5), Adds(), Squares(), Halves()), logits) == 5
    assert (logits == 0).all()


@pytest.mark.parametrize(
    ("processors", "names"),
    [
        ([Forces(5), Bans(5)], "forces"),
        ([Forces(5), Allows(6)], "forces"),
        ([Forces(5), Forces(6)], "forces"),
        ([Allows(1), Allows(2)], "allows"),
        ([Allows(1), Bans(1)], "allows, bans"),
        ([Allows(31), Bans(31)], "allows, bans"),
        ([Raises(Unsatisfiable("nothing fits"))], "raises"),
    ],
)
def test_what_cannot_be_satisfied_is_said_and_never_sampled(processors, names) -> None:
    made = chain(*processors)
    with pytest.raises(ProcessorFailed) as caught:
        made.plan()
    assert caught.value.reason == "unsatisfiable"
    assert caught.value.processor == names
    assert "position 3" in str(caught.value)
    assert str(made.failure) == str(caught.value)


def test_a_dense_bias_of_minus_infinity_is_a_mask() -> None:
    bias = torch.ones(VOCAB)
    bias[[4, 9]] = -torch.inf
    assert allowed(chain(*EmbeddingBias.members(bias))) == {*range(VOCAB)} - {4, 9}
    assert run(chain(*EmbeddingBias.members(bias), Forces(5))) == 5
    with pytest.raises(ProcessorFailed, match="forces: forces token 4, which another processor forbids"):
        run(chain(*EmbeddingBias.members(bias), Forces(4)))
    assert len(EmbeddingBias.members(torch.ones(VOCAB))) == 1


def test_a_dense_bias_is_where_the_logits_are() -> None:
    processor = EmbeddingBias(torch.ones(VOCAB))
    processor.shape(torch.zeros(VOCAB, device="meta"))
    assert processor._bias.device.type == "meta"


ids = st.sets(st.sampled_from([0, 3, 31, 32, 39]))


@given(masks=st.lists(st.tuples(ids, st.sampled_from([32, 40])), max_size=3), banned=st.lists(ids, max_size=2))
def test_a_token_is_left_whatever_the_widths_of_masks(masks, banned) -> None:
    """A grammar's mask has the ids of the tokenizer, which may be fewer than those of a row."""
    edits = [Allow.of({i for i in kept if i < width}, width) for kept, width in masks]
    left = set(range(VOCAB)).difference(*banned)
    for kept, width in masks:
        left &= {i for i in kept if i < width}
    acts = [(None, Stage.MASK, edit, "masked", 0) for edit in [*edits, *map(Ban.of, banned)]]
    assert RowPlan(acts).leaves_a_token() == (bool(left) or not masks)


def test_two_processors_may_force_the_same_token() -> None:
    assert run(chain(Forces(5), Forces(5))) == 5


# History


def test_accept_is_idempotent_and_position_checked() -> None:
    made = chain(NoRepeat())
    made.accept(7, 3)
    made.accept(7, 3)
    assert allowed(made) == set(range(VOCAB)) - {7}
    for position in (2, 5):
        with pytest.raises(ValueError, match="is not between 3 and 4"):
            made.accept(8, position)


def test_another_token_at_a_known_position_rewrites_history() -> None:
    made = chain(NoRepeat())
    for position, token in enumerate([7, 8, 9], start=3):
        made.accept(token, position)
    made.accept(5, 4)
    assert made.tokens == [1, 2, 3, 7, 5]
    assert allowed(made) == set(range(VOCAB)) - {7, 5}


histories = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def thinks(tokens):
    return [THINK if t % 7 == 3 else ANSWER if t % 7 == 5 else t for t in tokens]


def everything(cheap=False):
    return (
        [NoRepeat(cheap), NoRepeat(), NoRepeat(), Forces(4, 5), Adds(), Halves()],
        ["all", "thinking", "answer", "thinking", "answer", "all"],
    )


def plan_facts(made):
    try:
        plan = made.plan()
    except ProcessorFailed as failure:
        return str(failure)
    bans = [sorted(ban.token_ids.tolist()) for ban in plan.bans]
    num_soft = sum(kind in ("biased", "shaped") and stage <= Stage.SOFT for _, stage, _, kind, _ in plan.acts)
    return plan.force, bans, num_soft, len(plan.late)


@settings(max_examples=examples(100), deadline=None)
@given(stream=histories, cut=st.integers(0, 12), tail=histories, cheap=st.booleans())
def test_replay_rewind_and_peek_equal_plain_history(stream, cut, tail, cheap) -> None:
    stream, tail = thinks(stream), thinks(tail)
    processors, scopes = everything(cheap)
    made = chain(*processors, scopes=scopes)
    for token in stream:
        plan_facts(made) if made.position % 2 else None
        made.accept(token, made.position)
    made.rewind(3 + min(cut, len(stream)))
    kept = stream[:cut]
    processors, scopes = everything()
    fresh = chain(*processors, scopes=scopes, generated=kept)
    for token in tail:
        assert plan_facts(made) == plan_facts(fresh)
        before = plan_facts(made)
        try:
            made.peek([token, 1, THINK, 2, ANSWER, 3])
        except ProcessorFailed:
            assert isinstance(before, str)
        assert plan_facts(made) == before
        made.accept(token, made.position)
        fresh.accept(token, fresh.position)
    assert plan_facts(made) == plan_facts(fresh)


@settings(max_examples=examples(50), deadline=None)
@given(stream=histories, steps=st.lists(st.integers(0, 12), max_size=6))
def test_sync_makes_any_history_known(stream, steps) -> None:
    made, reference = chain(NoRepeat()), set()
    for length in steps:
        made.sync([1, 2, 3, *stream[:length]])
        reference = set(stream[:length])
        assert made.tokens == [1, 2, 3, *stream[:length]]
        assert allowed(made) == set(range(VOCAB)) - reference


@pytest.mark.parametrize("kept", [0, 5, 60, 99, 100])
def test_sync_to_a_much_shorter_history(kept) -> None:
    made = chain(NoRepeat())
    stream = [i % VOCAB for i in range(100)]
    made.sync([1, 2, 3, *stream])
    made.sync([1, 2, 3, *stream[:kept], 39])
    assert made.tokens == [1, 2, 3, *stream[:kept], 39]
    with pytest.raises(ValueError, match="shorter than the prompt"):
        made.sync([1, 2])


class Remembers(SteeringProcessor):
    """Bans a token that tells the whole history it has been told, so that one stale token
    anywhere shows.
    """

    name, stage, reads = "remembers", Stage.MASK, Reads.GENERATED

    def reset(self):
        self.digests = [sum(self.prompt) % VOCAB]

    def advance(self, token_id, index):
        self.digests.append((self.digests[-1] * 31 + token_id + index) % 8191)

    def rewind_state(self, token_ids):
        del self.digests[-len(token_ids) :]
        return True

    def edit(self):
        return Ban.of([self.digests[-1] % VOCAB])


long_ago = st.tuples(st.integers(0, 300), st.integers(0, 3), st.integers(0, 300))
"""Where the history changes, by what, and how long it is then."""


@settings(max_examples=examples(150), deadline=None)
@given(start=st.integers(0, 300), changes=st.lists(long_ago, max_size=6))
def test_sync_to_a_history_that_differs_equals_a_fresh_chain(start, changes) -> None:
    generated = [i * i % VOCAB for i in range(start)]
    made = chain(Remembers(None, CONTEXT), NoRepeat(), scopes=["all", "answer"])
    made.sync([1, 2, 3, *generated])
    for place, difference, length in changes:
        generated = [(token + difference * (i == place)) % VOCAB for i, token in enumerate(generated)]
        generated = [*generated, *(i % VOCAB for i in range(300))][:length]
        made.sync([1, 2, 3, *generated])
        assert made.tokens == [1, 2, 3, *generated]
        fresh = chain(Remembers(None, CONTEXT), NoRepeat(), scopes=["all", "answer"], generated=generated)
        assert plan_facts(made) == plan_facts(fresh)


@pytest.mark.parametrize("tokens", [[1, 9, 3], [1, 2, 9, 4, 4], (9, *range(2, 80))])
def test_a_history_that_differs_in_the_prompt_is_refused(tokens) -> None:
    made = chain(NoRepeat())
    made.sync([1, 2, 3, *range(4, 80)])
    with pytest.raises(ValueError, match=r"differs from the prompt at position [012]$"):
        made.sync(tokens)


def test_history_work_is_done_once_per_token() -> None:
    processor = NoRepeat()
    made = chain(processor)
    for position in range(3, 503):
        made.plan()
        made.plan()
        made.accept(position % 7, position)
    assert processor.advances == 499
    made.plan()
    assert processor.advances == 500


def test_peek_plans_draft_tokens_until_the_chain_forbids_one() -> None:
    made = chain(NoRepeat())
    plans = made.peek([4, 5, 4, 6])
    assert [sorted(b.token_ids.tolist() for b in plan.bans) for plan in plans] == [[], [[4]], [[4, 5]]]
    assert made.tokens == [1, 2, 3]


def test_what_a_peek_has_planned_is_counted_with_the_token() -> None:
    made = chain(Adds())
    made.peek([4, 5])
    assert made.last_edits() == [(0, "biased", 0)]
    made.accept(4, made.position)
    assert [record.steps_active for record in made.receipt.records] == [1]


class GivesUp(SteeringProcessor):
    name, stage, reads = "gives_up", Stage.MASK, Reads.GENERATED

    def __init__(self) -> None:
        pass

    def edit(self):
        if self.num_generated:
            raise Unsatisfiable("nothing fits")


def test_a_failure_behind_a_draft_is_none_of_the_request() -> None:
    made = chain(GivesUp())
    assert len(made.peek([4, 5])) == 1
    assert made.failure is None
    made.accept(4, made.position)
    with pytest.raises(ProcessorFailed):
        made.peek([5])
    assert made.failure is not None


def test_what_was_planned_before_a_rewind_is_not_counted() -> None:
    made = chain(Adds(), generated=[7, 8])
    made.plan()
    made.rewind(4)
    made.accept(9, 4)
    assert [record.steps_active for record in made.receipt.records] == [0]


@pytest.mark.parametrize(("last", "added"), [(False, [2, 1]), (True, [1, 2])])
def test_processors_are_added_before_or_behind_the_others(last, added) -> None:
    made = chain(Adds(1))
    made.add([Adds(2)], last=last)
    assert [member.processor.bias.token_ids.tolist()[0] for member in made.members] == added


# Scopes


def test_a_minimum_of_the_thinking_counts_there_alone() -> None:
    made = chain(MinTokens(MinTokens.Args(n=2), CONTEXT), scopes=["thinking"])
    found = []
    for token_id in (THINK, 7, 8, ANSWER, 9):
        found.append(made.is_too_short)
        made.accept(token_id, made.position)
    assert [*found, made.is_too_short] == [False, True, True, False, False, False]


def test_a_scoped_processor_lives_in_its_section_only() -> None:
    made = chain(Forces(10, 11), NoRepeat(), scopes=["answer", "thinking"], prompt=[1, THINK])
    for token in (4, 4, ANSWER):
        assert plan_facts(made)[0] is None
        made.accept(token, made.position)
    assert run(made) == 10


def test_a_mask_on_the_answer_lets_the_model_think_first() -> None:
    made = chain(Allows(5), scopes=["answer"], prompt=[1])
    assert allowed(made) == {5, THINK}
    made.accept(5, 1)
    assert allowed(made) == {5}
    closed = chain(Allows(5), scopes=["answer"], prompt=[1, THINK, 2, ANSWER])
    assert allowed(closed) == {5}
    earlier = chain(Allows(5), scopes=["answer"], prompt=[1, THINK, 2, ANSWER, 3, END, 1])
    assert allowed(earlier) == {5, THINK}


def test_a_ban_in_the_answer_permits_the_opening_tag_before_it() -> None:
    made = chain(Bans(THINK, 5), scopes=["answer"], prompt=[1])
    assert allowed(made) == {*range(VOCAB)} - {5}
    made.accept(6, 1)
    assert allowed(made) == {*range(VOCAB)} - {5, THINK}
    assert allowed(chain(Bans(THINK, 5), prompt=[1])) == {*range(VOCAB)} - {5, THINK}


def test_a_forced_token_of_the_answer_permits_the_opening_tag() -> None:
    made = chain(Forces(10, 11), scopes=["answer"], prompt=[1])
    assert allowed(made) == {10, THINK}
    made.accept(10, 1)
    assert run(made) == 11
    made.rewind(1)
    for token in (THINK, 4, ANSWER):
        made.accept(token, made.position)
    assert run(made) == 10
    assert run(chain(Forces(10, 11), prompt=[1])) == 10
    assert run(chain(Forces(10, 11), scopes=["answer"], prompt=[1, THINK, ANSWER])) == 10


@settings(max_examples=examples(60), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["allows", "bans", "forces", "no_repeat", "adds"]), min_size=1, max_size=3),
    scopes=st.lists(st.sampled_from(["all", "thinking", "answer"]), min_size=3, max_size=3),
    stream=histories,
)
def test_member_by_member_a_plan_is_the_plan(kinds, scopes, stream) -> None:
    made_of = {
        "allows": lambda: Allows(*range(4, 30)),
        "bans": lambda: Bans(THINK, 5),
        "forces": lambda: Forces(4, 5),
        "no_repeat": NoRepeat,
        "adds": Adds,
    }
    made = chain(*(made_of[kind]() for kind in kinds), scopes=scopes[: len(kinds)], prompt=[1])
    for token in [*thinks(stream), 6]:
        try:
            whole = made.plan()
        except ProcessorFailed:
            pass  # only the whole says that members contradict each other
        else:
            parts = [plan for _, plan in made.plan_each()]
            for each in range(VOCAB):
                assert whole.permits(each) == all(plan.permits(each) for plan in parts), each
        made.accept(token, made.position)


@pytest.mark.parametrize(
    ("processor", "scope", "is_held"),
    [
        (Allows(5), "answer", True),
        (Bans(5), "answer", True),
        (Forces(5), "answer", True),
        (Adds(), "answer", False),
        (Halves(), "answer", False),
        (Bans(5), "thinking", False),
        (Bans(5), "all", False),
    ],
)
def test_no_request_ends_while_thinking_if_its_answer_is_bound(processor, scope, is_held) -> None:
    made = chain(processor, NoRepeat(), scopes=[scope, "thinking"], prompt=[1, THINK])
    assert (END not in allowed(made)) == is_held
    assert ANSWER in allowed(made)
    made.accept(4, made.position)
    made.accept(ANSWER, made.position)
    if scope == "answer" and isinstance(processor, Bans):
        assert END in allowed(made)


def test_what_holds_the_end_back_is_in_the_receipt_and_to_blame() -> None:
    made = chain(Bans(5), scopes=["answer"], prompt=[1, THINK], context=STOPS_AT_THE_TAG)
    assert allowed(made) == {*range(VOCAB)} - {END}  # a client that stops at the closing tag gets its way
    made.accept(4, made.position)
    assert made.receipt.as_json()["processors"][0]["tokens_masked"] == 1
    held = chain(Bans(5), Forces(END), scopes=["answer", "all"], prompt=[1, THINK])
    with pytest.raises(ProcessorFailed, match="forces: forces token 0, which another processor forbids"):
        run(held)


def test_a_scoped_processor_knows_its_absolute_position() -> None:
    class Notes(NoRepeat):
        def edit(self):
            self.noted = self.position

    thinking, answer = Notes(), Notes()
    made = chain(thinking, answer, scopes=["thinking", "answer"], prompt=[1, 2])
    for token in (THINK, 4, 4, ANSWER, 5, THINK, 6, ANSWER, 7):
        made.plan()
        active = thinking if made._scope.is_thinking else answer
        assert active.noted == made.position
        made.accept(token, made.position)
    made.rewind(7)
    made.plan()
    assert answer.noted == 7


def test_a_scope_needs_tags() -> None:
    with pytest.raises(ValueError, match="opening and a closing tag"):
        ProcessorChain([Adds()], Context(Vocabulary(VOCAB)), scopes=["answer"])


# Logits-dependent state


def test_state_from_logits_is_rebuilt_by_replaying_on_logits() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens = [4, 9, 9, 2, 7]
    straight = chain(Adds(), Drifts())
    for i, token in enumerate(tokens):
        run(straight, logits[i : i + 1].clone())
        straight.accept(token, 3 + i)
    expected = run(straight, logits[5:].clone())
    for k in range(len(tokens) + 1):
        moved = ProcessorChain([Adds(), Drifts()], CONTEXT)
        replay(moved, [1, 2, 3], tokens[:k], logits[:k].clone())
        for i in range(k, len(tokens)):
            run(moved, logits[i : i + 1].clone())
            moved.accept(tokens[i], 3 + i)
        assert torch.equal(run(moved, logits[5:].clone()), expected)
        assert moved.receipt.as_json()["replayed_tokens"] == k


def test_it_cannot_be_started_from_tokens_alone() -> None:
    with pytest.raises(ValueError, match="drifts can be rebuilt only by replaying on logits"):
        chain(Drifts(), generated=[4])


# Batches and failures


def test_every_row_of_a_mixed_batch_equals_its_solo_run() -> None:
    def make():
        return [
            chain(Adds(1), Halves(3.0)),
            chain(Allows(1, 2, 3), Squares()),
            chain(Forces(9)),
            chain(Squares(), Adds(5), Halves(7.0), Bans(2)),
            chain(),
        ]

    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    order = [3, 1, 4, 0, 2]
    batch = logits[order].clone()
    planned, failures = plan_rows([(slot, make()[i]) for slot, i in enumerate(order)])
    assert not failures | apply_edits(batch, planned) | apply_late(batch, planned)
    for slot, i in enumerate(order):
        if i != 2:
            assert torch.equal(batch[slot], run(make()[i], logits[i : i + 1].clone()))


def test_a_shaping_processor_that_raises_fails_alone() -> None:
    class Fragile(Squares):
        def __init__(self, breaks=False) -> None:
            self.breaks = breaks

        def shape(self, logits):
            logits.add_(1)
            if self.breaks:
                raise RuntimeError("no")

    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    batch = logits.clone()
    chains = [chain(Fragile()), chain(Fragile(breaks=True)), chain(Fragile())]
    planned, _ = plan_rows(list(enumerate(chains)))
    failures = apply_edits(batch, planned)
    assert {row: failure.reason for row, failure in failures.items()} == {1: "raised"}
    for row in (0, 2):
        assert torch.equal(batch[row], logits[row] + 1)


def test_a_third_party_processor_over_budget_fails_its_request(monkeypatch) -> None:
    clock = iter([0.0, 0.05, 1.0, 1.2])
    monkeypatch.setattr("adapters.chain.chain.thread_time", lambda: next(clock))
    assert chain(Adds(), step_budget_s=0.1).plan().acts
    with pytest.raises(ProcessorFailed, match=r"took 200 ms of CPU time for one step, the budget is 100 ms") as caught:
        chain(Adds(), step_budget_s=0.1).plan()
    assert caught.value.reason == "budget"


@pytest.mark.parametrize("cheap", [False, True])
def test_a_replay_after_a_rewind_is_no_step_of_the_budget(monkeypatch, cheap) -> None:
    """Each token that the processor takes costs a second, as in a step of its own."""

    class Slow(NoRepeat):
        def advance(self, token_id, index):
            super().advance(token_id, index)
            clock.append(clock[-1] + 1.0)

    clock = [0.0]
    monkeypatch.setattr("adapters.chain.chain.thread_time", lambda: clock[-1])
    made = chain(Slow(cheap), step_budget_s=1.5)
    for token in (4, 5, 6, 7):
        made.plan()
        made.accept(token, made.position)
    made.plan()
    made.rewind(made.position - 1)
    made.accept(8, made.position)
    made.plan()
    assert allowed(made) == {*range(VOCAB)} - {4, 5, 6, 8}
    made.accept(9, made.position)
    made.accept(10, made.position)
    with pytest.raises(ProcessorFailed, match="took 2000 ms of CPU time for one step"):
        made.plan()


@pytest.mark.parametrize("module", ["chain", "batch"])
def test_a_built_in_never_fails_by_time(monkeypatch, module) -> None:
    """Frequency penalty is planned, min-p shapes a batch; each step takes an hour."""
    clock = itertools.count(step=3600.0)
    monkeypatch.setattr(f"adapters.chain.{module}.thread_time", lambda: float(next(clock)))
    members = [FrequencyPenalty(FrequencyPenalty.Args(penalty=0.5), CONTEXT), MinP(MinP.Args(p=0.1), CONTEXT)]
    made = chain(*members, step_budget_s=1e-9)
    for token_id in range(TIMED_EVERY):
        apply_chain(made, torch.zeros(VOCAB))
        made.accept(token_id, made.position)
    assert sum(member.record.seconds for member in made.members) >= 3600
    assert made.failure is None


def test_a_built_ins_timed_position_counts_for_all_of_them(monkeypatch) -> None:
    """Each step takes a second; the third party's is timed at every position."""
    clock = itertools.count(step=1.0)
    monkeypatch.setattr("adapters.chain.chain.thread_time", lambda: next(clock))
    made = chain(FrequencyPenalty(FrequencyPenalty.Args(penalty=0.5), CONTEXT), Adds(), step_budget_s=2.0)
    for token_id in range(2 * TIMED_EVERY):
        made.plan()
        made.accept(token_id, made.position)
    assert [member.record.seconds for member in made.members] == [2.0 * TIMED_EVERY] * 2


class Computes(SteeringProcessor):
    """Computes until ``seconds`` of CPU time have passed, in its own thread or in another one
    that it waits for.
    """

    name, stage, reads = "computes", Stage.BIAS, Reads.NOTHING

    def __init__(self, seconds, elsewhere) -> None:
        self.seconds, self.elsewhere = seconds, elsewhere

    def edit(self):
        if not self.elsewhere:
            self.compute()
            return
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.compute).result()

    def compute(self):
        ends = time.thread_time() + self.seconds
        while time.thread_time() < ends:
            pass


def test_waiting_is_not_computing() -> None:
    """A busy neighbour, or another thread: what a processor waits for is no time of its own."""
    with pytest.raises(ProcessorFailed, match="of CPU time for one step, the budget is 30 ms"):
        chain(Computes(0.06, elsewhere=False), step_budget_s=0.03).plan()
    assert chain(Computes(0.06, elsewhere=True), step_budget_s=0.03).plan().is_empty


def test_who_is_a_third_party() -> None:
    """By where the code comes from: this file's is one, the built-ins are not, but what they
    wrap is.
    """

    def quiet(req_id, logits, ids, stream_ptr, client_id):
        pass

    dense = EmbeddingBias(torch.zeros(VOCAB))
    third_party = ThirdPartyCallable(quiet, 0)
    made = ProcessorChain([Adds(), MinP(MinP.Args(p=0.1), CONTEXT), dense, third_party, SeededSampler(1)], CONTEXT)
    assert {member.name for member in made.members if member.is_third_party} == {"adds", third_party.name}


def test_whose_state_follows_the_history() -> None:
    """A third party's always may; of the built-ins, those that keep some."""
    members = [MinTokens(MinTokens.Args(n=2), CONTEXT), FrequencyPenalty(FrequencyPenalty.Args(penalty=0.5), CONTEXT)]
    assert {m.name: m.follows for m in chain(Adds(), *members).members} == {
        "adds": True,
        "min_tokens": False,
        "frequency_penalty": True,
    }


def test_a_processor_that_raises_is_named_without_its_message() -> None:
    with pytest.raises(ProcessorFailed, match="raised KeyError at position 3") as caught:
        chain(Raises(KeyError("private"))).plan()
    assert "private" not in str(caught.value)


# Rows in which nothing is left


class Watches(ShapingProcessor):
    """Keeps what it is shown, row by row."""

    name, stage, reads = "watches", Stage.TRUNCATION, Reads.NOTHING

    def __init__(self, stage=Stage.TRUNCATION) -> None:
        self.stage = stage
        self.shown = []

    def shape(self, logits):
        self.shown.append(logits.clone())
        logits[int(logits.argmax())] += 1


class WatchesTogether(Watches):
    name = "watches_together"

    @classmethod
    def shape_rows(cls, processors, logits):
        for processor, row in zip(processors, logits, strict=True):
            processor.shape(row)


def one_finite(token_id):
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, token_id] = 1.0
    return logits


class StagesLater(Bans):
    """Calls its state its stage, and itself by a number."""

    def reset(self):
        vars(self).update(stage="begun", name=5)


def test_declarations_are_those_at_the_beginning() -> None:
    chain = ProcessorChain([StagesLater(7), Halves()], CONTEXT)
    chain.start([1, 2])
    chain.add([Forces(7)])
    assert [member.name for member in chain.members] == ["bans", "forces", "halves"]
    with pytest.raises(ProcessorFailed, match="forces token 7, which another processor forbids"):
        chain.plan()
    assert chain.failures.no_token_left().processor == "model"
    assert [record["name"] for record in chain.receipt.as_json()["processors"]] == ["bans", "forces", "halves"]


@pytest.mark.parametrize("kind", [Watches, WatchesTogether])
@pytest.mark.parametrize("stage", [Stage.SOFT, Stage.MASK, Stage.SAMPLING])
def test_a_row_in_which_nothing_is_left_is_shown_to_nobody(kind, stage) -> None:
    watch = kind(stage)
    before = [Bans(7)] if stage > Stage.SOFT else []
    logits = one_finite(7) if before else torch.full((1, VOCAB), -torch.inf)
    made = chain(watch, *before)
    with pytest.raises(ProcessorFailed, match=r"no token is left at position 3") as caught:
        run(made, logits)
    assert (caught.value.reason, caught.value.processor) == ("unsatisfiable", "bans" if before else "model")
    assert str(made.failure) == str(caught.value)
    assert watch.shown == []


def test_who_emptied_a_row_is_named_and_not_who_comes_after() -> None:
    class Empties(ShapingProcessor):
        name, stage, reads = "empties", Stage.TEMPERATURE, Reads.NOTHING

        def __init__(self) -> None:
            pass

        def shape(self, logits):
            self.shape_rows([self], logits)

        @classmethod
        def shape_rows(cls, processors, logits):
            logits.fill_(-torch.inf)

    watch = Watches()
    with pytest.raises(ProcessorFailed, match="left no token that can be sampled") as caught:
        run(chain(watch, Halves(), Empties(), Bans(3)))
    assert caught.value.processor == "empties"
    assert watch.shown == []


@pytest.mark.parametrize("kind", [Watches, WatchesTogether])
def test_batch_mates_of_an_empty_row_are_shaped_as_ever(kind) -> None:
    rows = torch.arange(3 * VOCAB, dtype=torch.float32).view(3, VOCAB)
    rows[1] = one_finite(7)
    chains = [chain(kind()), chain(kind(), Bans(7)), chain(kind())]
    planned, _ = plan_rows(list(enumerate(chains)))
    assert not apply_edits(rows, planned)
    failures = apply_late(rows, planned)
    assert {row: failure.processor for row, failure in failures.items()} == {1: "bans"}
    alone = torch.arange(3 * VOCAB, dtype=torch.float32).view(3, VOCAB)
    for row in (0, 2):
        assert torch.equal(rows[row], run(chain(kind()), alone[row : row + 1]))


def test_the_callable_ends_such_a_row_too() -> None:
    watch, reports = Watches(), []
    (adapter,) = create_trtllm_adapters([chain(watch, Bans(7))], end_id=0, report=reports.append)
    logits = one_finite(7)[None]
    adapter(1, logits, [[1, 2, 3]])
    assert [(report.processor, report.reason) for report in reports] == [("bans", "unsatisfiable")]
    assert logits[0, 0].argmax() == 0
    assert watch.shown == []


# Receipts


def test_the_receipt_counts_positions_not_calls() -> None:
    made = chain(Allows(1, 2, 5), Forces(5), Bans(9), attribution=True)
    for token in (5, 1):
        for _ in range(3):
            made.plan()
        made.peek([5, 1])
        made.plan()
        made.accept(token, made.position)
        made.accept(token, made.position - 1)
    report = made.receipt.as_json()
    assert report["mode"] == "aggregated"
    allows, bans, forces = report["processors"]
    assert (allows["name"], allows["steps_active"], allows["tokens_masked"]) == ("allows", 2, 2 * (VOCAB - 3))
    assert (bans["name"], bans["tokens_masked"], bans["first_position"], bans["last_position"]) == ("bans", 2, 3, 4)
    assert (forces["steps_active"], forces["tokens_forced"], forces["last_position"]) == (1, 1, 3)
    assert [(t["position"], t["processor"], t["did"]) for t in report["tokens"]] == [
        (3, "allows", "masked"),
        (3, "bans", "masked"),
        (3, "forces", "forced"),
        (4, "allows", "masked"),
        (4, "bans", "masked"),
    ]


def test_the_receipt_of_a_continuation_says_so() -> None:
    made = ProcessorChain([Adds()], CONTEXT)
    made.start([1, 2], [3, 4, 5], mode="migrated")
    report = made.receipt.as_json()
    assert (report["mode"], report["replayed_tokens"], report["prompt_length"]) == ("migrated at 3", 3, 2)
    assert report["processors"][0]["steps_active"] == 0


# The TensorRT-LLM callable


def decode(adapter, tokens, steps):
    """Greedy decoding through the callable, as the engine calls it."""
    tokens, base = list(tokens), torch.linspace(1, 0, VOCAB)
    for _ in range(steps):
        logits = base.view(1, 1, -1).clone()
        adapter(1, logits, [tokens], None, None)
        tokens.append(int(logits.argmax()))
    return tokens


def test_the_callable_is_exact_on_chunks_repeats_and_rollback() -> None:
    (adapter,) = create_trtllm_adapters([chain(Forces(9, 8), NoRepeat())], end_id=0)
    for _ in range(3):  # chunked prefill: the same ids several times
        logits = torch.zeros(1, 1, VOCAB)
        adapter(1, logits, [[1, 2, 3]], None, None)
        assert int(logits.argmax()) == 9
    assert decode(adapter, [1, 2, 3], 4) == [1, 2, 3, 9, 8, 0, 1]
    assert decode(adapter, [1, 2, 3, 9], 3) == [1, 2, 3, 9, 8, 0, 1]
    assert adapter.failure is None


steps_of_an_engine = st.lists(st.tuples(st.sampled_from("grrcd"), st.integers(0, 90), st.integers(0, 38)), max_size=40)


@settings(max_examples=examples(60), deadline=None)
@given(steps=steps_of_an_engine, begun=st.integers(0, 120))
def test_the_callable_follows_dropped_and_resampled_tokens(steps, begun) -> None:
    (adapter,) = create_trtllm_adapters([chain(Remembers(None, CONTEXT))])

    def masked(adapter, tokens):
        logits = torch.zeros(1, 1, VOCAB)
        adapter(1, logits, [list(tokens)], None, None)
        return logits.isinf().nonzero()[:, 2].tolist()

    def sample(token_id):
        assert masked(adapter, tokens) == masked(create_trtllm_adapters([chain(Remembers(None, CONTEXT))])[0], tokens)
        tokens.append(token_id)

    tokens = [1, 2, 3]
    for i in range(begun):
        sample(i % VOCAB)
    for kind, count, token_id in steps:
        if kind == "d":  # dropped
            del tokens[max(3, len(tokens) - count) :]
        elif kind == "c":  # called again
            masked(adapter, tokens)
        for i in range(count if kind == "g" else 1):  # grows
            sample((token_id + i) % VOCAB)
    assert adapter.failure is None


class CountedTokens(list):
    """Counts how many of its items are read."""

    num_read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_step_of_the_callable_reads_few_tokens_of_any_history(length) -> None:
    (adapter,) = create_trtllm_adapters([chain(Forces(), NoRepeat())])
    tokens = [1, 2, 3]
    adapter(1, torch.zeros(1, 1, VOCAB), [tokens])
    adapter.chain.sync([*tokens, *(i % 9 for i in range(length))])
    tokens = list(adapter.chain.tokens)
    for _ in range(5):
        tokens.append(4)
        shown = CountedTokens(tokens)
        adapter(1, torch.zeros(1, 1, VOCAB), [shown])
        assert shown.num_read < 40
    assert adapter.chain.tokens == tokens


def test_a_callable_that_is_called_for_another_request_fails() -> None:
    failures = []
    prompt = list(range(3)) + [4] * 60
    (adapter,) = create_trtllm_adapters([chain(NoRepeat(), prompt=prompt)], end_id=0, report=failures.append)
    adapter(1, torch.zeros(1, 1, VOCAB), [prompt])
    assert not failures
    other = [9, *prompt[1:], 5]  # as long as the next step of the first, and alike in its newest tokens
    adapter(2, torch.zeros(1, 1, VOCAB), [other])
    assert [failure.reason for failure in failures] == ["skipped"]
    assert "called for another request: history differs from the prompt at position 0" in failures[0].message


def test_the_callable_is_exact_if_the_history_lags_by_one_step() -> None:
    expected = decode(create_trtllm_adapters([chain(Forces(9, 8, 7), Bans(0))])[0], [1, 2, 3], 5)
    (adapter,) = create_trtllm_adapters([chain(Forces(9, 8, 7), Bans(0))], lagged=True)
    tokens, shown = [1, 2, 3], [1, 2, 3]
    for _ in range(5):
        logits = torch.linspace(1, 0, VOCAB).view(1, 1, -1).clone()
        adapter(1, logits, [list(shown)], None, None)
        shown = list(tokens)
        tokens.append(int(logits.argmax()))
    assert tokens == expected


@pytest.mark.parametrize(("processors", "scopes"), [([NoRepeat()], None), ([Forces(1)], ["answer"])])
def test_a_chain_that_needs_the_last_token_is_refused_there(processors, scopes) -> None:
    with pytest.raises(ValueError, match="need the last sampled token"):
        create_trtllm_adapters([chain(*processors, scopes=scopes)], lagged=True)


def test_a_failing_chain_is_undone_reported_and_forced_to_end() -> None:
    class Nan(Squares):
        def shape(self, logits):
            logits.fill_(float("nan"))

    failures = []
    (adapter,) = create_trtllm_adapters([chain(Adds(), Nan())], end_id=0, report=failures.append)
    logits = torch.zeros(1, 1, VOCAB)
    adapter(1, logits, [[1, 2, 3]], None, None)
    assert int(logits.argmax()) == 0
    assert [f.reason for f in failures] == ["nan"]
    (adapter,) = create_trtllm_adapters([chain(Adds(), Nan())], report=failures.append)
    logits = torch.zeros(1, 1, VOCAB)
    adapter(1, logits, [[1, 2, 3]], None, None)
    assert (logits == 0).all()


def test_a_forced_token_that_the_model_cannot_sample_fails() -> None:
    (adapter,) = create_trtllm_adapters([chain(Forces(5))])
    logits = torch.zeros(1, 1, VOCAB)
    logits[0, 0, 5] = -torch.inf
    adapter(1, logits, [[1, 2, 3]], None, None)
    assert adapter.failure.reason == "unsatisfiable"


def test_the_callable_pickles_mid_stream() -> None:
    (adapter,) = create_trtllm_adapters([chain(Forces(9, 8), NoRepeat(), scopes=["all", "answer"])], end_id=0)
    tokens = decode(adapter, [1, 2, 3], 2)
    moved = pickle.loads(pickle.dumps(adapter))
    assert decode(moved, tokens, 4) == decode(adapter, tokens, 4)


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage > Stage.PENALTY])
def test_no_stage_brings_back_what_is_no_token(stage) -> None:
    class Flattens(ShapingProcessor):
        name, reads = "flattens", Reads.NOTHING

        def __init__(self) -> None:
            pass

        def shape(self, logits):
            logits.zero_()

    Flattens.stage = stage
    row = torch.zeros(VOCAB)
    row[[1, 7]] = -torch.inf
    apply_chain(chain(Flattens()), row, never_ids=[1, 7])
    assert (row == -torch.inf).nonzero()[:, 0].tolist() == [1, 7]


def test_what_is_no_token_is_not_drawn() -> None:
    class Raises(ShapingProcessor):
        name, stage, reads = "raises_padding", Stage.TRUNCATION, Reads.NOTHING

        def __init__(self) -> None:
            pass

        def shape(self, logits):
            logits[[1, 7]] = 50.0

    made, row = chain(Raises(), SeededSampler(1)), torch.zeros(VOCAB)
    apply_chain(made, row, never_ids=[1, 7])
    drawn = (row > -torch.inf).nonzero()[:, 0].tolist()
    assert len(drawn) == 1
    assert drawn[0] not in (1, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_every_dtype_are_edited_in_place(dtype) -> None:
    row = torch.ones(VOCAB, dtype=dtype)
    apply_chain(chain(Adds(3, 2.0), Squares(), Halves(), Bans(4)), row)
    assert row.dtype == dtype
    assert (row[3], row[5], row[4]) == (4.5, 0.5, -torch.inf)


def test_deepcopies_do_not_share_state() -> None:
    made = chain(NoRepeat())
    other = copy.deepcopy(made)
    made.accept(7, 3)
    assert allowed(other) == set(range(VOCAB))


# Masks that are counted once


class Narrows(SteeringProcessor):
    """Masks one more token at every position, in the edit that it has returned before."""

    name, stage, reads = "narrows", Stage.MASK, Reads.NOTHING

    def __init__(self) -> None:
        self.allow = Allow.of(range(VOCAB), VOCAB)

    def edit(self):
        self.allow.bitmask.copy_(bitmask_of(range(self.num_generated, VOCAB), VOCAB))
        return self.allow


def test_a_mask_is_counted_at_every_position() -> None:
    """That of a built-in stays the same, that of a third party has changed in place."""
    made = chain(AllowedTokens(AllowedTokens.Args(token_ids=[1, 2, 3]), CONTEXT), Narrows())
    for token_id in (1, 2, 3):
        made.plan()
        made.accept(token_id, made.position)
    kept, narrowed = (member.record.tokens_masked for member in made.members)
    assert kept == 3 * (VOCAB - 4)  # the end token may be sampled too
    assert narrowed == 0 + 1 + 2
