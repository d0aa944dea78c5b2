"""Whatever a third party's processor returns as an edit, its batch-mates stay as they are, and
it is named.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from adapters.chain import ProcessorChain, ProcessorFailed, apply_edits, apply_late, plan_rows
from adapters.contract import (
    Allow,
    Ban,
    Bias,
    Context,
    Edit,
    Force,
    Processor,
    ProcessorArgs,
    Reads,
    Scale,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    Unsatisfiable,
    bitmask_of,
)
from adapters.trtllm import ChainAdapter
from adapters.vocabulary import Vocabulary

V = 70
CONTEXT = Context(Vocabulary(V), end_token_ids=frozenset({1}))


class Returns(SteeringProcessor):
    """Returns what it is told to."""

    name = "returns"
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def __init__(self, edit: Any, stage: Stage) -> None:
        self._edit, self.stage = edit, stage  # type: ignore[misc]

    def edit(self) -> Edit | None:
        return self._edit


class Halves(ShapingProcessor):
    """Halves the row, at a stage of one's choice."""

    name = "halves"
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def __init__(self, stage: Stage) -> None:
        self.stage = stage  # type: ignore[misc]

    def shape(self, logits: torch.Tensor) -> None:
        logits.mul_(0.5)


class Clamps(Halves):
    """Lifts the lowest logits, masked ones too."""

    def shape(self, logits: torch.Tensor) -> None:
        logits.clamp_(min=-50.0)


class Reshapes(ShapingProcessor):
    """Does to its rows what it is told to, all at once."""

    name = "reshapes"
    stage = Stage.SOFT
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def __init__(self, reshape: Callable[[torch.Tensor], object]) -> None:
        self.reshape = reshape

    def shape(self, logits: torch.Tensor) -> None:
        raise NotImplementedError

    @classmethod
    def shape_rows(cls, processors: Sequence[Reshapes], logits: torch.Tensor) -> None:
        for one in processors:
            one.reshape(logits)


class TooShort(Returns):
    """Raises where it is asked whether the answer may end."""

    @property
    def is_too_short(self) -> bool:
        raise ZeroDivisionError


class Exits(Returns):
    """Raises what is no `Exception`, as a panic in Rust."""

    def edit(self) -> Edit | None:
        raise self._edit


class Usual(Returns):
    """Names a token that it prefers, as built-ins do."""

    def usual_token(self) -> int | None:
        return -5


def step(*groups: list[Any]) -> tuple[torch.Tensor, dict[int, ProcessorFailed]]:
    """One step of some chains over rows of ones, and a row without a chain at the end."""
    chains = [ProcessorChain(group, CONTEXT) for group in groups]
    for chain in chains:
        chain.start([1, 2, 3])
    logits = torch.ones(len(chains) + 1, V)
    planned, failures = plan_rows(list(enumerate(chains)))
    for apply in (apply_edits, apply_late):
        failures |= apply(logits, planned)
    return logits, failures


FULL = bitmask_of(range(V), V)

