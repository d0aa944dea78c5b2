"""An edit that is not made in place would be lost: its request fails, whoever calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from adapters.chain import ProcessorChain, ProcessorFailed, apply_edits, apply_late, plan_rows
from adapters.contract import Context, Processor, ProcessorArgs, Reads, ShapingProcessor, Stage, SteeringProcessor
from adapters.third_party import third_party_processor
from adapters.trtllm import Failure, create_trtllm_adapters
from adapters.trtllm.native_controls import ThirdPartyCallable
from adapters.vocabulary import Vocabulary

V = 20
CONTEXT = Context(Vocabulary(V))

Edit = Callable[[torch.Tensor], object]


async def edits_later(logits: torch.Tensor) -> None:
    logits.mul_(2)


def doubles(logits: torch.Tensor) -> None:
    logits.mul_(2)


def replaces_data(logits: torch.Tensor) -> None:
    logits.data = logits * 2


def widens_data(logits: torch.Tensor) -> torch.Tensor:
    logits.data = logits.double() * 2
    return logits


LOST: dict[str, tuple[Edit, str]] = {
    "a new tensor": (lambda logits: logits * 2, "returned Tensor"),
    "a coroutine": (edits_later, "returned coroutine"),
    "a list": (lambda logits: logits.tolist(), "returned list"),
    "other data": (replaces_data, "put other data"),
    "wider data": (widens_data, "put other data"),
}

KEPT: dict[str, Edit] = {
    "the row": lambda logits: logits.mul_(2),
    "a part of it": lambda logits: logits.mul_(2).view(-1)[3:5],
    "nothing": doubles,
}


class Shapes(ShapingProcessor):
    """Edits its row as it is told to."""

    name = "shapes"
    stage = Stage.SOFT
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def shape(self, logits: torch.Tensor) -> None:
        return self._edit(logits)  # type: ignore[return-value]


class ShapesAll(Shapes):
    """Edits the rows of a batch, as the first one is told to."""

    name = "shapes_all"

    @classmethod
    def shape_rows(cls, processors: Sequence[ShapesAll], logits: torch.Tensor) -> None:
        return processors[0]._edit(logits)  # type: ignore[return-value]


def dynamo(edit: Edit) -> Callable[..., object]:
    return lambda input_ids, logits: edit(logits)


def trtllm(edit: Edit) -> Callable[..., object]:
    return lambda req_id, logits, ids, stream_ptr, client_id: edit(logits)


MAKERS: dict[str, Callable[[Edit], Processor]] = {
    "shape": Shapes,
    "dynamo": lambda edit: third_party_processor(dynamo(edit), name="dynamo"),
    "trtllm": lambda edit: third_party_processor(trtllm(edit), name="trtllm"),
    "callable": lambda edit: ThirdPartyCallable(trtllm(edit), 0),  # type: ignore[arg-type]
}


def step(*processors: Processor) -> tuple[torch.Tensor, dict[int, ProcessorFailed]]:
    """One step of a chain for each processor, over rows of ones."""
    chains = [ProcessorChain([each], CONTEXT) for each in processors]
    for chain in chains:
        chain.start([1, 2])
    logits = torch.ones(len(chains), V)
    planned, failures = plan_rows(list(enumerate(chains)))
    for apply in (apply_edits, apply_late):
        failures |= apply(logits, planned)
    return logits, failures


@pytest.mark.parametrize(("edit", "problem"), LOST.values(), ids=LOST)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_lost_edit_fails_its_request(make: Callable[[Edit], Processor], edit: Edit, problem: str) -> None:
    logits, failures = step(make(KEPT["the row"]), make(edit))
    assert failures.keys() == {1}
    assert problem in str(failures[1])
    assert "instead of editing" in str(failures[1])
    assert torch.equal(logits, torch.tensor([[2.0], [1.0]]).expand(2, V))


async def awaits(self: object, *arguments: object) -> None:
    """Runs when it is awaited."""


def yields(self: object, *arguments: object) -> Iterator[None]:
    """Runs when it is iterated over."""
    yield


async def awaits_and_yields(self: object, *arguments: object) -> AsyncIterator[None]:
    """Runs when it is both."""
    yield


@pytest.mark.parametrize("method", [awaits, yields, awaits_and_yields])
@pytest.mark.parametrize(
    ("base", "name"),
    [
        *((SteeringProcessor, name) for name in ("reset", "advance", "rewind_state", "edit", "same_until")),
        *((ShapingProcessor, name) for name in ("reset", "shape", "shape_rows")),
    ],
)
def test_methods_whose_code_would_never_run(base: type[Processor], name: str, method: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=rf"Later\.{name}: a chain calls it and awaits nothing"):
        type("Later", (base,), {name: classmethod(method) if name == "shape_rows" else method})


@pytest.mark.parametrize("edit", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_edit_in_place_is_applied(make: Callable[[Edit], Processor], edit: Edit) -> None:
    logits, failures = step(make(edit))
    assert not failures
    assert torch.equal(logits, torch.full((1, V), 2.0))


def test_rows_that_a_batch_returns_are_lost() -> None:
    logits, failures = step(Shapes(KEPT["the row"]), ShapesAll(lambda rows: rows * 2), ShapesAll(lambda rows: rows * 2))
    assert failures.keys() == {1, 2}
    assert "shapes_all: returned Tensor instead of editing" in str(failures[1])
    assert torch.equal(logits[0], torch.full((V,), 2.0))
    logits, failures = step(ShapesAll(KEPT["the row"]), ShapesAll(KEPT["the row"]))
    assert not failures
    assert torch.equal(logits, torch.full((2, V), 2.0))


def call(edit: Edit) -> tuple[torch.Tensor, list[Failure]]:
    """The row after a call of Dynamo's own adapter, made in TensorRT-LLM's executor."""
    found: list[Failure] = []
    processor: Any = dynamo(edit)
    (adapter,) = create_trtllm_adapters([processor], report=found.append)
    logits = torch.ones(1, 1, V)
    adapter(7, logits, [[1, 2]], None, None)
    return logits[0, 0], found


@pytest.mark.parametrize(("edit", "problem"), LOST.values(), ids=LOST)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_lost_edit_of_dynamos_adapter_is_reported(edit: Edit, problem: str) -> None:
    row, found = call(edit)
    (failure,) = found
    assert failure.reason == "raised"
    assert failure.message.startswith(problem)
    assert failure.message.endswith("in place at position 2")
    assert torch.equal(row, torch.ones(V))


@pytest.mark.parametrize("edit", KEPT.values(), ids=KEPT)
def test_an_edit_in_place_of_dynamos_adapter_is_kept(edit: Edit) -> None:
    row, found = call(edit)
    assert not found
    assert torch.equal(row, torch.full((V,), 2.0))
