"""The catalogue: every processor that a request may name, and how a selection becomes a chain.

Built-ins are always present. A third-party processor, from an entry point of the group
``logits_processors`` or from ``--logits-processor NAME=module:Class``, is present only if the
operator allows it, and never replaces a built-in.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from adapters.catalog.entry import BuildFailed, Entry
from adapters.catalog.loading import CatalogError, check_entry, entry_of_option, offered_entries
from adapters.catalog.selection import VERSION, Requested, Selection, SelectionError, shown
from adapters.chain import ProcessorChain
from adapters.contract import Context, Processor, Scope, Stage
from adapters.grammars.json_schema import MAX_WORK_OF_ALL, limited
from adapters.processors import BUILTINS
from adapters.processors.grammar import GrammarProcessor


class RuledOut(SelectionError):
    """A request rules out a mandatory processor of the operator's.

    Args:
        requested: The processor.
        problem: Reason for which it cannot be honoured.
    """

    def __init__(self, requested: Requested, problem: str) -> None:
        required = f"the operator requires the logits processor {requested.name} for this model, and"
        super().__init__("", f"{required} this request rules it out: {problem}")
        self.requested = requested
        self.reason = problem

    def __reduce__(self) -> tuple[type[RuledOut], tuple[Requested, str]]:  # type: ignore[override]
        return type(self), (self.requested, self.reason)


class Catalog:
    """Processors by name.

    Args:
        entries: Entries with distinct names.

    Attributes:
        names: All names; built-ins come first, in the order law's order.
        entries: All entries, in the order of `names`.

    Raises:
        CatalogError: a name is malformed or taken, or a class does not keep the contract.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[str, Entry] = {}
        for entry in entries:
            check_entry(entry)
            known = self._entries.get(entry.name)
            if known is not None:
                raise CatalogError(f"{entry.source}: the name {entry.name} is taken ({known.source})")
            self._entries[entry.name] = entry
        self.names = list(self._entries)
        self.entries = list(self._entries.values())

    @classmethod
    def default(cls) -> Catalog:
        """The built-ins."""
        return cls(Entry(processor.name, processor) for processor in BUILTINS)

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
        return cls([*cls.default().entries, *offered_entries(allow), *map(entry_of_option, options)])

    def __getitem__(self, name: str) -> Entry:
        """The entry ``name``.

        Raises:
            KeyError: there is none; the message lists close matches.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise KeyError(_unknown(name, self.names))
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def find(self, requested: Requested) -> Entry:
        """The entry that ``requested`` names.

        Raises:
            SelectionError: there is none; the message lists close matches.
        """
        entry = self._entries.get(requested.name)
        if entry is None:
            raise SelectionError(f"{requested.path}.name", _unknown(requested.name, self.names))
        return entry

    def as_json(self) -> dict[str, Any]:
        """The entries as the worker publishes them and ``python -m adapters`` prints them."""
        return {"version": VERSION, "processors": [entry.as_json() for entry in self.entries]}

    def check(self, selection: Selection) -> None:
        """Check what of ``selection`` needs no model: names, arguments, what may be named once.

        Raises:
            SelectionError: a processor is unknown, repeated, or its arguments are out of bounds, or
                the order names one of another stage.
        """
        for requested in selection.processors:
            self.find(requested).parse_args(requested)
        self._check_once_and_order(selection)

    def _check_once_and_order(self, selection: Selection) -> None:
        known: dict[tuple[str, Scope], Requested] = {}
        for requested in selection.processors:
            first = known.setdefault((requested.name, requested.scope), requested)
            if first is not requested and self.find(requested).processor.once:
                problem = f"{requested.name} may be named once with scope {requested.scope}, and is at {first.path}"
                raise SelectionError(requested.path, problem)
        for i, name in enumerate(selection.order):
            entry = self._entries.get(name)
            if entry is None:
                raise SelectionError(f"order[{i}]", _unknown(name, self.names))
            if entry.processor.stage not in (Stage.TEMPERATURE, Stage.TRUNCATION):
                problem = f"expected processors of temperature and truncation, got {name}"
                raise SelectionError(f"order[{i}]", problem)

    def build_chain(
        self, selection: Selection, context: Context, *, step_budget_s: float | None = None
    ) -> ProcessorChain:
        """The chain of one choice. Compiles grammars: call it in a thread, never in the step.

        An operator's default that this request rules out (``loop_stop`` beside ``ignore_eos``) is
        left out.

        Args:
            selection: Selection of the request; only its form has been checked.
            context: Context of the choice.
            step_budget_s: CPU time that a third-party processor may take for one step, seconds.

        Raises:
            SelectionError: a processor is unknown, or its arguments cannot be honoured.
            RuledOut: a mandatory processor's arguments cannot be honoured in this request.
        """
        processors: list[Processor] = []
        scopes: list[Scope] = []
        self._check_once_and_order(selection)
        wants_random_sampling = False
        for requested in selection.processors:
            built = _built(self, requested, context)
            processors += built
            scopes += [requested.scope] * len(built)
            wants_random_sampling |= any(_wants_random_sampling(requested, processor) for processor in built)
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
            SelectionError: as `build_chain`, or the schemas are too complex together.
        """
        with limited(MAX_WORK_OF_ALL):
            found = [self.find(requested).grammar(requested, context) for requested in selection.processors]
        return [each for each in found if each is not None]


def _built(catalog: Catalog, requested: Requested, context: Context) -> list[Processor]:
    """The processors of ``requested``; none for a default that this request rules out."""
    try:
        return catalog.find(requested).build(requested, context)
    except BuildFailed:
        raise
    except SelectionError as error:
        if requested.origin == "default":
            return []
        if requested.origin == "mandatory":
            raise RuledOut(requested, error.problem) from error
        raise


def _wants_random_sampling(requested: Requested, processor: Processor) -> bool:
    """Whether this processor makes a request without temperature, top-k and top-p sample randomly.

    A processor that the client names counts; an operator's default does not, nor does a mandatory
    truncation, which leaves greedy sampling unchanged.
    """
    if requested.origin == "client":
        return processor.stage >= Stage.TEMPERATURE
    return requested.origin == "mandatory" and processor.stage in (Stage.TEMPERATURE, Stage.SAMPLING)


def _unknown(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"unknown logits processor {shown(name)}" + (f"; did you mean {' or '.join(close)}?" if close else "")