MALFORMED = {
    "id above": (Bias.of([V + 2], [9.0]), Stage.BIAS, "ids 72 to 72 for a row of 70"),
    "id far above": (Bias.of([9 * V], [9.0]), Stage.BIAS, "for a row of 70"),
    "id below": (Ban.of([-2]), Stage.MASK, "ids -2 to -2"),
    "ids in a list": (Ban([1]), Stage.MASK, "ids of type list, expected a tensor"),  # type: ignore[arg-type]
    "values in a list": (Bias(torch.tensor([1]), [1.0]), Stage.BIAS, "values of type list"),  # type: ignore[arg-type]
    "a mask in a list": (Allow([1]), Stage.MASK, "bitmask of type list"),  # type: ignore[arg-type]
    "ids of int32": (Ban(torch.tensor([1], dtype=torch.int32)), Stage.MASK, "ids int32"),
    "ids in a matrix": (Ban(torch.tensor([[1]])), Stage.MASK, r"ids int64 \[1, 1\]"),
    "too few values": (Bias(torch.tensor([1, 2]), torch.tensor([1.0])), Stage.BIAS, r"expected float32 \[2\]"),
    "values of float64": (Scale(torch.tensor([1]), torch.ones(1).double()), Stage.SOFT, "values float64"),
    "a wide bitmask": (Allow(bitmask_of([1], V + 64)), Stage.MASK, r"int32 \[5\]"),
    "a boolean mask": (Allow(torch.ones(V, dtype=torch.bool)), Stage.MASK, "bitmask bool"),
    "a float mask": (Allow(torch.ones(3)), Stage.MASK, "bitmask float32"),
    "no edit": (5, Stage.MASK, "returned int, which is not an edit"),
    "a tensor": (torch.zeros(V), Stage.BIAS, "returned Tensor"),
    "a forced id above": (Force(V), Stage.FORCE, "forces 70"),
    "a forced id below": (Force(-1), Stage.FORCE, "forces -1"),
    "a forced tensor": (Force(torch.tensor(3)), Stage.FORCE, r"forces tensor\(3\)"),  # type: ignore[arg-type]
    "NaN": (Bias.of([1, 2], [1.0, float("nan")]), Stage.BIAS, "Bias holds a value that is not finite"),
    "a masking bias": (Bias.of([1], [-float("inf")]), Stage.SOFT, "Bias holds a value that is not finite"),
    "an infinite factor": (Scale.of([1], [float("inf")]), Stage.SOFT, "Scale holds a value that is not finite"),
    "a factor of 0": (Scale.of([1], [0.0]), Stage.SOFT, "Scale holds a factor that is not above 0"),
    "a bias among masks": (Bias.of([3], [1.0]), Stage.MASK, "not applied"),
    "a scale among temperatures": (Scale.of([3], [1.0]), Stage.TEMPERATURE, "not applied"),
}


@pytest.mark.parametrize(("edit", "stage", "message"), MALFORMED.values(), ids=MALFORMED)
def test_only_its_own_row_fails(edit: Any, stage: Stage, message: str) -> None:
    mates = [Returns(Bias.of([3], [1.0]), Stage.BIAS), Returns(Allow(FULL), Stage.MASK)]
    alone, _ = step(mates)
    logits, failures = step(mates, [Returns(edit, stage)], mates)
    assert failures.keys() == {1}
    assert (failures[1].processor, failures[1].reason) == ("returns", "raised")
    with pytest.raises(ProcessorFailed, match=message):
        raise failures[1]
    assert torch.equal(logits[[0, 2]], alone[[0, 0]])
    assert torch.equal(logits[[1, 3]], torch.ones(2, V))


class OwnBias(Bias):
    """An author's own kind of edit."""


class OwnScale(Scale):
    """The same."""


class OwnBan(Ban):
    """The same."""


class OwnAllow(Allow):
    """The same."""


class OwnForce(Force):
    """The same."""


OWN: dict[str, tuple[Any, Edit, Stage]] = {
    "bias": (OwnBias.of([4], [2.0]), Bias.of([4], [2.0]), Stage.BIAS),
    "scale": (OwnScale.of([4], [2.0]), Scale.of([4], [2.0]), Stage.SOFT),
    "ban": (OwnBan(torch.tensor([4, 5])), Ban.of([4, 5]), Stage.MASK),
    "allow": (OwnAllow(FULL[:1]), Allow(FULL[:1]), Stage.MASK),
    "force": (OwnForce(4), Force(4), Stage.FORCE),
}


@pytest.mark.parametrize(("own", "plain", "stage"), OWN.values(), ids=OWN)
def test_an_edit_of_an_authors_own_class_is_what_it_is_made_from(own: Any, plain: Edit, stage: Stage) -> None:
    results = [step([Returns(edit, stage)], [Halves(Stage.SOFT)]) for edit in (own, plain)]
    assert results[0][1] == results[1][1] == {}
    assert torch.equal(results[0][0], results[1][0])


class WritesAgain(Returns):
    """Writes into the tensors of an edit that it has returned, or another of its class."""

    def __init__(self, edit: Any, stage: Stage, write: Callable[[Any], object]) -> None:
        super().__init__(edit, stage)
        self._write = write

    def edit(self) -> Edit | None:
        self._write(self._edit)
        return None


