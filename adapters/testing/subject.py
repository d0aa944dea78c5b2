"""The processor under test, and the arguments that it is tested with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationError

from adapters.chain import ProcessorChain
from adapters.contract import ArgumentError, CompanionProcessor, Context, Processor, ProcessorArgs, Scope, Unsatisfiable
from adapters.interrupts import is_interrupt
from adapters.testing.generation import each, valid
from adapters.testing.kit_model import kit_context, second_row
from adapters.testing.schemas import Schema
from adapters.third_party import ThirdPartyProcessor, wrap_third_party

NUM_GENERATED_CASES = 2
_TRIES = 60
_PATIENT = 3600.0
"""Step budget while testing, CPU seconds: a slow processor is reported but does not fail."""


class CheckFailed(AssertionError):
    """A processor breaks the contract; the message says where and with what arguments."""


@dataclass(frozen=True)
class Case:
    """Arguments as JSON data, and a scope.

    Attributes:
        is_example: True if the author gave the arguments.
    """

    arguments: Mapping[str, Any]
    scope: Scope = "all"
    is_example: bool = True

    def __str__(self) -> str:
        text = json.dumps(dict(self.arguments), ensure_ascii=False)
        scope = "" if self.scope == "all" else f" with scope {self.scope}"
        return f"arguments {text if len(text) < 300 else text[:300] + '…'}{scope}"


class Subject:
    """A processor class, with arguments to test it.

    Args:
        processor: A `SteeringProcessor` or `ShapingProcessor` class, or a third-party class that
            `adapters.third_party` can wrap: a Dynamo `BaseLogitsProcessor`, a Hugging
            Face `LogitsProcessor`, a TensorRT-LLM logits processor.
        examples: Arguments as JSON data that the processor accepts for the kit's own model. Needed
            where none can be generated from the schema; ``examples`` in the schema itself count
            too.
        context: Context that the processor is built with instead of the kit's own.

    Raises:
        TypeError: the class is neither a processor nor a third-party one.
        ModuleNotFoundError: Hypothesis is not installed.
    """

    def __init__(
        self, processor: type, examples: Sequence[Mapping[str, Any]] = (), context: Context | None = None
    ) -> None:
        if find_spec("hypothesis") is None:
            raise ModuleNotFoundError("the conformance kit needs Hypothesis: pip install hypothesis")
        self.original = processor
        self.processor: type[Processor] = (
            processor if issubclass(processor, Processor) else wrap_third_party(processor, processor.__name__.lower())
        )
        self.is_third_party = issubclass(self.processor, ThirdPartyProcessor)
        self._given = [dict(example) for example in examples]
        self._context = context

    @cached_property
    def context(self) -> Context:
        """Context that the processor is built with."""
        return self._context or kit_context()

    @cached_property
    def schema(self) -> Schema:
        """JSON Schema of the arguments."""
        return self.processor.Args.model_json_schema()

    @cached_property
    def examples(self) -> list[dict[str, Any]]:
        """Arguments from the author (call or schema), or none if that is accepted."""
        found = [*self._given, *self.schema.get("examples", ())]
        return found or ([{}] if self._refusal({}) is None else [])

    @cached_property
    def cases(self) -> list[Case]:
        """Every example, the first one in each other scope, and generated arguments.

        Raises:
            CheckFailed: an example is refused, or there is none and no generated arguments were
                accepted.
        """
        for example in self.examples:
            problem = self._refusal(example)
            if problem is not None:
                raise CheckFailed(f"the example {json.dumps(example)} is refused: {problem}")
        cases = [Case(example) for example in self.examples]
        cases += [Case(arguments, is_example=False) for arguments in self._made_up()]
        if not cases:
            problem = "no arguments could be generated from the schema; give examples"
            raise CheckFailed(f"{problem} (examples=[...], --example, or `examples` in the schema)")
        scopes = [scope for scope in self.processor.scopes if scope != "all"]
        if not (self.context.think_start and self.context.think_end):
            scopes = []
        return cases + [Case(cases[0].arguments, scope, is_example=False) for scope in scopes]

    def parse(self, arguments: Mapping[str, Any]) -> ProcessorArgs:
        """Typed arguments, by way of JSON as in a request.

        Raises:
            ValidationError: they do not match the schema.
        """
        return self.processor.Args.model_validate_json(json.dumps(dict(arguments)))

    def build(self, arguments: Mapping[str, Any]) -> list[Processor]:
        """The processors that the name stands for.

        Raises:
            ValidationError, ArgumentError, Unsatisfiable: the arguments are refused.
        """
        return list(self.processor.build(self.parse(arguments), self.context))

    def chain(self, case: Case, *others: Processor, tokens: list[int] | None = None) -> ProcessorChain:
        """A fresh chain with the processor alone, or with ``others`` after it; not started.

        It keeps its history in ``tokens``, an empty list, if given.
        """
        return self.chain_of(self.build(case.arguments), case.scope, *others, tokens=tokens)

    def chain_of(
        self, processors: Sequence[Processor], scope: Scope = "all", *others: Processor, tokens: list[int] | None = None
    ) -> ProcessorChain:
        """The chain of processors already built; else as `chain`."""
        for processor in processors:
            if isinstance(processor, CompanionProcessor):
                processor.second_row = partial(second_row, self.context.vocabulary.size)
        unscoped: list[Scope] = ["all"] * len(others)
        scopes: list[Scope] = [scope] * len(processors)
        return ProcessorChain(
            [*processors, *others], self.context, scopes=scopes + unscoped, step_budget_s=_PATIENT, tokens=tokens
        )

    def _refusal(self, arguments: Mapping[str, Any]) -> str | None:
        try:
            self.build(arguments)
        except (ValidationError, ArgumentError, Unsatisfiable) as error:
            return str(error)
        except BaseException as error:  # the processor boundary: the check of arguments reports it
            if is_interrupt(error):
                raise
            return f"raised {type(error).__name__}: {error}"
        return None

    def _made_up(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        tried: list[dict[str, Any]] = list(self.examples)

        def take(arguments: dict[str, Any]) -> None:
            if len(found) >= NUM_GENERATED_CASES or arguments in tried:
                return
            tried.append(arguments)
            if self._refusal(arguments) is None:
                found.append(arguments)

        # The bounds of a third-party class's arguments are generic, so values near them may make no
        # sense.
        if self.schema.get("properties") and not (self.is_third_party and self.examples):
            each(valid(self.schema, self.examples), _TRIES, take)
        return found
