"""The catalogue: every processor that a request may name, and how a selection becomes a chain.

Built-ins are always present. A third-party processor, from an entry point of the group
``logits_processors`` or from ``--logits-processor NAME=module:Class``, is present only if the
operator allows it, and never replaces a built-in.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import ValidationError

from adapters.catalog.selection import (
    MAX_CHOICES,
    MAX_DEADLINE,
    MAX_PROCESSORS,
    NAME,
    VERSION,
    Requested,
    Selection,
    SelectionError,
    shown,
)
from adapters.chain import ProcessorChain
from adapters.contract import (
    ArgumentError,
    Context,
    Processor,
    ProcessorArgs,
    Scope,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    Unsatisfiable,
)
from adapters.processors import BUILTINS
from adapters.processors.grammar import GrammarProcessor
from adapters.third_party import wrap_third_party

GROUP = "logits_processors"
"""Entry-point group of third-party processors."""

BUILT_IN = "built-in"


class CatalogError(ValueError):
    """The operator's list of processors cannot be honoured."""


class BuildFailed(SelectionError):
    """A processor could not be built, and not because of its arguments.

    Args:
        path: Where in the selection.
        problem: One sentence for the caller.
        processor: Its name.
    """

    def __init__(self, path: str, problem: str, processor: str = "") -> None:
        super().__init__(path, problem)
        self.processor = processor

    def __reduce__(self) -> tuple[type[BuildFailed], tuple[str, str, str]]:  # type: ignore[override]
        return type(self), (self.path, self.problem, self.processor)


class RuledOut(SelectionError):
    """A request rules out a mandatory processor of the operator's.

    Args:
        requested: The processor.
        problem: Why it cannot be honoured.
    """

    def __init__(self, requested: Requested, problem: str) -> None:
        required = f"the operator requires the logits processor {requested.name} for this model, and"
        super().__init__("", f"{required} this request rules it out: {problem}")
        self.requested = requested
        self.reason = problem

    def __reduce__(self) -> tuple[type[RuledOut], tuple[Requested, str]]:  # type: ignore[override]
        return type(self), (self.requested, self.reason)


