"""`Entry`: one processor of the catalogue, which a request's arguments build."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from adapters.catalog.selection import Requested, SelectionError, shown
from adapters.chain import kept_thread_state
from adapters.contract import (
    ArgumentError,
    Context,
    Processor,
    ProcessorArgs,
    Reads,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    Unsatisfiable,
)
from adapters.interrupts import is_interrupt
from adapters.processors.grammar import GrammarProcessor

BUILT_IN = "built-in"

DECLARED = {"version": int, "stage": Stage, "reads": Reads, "scopes": tuple, "Args": type}
"""Class attributes of a processor, and their types."""


class BuildFailed(SelectionError):
    """A processor could not be built, and not because of its arguments.

    Args:
        path: JSON path in the selection.
        problem: One sentence for the caller.
        processor: Name of the processor.
    """

    def __init__(self, path: str, problem: str, processor: str = "") -> None:
        super().__init__(path, problem)
        self.processor = processor

    def __reduce__(self) -> tuple[type[BuildFailed], tuple[str, str, str]]:  # type: ignore[override]
        return type(self), (self.path, self.problem, self.processor)


@dataclass(frozen=True, slots=True)
class Entry:
    """One processor of the catalogue.

    Attributes:
        name: Name in requests.
        processor: Class of the processor.
        source: ``built-in``, or the option or distribution that a third-party class comes from.
    """

    name: str
    processor: type[Processor]
    source: str = BUILT_IN

    @property
    def kind(self) -> Literal["steering", "shaping"]:
        """Steering (by history) or shaping (logits to logits)."""
        return "shaping" if issubclass(self.processor, ShapingProcessor) else "steering"

    @property
    def summary(self) -> str:
        """First line of its docstring."""
        return " ".join((inspect.getdoc(self.processor) or "").partition("\n\n")[0].split())

    def args_schema(self, ref_prefix: str = "") -> dict[str, Any]:
        """JSON Schema of its arguments and ``scope``; ``ref_prefix`` precedes definition names."""
        schema = self.processor.Args.model_json_schema(ref_template=f"#/$defs/{ref_prefix}{{model}}")
        schema.pop("title", None)
        if "$defs" in schema:
            schema["$defs"] = {ref_prefix + name: definition for name, definition in schema["$defs"].items()}
        scope = {
            "type": "string",
            "enum": list(self.processor.scopes),
            "default": "all",
            "description": "Part of the generation that it applies to.",
        }
        return {**schema, "properties": {**schema.get("properties", {}), "scope": scope}}

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON data; the key order is stable."""
        processor = self.processor
        return {
            "name": self.name,
            "version": processor.version,
            "summary": self.summary,
            "kind": self.kind,
            "stage": processor.stage.name.lower(),
            "reads": processor.reads.value,
            "observes_logits": processor.observes_logits,
            "source": self.source,
            "args": self.args_schema(),
        }

    def parse_args(self, requested: Requested) -> ProcessorArgs:
        """Typed arguments of one entry of a selection; needs no model.

        Raises:
            SelectionError: the arguments are out of their bounds.
            BuildFailed: its check of them raised.
        """
        path = f"{requested.path}.args"
        try:
            data = json.dumps(dict(requested.args), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SelectionError(path, f"is not JSON data: {error}") from None
        try:
            return self.processor.Args.model_validate_json(data)
        except ValidationError as error:
            raise _selection_error(error, path, self.processor.Args) from None
        except BaseException as error:  # the processor boundary: third-party code
            raise _raised(requested, error, "its arguments were checked") from error

    def build(self, requested: Requested, context: Context) -> list[Processor]:
        """The processors that one entry of a selection stands for.

        Raises:
            SelectionError: the scope or the arguments cannot be honoured.
            BuildFailed: the processor raised.
        """
        _check_scope(requested, self.processor, context)
        args = self.parse_args(requested)
        with _refusals(requested), nullcontext() if self.source == BUILT_IN else kept_thread_state():
            built = list(self.processor.build(args, context))
        if not all(isinstance(one, SteeringProcessor | ShapingProcessor) for one in built):
            problem = f"the logits processor {requested.name} is built of what is none"
            raise BuildFailed(requested.path, problem, requested.name)
        for name in _redeclared(built):
            problem = f"the logits processor {requested.name} changes {name}, which is an attribute of its class"
            raise BuildFailed(requested.path, problem, requested.name)
        return built

    def grammar(self, requested: Requested, context: Context) -> tuple[str, str] | None:
        """The grammar that `build` compiles and the path of its argument, None if it compiles none.

        Raises:
            SelectionError, BuildFailed: as `build`.
        """
        processor = self.processor
        if not issubclass(processor, GrammarProcessor):
            return None
        _check_scope(requested, processor, context)
        args = self.parse_args(requested)
        with _refusals(requested):
            return f"{requested.path}.args.{processor.argument}", processor.kept_grammar(args, context.vocabulary)


def _redeclared(built: Sequence[Processor]) -> Iterator[str]:
    """Names of declarations that a processor has overwritten with something else in `__init__`, as
    where an automaton calls its state its stage.
    """
    for one in built:
        if "name" in vars(one) and not one.wraps_third_party:  # wrappers serve many classes
            yield "name"
        for name, kind in DECLARED.items():
            if not isinstance(getattr(one, name), kind):
                yield name


@contextmanager
def _refusals(requested: Requested) -> Iterator[None]:
    """Errors of a processor's own code as `SelectionError`, with the path of the argument."""
    path = f"{requested.path}.args"
    try:
        yield
    except ArgumentError as error:
        raise SelectionError(f"{path}.{error.argument}", error.problem) from error
    except Unsatisfiable as error:
        raise SelectionError(path, str(error)) from error
    except BaseException as error:  # the processor boundary: third-party code
        raise _raised(requested, error, "it was built") from error


def _raised(requested: Requested, error: BaseException, when: str) -> BuildFailed:
    """The failure of a processor that raised; an interrupt, which is not its own, is raised."""
    if is_interrupt(error):
        raise error
    problem = f"the logits processor {requested.name} raised {type(error).__name__} when {when}"
    return BuildFailed(requested.path, problem, requested.name)


def _check_scope(requested: Requested, processor: type[Processor], context: Context) -> None:
    path = f"{requested.path}.args.scope"
    if requested.scope not in processor.scopes:
        raise SelectionError(path, f"expected one of {', '.join(processor.scopes)}, got {requested.scope}")
    if requested.scope != "all" and not (context.think_start and context.think_end):
        raise SelectionError(path, f"{requested.scope} needs a model with thinking tags, and this model has none")


def _selection_error(error: ValidationError, path: str, args: type[ProcessorArgs]) -> SelectionError:
    """The first problem that pydantic found, under its JSON path."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    problem = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        known = [field.alias or name for name, field in args.model_fields.items()]
        problem = f"unknown argument; known are {', '.join([*known, 'scope'])}"
    elif isinstance(first["input"], str | int | float | bool | None) and first["type"] != "missing":
        problem += f", got {shown(first['input'])}"
    return SelectionError((path + where)[:200], problem)