WRITTEN: dict[str, tuple[Callable[[], Any], Stage, Callable[[Any], object]]] = {
    "ids of a bias": (lambda: Bias.of([4], [2.0]), Stage.BIAS, lambda edit: edit.token_ids.fill_(V + 3)),
    "values": (lambda: Bias.of([4], [2.0]), Stage.BIAS, lambda edit: edit.values.fill_(torch.nan)),
    "ids of an array": (lambda: Bias(array("q", [4]), array("f", [2.0])), Stage.BIAS, lambda edit: edit._ids.append(9)),
    "factors": (lambda: Scale.of([4], [2.0]), Stage.SOFT, lambda edit: edit.factors.fill_(-1.0)),
    "ids of a ban": (lambda: Ban.of([4]), Stage.MASK, lambda edit: edit.token_ids.fill_(V + 3)),
    "more ids": (lambda: Ban.of([4]), Stage.MASK, lambda edit: edit.token_ids.resize_(9).fill_(10**9)),
    "a bitmask": (lambda: Allow(FULL.clone()), Stage.MASK, lambda edit: edit.bitmask.fill_(0)),
}


@pytest.mark.parametrize(("make", "stage", "write"), WRITTEN.values(), ids=WRITTEN)
def test_what_is_written_into_an_edit_later_changes_no_row(
    make: Callable[[], Any], stage: Stage, write: Callable[[Any], object]
) -> None:
    shared = make()
    mates = [Halves(Stage.SOFT)]
    expected, _ = step([Returns(make(), stage)], mates, mates)
    logits, failures = step([Returns(shared, stage)], [WritesAgain(shared, stage, write)], mates)
    assert not failures
    assert torch.equal(logits[[0, 2]], expected[[0, 2]])
    assert torch.equal(logits[[1, 3]], torch.ones(2, V))


LATE = [stage for stage in Stage if stage >= Stage.MASK]


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_mask_that_shaping_undoes_fails_its_request(stage: Stage, at_once: bool) -> None:
    shaping: Any = Reshapes(lambda rows: rows.clamp_(min=-50.0)) if at_once else Clamps(stage)
    shaping.stage = stage
    masks = Returns(Ban.of([4, 6]), Stage.MASK)
    logits, failures = step([masks, shaping], [Halves(stage)], [shaping])
    assert torch.equal(logits[[1, 2]], torch.tensor([[0.5], [1.0]]).expand(2, V))
    if stage in LATE:
        assert failures.keys() == {0}
        assert str(failures[0]).endswith(": gave a logit to token 4, which was masked, at position 3")
    else:
        assert not failures
        assert logits[0, [4, 6]].tolist() == [-torch.inf] * 2


def test_a_narrow_bitmask_forbids_the_ids_beyond_it_in_any_batch() -> None:
    narrow, full = Returns(Allow(FULL[:1]), Stage.MASK), Returns(Allow(FULL), Stage.MASK)
    logits, failures = step([narrow], [full], [narrow, full])
    assert not failures
    expected = torch.ones(V).index_fill(0, torch.arange(32, V), -torch.inf)
    assert torch.equal(logits[0], expected)
    assert torch.equal(logits[1], torch.ones(V))
    assert torch.equal(logits[2], expected)


@pytest.mark.parametrize("stage", Stage)
def test_shaping_is_applied_at_every_stage(stage: Stage) -> None:
    logits, failures = step([Halves(stage)])
    assert not failures
    assert torch.equal(logits[0], torch.full((V,), 0.5))


def test_shaping_at_the_mask_stage_sees_what_edits_masked() -> None:
    logits, _ = step([Halves(Stage.MASK), Returns(Ban.of([4]), Stage.MASK)])
    assert torch.equal(logits[0], torch.full((V,), 0.5).index_fill(0, torch.tensor(4), -torch.inf))


