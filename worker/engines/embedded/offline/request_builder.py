"""What may be asked of the engine offline: a prompt and its `SamplingParams` become requests,
one for each answer.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

from adapters.catalog import Catalog, Requested, SelectionError, parse_selection
from adapters.contract import Context, Scope
from adapters.processors.structural import format_of
from adapters.trtllm import ChainAdapter, DynamoAdapter, create_trtllm_adapters
from adapters.vocabulary import Vocabulary, thinking_tags
from worker.engines.embedded.admission import admit, end_ids_of
from worker.engines.embedded.offline.results import Answer, Job
from worker.engines.embedded.offline.stop_strings import AnswerText
from worker.engines.embedded.plan import Model, Request
from worker.engines.embedded.sampling import LogitsCollector
from worker.errors import InvalidRequest
from worker.sampling import GuidedDecodingParams, SamplingParams
from worker.sampling.controls import GUIDES

Named = Mapping[str, Any]
"""A processor by its name in the catalogue: ``{"name": ..., "args": {...}}``."""

ALLOWED = frozenset(
    {
        "n",
        "best_of",
        "stop",
        "bad",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "logprobs_simple_format",
        "prompt_logprobs_simple_format",
        "return_context_logits",
        "return_generation_logits",
        "guided_decoding",
        "thinking_token_budget",
    }
)
"""Fields that the serving path refuses and that are honoured here."""

_SHARED_CHAIN = "a chain serves one answer: name its processors in processors=, for each answer has a chain of its own"


class Desk:
    """Checks prompts and makes jobs of them.

    Args:
        model: Which will answer.
        context_length: Longest prompt + answer, in tokens.
        vocabulary: Of the model; without a tokenizer there are token ids alone.
        catalog: Processors that may be named.
    """

    def __init__(self, model: Model, context_length: int, vocabulary: Vocabulary, catalog: Catalog) -> None:
        self.vocabulary = vocabulary
        self._model = model
        self._context_length = context_length
        self._catalog = catalog
        self._tags = thinking_tags(vocabulary)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, None if there is none."""
        return self.vocabulary.tokenizer

    def job(
        self,
        number: int,
        prompt: str | Sequence[int],
        wanted: SamplingParams,
        named: Sequence[Named],
        shared: AbstractSet[int],
        where: str,
    ) -> Job:
        """Check a prompt and make a job of it.

        Args:
            number: The engine's own id.
            prompt: Text or token ids.
            wanted: What is asked for.
            named: Processors by name.
            shared: Ids of callables that are given for more than one answer.
            where: Head of the field in errors.

        Raises:
            InvalidRequest: it cannot be served.
        """
        try:
            tokens = self._tokens(prompt, wanted)
            _check(wanted, self.tokenizer is not None)
            requested = self._requested(wanted, named)
            seeded = replace(wanted, seed=secrets.randbits(64)) if wanted.seed is None else wanted
            answers = [
                self._answer(number, tokens, seeded, requested, shared, choice) for choice in range(wanted.best_of or 1)
            ]
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}.{error.field}", error.problem) from error
        return Job(str(number), prompt if isinstance(prompt, str) else None, tokens, wanted, answers)

    def _tokens(self, prompt: str | Sequence[int], wanted: SamplingParams) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest("prompt", "is text, and the model has no tokenizer; give token ids")
            tokens = list(self.tokenizer.encode(prompt, add_special_tokens=wanted.add_special_tokens))
        else:
            tokens = list(prompt)
        return tokens if wanted.truncate_prompt_tokens is None else tokens[-wanted.truncate_prompt_tokens :]

    def _requested(self, wanted: SamplingParams, named: Sequence[Named]) -> list[Requested]:
        """The processors that the request names, and its fields that are processors by another
        name.
        """
        try:
            selected = parse_selection(json.dumps({"version": 1, "processors": [dict(one) for one in named]}))
        except SelectionError as error:
            raise InvalidRequest(error.path, error.problem) from None
        except (TypeError, ValueError) as error:
            raise InvalidRequest("processors", f"must be JSON data: {error}") from None
        fields = field_processors(wanted)
        names = {one.name for one in selected.processors}
        for one in fields:
            if one.name in names:
                raise InvalidRequest(one.path, f"is set, and the processor {one.name} is named too")
        return [*selected.processors, *fields]

    def _answer(
        self,
        number: int,
        tokens: list[int],
        params: SamplingParams,
        requested: Sequence[Requested],
        shared: AbstractSet[int],
        choice: int,
    ) -> Answer:
        asks = params.logprobs if params.logprobs is not None or (params.best_of or 1) == params.n else 0
        processors = [_own(one, shared) for one in params.logits_processors]
        chains = [one for one in processors if isinstance(one, ChainAdapter)]
        if requested:
            if chains:
                raise InvalidRequest("sampling_params.logits_processor", "holds a chain, and processors are named too")
            processors += self._chain(tokens, params, requested, choice)
        own = replace(params, n=1, best_of=1, logprobs=asks, logits_processor=processors or None)
        request = admit(
            f"{number}.{choice}",
            number,
            tokens,
            own,
            self._model,
            self._context_length,
            choice=choice,
            allowed=ALLOWED,
        )
        collector = self._collector(request, params, choice)
        request.tap = collector
        return Answer(request, self._text(request, params), collector)

    def _chain(
        self, tokens: list[int], params: SamplingParams, requested: Sequence[Requested], choice: int
    ) -> list[Callable[..., None]]:
        room = self._context_length - len(tokens)
        context = Context(
            self.vocabulary,
            end_ids_of(params, self._model),
            params.seed or 0,
            choice,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            think_start=self._tags[0],
            think_end=self._tags[1],
        )
        selection = parse_selection('{"version": 1}').with_processors(*requested)
        try:
            chain = self._catalog.build_chain(selection, context)
        except SelectionError as error:
            raise InvalidRequest(error.path or "processors", error.problem) from None
        return list(create_trtllm_adapters([chain]))

    def _collector(self, request: Request, params: SamplingParams, choice: int) -> LogitsCollector | None:
        collector = LogitsCollector(
            request.tokens,
            top_n=params.prompt_logprobs if choice == 0 else None,
            never=self._model.undecodable_ids,
            keep_prompt=params.return_context_logits and choice == 0,
            keep_generated=params.return_generation_logits,
        )
        return collector if collector.wants_prompt or collector.wants_generated else None

    def _text(self, request: Request, params: SamplingParams) -> AnswerText | None:
        stops = stop_strings(params)
        if self.tokenizer is None or not (params.detokenize or stops):
            return None
        # what decode of transformers ends in, without the tenth of a millisecond around it
        decode = partial(self.tokenizer.backend_tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        chain = request.chain
        return AnswerText(
            decode,
            stops,
            include=params.include_stop_str_in_output,
            context=request.tokens,
            is_too_short=lambda: chain is not None and chain.is_too_short,
        )


def stop_strings(params: SamplingParams) -> list[str]:
    """The stop strings as a list."""
    return [params.stop] if isinstance(params.stop, str) else list(params.stop or ())


def field_processors(params: SamplingParams) -> list[Requested]:
    """Fields that have no counterpart in the sampler: they are processors by another name.

    Raises:
        InvalidRequest: a guide that no processor stands for.
    """
    found = []

    def add(field: str, name: str, scope: Scope = "all", **args: Any) -> None:
        found.append(Requested(name, args, scope, f"sampling_params.{field}"))

    if params.bad is not None:
        add("bad", "bad_words", words=[params.bad] if isinstance(params.bad, str) else params.bad)
    if params.thinking_token_budget is not None and params.thinking_token_budget >= 0:
        add("thinking_token_budget", "thinking_budget", tokens=params.thinking_token_budget)
    if params.guided_decoding is not None:
        name, args = guide(params.guided_decoding)
        add("guided_decoding", name, **args)
    return found


def guide(guided: GuidedDecodingParams) -> tuple[str, dict[str, Any]]:
    """Processor and arguments for a guide.

    Raises:
        InvalidRequest: it is a structural tag that is not JSON, or none at all.
    """
    if guided.structural_tag:
        try:
            return "structural_tag", {"format": format_of(json.loads(guided.structural_tag))}
        except (ValueError, RecursionError):
            raise InvalidRequest("sampling_params.guided_decoding", "structural_tag must be JSON") from None
    if guided.json_object:
        return "json_schema", {"schema": {"type": "object"}}
    for kind in ("json", "regex", "grammar"):
        value = getattr(guided, kind)
        if value:
            return GUIDES[kind].processor.name, {GUIDES[kind].argument: value}
    raise InvalidRequest("sampling_params.guided_decoding", "must hold a guide")


def _check(wanted: SamplingParams, has_tokenizer: bool) -> None:
    stops = stop_strings(wanted)
    if any(not isinstance(stop, str) or not stop for stop in stops):
        raise InvalidRequest("sampling_params.stop", f"must be strings that are not empty, got {wanted.stop!r}")
    for field, used in (("stop", stops), ("bad", wanted.bad), ("guided_decoding", wanted.guided_decoding)):
        if used and not has_tokenizer:
            raise InvalidRequest(f"sampling_params.{field}", "needs a tokenizer, and the model has none")
    if wanted.prompt_logprobs_simple_format and wanted.prompt_logprobs != 0:
        raise InvalidRequest("sampling_params.prompt_logprobs_simple_format", "needs prompt_logprobs=0")


def _own(processor: Callable[..., None], shared: AbstractSet[int]) -> Callable[..., None]:
    """A callable for one answer: what keeps state is copied where it is given for several."""
    if id(processor) not in shared:
        return processor
    if isinstance(processor, ChainAdapter):
        raise InvalidRequest("sampling_params.logits_processor", _SHARED_CHAIN)
    if not isinstance(processor, DynamoAdapter):
        return processor  # under TensorRT-LLM's contract, which tells it the request
    try:
        return copy.deepcopy(processor)
    except Exception as error:  # the callback boundary: foreign code
        problem = f"{processor.name} is given for several answers and cannot be copied ({type(error).__name__})"
        raise InvalidRequest("sampling_params.logits_processor", problem) from error
