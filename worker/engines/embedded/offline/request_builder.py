"""Request builder: a prompt and its `SamplingParams` become one engine request per answer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

from adapters.catalog import Catalog, Selection, SelectionError, model_context, parse_selection
from adapters.chain import ProcessorChain
from adapters.strict_json import has_half_a_pair
from adapters.third_party.copies import copied
from adapters.trtllm import ChainAdapter, DynamoAdapter
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.chain_builder import ChainBuilder
from worker.engines.embedded.admission import admit, end_ids_of
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.offline.results import Answer, RequestGroup
from worker.engines.embedded.plan import Model, Request
from worker.engines.embedded.sampling import LogitsCollector
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams
from worker.sampling.field_processors import for_engine, processor_controls
from worker.sampling.guides import structural_format
from worker.text.answer_text import AnswerText

Named = Mapping[str, Any]
"""A processor by its name in the catalogue: ``{"name": ..., "args": {...}}``."""

ALLOWED = frozenset(
    {
        "n",
        "best_of",
        "stop",
        "truncate_prompt_tokens",
        "logprobs_simple_format",
        "prompt_logprobs_simple_format",
        "return_context_logits",
        "return_generation_logits",
    }
)
"""Fields that the engine refuses and that are served here."""

HONOURED = ALLOWED | {one.name for one in processor_controls(SamplingParams) if one.refused is not None}
"""The same with the fields that are processors of the chain before the engine gets it."""

_SHARED_CHAIN = "a chain serves one answer: name its processors in processors=, for each answer has a chain of its own"


class RequestBuilder:
    """Checks prompts and makes the engine's requests of them.

    Args:
        model: Model that answers.
        context_length: Longest prompt + answer, in tokens.
        vocabulary: Vocabulary of the model; without a tokenizer there are token ids alone.
        catalog: Processors that may be named.
        draft_model: Draft model of the engine, None if it has none.
    """

    def __init__(
        self,
        model: Model,
        context_length: int,
        vocabulary: Vocabulary,
        catalog: Catalog,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self._model = model
        self._draft_model = draft_model
        self._context_length = context_length
        self._chains = ChainBuilder(catalog, model_context(vocabulary))
        self._begun: WeakSet[ProcessorChain | DynamoAdapter] = WeakSet()  # callers' own that serve an answer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, None if there is none."""
        return self.vocabulary.tokenizer

    def predicted(self, text: str) -> Sequence[int]:
        """Token ids of a prediction; none if the model has no tokenizer, or cannot write it."""
        return self._chains.predicted(text)

    def build(
        self,
        number: int,
        prompt: str | Sequence[int],
        wanted: SamplingParams,
        named: Sequence[Named],
        shared: AbstractSet[int],
        where: str,
    ) -> RequestGroup:
        """Check a prompt and make the requests of its answers.

        Args:
            number: Id of the prompt within the engine.
            prompt: Text or token ids.
            wanted: Sampling parameters of the prompt.
            named: Processors by name.
            shared: Ids of callables that are given for more than one answer.
            where: Head of the field in errors.

        Raises:
            InvalidRequest: it cannot be served.
        """
        try:
            tokens = self._tokens(prompt, wanted)
            _check(wanted, self.tokenizer is not None)
            selection = self._selection(wanted, named)
            seeded = replace(wanted, seed=secrets.randbits(64)) if wanted.seed is None else wanted
            answers = [
                self._answer(number, tokens, seeded, selection, shared, choice) for choice in range(wanted.best_of or 1)
            ]
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}.{error.field}", error.problem) from error
        return RequestGroup(str(number), prompt if isinstance(prompt, str) else None, tokens, wanted, answers)

    def _tokens(self, prompt: str | Sequence[int], wanted: SamplingParams) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest("prompt", "is text, and the model has no tokenizer; give token ids")
            if has_half_a_pair(prompt):
                raise InvalidRequest("prompt", "has half of a surrogate pair")
            tokens = list(self.tokenizer.encode(prompt, add_special_tokens=wanted.add_special_tokens))
        else:
            tokens = list(prompt)
        return tokens if wanted.truncate_prompt_tokens is None else tokens[-wanted.truncate_prompt_tokens :]

    def _selection(self, wanted: SamplingParams, named: Sequence[Named]) -> Selection:
        """The processors that the request names, and its fields that run as processors."""
        for index, one in enumerate(named):
            if not isinstance(one, Mapping):
                problem = f'must be an object such as {{"name": "min_tokens", "args": {{"n": 8}}}}, got {one!r}'
                raise InvalidRequest(f"processors[{index}]", problem)
        try:
            text = json.dumps({"version": 1, "processors": [dict(one) for one in named]})
        except (TypeError, ValueError) as error:
            raise InvalidRequest("processors", f"must be JSON data: {error}") from None
        try:
            return self._chains.select(parse_selection(text), wanted)
        except SelectionError as error:
            raise InvalidRequest(error.path or "processors", error.problem) from None

    def _answer(
        self,
        number: int,
        tokens: list[int],
        params: SamplingParams,
        selection: Selection,
        shared: AbstractSet[int],
        choice: int,
    ) -> Answer:
        asks = params.logprobs if params.logprobs is not None or (params.best_of or 1) == params.n else 0
        given = [self._own(one, shared) for one in params.logits_processors]
        chain = _given_chain(given)
        if chain in self._begun:  # with the members that its answer's fields have added
            raise InvalidRequest("sampling_params.logits_processor", _SHARED_CHAIN)
        callables = [one for one in given if not isinstance(one, ChainAdapter)]
        own = for_engine(params, n=1, best_of=1, logprobs=asks, logits_processor=callables or None)
        engine_request = EngineRequest(f"{number}.{choice}", tokens, own, chain, choice=choice)
        if selection.processors:
            if chain is not None:
                raise InvalidRequest("sampling_params.logits_processor", "holds a chain, and processors are named too")
            engine_request = self._with_chain(engine_request, selection)
        model, draft_model = self._model, self._draft_model
        request = admit(engine_request, number, model, self._context_length, allowed=ALLOWED, draft_model=draft_model)
        if chain is not None:
            self._begun.add(chain)
        collector = self._collector(request, params, choice)
        request.tap = collector
        return Answer(request, self._text(request, params), collector)

    def _own(self, processor: Callable[..., None], shared: AbstractSet[int]) -> Callable[..., None]:
        """A callable for one answer: a copy of what keeps a state, which stays as it was given."""
        if isinstance(processor, ChainAdapter) and id(processor) in shared:
            raise InvalidRequest("sampling_params.logits_processor", _SHARED_CHAIN)
        if not isinstance(processor, DynamoAdapter):
            return processor  # a chain, or under TensorRT-LLM's contract, which tells it the request
        try:
            return processor.with_processor(copied(processor.processor))
        except Exception as error:  # the callback boundary: third-party code
            if id(processor) in shared or processor in self._begun:
                problem = f"{processor.name} is given for several answers and cannot be copied ({type(error).__name__})"
                raise InvalidRequest("sampling_params.logits_processor", problem) from error
            self._begun.add(processor)
            return processor

    def _with_chain(self, engine_request: EngineRequest, selection: Selection) -> EngineRequest:
        params, room = engine_request.params, self._context_length - len(engine_request.prompt_token_ids)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = end_ids_of(params, self._model)
        context = self._chains.context(ends, params.seed or 0, most, engine_request.choice)
        try:
            return self._chains.prepare(engine_request, selection, context)
        except SelectionError as error:
            raise InvalidRequest(error.path or "processors", error.problem) from None

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
        return AnswerText(decode, stops, include=params.include_stop_str_in_output, context=request.tokens)