@pytest.mark.parametrize("end_id", [None, 1])
def test_a_row_that_masks_leave_empty_is_restored_or_ended(end_id: int | None) -> None:
    chain = ProcessorChain([Returns(Ban.of(range(V)), Stage.MASK)], CONTEXT)
    chain.start([1, 2])
    adapter = ChainAdapter(chain, end_id=end_id)
    logits = torch.ones(1, 1, V)
    adapter("request", logits, [[1, 2]])
    assert adapter.failure is not None
    assert adapter.failure.reason == "unsatisfiable"
    assert int((logits > -torch.inf).sum()) == (V if end_id is None else 1)


RESHAPED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "narrow": (lambda rows: rows.resize_(len(rows), 5), "expected 1 rows of 70"),
    "turned": (lambda rows: rows.t_(), "expected 1 rows of 70"),
    "of float64": (lambda rows: setattr(rows, "data", rows.double()), "float64"),
    "NaN": (lambda rows: rows.fill_(torch.nan), "left NaN"),
}


@pytest.mark.parametrize(("reshape", "message"), RESHAPED.values(), ids=RESHAPED)
def test_rows_of_another_form_fail_alone(reshape: Callable[[torch.Tensor], object], message: str) -> None:
    logits, failures = step([Reshapes(lambda rows: rows[:1].mul_(1))], [Reshapes(reshape)])
    assert failures.keys() == {1}
    with pytest.raises(ProcessorFailed, match=f"reshapes: .*{message}"):
        raise failures[1]
    assert torch.equal(logits[[0, 2]], torch.ones(2, V))


def test_a_minimum_length_that_raises_is_named() -> None:
    chain = ProcessorChain([TooShort(None, Stage.MASK)], CONTEXT)
    chain.start([1, 2])
    with pytest.raises(ProcessorFailed, match="returns: raised ZeroDivisionError"):
        assert chain.is_too_short


def test_usual_tokens_are_those_of_built_ins() -> None:
    chain = ProcessorChain([Usual(Allow(FULL), Stage.MASK)], CONTEXT)
    chain.masks_alone = True
    chain.start([1, 2])
    assert chain.plan().force is None


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), type("PanicException", (BaseException,), {})()])
def test_a_processor_that_exits_or_panics_fails_alone(error: BaseException) -> None:
    shaping = Reshapes(lambda rows: Exits(error, Stage.MASK).edit())
    logits, failures = step([Halves(Stage.SOFT)], [Exits(error, Stage.MASK)], [shaping])
    assert failures.keys() == {1, 2}
    assert f"raised {type(error).__name__} at position 3" in str(failures[1])
    assert torch.equal(logits[0], torch.full((V,), 0.5))


def test_an_error_without_a_text_of_its_own_is_named() -> None:
    class Mute(Unsatisfiable):
        def __str__(self) -> str:
            raise KeyError

    logits, failures = step([Exits(Mute(), Stage.MASK)], [Halves(Stage.SOFT)])
    assert str(failures[0]).endswith("raised Mute at position 3")
    assert failures[0].reason == "unsatisfiable"
    assert torch.equal(logits[1], torch.full((V,), 0.5))


class CausesItself(Returns):
    """Raises an error from itself, or from another one while it handles a third."""

    def edit(self) -> Edit | None:
        try:
            raise KeyError(self._edit)
        except KeyError as error:
            if self._edit is None:
                raise error from error
            raise ValueError from TypeError(str(self._edit))


@pytest.mark.parametrize(("edit", "name"), [(None, "KeyError"), (3, "ValueError")])
def test_a_failure_keeps_no_frame_of_any_cause(edit: object, name: str) -> None:
    logits, failures = step([CausesItself(edit, Stage.MASK)], [Halves(Stage.SOFT)])
    assert str(failures[0]) == f"logits processor returns: raised {name} at position 3"
    assert torch.equal(logits[1], torch.full((V,), 0.5))
    cause = failures[0].__cause__
    assert cause is not None
    errors = [failures[0], cause, cause.__cause__, cause.__context__]
    assert not any(error.__traceback__ for error in errors if error is not None)


def leaves_inference_mode() -> None:
    torch.inference_mode(False).__enter__()


