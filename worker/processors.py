"""The logits processors of a request: its selection, the operator's policy, and request fields that are processors.

Everything that can refuse a request happens here, before the first chunk. Chains are built in a thread, because
grammars compile while they are built.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry

from adapters.catalog import BUILT_IN, BuildFailed, Catalog, CatalogError, RuledOut
from adapters.chain import ProcessorChain
from adapters.characters import split_characters
from adapters.contract import Context
from adapters.plan import ProcessorFailed
from adapters.policy import FieldValue, Policy, PolicyError
from adapters.processors.grammar import grammar_cache
from adapters.scope import Scope
from adapters.selection import Requested, Selection, SelectionError, from_channels
from adapters.token_bytes import byte_index
from adapters.vocabulary import Vocabulary
from worker.arguments import Arguments
from worker.breaker import Breaker
from worker.controls import CONTROLS, Control
from worker.engines import EngineInfo
from worker.errors import InvalidRequest, StartupError
from worker.fields import FIELDS
from worker.processor_metrics import ProcessorMetrics
from worker.request import GenerationRequest

CHANNEL = "logits_processors"
"""Head of the path in errors about the request channel."""

_PATHS = {row.target: row.path for row in FIELDS if row.target is not None}
"""Where the frontend puts each attribute of a `GenerationRequest`."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What chains need to know of the served model.

    Attributes:
        vocabulary: Its ids and tokenizer.
        think_start: Ids of the tag that opens a thinking section, empty if it has none.
        think_end: Ids of the tag that closes it.
    """

    vocabulary: Vocabulary
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()

    @classmethod
    def load(cls, model_path: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Facts:
        """Read the checkpoint's tokenizer.

        Raises:
            OSError, ValueError: there is none that can be read.
        """
        vocabulary = Vocabulary.from_pretrained(model_path, vocab_size, eos_token_ids)
        byte_index(vocabulary)  # seconds for a large vocabulary, and the grammars' trie too: no request should wait
        split_characters(vocabulary)
        grammar_cache(vocabulary)
        return cls(vocabulary, vocabulary.tag("<think>"), vocabulary.tag("</think>"))


def make_desk(arguments: Arguments, info: EngineInfo, registry: CollectorRegistry) -> ProcessorDesk:
    """The desk of a worker that has just loaded its model.

    Raises:
        StartupError: the tokenizer cannot be read, or the operator's processors or policy cannot be honoured.
    """
    try:
        facts = Facts.load(arguments.model_path, info.vocab_size, info.eos_token_ids)
    except (OSError, ValueError) as error:
        raise StartupError(f"--model-path {arguments.model_path}: no tokenizer: {error}") from None
    try:
        catalog = Catalog.load(allow=arguments.allow_logits_processors, options=arguments.logits_processor)
        path = arguments.processor_policy
        policy = Policy() if path is None else Policy.load(path, catalog)
        budget = arguments.processor_step_budget_s
        return ProcessorDesk(catalog, policy, arguments.served_model_name, facts, registry, step_budget_s=budget)
    except (CatalogError, PolicyError) as error:
        raise StartupError(str(error)) from None


class ProcessorDesk:
    """Turns requests into chains.

    Args:
        catalog: Every processor that may be named.
        policy: The operator's.
        model: Served model name, which the policy goes by.
        facts: Of the model.
        registry: Where the metrics of processors go.
        step_budget_s: Most CPU time that a third party's processor may take for one step, seconds.
    """

    def __init__(
        self,
        catalog: Catalog,
        policy: Policy,
        model: str,
        facts: Facts,
        registry: CollectorRegistry,
        *,
        step_budget_s: float | None = None,
    ) -> None:
        self.catalog = catalog
        self.facts = facts
        self.registry = registry
        self.step_budget_s = step_budget_s
        self.breaker = Breaker(entry.name for entry in catalog.entries if entry.source != BUILT_IN)
        self.metrics = ProcessorMetrics(registry, lambda: len(self.breaker.open_names()))
        self._policy = policy.for_model(model)
        self._keys = policy.watermark_keys
        policy.check(model, catalog, self.context(frozenset(facts.vocabulary.eos_token_ids), 0, None))

    def select(self, request: GenerationRequest, metadata: Mapping[str, str]) -> Selection:
        """What the request asks for, and what the operator adds.

        Raises:
            InvalidRequest: the selection is malformed, or the policy forbids it.
        """
        try:
            asked = from_channels(request.annotations, metadata) or Selection()
            fields = field_values(request, bool(self.facts.think_start))
            _refuse_twice(asked, fields)
            selection = self._policy.apply(asked, self.catalog, [value for _, value in fields])
        except SelectionError as error:
            raise _invalid(error) from None
        return selection.with_processors(
            *(value.requested for control, value in fields if not (control.in_params or value.is_neutral))
        )

    async def chain(
        self, selection: Selection, prompt: list[int], end_token_ids: frozenset[int], seed: int, max_tokens: int
    ) -> ProcessorChain | None:
        """The chain of a request, begun after its prompt; None if there is nothing for one to do.

        Raises:
            InvalidRequest: a processor is unknown, its arguments cannot be honoured, or nothing can satisfy them all.
            ProcessorUnavailable: a third party's processor has failed too often.
        """
        if not selection.processors:
            return None
        names = [requested.name for requested in selection.processors]
        self.breaker.check(names)
        context = self.context(end_token_ids, seed, max_tokens)
        try:
            chain = await asyncio.to_thread(self._build, selection, context, prompt)
        except BuildFailed as error:
            self.breaker.record(error.processor)
            raise _invalid(error) from None
        except SelectionError as error:
            raise _invalid(error) from None
        except ProcessorFailed as error:
            self.breaker.record(error.processor)
            raise InvalidRequest(CHANNEL, str(error)) from None
        return chain if chain.members else None

    def _build(self, selection: Selection, context: Context, prompt: list[int]) -> ProcessorChain:
        try:
            chain = self.catalog.build_chain(selection, context, step_budget_s=self.step_budget_s)
        except RuledOut as error:
            raise self._blamed(error, context) from None
        chain.wants_receipt = bool(selection.receipt)
        chain.start(prompt)
        return chain

    def _blamed(self, error: RuledOut, context: Context) -> SelectionError:
        """``error`` with the field that the client can change, where that is ``ignore_eos``."""
        ends = context.vocabulary.eos_token_ids
        if context.end_token_ids or not ends:
            return error
        try:
            self.catalog.build(error.requested, replace(context, end_token_ids=ends))
        except SelectionError:
            return error
        return SelectionError("stop_conditions.ignore_eos", f"must not be true: {error.problem}")

    def context(self, end_token_ids: frozenset[int], seed: int, max_tokens: int | None) -> Context:
        """What the processors of one request may know."""
        return Context(
            self.facts.vocabulary,
            end_token_ids,
            seed,
            max_tokens=max_tokens,
            watermark_keys=self._keys,
            think_start=self.facts.think_start,
            think_end=self.facts.think_end,
        )


def field_values(request: GenerationRequest, can_think: bool) -> list[tuple[Control, FieldValue]]:
    """The fields that the client set and that are processors by another name.

    Args:
        request: Of the client.
        can_think: The model has thinking tags, so that a grammar may begin after the thinking.
    """
    found = []
    for control in CONTROLS:
        value = control.value(request) if control.field in _PATHS else None
        if value is None:
            continue
        scope: Scope = "answer" if control.guide is not None and request.require_reasoning and can_think else "all"
        args = {control.argument: _as_json(value), **control.fixed}
        requested = Requested(control.processor.name, args, scope, _PATHS[control.field])
        found.append((control, FieldValue(requested, control.is_neutral(value))))
    return found


def _as_json(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value


def _refuse_twice(selection: Selection, fields: Sequence[tuple[Control, FieldValue]]) -> None:
    named = {requested.name for requested in selection.processors}
    for _, value in fields:
        if value.requested.name in named and not value.is_neutral:
            problem = f"is set, and the processor {value.requested.name} is named too; give one of them"
            raise SelectionError(value.requested.path, problem)


def _invalid(error: SelectionError) -> InvalidRequest:
    path = error.path
    if path.startswith(("sampling_options", "stop_conditions", "extra_args")):
        return InvalidRequest(path, error.problem)
    return InvalidRequest(f"{CHANNEL}.{path}" if path else CHANNEL, error.problem)