def stop_strings(params: SamplingParams) -> list[str]:
    """The stop strings as a list."""
    return [params.stop] if isinstance(params.stop, str) else list(params.stop or ())


def _check(wanted: SamplingParams, has_tokenizer: bool) -> None:
    if wanted.stop is not None and not isinstance(wanted.stop, str | list | tuple):
        raise InvalidRequest("sampling_params.stop", f"must be a text or a list of texts, got {wanted.stop!r}")
    stops = stop_strings(wanted)
    if any(not isinstance(stop, str) or not stop for stop in stops):
        raise InvalidRequest("sampling_params.stop", f"must be strings that are not empty, got {wanted.stop!r}")
    for field, used in (("stop", stops), ("bad", wanted.bad), ("guided_decoding", wanted.guided_decoding)):
        if used and not has_tokenizer:
            raise InvalidRequest(f"sampling_params.{field}", "needs a tokenizer, and the model has none")
    if wanted.guided_decoding is not None:
        _check_structural_tag(wanted.guided_decoding.structural_tag)
    if wanted.guided_decoding is not None and not wanted.guided_decoding.given:
        raise InvalidRequest("sampling_params.guided_decoding", "must hold a guide")
    if wanted.prompt_logprobs_simple_format and wanted.prompt_logprobs != 0:
        raise InvalidRequest("sampling_params.prompt_logprobs_simple_format", "needs prompt_logprobs=0")


def _check_structural_tag(tag: object) -> None:
    try:
        structural_format(tag)
    except (ValueError, RecursionError):
        raise InvalidRequest("sampling_params.guided_decoding", "structural_tag must be JSON") from None


def _given_chain(callables: Sequence[Callable[..., None]]) -> ProcessorChain | None:
    """The chain that a caller gives as one of its callables."""
    chains = [one.chain for one in callables if isinstance(one, ChainAdapter)]
    if len(chains) > 1:
        raise InvalidRequest("sampling_params.logits_processor", "must hold at most one chain of processors")
    return chains[0] if chains else None
