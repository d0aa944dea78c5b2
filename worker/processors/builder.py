"""Chains of served requests, from the processors they name, their fields and the policy.

Everything that can refuse a request happens here, before the first chunk. Grammars are compiled
first, in the sandbox and in threads of their own, and chains are built in a few threads of the
builder: never in the event loop, nor in the threads that all of asyncio shares.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
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
    model_context,
    precompute,
)
from adapters.chain import ProcessorFailed
from adapters.contract import CompanionProcessor, Context, ThinkingTracker
from adapters.grammars.cache import GrammarCache
from adapters.grammars.compile_threads import Compiled
from adapters.grammars.compiler import GrammarRefused
from adapters.grammars.sandbox import SandboxBusy, SandboxUnavailable
from adapters.processors.grammar import grammar_cache
from adapters.vocabulary import CopiedTokenizer, ReasoningTokens, Vocabulary
from adapters.vocabulary.text_match import tag_matcher
from worker.arguments import Arguments
from worker.engines import EngineInfo, EngineRequest, TokenDelta
from worker.engines.chain_builder import ChainBuilder
from worker.errors import GrammarsUnavailable, InvalidRequest, Overloaded, StartupError
from worker.models.tokenizer_copy import load_vocabulary
from worker.processors.breaker import Breaker
from worker.processors.grammar_metrics import GrammarMetrics
from worker.processors.metrics import ProcessorMetrics
from worker.processors.sandbox_start import GrammarsAhead, StartingSandbox, kept_tokenizers
from worker.requests.client_turns import ClientTurns
from worker.requests.fields import SECTIONS
from worker.requests.request import GenerationRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHANNEL = "logits_processors"
"""Head of the path in errors about the request channel."""

NUM_BUILDERS = 4
"""Threads that build chains."""

MAX_HUNG_BUILDERS = 60
"""More threads, in the place of those in which a third party's processor never ended."""

WARM_UP_AFTER_S = 0.5
"""Seconds behind the start until a builder makes, unasked, what only some requests need."""


def make_chain_builder(
    arguments: Arguments,
    info: EngineInfo,
    registry: CollectorRegistry,
    *,
    renders_templates: bool = False,
    ahead: GrammarsAhead | None = None,
) -> ServedChainBuilder:
    """The chain builder of a worker that has just loaded its model.

    Args:
        arguments: Options of the worker.
        info: Description of its engine.
        registry: Registry of the metrics.
        renders_templates: Whether its tokenizer is to render chat templates; for the NATS runtime
            it does.
        ahead: Result of `grammars_ahead`, which is taken.

    Raises:
        StartupError: the tokenizer cannot be read, the sandbox for grammars cannot be started, or
            the operator's processors or policy cannot be honoured.
    """
    metrics = GrammarMetrics(registry)
    with contextlib.ExitStack() as on_failure:
        try:
            if ahead is not None and ahead.size != info.vocab_size:
                ahead.starting.close()
                ahead = None
            starting = StartingSandbox(arguments.grammar_timeout_s) if ahead is None else ahead.starting
            on_failure.callback(starting.close)
            starting.observe = metrics.count
            vocabulary = _vocabulary(arguments, info, renders_templates, ahead)
            if ahead is None:
                starting.give(vocabulary.token_bytes)
            model = _model_context(vocabulary, arguments)
            cache = grammar_cache(vocabulary)
            cache.sandbox, cache.max_bytes = starting.sandbox, arguments.grammar_cache_mib * 2**20
            metrics.watch(cache)
            starting.sandbox.wait_ready()
            chains = _with_policy(arguments, model, registry)
        except (OSError, ValueError) as error:
            raise StartupError(f"--model-path {arguments.model_path}: {error}") from None
        except SandboxUnavailable as error:
            raise StartupError(f"the sandbox for grammars {error}") from None
        on_failure.pop_all()
    chains.warm_up()
    return chains


def _vocabulary(
    arguments: Arguments, info: EngineInfo, renders_templates: bool, ahead: GrammarsAhead | None
) -> Vocabulary:
    """The vocabulary, with transformers' tokenizer where a template or third party may use it."""
    path, size, ends = arguments.model_path, info.vocab_size, info.eos_token_ids
    if ahead is not None:
        return Vocabulary(size, ahead.tokenizer, ends, path=path)
    return load_vocabulary(Path(path), size, ends, kept_tokenizers(arguments, renders_templates))


def _model_context(vocabulary: Vocabulary, arguments: Arguments) -> Context:
    try:
        return model_context(vocabulary, arguments.thinking_start, arguments.thinking_end)
    except ValueError as error:
        raise StartupError(f"--thinking-start and --thinking-end: {error}") from None


