"""Chains of served requests: what a request selects, the operator's policy, and its fields.

Everything that can refuse a request happens here, before the first chunk. Grammars are compiled
first, in the sandbox and in threads of their own, and chains are built in a few threads of the
builder: never in the event loop, nor in the threads that all of asyncio shares.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from adapters.catalog import (
    BUILT_IN,
    BuildFailed,
    Catalog,
    CatalogError,
    Policy,
    PolicyError,
    RuledOut,
    Selection,
    SelectionError,
    from_channels,
)
from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.contract import Context
from adapters.grammars.cache import GrammarCache
from adapters.grammars.compile_threads import Compiled
from adapters.grammars.compiler import GrammarRefused
from adapters.grammars.sandbox import GrammarSandbox, SandboxBusy, SandboxUnavailable
from adapters.processors.grammar import grammar_cache, tokenizer_tables
from adapters.vocabulary import Vocabulary
from worker.arguments import Arguments
from worker.engines import EngineInfo
from worker.errors import GrammarsUnavailable, InvalidRequest, Overloaded, StartupError
from worker.models.tokenizer_copy import load_vocabulary
from worker.processors.breaker import Breaker
from worker.processors.grammar_metrics import GrammarMetrics
from worker.processors.metrics import ProcessorMetrics
from worker.requests.fields import SECTIONS
from worker.requests.request import GenerationRequest
from worker.sampling.chain_builder import ChainBuilder, Facts

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHANNEL = "logits_processors"
"""Head of the path in errors about the request channel."""

NUM_BUILDERS = 4
"""Threads that build chains."""


def make_chain_builder(
    arguments: Arguments, info: EngineInfo, registry: CollectorRegistry, *, renders_templates: bool = False
) -> ServedChainBuilder:
    """The chain builder of a worker that has just loaded its model.

    Args:
        arguments: Of the worker.
        info: Of its engine.
        registry: Where metrics go.
        renders_templates: Whether its tokenizer is to render chat templates; for the NATS runtime
            it does.

    Raises:
        StartupError: the tokenizer cannot be read, the sandbox for grammars cannot be started, or
            the operator's processors or policy cannot be honoured.
    """
    metrics = GrammarMetrics(registry)
    sandbox = None
    try:
        vocabulary = _vocabulary(arguments, info, renders_templates or arguments.runtime == "nats")
        tables = partial(tokenizer_tables, vocabulary)
        sandbox = GrammarSandbox(tables, timeout_s=arguments.grammar_timeout_s, observe=metrics.count)
        sandbox.start()  # loads the tokenizer while this process does
        facts = _facts(vocabulary, arguments)
        facts.precompute()  # no request should wait for it
        cache = grammar_cache(vocabulary)
        cache.sandbox, cache.max_bytes = sandbox, arguments.grammar_cache_mib * 2**20
        metrics.watch(cache)
        sandbox.wait_ready()
        return _with_policy(arguments, facts, registry)
    except (OSError, ValueError) as error:
        _close(sandbox)
        raise StartupError(f"--model-path {arguments.model_path}: {error}") from None
    except SandboxUnavailable as error:
        _close(sandbox)
        raise StartupError(f"the sandbox for grammars {error}") from None
    except BaseException:
        _close(sandbox)
        raise


def _vocabulary(arguments: Arguments, info: EngineInfo, renders_templates: bool) -> Vocabulary:
    """With transformers' own tokenizer where chat templates or third-party code may use it."""
    path, size, ends = arguments.model_path, info.vocab_size, info.eos_token_ids
    runs_third_party = arguments.allow_logits_processors or arguments.logits_processor
    copy = "off" if renders_templates or runs_third_party else arguments.packed_copy
    return load_vocabulary(Path(path), size, ends, copy)


def _facts(vocabulary: Vocabulary, arguments: Arguments) -> Facts:
    try:
        return Facts.of(vocabulary, arguments.thinking_start, arguments.thinking_end)
    except ValueError as error:
        raise StartupError(f"--thinking-start and --thinking-end: {error}") from None


def _close(sandbox: GrammarSandbox | None) -> None:
    if sandbox is not None:
        sandbox.close()


def _with_policy(arguments: Arguments, facts: Facts, registry: CollectorRegistry) -> ServedChainBuilder:
    try:
        catalog = Catalog.load(allow=arguments.allow_logits_processors, options=arguments.logits_processor)
        path = arguments.processor_policy
        policy = Policy() if path is None else Policy.load(path, catalog)
        budget = arguments.processor_step_budget_s
        return ServedChainBuilder(catalog, policy, arguments.served_model_name, facts, registry, step_budget_s=budget)
    except (CatalogError, PolicyError) as error:
        raise StartupError(str(error)) from None


