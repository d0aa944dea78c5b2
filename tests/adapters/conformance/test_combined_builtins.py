"""Chains of several built-ins keep what each of them keeps alone."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
from builtin_examples import EXAMPLES
from effort import grid

from adapters.contract import (
    CompanionProcessor,
    Context,
    Edit,
    Processor,
    ProcessorArgs,
    Reads,
    Stage,
    SteeringProcessor,
)
from adapters.processors import BUILTINS
from adapters.testing import CHECKS, Subject, run_check

_ABOUT_ONE_CLASS = {"declares", "bounds", "arguments", "cost"}
_MAY_CONTRADICT = {"runs"}  # the first token may be unsatisfiable: forced by one, banned by another
_OF_ENGINES_WITHOUT_COMPANIONS = {"chunked_prefill"}  # they refuse a processor that needs a second row


def drawn(seed: int) -> list[tuple[type[Processor], Any]]:
    """A few built-ins with example arguments."""
    choose = random.Random(seed)
    kinds = choose.sample(BUILTINS, choose.randint(2, 6))
    return [(kind, choose.choice(EXAMPLES[kind.name])) for kind in kinds]


def combination(given: list[tuple[type[Processor], Any]]) -> type[Processor]:
    """A class that stands for the built-ins with these arguments."""
    kinds = [kind for kind, _ in given]

    class Combination(SteeringProcessor):
        """Several processors under one name."""

        name = "_".join(kind.name for kind in kinds)[:60]
        stage = Stage.BIAS
        reads = Reads.PROMPT_AND_GENERATED
        scopes = tuple(scope for scope in Processor.scopes if all(scope in kind.scopes for kind in kinds))
        Args: ClassVar[Any] = ProcessorArgs

        @classmethod
        def build(cls, args: Any, context: Context) -> list[Processor]:
            return [one for kind, data in given for one in kind.build(kind.Args.model_validate(data), context)]

        def edit(self) -> Edit | None:
            raise AssertionError("stands for others")

    return Combination


def _check(seed: int) -> None:
    given = drawn(seed)
    left_out = _ABOUT_ONE_CLASS | _MAY_CONTRADICT
    if any(issubclass(kind, CompanionProcessor) for kind, _ in given):
        left_out |= _OF_ENGINES_WITHOUT_COMPANIONS
    subject = Subject(combination(given))
    for check in CHECKS:
        if check.name not in left_out:
            run_check(subject, check)


@pytest.mark.parametrize(
    "seed", grid([0, 1, 2, 291], fast=lambda seed: seed < 3)
)  # 291: mirostat of an answer that begins with forced tokens
def test_some_builtins_together(seed: int) -> None:
    _check(seed)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_many_builtins_together() -> None:
    for seed in range(3, 300):
        _check(seed)
