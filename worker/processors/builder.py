"""The logits processors of a request: its selection, the operator's policy, and request fields that
are processors.

Everything that can refuse a request happens here, before the first chunk. Grammars are compiled
first, in the sandbox and in threads of their own, and chains are built in a few threads of the
desk: never in the event loop, nor in the threads that all of asyncio shares.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from adapters.catalog import (
    BUILT_IN,
    BuildFailed,
    Catalog,
    CatalogError,
    FieldValue,
    Policy,
    PolicyError,
    Requested,
    RuledOut,
    Selection,
    SelectionError,
    from_channels,
)
from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.contract import Context, Scope
from adapters.grammars.cache import Compiled, GrammarCache
from adapters.grammars.compiler import GrammarRefused
from adapters.grammars.sandbox import GrammarSandbox, SandboxBusy, SandboxUnavailable
from adapters.processors.characters import split_characters
from adapters.processors.grammar import grammar_cache, tokenizer_tables
from adapters.vocabulary import Vocabulary, byte_index, thinking_tags
from worker.arguments import Arguments
from worker.engines import EngineInfo
from worker.errors import GrammarsUnavailable, InvalidRequest, Overloaded, StartupError
from worker.processors.breaker import Breaker
from worker.processors.grammar_metrics import GrammarMetrics
from worker.processors.metrics import ProcessorMetrics
from worker.requests.fields import FIELDS
from worker.requests.request import GenerationRequest
from worker.sampling.controls import CONTROLS, Control

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHANNEL = "logits_processors"
"""Head of the path in errors about the request channel."""

_PATHS = {row.target: row.path for row in FIELDS if row.target is not None}
"""Where the frontend puts each attribute of a `GenerationRequest`."""

NUM_BUILDERS = 4
"""Threads that build chains."""


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
        return cls.of(Vocabulary.from_pretrained(model_path, vocab_size, eos_token_ids))

    @classmethod
    def of(cls, vocabulary: Vocabulary, think_start: str | None = None, think_end: str | None = None) -> Facts:
        """Derive what takes long from a vocabulary with a tokenizer.

        Args:
            vocabulary: Of the model.
            think_start: Text of the opening tag; by default the model's own, if it has a known one.
            think_end: Text of the closing tag.

        Raises:
            ValueError: llguidance cannot read the tokenizer, or its tokens cannot write the tags.
        """
        byte_index(vocabulary)  # seconds for a large vocabulary, and the grammars' trie too: no request should wait
        split_characters(vocabulary)
        grammar_cache(vocabulary)
        return cls(vocabulary, *thinking_tags(vocabulary, think_start, think_end))


def make_desk(arguments: Arguments, info: EngineInfo, registry: CollectorRegistry) -> ProcessorDesk:
    """The desk of a worker that has just loaded its model.

    Raises:
        StartupError: the tokenizer cannot be read, the sandbox for grammars cannot be started, or
            the operator's processors or policy cannot be honoured.
    """
    metrics = GrammarMetrics(registry)
    sandbox = None
    try:
        vocabulary = Vocabulary.from_pretrained(arguments.model_path, info.vocab_size, info.eos_token_ids)
        tables = partial(tokenizer_tables, vocabulary)
        sandbox = GrammarSandbox(tables, timeout_s=arguments.grammar_timeout_s, observe=metrics.count)
        sandbox.start()  # loads the tokenizer while this process does
        facts = _facts(vocabulary, arguments)
        cache = grammar_cache(vocabulary)
        cache.sandbox, cache.max_bytes = sandbox, arguments.grammar_cache_mib * 2**20
        metrics.watch(cache)
        sandbox.wait_ready()
        return _open_desk(arguments, facts, registry)
    except (OSError, ValueError) as error:
        _close(sandbox)
        raise StartupError(f"--model-path {arguments.model_path}: no tokenizer: {error}") from None
    except SandboxUnavailable as error:
        _close(sandbox)
        raise StartupError(f"the sandbox for grammars {error}") from None
    except BaseException:
        _close(sandbox)
        raise


def _facts(vocabulary: Vocabulary, arguments: Arguments) -> Facts:
    try:
        thinking_tags(vocabulary, arguments.thinking_start, arguments.thinking_end)
    except ValueError as error:
        raise StartupError(f"--thinking-start and --thinking-end: {error}") from None
    return Facts.of(vocabulary, arguments.thinking_start, arguments.thinking_end)


def _close(sandbox: GrammarSandbox | None) -> None:
    if sandbox is not None:
        sandbox.close()


def _open_desk(arguments: Arguments, facts: Facts, registry: CollectorRegistry) -> ProcessorDesk:
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
        self._builders = ThreadPoolExecutor(NUM_BUILDERS, thread_name_prefix="chain-builder")
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
        self,
        selection: Selection,
        prompt: list[int],
        end_token_ids: frozenset[int],
        seed: int,
        max_tokens: int,
        client: str | None = None,
    ) -> ProcessorChain | None:
        """The chain of a request, begun after its prompt; None if there is nothing for one to do.

        Cancelling it while a grammar compiles ends that at once. ``client`` is whose turn that
        takes.

        Raises:
            InvalidRequest: a processor is unknown, its arguments cannot be honoured, or nothing can
                satisfy them all.
            ProcessorUnavailable: a third party's processor has failed too often.
            Overloaded: too many grammars wait to be compiled.
            GrammarsUnavailable: there is no process to compile them in.
        """
        if not (selection.processors or selection.order):
            return None
        names = [requested.name for requested in selection.processors]
        self.breaker.check(names)
        context = self.context(end_token_ids, seed, max_tokens)
        try:
            grammars = await self._compiled(selection, context, client)
            chain = await self._in_thread(self._build, selection, context, prompt)
            del grammars  # until here they were in use, so the chain's processors found them in the cache
        except BuildFailed as error:
            self.breaker.record(error.processor)
            raise _invalid(error) from None
        except SelectionError as error:
            raise _invalid(error) from None
        except ProcessorFailed as error:
            self.breaker.record(error.processor)
            raise InvalidRequest(CHANNEL, str(error)) from None
        return chain if chain.members or chain.order else None

    async def _compiled(self, selection: Selection, context: Context, client: str | None) -> list[Compiled]:
        """The grammars of a selection, compiled."""
        if self.facts.vocabulary.tokenizer is None or not self.catalog.has_grammars(selection):
            return []
        cache = grammar_cache(self.facts.vocabulary)
        wanted = await self._in_thread(self.catalog.grammars, selection, context)
        return [await _compiled_one(cache, path, grammar, client) for path, grammar in wanted]

    def _in_thread(self, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._builders, call, *arguments)

    async def close(self) -> None:
        """End the process that compiles grammars; requests with one are refused from now on.
        Idempotent.
        """
        self._builders.shutdown(wait=False, cancel_futures=True)
        if self.facts.vocabulary.tokenizer is not None:
            sandbox = grammar_cache(self.facts.vocabulary).sandbox
            if sandbox is not None:
                await asyncio.to_thread(sandbox.close)

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


async def _compiled_one(cache: GrammarCache, path: str, grammar: str, client: str | None) -> Compiled:
    try:
        return await asyncio.wrap_future(cache.request(grammar, client))
    except GrammarRefused as error:
        raise SelectionError(path, str(error)) from None
    except SandboxBusy as error:
        raise Overloaded(f"{path}: {error}; retry later or elsewhere") from None
    except SandboxUnavailable as error:
        logger.error("no grammar can be compiled: the sandbox %s", error)
        raise GrammarsUnavailable(f"no grammar can be compiled: the sandbox {error}") from None


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