class ServedChainBuilder:
    """Builds the chains of served requests.

    Args:
        catalog: Every processor that may be named.
        policy: The operator's.
        model: Served model name, which the policy goes by.
        facts: Of the model.
        registry: Where the metrics of processors go.
        step_budget_s: Most CPU time that a third-party processor may take for one step, seconds.

    Attributes:
        builder: Builds what is selected.
        breaker: Of the third-party processors.
        metrics: Of all processors.
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
        self.builder = ChainBuilder(catalog, facts, policy.for_model(model), policy.watermark_keys, step_budget_s)
        self.breaker = Breaker(entry.name for entry in catalog.entries if entry.source != BUILT_IN)
        self.metrics = ProcessorMetrics(registry, lambda: len(self.breaker.open_names()))
        self._threads = ThreadPoolExecutor(NUM_BUILDERS, thread_name_prefix="chain-builder")
        ends = frozenset(facts.vocabulary.eos_token_ids)
        policy.check(model, catalog, self.builder.context(ends, 0, None))

    def select(self, request: GenerationRequest, metadata: Mapping[str, str]) -> Selection:
        """What the request asks for, and what the operator adds.

        Raises:
            InvalidRequest: the selection is malformed, or the policy forbids it.
        """
        try:
            named = from_channels(request.annotations, metadata) or Selection()
            after_thinking = request.require_reasoning
            return self.builder.select(named, request.params, served=True, after_thinking=after_thinking)
        except SelectionError as error:
            raise _invalid(error) from None

    async def build(
        self,
        selection: Selection,
        prompt: list[int],
        end_token_ids: frozenset[int],
        seed: int,
        max_tokens: int | None,
        client: str | None = None,
        generated: Sequence[int] = (),
        choice: int = 0,
    ) -> ProcessorChain | None:
        """The chain of a request, begun after its prompt; None if there is nothing for one to do.
        A request that wants a receipt, or no speculation, has one, be it empty.

        Cancelling it while a grammar compiles ends that at once. ``client`` is whose turn that
        takes. ``generated`` is the answer so far of a migrated request: it is replayed, unless that
        needs logits. ``choice`` is which of several answers to one prompt the chain is for.

        Raises:
            InvalidRequest: a processor is unknown, its arguments cannot be honoured, or nothing can
                satisfy them all.
            ProcessorUnavailable: a third-party processor has failed too often.
            Overloaded: too many grammars wait to be compiled.
            GrammarsUnavailable: there is no process to compile them in.
        """
        asks_nothing = selection.speculation and not (selection.order or selection.receipt)
        if asks_nothing and not selection.processors:
            return None
        names = [requested.name for requested in selection.processors]
        self.breaker.check(names)
        context = self.builder.context(end_token_ids, seed, max_tokens, choice)
        try:
            grammars = await self._compiled(selection, context, client)
            chain = await self._in_thread(self._build, selection, context, prompt, generated)
            del grammars  # until here they were in use, so the chain's processors found them in the cache
        except BuildFailed as error:
            self.breaker.record(error.processor)
            raise _invalid(error) from None
        except SelectionError as error:
            raise _invalid(error) from None
        except ProcessorFailed as error:
            self.breaker.record(error.processor)
            raise InvalidRequest(CHANNEL, str(error)) from None
        return None if asks_nothing and not chain.members else chain

    async def _compiled(self, selection: Selection, context: Context, client: str | None) -> list[Compiled]:
        """The grammars of a selection, compiled."""
        if self.facts.vocabulary.tokenizer is None or not self.catalog.has_grammars(selection):
            return []
        cache = grammar_cache(self.facts.vocabulary)
        wanted = await self._in_thread(self.catalog.grammars, selection, context)
        return [await _compiled_one(cache, path, grammar, client) for path, grammar in wanted]

    def _in_thread(self, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def close(self) -> None:
        """End the process that compiles grammars; requests with one are refused. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.facts.vocabulary.tokenizer is not None:
            sandbox = grammar_cache(self.facts.vocabulary).sandbox
            if sandbox is not None:
                await asyncio.to_thread(sandbox.close)

    def _build(
        self, selection: Selection, context: Context, prompt: list[int], generated: Sequence[int]
    ) -> ProcessorChain:
        try:
            chain = self.builder.build(selection, context)
        except RuledOut as error:
            raise self._blamed(error, context) from None
        chain.wants_receipt = bool(selection.receipt)
        if generated and not chain.observes_logits:
            chain.start(prompt, generated, mode="migrated")
        else:
            chain.start(prompt)
        return chain

    def _blamed(self, error: RuledOut, context: Context) -> SelectionError:
        """``error`` with the field that the client can change, where that is ``ignore_eos``."""
        ends = context.vocabulary.eos_token_ids
        if context.end_token_ids or not ends:
            return error
        try:
            self.catalog.find(error.requested).build(error.requested, replace(context, end_token_ids=ends))
        except SelectionError:
            return error
        return SelectionError("stop_conditions.ignore_eos", f"must not be true: {error.problem}")


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


def _invalid(error: SelectionError) -> InvalidRequest:
    path = error.path
    if path.partition(".")[0] in SECTIONS:
        return InvalidRequest(path, error.problem)
    return InvalidRequest(f"{CHANNEL}.{path}" if path else CHANNEL, error.problem)
