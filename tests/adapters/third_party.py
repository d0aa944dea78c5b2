"""Classes that play third parties in the catalogue's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, field_validator

from adapters.contract import Bias, Context, Edit, ProcessorArgs, Reads, Scope, Stage, SteeringProcessor


class Loud(SteeringProcessor):
    """Raises the logit of one token."""

    name = "acme/loud"
    stage = Stage.BIAS
    reads = Reads.NOTHING

    class Args(ProcessorArgs):
        token_id: Annotated[int, Field(ge=0, le=100)]

    def __init__(self, args: Args, context: Context) -> None:
        context.check_ids("token_id", [args.token_id])
        self.bias = Bias.of([args.token_id], [5.0])

    def edit(self) -> Edit:
        return self.bias


class Broken(Loud):
    """Cannot be built."""

    name = "broken"

    def __init__(self, args: Any, context: Context) -> None:
        raise ZeroDivisionError


class BuiltOfNone(Loud):
    """Is built of what is no processor."""

    name = "built_of_none"

    @classmethod
    def build(cls, args: Any, context: Context) -> list[Any]:
        return [cls(args, context), "half"]


class Undecided(Loud):
    """Cannot check its arguments."""

    name = "undecided"

    class Args(Loud.Args):
        @field_validator("token_id")
        @classmethod
        def _is_known(cls, token_id: int) -> int:
            raise SystemExit(token_id)


class NamesItself(Loud):
    """Calls itself what no request and no log knows."""

    name = "names_itself"

    def __init__(self, args: Any, context: Context) -> None:
        super().__init__(args, context)
        self.name = "Bob"  # type: ignore[misc]


class SetsDevice(Loud):
    """Lets all tensors of the thread that builds it have no data."""

    name = "sets_device"

    def __init__(self, args: Any, context: Context) -> None:
        super().__init__(args, context)
        torch.set_default_device("meta")


class StagesItself(Loud):
    """Calls its state its stage."""

    name = "stages_itself"

    def __init__(self, args: Any, context: Context) -> None:
        super().__init__(args, context)
        self.stage = "begun"  # type: ignore[assignment, misc]


class Shadow(Loud):
    """Takes a built-in's name."""

    name = "top_k"


class NoStage(SteeringProcessor):
    """Lacks a stage."""

    name = "no_stage"

    def edit(self) -> None:
        return None


class Scoped(Loud):
    """Has an argument that is every processor's."""

    name = "scoped"

    class Args(ProcessorArgs):
        scope: str = ""


class AnswerOnly(Loud):
    """Lives in the answer only."""

    name = "answer_only"
    scopes: tuple[Scope, ...] = ("answer",)  # type: ignore[misc]


class StageOfInt(Loud):
    """Has a number for its stage."""

    name = "stage_of_int"
    stage = 4  # type: ignore[assignment]


class VersionOfText(Loud):
    """Has a text for its version."""

    name = "version_of_text"
    version = "1.0"  # type: ignore[assignment]


class ReadsText(Loud):
    """Has a text for what it reads."""

    name = "reads_text"
    reads = "generated"  # type: ignore[assignment]


class ScopedByText(Loud):
    """Has a text for its scopes."""

    name = "scoped_by_text"
    scopes = "answer"  # type: ignore[assignment]


class Lenient(BaseModel):
    """Arguments that let unknown names pass."""

    token_id: int = 0


class LenientArgs(Loud):
    """Takes arguments by a model of pydantic's own."""

    name = "lenient_args"
    Args = Lenient  # type: ignore[assignment]


class BoundlessDefault(Loud):
    """Has a default that JSON cannot write."""

    name = "boundless_default"

    class Args(Loud.Args):
        most: float = float("inf")


class LenientPart(Loud):
    """Takes an object that lets unknown names pass, whose class is defined after it."""

    name = "lenient_part"

    class Args(Loud.Args):
        part: LenientLater | None = None


class LenientLater(BaseModel):
    """A part of arguments."""

    size: int = 0


class WithoutSchema(Loud):
    """Has an argument that JSON Schema cannot describe."""

    name = "without_schema"

    class Args(Loud.Args):
        call: Callable[[], int] | None = None


class Half:
    """Halves the logits."""

    def __call__(self, input_ids: list[int], logits: torch.Tensor) -> None:
        logits.mul_(0.5)


class Nothing:
    """Is no processor."""


number = 7