def enables_gradients() -> None:
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("change", [leaves_inference_mode, enables_gradients])
def test_a_mode_of_the_thread_that_is_left_changed_is_put_back(change: Callable[[], None]) -> None:
    class Changes(Returns):
        def edit(self) -> Edit | None:
            change()
            return None

    def changes(rows: torch.Tensor) -> None:
        change()
        rows.mul_(2)

    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
            logits, failures = step([Changes(None, Stage.MASK)], [Reshapes(changes)], [Halves(Stage.SOFT)])
            assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == before
        assert not failures
        assert torch.equal(logits, torch.tensor([[1.0], [2.0], [0.5], [1.0]]).expand(4, V))


def test_who_changes_the_default_device_fails_alone() -> None:
    class Changes(Returns):
        def edit(self) -> Edit | None:
            torch.set_default_device("meta")
            return None

    shaping = Reshapes(lambda rows: torch.set_default_device("meta"))
    logits, failures = step([Changes(None, Stage.MASK)], [Halves(Stage.SOFT)], [shaping])
    assert failures.keys() == {0, 2}
    told = "sets torch's default device to meta, which all requests share, at position 3"
    assert [str(failure) for failure in failures.values()] == [
        f"logits processor {name}: {told}" for name in ("returns", "reshapes")
    ]
    assert torch.equal(logits, torch.tensor([[1.0], [0.5], [1.0], [1.0]]).expand(4, V))
    assert torch.tensor([1.0]).device.type == "cpu"


class ChangesInAReplay(Returns):
    """Changes the default device in its second `reset`, or, told so, where it takes a token."""

    num_resets = 0

    def reset(self) -> None:
        self.num_resets += 1
        if self.num_resets > 1:
            torch.set_default_device("meta")

    def advance(self, token_id: int, index: int) -> None:
        if self._edit == "advance":
            self._edit = None
            torch.set_default_device("meta")


def test_who_changes_the_default_device_in_a_replay_fails() -> None:
    rewound = ProcessorChain([ChangesInAReplay(None, Stage.MASK)], CONTEXT)
    rewound.start([5, 6, 7])
    rewound.accept(8, 3)
    rewound.plan()
    rewound.rewind(3)
    moved = ProcessorChain([ChangesInAReplay("advance", Stage.MASK)], CONTEXT)
    told = "sets torch's default device to meta"
    try:
        with pytest.raises(ProcessorFailed, match=told):
            rewound.plan()
        with pytest.raises(ProcessorFailed, match=told):
            moved.start([5, 6, 7], [8, 9], mode="migrated")
        assert torch.get_default_device().type == "cpu"
    finally:
        torch.set_default_device(None)


def test_an_interrupt_is_not_the_processors() -> None:
    with pytest.raises(KeyboardInterrupt):
        step([Exits(KeyboardInterrupt(), Stage.MASK)])


class Interrupts(Processor):
    """Raises wherever it is called, as at Ctrl-C."""

    name = "interrupts"
    stage = Stage.MASK
    reads = Reads.GENERATED
    Args = ProcessorArgs

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        raise KeyboardInterrupt


class InterruptsEdit(Interrupts, SteeringProcessor):
    """In a step."""

    def edit(self) -> Edit | None:
        raise KeyboardInterrupt


class InterruptsShape(Interrupts, ShapingProcessor):
    """In a step, once there are logits."""

    def shape(self, logits: torch.Tensor) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [InterruptsEdit, InterruptsShape])
def test_beside_the_main_thread_it_is(kind: type[Processor]) -> None:
    """Ctrl-C is raised in the main thread, and engines step in others."""
    with ThreadPoolExecutor(1) as threads:
        logits, failures = threads.submit(step, [Halves(Stage.SOFT)], [kind(None, CONTEXT)]).result()
    assert failures.keys() == {1}
    assert str(failures[1]) == "logits processor interrupts: raised KeyboardInterrupt at position 3"
    assert torch.equal(logits[0], torch.full((V,), 0.5))


def test_a_rewind_that_interrupts_beside_the_main_thread() -> None:
    chain = ProcessorChain([InterruptsEdit(None, CONTEXT)], CONTEXT)
    chain.start([1, 2], [3, 4])
    with ThreadPoolExecutor(1) as threads:
        threads.submit(chain.rewind, 3).result()
    assert chain.tokens == [1, 2, 3]