def _with_policy(arguments: Arguments, model: Context, registry: CollectorRegistry) -> ServedChainBuilder:
    try:
        catalog = Catalog.load(allow=arguments.allow_logits_processors, options=arguments.logits_processor)
        path = arguments.processor_policy
        policy = Policy() if path is None else Policy.load(path, catalog)
        budget, limit = arguments.processor_step_budget_s, arguments.step_timeout_s
        name = arguments.served_model_name
        return ServedChainBuilder(catalog, policy, name, model, registry, step_budget_s=budget, build_limit_s=limit)
    except (CatalogError, PolicyError) as error:
        raise StartupError(str(error)) from None


class ServedChainBuilder:
    """Builds the chains of served requests.

    Args:
        catalog: Every processor that may be named.
        policy: Operator's policies.
        model_name: Served model name, which selects the policy.
        model: Context that all requests to the model share; see `model_context`.
        registry: Registry of the processors' metrics.
        step_budget_s: Most CPU time that a third-party processor may take for one step, seconds.
        build_limit_s: Most time that the processors of a request may take to be built and to read
            its prompt and its answer so far, seconds, if a third party's is among them; None for no
            limit.

    Attributes:
        builder: Builds the chain of a selection.
        breaker: Refuses third-party processors that keep failing.
        metrics: Metrics of all processors.
    """

    def __init__(
        self,
        catalog: Catalog,
        policy: Policy,
        model_name: str,
        model: Context,
        registry: CollectorRegistry,
        *,
        step_budget_s: float | None = None,
        build_limit_s: float | None = None,
    ) -> None:
        self.catalog = catalog
        self.vocabulary = model.vocabulary
        self.registry = registry
        known = replace(model, watermark_keys=policy.watermark_keys)
        self.builder = ChainBuilder(catalog, known, policy.for_model(model_name), step_budget_s)
        self.breaker = Breaker(entry.name for entry in catalog.entries if entry.source != BUILT_IN)
        self.metrics = ProcessorMetrics(registry, lambda: len(self.breaker.open_names()))
        self._threads = ThreadPoolExecutor(NUM_BUILDERS + MAX_HUNG_BUILDERS, thread_name_prefix="chain-builder")
        self._build_limit_s = build_limit_s
        self._turns = ClientTurns(NUM_BUILDERS, spare=1)
        self._warm_up = threading.Timer(WARM_UP_AFTER_S, self._derive)
        self._warm_up.daemon = True
        ends = frozenset(model.vocabulary.eos_token_ids)
        policy.check(model_name, catalog, self.builder.context(ends, 0, None))

    def warm_up(self) -> None:
        """Derive from the tokenizer, in a thread and in a moment, what only some requests need and
        takes long; those that come before do so themselves.
        """
        self._warm_up.start()

    def _derive(self) -> None:
        tokenizer = self.vocabulary.tokenizer
        if isinstance(tokenizer, CopiedTokenizer):
            tokenizer.backend_tokenizer  # noqa: B018
        precompute(self.vocabulary)

    def select(self, request: GenerationRequest, metadata: Mapping[str, str]) -> Selection:
        """The processors that the request asks for, and those that the operator adds.

        Raises:
            InvalidRequest: the selection is malformed, or the policy forbids it.
        """
        try:
            named = from_channels(request.annotations, metadata) or Selection()
            after_thinking = request.require_reasoning
            return self.builder.select(named, request.params, served=True, after_thinking=after_thinking)
        except SelectionError as error:
            raise _invalid(error) from None

    def reasoning_tokens(self, prompt: Sequence[int]) -> ReasoningTokens | None:
        """Counts the thinking of the answer to ``prompt``, None if the model has no tags for it."""
        vocabulary, start, end = self.vocabulary, self.builder.model.think_start, self.builder.model.think_end
        if not start:
            return None
        tracker = ThinkingTracker.of(vocabulary, start, end)
        tracker.reset(prompt)
        matchers = tag_matcher(vocabulary, start), tag_matcher(vocabulary, end)
        return ReasoningTokens(*matchers, is_inside=tracker.thinking)

    def needs_draft_model(self, selection: Selection) -> bool:
        """Whether a processor computes with the draft model; unknown ones are refused later."""
        known = (self.catalog[one.name].processor for one in selection.processors if one.name in self.catalog)
        return any(issubclass(one, CompanionProcessor) and one.companion_model == "draft" for one in known)

    def has_work(self, selection: Selection) -> bool:
        """Whether `prepare` may compile, build or tokenize something, which takes time."""
        return bool(selection.processors or selection.prediction) or _needs_chain(selection)

    async def prepare(self, request: EngineRequest, selection: Selection, max_tokens: int | None) -> EngineRequest:
        """The request with its chain, without one if there is nothing for it to do, and with the
        tokens of its prediction.

        A request that wants a receipt, or no speculation, has a chain, be it empty. Cancelling this
        while a grammar compiles ends that at once. Clients take turns, by the label of the request,
        or else by its cache salt.

        Args:
            request: A request without a chain.
            selection: Processors of the request.
            max_tokens: Most tokens of its answer, None if only the context bounds it.

        Raises:
            InvalidRequest: a processor is unknown, its arguments cannot be honoured, or nothing can
                satisfy them all.
            ProcessorUnavailable: a third-party processor has failed too often.
            Overloaded: too many grammars wait to be compiled.
            GrammarsUnavailable: there is no process to compile them in.
        """
        if not self.has_work(selection):
            return request
        names = [requested.name for requested in selection.processors]
        self.breaker.check(names)
        context = self.builder.context(request.params.end_token_ids, request.seed, max_tokens, request.choice)
        client = request.hints.client or request.cache_salt
        try:
            grammars = await self._compiled(selection, context, client)
            prepared = await self._prepared(client, request, selection, context)
            del grammars  # until here they were in use, so the chain's processors found them in the cache
        except SelectionError as error:
            if isinstance(error, BuildFailed):
                self._count_failure(error.processor, "raised")
            raise _invalid(error) from None
        except ProcessorFailed as error:
            self._count_failure(error.processor, error.reason)
            raise InvalidRequest(CHANNEL, str(error)) from None
        assert prepared.chain is not None
        return prepared if prepared.chain.members or _needs_chain(selection) else replace(prepared, chain=None)

    def count(self, delta: TokenDelta) -> None:
        """Count the last delta of a request with processors: metrics, and circuit breakers."""
        if delta.receipt is None or delta.finish_reason is None:
            return
        self.metrics.count(delta.receipt, delta.failure)
        if delta.failure is not None and delta.failure.reason != "unsatisfiable":
            self.breaker.record(delta.failure.processor)
        elif delta.finish_reason in ("stop", "length"):
            self.breaker.record_success(record.name for record in delta.receipt.records)

    def _count_failure(self, processor: str, reason: str) -> None:
        """Count a processor that failed a request before it began."""
        self.metrics.count_failure(processor, reason)
        self.breaker.record(processor)

    async def _compiled(self, selection: Selection, context: Context, client: str | None) -> list[Compiled]:
        """The grammars of a selection, compiled."""
        if self.vocabulary.tokenizer is None or not self.catalog.has_grammars(selection):
            return []
        cache = grammar_cache(self.vocabulary)
        wanted = await self._in_thread(client, self.catalog.grammars, selection, context)
        return [await _compiled_one(cache, path, grammar, client) for path, grammar in wanted]

    async def _prepared(
        self, client: str | None, request: EngineRequest, selection: Selection, context: Context
    ) -> EngineRequest:
        """Result of `_prepare`, in a builder's thread.

        Raises:
            InvalidRequest: with a third party's processor, it takes longer than the limit. The
                thread is lost, and the builders get another one.
        """
        names = [one.name for one in selection.processors if self.breaker.counts(one.name)]

        def count() -> None:
            logger.error("logits processor %s: not built within %g s", ", ".join(names), self._build_limit_s)
            for name in names:
                self._count_failure(name, "budget")

        call = partial(self._prepare, request, selection, context)
        try:
            return await self._turns.in_thread(
                client, self._threads, call, self._build_limit_s if names else None, count
            )
        except TimeoutError:
            problem = f"{' and '.join(names)} took more than {self._build_limit_s:g} s to be built"
            raise InvalidRequest(CHANNEL, problem) from None

    async def _in_thread(self, client: str | None, call: Callable[..., T], *arguments: Any) -> T:
        """Result of ``call`` in a builder's thread, once it is the client's turn."""
        return await self._turns.in_thread(client, self._threads, partial(call, *arguments))

    async def close(self) -> None:
        """End the process that compiles grammars; requests with one are refused. Idempotent."""
        self._warm_up.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.vocabulary.tokenizer is not None:
            sandbox = grammar_cache(self.vocabulary).sandbox
            if sandbox is not None:
                await asyncio.to_thread(sandbox.close)

    def _prepare(self, request: EngineRequest, selection: Selection, context: Context) -> EngineRequest:
        """The request with its chain, started here: replaying a long answer takes time.

        A chain whose state depends on logits stands after the prompt; the engine computes those.
        """
        try:
            prepared = self.builder.prepare(request, selection, context)
        except RuledOut as error:
            raise self._blamed(error, context) from None
        chain, prompt, generated = prepared.chain, list(request.prompt_token_ids), request.generated_token_ids
        assert chain is not None
        if generated and not chain.observes_logits:
            chain.start(prompt, generated, mode="migrated")
        else:
            chain.start(prompt)
        return prepared

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


def _needs_chain(selection: Selection) -> bool:
    """Whether a request has a chain even if that has no processor."""
    return bool(selection.order or selection.receipt or not selection.speculation)


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