@dataclass(frozen=True, slots=True)
class Entry:
    """One processor of the catalogue.

    Attributes:
        name: How requests name it.
        processor: Its class.
        source: ``built-in``, or where a third party's class comes from.
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


class Catalog:
    """Processors by name.

    Args:
        entries: Of distinct names.

    Raises:
        CatalogError: a name is malformed or taken, or a class does not keep the contract.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[str, Entry] = {}
        for entry in entries:
            _check_entry(entry)
            known = self._entries.get(entry.name)
            if known is not None:
                raise CatalogError(f"{entry.source}: the name {entry.name} is taken ({known.source})")
            self._entries[entry.name] = entry

    @classmethod
    def default(cls) -> Catalog:
        """The built-ins."""
        return cls(_built_in_entries())

    @classmethod
    def load(cls, *, allow: Sequence[str] = (), options: Sequence[str] = ()) -> Catalog:
        """The built-ins and the third-party processors that the operator allows.

        Args:
            allow: Names to take from the entry points of the group ``logits_processors``; no other
                is imported.
            options: ``NAME=module:Class`` each; naming one allows it.

        Raises:
            CatalogError: a name is malformed, missing, taken or offered twice, or its class is
                unfit.
        """
        offered = [_entry_of(point, allow) for point in entry_points(group=GROUP) if point.name in allow]
        missing = set(allow) - {entry.name for entry in offered}
        if missing:
            raise CatalogError(f"no installed distribution offers the logits processor {', '.join(sorted(missing))}")
        return cls([*_built_in_entries(), *offered, *map(_entry_of_option, options)])

    @property
    def names(self) -> list[str]:
        """All names; built-ins come first, in the order law's order."""
        return list(self._entries)

    @property
    def entries(self) -> list[Entry]:
        """All entries, in the order of `names`."""
        return list(self._entries.values())

    def __getitem__(self, name: str) -> Entry:
        """The entry ``name``.

        Raises:
            KeyError: there is none; the message lists close matches.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise KeyError(self._unknown(name))
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def as_json(self) -> dict[str, Any]:
        """The entries as the worker publishes them and ``python -m adapters`` prints them."""
        return {"version": VERSION, "processors": [entry.as_json() for entry in self.entries]}

    def selection_schema(self) -> dict[str, Any]:
        """JSON Schema of the request channel with this catalogue."""
        definitions: dict[str, Any] = {}
        choices = [_choice_schema(entry, definitions) for entry in self.entries]
        late = [e.name for e in self.entries if e.processor.stage in (Stage.TEMPERATURE, Stage.TRUNCATION)]
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "logits_processors",
            "type": "object",
            "additionalProperties": False,
            "required": ["version"],
            "properties": {
                "version": {"const": VERSION},
                "processors": {"type": "array", "maxItems": MAX_PROCESSORS, "items": {"oneOf": choices}},
                "receipt": {"enum": [False, True, "debug"], "default": False},
                "deadline": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE},
                "order": {"type": "array", "maxItems": MAX_PROCESSORS, "uniqueItems": True, "items": {"enum": late}},
                "speculation": {"type": "boolean", "default": True},
                "choice": {"type": "integer", "minimum": 0, "maximum": MAX_CHOICES - 1, "default": 0},
            },
            "$defs": definitions,
        }

    def check(self, selection: Selection) -> None:
        """Check what of ``selection`` needs no model: names, arguments, what may be named once.

        Raises:
            SelectionError: a processor is unknown, repeated, or its arguments are out of bounds, or
                the order names one of another stage.
        """
        for requested in selection.processors:
            self.parse_args(requested)
        self._check_once(selection)
        self._check_order(selection)

    def build_chain(
        self, selection: Selection, context: Context, *, step_budget_s: float | None = None
    ) -> ProcessorChain:
        """The chain of one choice. Compiles grammars: call it in a thread, never in the step.

        An operator's default that this request rules out (``loop_stop`` beside ``ignore_eos``) is
        left out.

        Args:
            selection: Of the request; only its form has been checked.
            context: Of the choice.
            step_budget_s: Most CPU time that a third party's processor may take for one step,
                seconds.

        Raises:
            SelectionError: a processor is unknown, or its arguments cannot be honoured.
            RuledOut: a mandatory processor's arguments cannot be honoured in this request.
        """
        processors: list[Processor] = []
        scopes: list[Scope] = []
        self._check_once(selection)
        self._check_order(selection)
        wants_random_sampling = False
        for requested in selection.processors:
            built = self._built(requested, context)
            processors += built
            scopes += [requested.scope] * len(built)
            wants_random_sampling = wants_random_sampling or any(
                _wants_random_sampling(requested, processor) for processor in built
            )
        chain = ProcessorChain(
            processors,
            context,
            scopes=scopes,
            step_budget_s=step_budget_s,
            attribution=selection.receipt == "debug",
            order=selection.order,
        )
        chain.wants_random_sampling = wants_random_sampling
        chain.speculates = selection.speculation
        return chain

    def _built(self, requested: Requested, context: Context) -> list[Processor]:
        """As `build`; nothing for a default that this request rules out."""
        try:
            return self.build(requested, context)
        except BuildFailed:
            raise
        except SelectionError as error:
            if requested.origin == "default":
                return []
            if requested.origin == "mandatory":
                raise RuledOut(requested, error.problem) from error
            raise

    def has_grammars(self, selection: Selection) -> bool:
        """Whether `build_chain` would compile a grammar."""
        return any(
            requested.name in self and issubclass(self[requested.name].processor, GrammarProcessor)
            for requested in selection.processors
        )

    def grammars(self, selection: Selection, context: Context) -> list[tuple[str, str]]:
        """The grammars that `build_chain` compiles, each with the path of its argument.

        Lets the caller compile them in advance.

        A schema may be a megabyte: call it in a thread.

        Raises:
            SelectionError: as `build_chain`.
        """
        found = []
        for requested in selection.processors:
            processor = self._find(requested).processor
            if not issubclass(processor, GrammarProcessor):
                continue
            _check_scope(requested, processor, context)
            try:
                grammar = processor.grammar(self.parse_args(requested), context.vocabulary)
            except ArgumentError as error:
                raise SelectionError(f"{requested.path}.args.{error.argument}", error.problem) from error
            except SelectionError:
                raise
            except Exception as error:  # the processor boundary: third-party code
                problem = f"the logits processor {requested.name} raised {type(error).__name__} when it was built"
                raise BuildFailed(requested.path, problem, requested.name) from error
            found.append((f"{requested.path}.args.{processor.argument}", grammar))
        return found

    def build(self, requested: Requested, context: Context) -> list[Processor]:
        """The processors that one entry of a selection stands for.

        Raises:
            SelectionError: as `build_chain`.
        """
        processor, path = self._find(requested).processor, requested.path
        _check_scope(requested, processor, context)
        args = self.parse_args(requested)
        try:
            return processor.build(args, context)
        except ArgumentError as error:
            raise SelectionError(f"{path}.args.{error.argument}", error.problem) from error
        except Unsatisfiable as error:
            raise SelectionError(f"{path}.args", str(error)) from error
        except Exception as error:  # the processor boundary: third-party code
            problem = f"the logits processor {requested.name} raised {type(error).__name__} when it was built"
            raise BuildFailed(path, problem, requested.name) from error

    def parse_args(self, requested: Requested) -> ProcessorArgs:
        """Typed arguments of one entry of a selection; needs no model.

        Raises:
            SelectionError: the processor is unknown, or the arguments are out of their bounds.
        """
        entry, path = self._find(requested), f"{requested.path}.args"
        try:
            data = json.dumps(dict(requested.args), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SelectionError(path, f"is not JSON data: {error}") from None
        try:
            return entry.processor.Args.model_validate_json(data)
        except ValidationError as error:
            raise _selection_error(error, path, entry.processor.Args) from None

    def _check_order(self, selection: Selection) -> None:
        for i, name in enumerate(selection.order):
            entry = self._entries.get(name)
            if entry is None:
                raise SelectionError(f"order[{i}]", self._unknown(name))
            if entry.processor.stage not in (Stage.TEMPERATURE, Stage.TRUNCATION):
                problem = f"expected processors of temperature and truncation, got {name}"
                raise SelectionError(f"order[{i}]", problem)

    def _check_once(self, selection: Selection) -> None:
        known: dict[tuple[str, Scope], Requested] = {}
        for requested in selection.processors:
            first = known.setdefault((requested.name, requested.scope), requested)
            if first is not requested and self._find(requested).processor.once:
                problem = f"{requested.name} may be named once with scope {requested.scope}, and is at {first.path}"
                raise SelectionError(requested.path, problem)

    def _find(self, requested: Requested) -> Entry:
        entry = self._entries.get(requested.name)
        if entry is None:
            raise SelectionError(f"{requested.path}.name", self._unknown(requested.name))
        return entry

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.5)
        return f"unknown logits processor {shown(name)}" + (f"; did you mean {' or '.join(close)}?" if close else "")


def _wants_random_sampling(requested: Requested, processor: Processor) -> bool:
    """Whether this processor makes a request without temperature, top-k and top-p sample randomly.

    A processor that the client names counts; an operator's default does not, nor does a mandatory
    truncation, which leaves greedy sampling unchanged.
    """
    if requested.origin == "client":
        return processor.stage >= Stage.TEMPERATURE
    return requested.origin == "mandatory" and processor.stage in (Stage.TEMPERATURE, Stage.SAMPLING)


def _built_in_entries() -> list[Entry]:
    return [Entry(processor.name, processor) for processor in BUILTINS]


def _check_entry(entry: Entry) -> None:
    processor = entry.processor
    if not NAME.fullmatch(entry.name):
        raise CatalogError(f"{entry.source}: {entry.name!r} is not a name; expected {NAME.pattern}")
    if inspect.isabstract(processor) or not issubclass(processor, SteeringProcessor | ShapingProcessor):
        raise CatalogError(f"{entry.source}: {processor.__name__} is neither a steering nor a shaping processor")
    missing = [name for name in ("name", "stage") if not hasattr(processor, name)]
    if missing:
        raise CatalogError(f"{entry.source}: {processor.__name__} lacks {', '.join(missing)}")
    if processor.name != entry.name:
        raise CatalogError(f"{entry.source}: {processor.__name__} names itself {processor.name}, not {entry.name}")
    if "scope" in processor.Args.model_fields:
        raise CatalogError(
            f"{entry.source}: scope is an argument of every processor, {processor.__name__} redefines it"
        )


def _entry_of(point: EntryPoint, allow: Sequence[str]) -> Entry:
    distribution = point.dist.name if point.dist is not None else "unknown distribution"
    return _third_party(point.name, point.value, f"{distribution} ({point.value})")


def _entry_of_option(option: str) -> Entry:
    name, separator, target = option.partition("=")
    if not separator or not name or not target:
        raise CatalogError(f"--logits-processor {option}: expected NAME=module:Class")
    return _third_party(name, target, f"--logits-processor {option}")


def _third_party(name: str, target: str, source: str) -> Entry:
    loaded = load_class(target, source)
    if issubclass(loaded, Processor):
        return Entry(name, loaded, source)
    try:
        return Entry(name, wrap_third_party(loaded, name), source)
    except (TypeError, ValueError) as error:
        raise CatalogError(f"{source}: {error}") from error


def load_class(target: str, source: str) -> type:
    """The class that ``module:Class`` names.

    Raises:
        CatalogError: there is none; the message starts with ``source``.
    """
    module, separator, attribute = target.partition(":")
    if not separator or not module or not attribute:
        raise CatalogError(f"{source}: expected module:Class, got {target!r}")
    if "/" in module or module.endswith(".py"):
        raise CatalogError(f"{source}: expected the module as import names it, not a path, got {module!r}")
    try:
        loaded: object = importlib.import_module(module)
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except (ImportError, AttributeError) as error:
        raise CatalogError(f"{source}: {error}") from error
    except Exception as error:  # the processor boundary: third-party code
        raise CatalogError(f"{source}: raised {type(error).__name__} when it was imported: {error}") from error
    if not isinstance(loaded, type):
        raise CatalogError(f"{source}: {attribute} is not a class")
    return loaded


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


def _choice_schema(entry: Entry, definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of one entry of a selection; adds the definitions it refers to to ``definitions``."""
    args = entry.args_schema(entry.name.replace("/", ".") + ".")
    definitions.update(args.pop("$defs", {}))
    return {
        "type": "object",
        "description": entry.summary,
        "additionalProperties": False,
        "required": ["name", "args"] if args.get("required") else ["name"],
        "properties": {"name": {"const": entry.name}, "args": args},
    }
