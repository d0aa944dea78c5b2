"""Sampling controls that are a field and a processor by another name: one table, and one order law
for both.

`CONTROLS` is the only place that says which field is which processor. The operator's policy is
applied to a request's fields by it (`worker.processors.builder`), and an engine calls
`with_field_processors` at admission. Penalties, bans, biases and the minimum length join the chain;
with a processor that acts at the temperature stage or later, so do temperature and truncation,
because a request's own truncation must not come after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

from pydantic import ValidationError

from adapters.chain import ProcessorChain
from adapters.contract import ArgumentError, Context, Processor, Stage
from adapters.processors.grammar import Choice, Grammar, JsonSchema, Regex
from adapters.processors.length import MinTokens
from adapters.processors.masks import AllowedTokens, BadWords, BannedTokens
from adapters.processors.penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from adapters.processors.repetition import NoRepeatNgram
from adapters.processors.structural import StructuralTag
from adapters.processors.thinking import ThinkingBudget
from adapters.processors.truncation import MinP, Temperature, TopK, TopP
from worker.errors import InvalidRequest
from worker.sampling.params import SamplingParams

_NEVER = object()


@dataclass(frozen=True, slots=True)
class Control:
    """One field and the processor that it is.

    Attributes:
        field: Attribute of `GenerationRequest`, of `SamplingParams`, or of both.
        processor: What it runs as.
        argument: The processor's argument that takes the value.
        neutral: The value that asks for nothing, if there is one.
        guide: For ``guided_decoding``: which of its kinds this is.
        fixed: Arguments that the field has beside its value.
        in_params: An engine finds it in `SamplingParams`; otherwise it is a processor before an
            engine sees it.
    """

    field: str
    processor: type[Processor]
    argument: str
    neutral: Any = _NEVER
    guide: str | None = None
    fixed: Mapping[str, Any] = dataclass_field(default_factory=dict)
    in_params: bool = True

    def value(self, holder: object) -> Any:
        """What ``holder``, a `GenerationRequest` or `SamplingParams`, has for it; None if it is
        not set.
        """
        value = getattr(holder, self.field)
        return value if self.guide is None or value is None else value.get(self.guide)

    def is_neutral(self, value: Any) -> bool:
        """Whether ``value`` asks for nothing."""
        return bool(value == self.neutral)


# those of the truncation stage in the order of the law: min-p, top-k, top-p
CONTROLS: tuple[Control, ...] = (
    Control("repetition_penalty", RepetitionPenalty, "penalty", 1),
    Control("frequency_penalty", FrequencyPenalty, "penalty", 0),
    Control("presence_penalty", PresencePenalty, "penalty", 0),
    Control("no_repeat_ngram_size", NoRepeatNgram, "n", 0),
    Control("bad_token_ids", BannedTokens, "token_ids", []),
    Control("min_tokens", MinTokens, "n", 0),
    Control("temperature", Temperature, "value", 1),
    Control("min_p", MinP, "p", 0),
    Control("top_k", TopK, "k", 0),
    Control("top_p", TopP, "p", 1),
    Control("allowed_token_ids", AllowedTokens, "token_ids", fixed={"allow_end": False}, in_params=False),
    Control("bad_words_token_ids", BadWords, "token_ids", (), in_params=False),
    Control("max_thinking_tokens", ThinkingBudget, "tokens", in_params=False),
    Control("guided_decoding", JsonSchema, "schema", guide="json", in_params=False),
    Control("guided_decoding", Regex, "pattern", guide="regex", in_params=False),
    Control("guided_decoding", Choice, "choices", guide="choice", in_params=False),
    Control("guided_decoding", Grammar, "lark", guide="grammar", in_params=False),
    Control("guided_decoding", StructuralTag, "format", guide="structural_tag", in_params=False),
)

GUIDES = {control.guide: control for control in CONTROLS if control.guide is not None}
"""The controls of ``guided_decoding`` by its kinds."""

_LATE = tuple(control for control in CONTROLS if control.in_params and control.processor.stage >= Stage.TEMPERATURE)
_EARLY = tuple(control for control in CONTROLS if control.in_params and control not in _LATE)


def is_drawn(params: SamplingParams, chain: ProcessorChain | None) -> bool:
    """Whether tokens are drawn: the fields say so, or they say nothing and the chain was asked
    for to draw.
    """
    says_nothing = all(control.value(params) is None for control in _LATE)
    return not params.is_greedy or (says_nothing and chain is not None and chain.wants_draw)


def with_field_processors(
    params: SamplingParams,
    chain: ProcessorChain | None,
    prompt: Sequence[int],
    context: Context,
    extra: Sequence[Processor] = (),
    *,
    late: bool = False,
) -> tuple[SamplingParams, ProcessorChain | None]:
    """The parameters that are left to the sampler, and the chain with everything else.

    Args:
        params: Of the request.
        chain: The request's own processors, begun after its prompt and added to in place; None if
            it has none.
        prompt: Token ids of the prompt.
        context: Of the request, for the processors that are made here.
        extra: Processors that the engine adds, before those of the same stage.
        late: Temperature and truncation join the chain whatever is in it.

    Raises:
        InvalidRequest: a value is out of the bounds of its processor, or a control is given twice.
        ProcessorFailed: a processor raised on the prompt.
    """
    _refuse_twice(params, chain)
    added = [*extra, *_processors(params, _EARLY, context)]
    if late or (chain is not None and chain.shapes_late):
        params, last = _late_processors(params, context, is_drawn(params, chain))
        added += last
    if not added:
        return params, chain
    if chain is None:
        chain = ProcessorChain([], context)
        chain.start(prompt)
    chain.add(added)
    return params, chain


def _late_processors(params: SamplingParams, context: Context, drawn: bool) -> tuple[SamplingParams, list[Processor]]:
    """Of a request that is not drawn temperature 0, before every processor of these stages; of
    others their own.
    """
    if not drawn:
        return params, Temperature.build(Temperature.Args(value=0.0), context)
    processors = _processors(params, _LATE, context)
    return replace(params, temperature=1.0, top_k=None, top_p=None, min_p=None), processors


def _processors(params: SamplingParams, controls: Sequence[Control], context: Context) -> list[Processor]:
    made: list[Processor] = []
    for control in controls:
        value, processor = control.value(params), control.processor
        if value is None or control.is_neutral(value):
            continue
        try:
            made += processor.build(processor.Args.model_validate({control.argument: value}), context)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"]
            raise InvalidRequest(f"sampling_params.{control.field}", f"{problem}, got {value!r}") from None
        except ArgumentError as error:
            raise InvalidRequest(f"sampling_params.{control.field}", error.problem) from None
    return made


def _refuse_twice(params: SamplingParams, chain: ProcessorChain | None) -> None:
    if chain is None:
        return
    named = {member.name for member in chain.members}
    for control in (*_EARLY, *_LATE):
        value, name = control.value(params), control.processor.name
        if name in named and value is not None and not control.is_neutral(value):
            raise InvalidRequest(f"sampling_params.{control.field}", f"is set, and the processor {name} is named too")
