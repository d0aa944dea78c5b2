"""The logits processors that a request to vLLM asks for, and who draws its tokens.

vLLM applies its own fields around our chain: ``min_tokens``, ``logit_bias``, ``allowed_token_ids``,
``bad_words`` and structured outputs before it, penalties after it (V1) or before it (V2), then
temperature, min-p, top-k and top-p. That is the order law unless the chain acts where vLLM's later
steps belong before it. There, and where a seed was given, the chain draws: vLLM's later fields join
it as processors, and our sampler leaves one token, which vLLM's steps then cannot change. What V2
has applied too early is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from secrets import randbits
from typing import Any, ClassVar, Protocol

from adapters.catalog import FieldValue, Requested, Selection, SelectionError, parse_selection
from adapters.catalog.policy import GRAMMARS
from adapters.chain import ProcessorChain
from adapters.contract import Context, Processor, Stage
from adapters.processors.penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from adapters.processors.seeded_sampler import SeededSampler
from adapters.processors.truncation import MinP, Temperature, TopK, TopP
from adapters.sampling.truncation import GREEDY_BELOW
from adapters.vllm.model import ServedModel

SELECTION = "logits_processors"
"""Key of the selection in ``extra_args``, which clients of the server write as ``vllm_xargs``."""

REPORT = "logits_processors_report"
"""Key in ``extra_args`` of the name under which failure and receipt are kept (`reports`)."""

_SEEDS = 2**64

_ALIKE = 0.9
"""Likeness from which another key of ``extra_args`` is one of these two, misspelt; others may be of
other processors that a server has loaded.
"""


class Params(Protocol):
    """The fields of ``vllm.SamplingParams`` that are read here, and the names of all of them."""

    __struct_fields__: ClassVar[tuple[str, ...]]
    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    min_tokens: int
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | None
    bad_words: list[str] | None
    seed: int | None
    stop_token_ids: list[int] | None
    ignore_eos: bool
    max_tokens: int | None
    logprobs: int | None
    structured_outputs: Any
    thinking_token_budget: int | None
    extra_args: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of vLLM's that can join a chain as a processor.

    Attributes:
        name: Name of the field.
        processor: The processor that does the same.
        argument: Argument of the processor that has the field's value.
        off: Values that change nothing.
    """

    name: str
    processor: type[Processor]
    argument: str
    off: tuple[float, ...]

    def requested(self, params: Params) -> Requested | None:
        """The processor with the field's value, None where that changes nothing."""
        value = getattr(params, self.name)
        if value is None or value in self.off:
            return None
        return Requested(self.processor.name, {self.argument: value}, path=self.name)


_PENALTIES = (
    _Field("repetition_penalty", RepetitionPenalty, "penalty", (1.0,)),
    _Field("frequency_penalty", FrequencyPenalty, "penalty", (0.0,)),
    _Field("presence_penalty", PresencePenalty, "penalty", (0.0,)),
)
_LATE = (
    _Field("temperature", Temperature, "value", (1.0,)),
    _Field("min_p", MinP, "p", (0.0,)),
    _Field("top_k", TopK, "k", (0, -1)),
    _Field("top_p", TopP, "p", (1.0,)),
)


_REPORTED = ("logprobs", "logprob_token_ids")
"""Fields that ask for log probabilities of the answer."""

_GRAMMAR_FIELDS = (
    ("json", "json_schema", "schema"),
    ("json_object", "json_schema", "schema"),
    ("regex", "regex", "pattern"),
    ("choice", "choice", "choices"),
    ("grammar", "grammar", "lark"),
    ("structural_tag", "structural_tag", "format"),
)
"""Name in ``structured_outputs``, processor that does the same, and its argument."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The processors of a request, and the context of their chain.

    Attributes:
        selection: The request's own processors and the operator's.
        context: Context of its chain.
        report: Name under which failure and receipt are kept, None if nobody reads them.
    """

    selection: Selection
    context: Context
    report: str | None


def read(params: Params, model: ServedModel, drawn_seed: int | None = None) -> Asked | None:
    """The processors of a request; None where neither it nor the operator names one.

    Args:
        params: The request's ``SamplingParams``.
        model: The served model.
        drawn_seed: Seed of a request that gives none; by default a random one.

    Raises:
        SelectionError: the selection is malformed, forbidden, or asks for what vLLM cannot keep.
    """
    extra = params.extra_args or {}
    _refuse_misspelt(extra)
    named = selection_of(extra.get(SELECTION))
    report = extra.get(REPORT)
    set_fields = [each.requested(params) for each in (*_PENALTIES, *_LATE)]
    names = {requested.name for requested in named.processors}
    set_fields += _left_to_vllm(params)
    fields = [FieldValue(each) for each in set_fields if each is not None and each.name not in names]
    selection = model.policy.apply(named, model.catalog, fields)
    _refuse_what_vllm_lacks(selection, report)
    if not selection.processors and not selection.order and not selection.receipt:
        return None
    _refuse_other_masters(selection, params)
    seed = params.seed if params.seed is not None else drawn_seed
    context = replace(
        model.context,
        end_token_ids=_ends(params, model),
        seed=(randbits(64) if seed is None else seed) % _SEEDS,
        choice=selection.choice,
        max_tokens=params.max_tokens,
    )
    return Asked(selection, context, report)


def chain_of(asked: Asked, params: Params, model: ServedModel) -> tuple[ProcessorChain, bool]:
    """The chain of a request, not started, and whether it draws the tokens.

    Raises:
        SelectionError: an argument, or a field that joins the chain, cannot be honoured.
    """
    chain = model.catalog.build_chain(asked.selection, asked.context)
    if chain.backtracks:
        names = " and ".join(member.name for member in chain.members if hasattr(member.processor, "rewinds_to"))
        problem = f"{names} takes tokens back, and vLLM has sent them by then; use this project's embedded engine"
        raise SelectionError("processors", problem)
    if chain.companion is not None:
        problem = f"{chain.companion.name} needs a second row of logits, and vLLM computes one"
        raise SelectionError("processors", f"{problem}; use this project's embedded engine")
    penalties = [requested for each in _PENALTIES if (requested := each.requested(params)) is not None]
    _refuse_twice(chain, penalties)
    if model.facts.penalises_first:
        _refuse_penalties_before(chain, penalties)
    draws = _draws(chain, params, penalties, model)
    reported = next((name for name in _REPORTED if getattr(params, name, None) is not None), None)
    if draws and reported is not None and model.facts.reports_processed:
        problem = "processed log probabilities are vLLM's own, and this request's tokens are drawn by its processors"
        raise SelectionError(reported, problem)
    if draws:
        late = [requested for each in _LATE if (requested := each.requested(params)) is not None]
        fields = late if model.facts.penalises_first else [*penalties, *late]
        _take_over(chain, params, fields, asked.context, model)
    chain.masks_alone = not (params.allowed_token_ids or params.bad_words or params.structured_outputs)
    return chain, draws


def _refuse_twice(chain: ProcessorChain, penalties: Sequence[Requested]) -> None:
    names = {member.name for member in chain.members}
    for penalty in penalties:
        if penalty.name in names:
            problem = f"is set, and the processor {penalty.name} is named too; give one of them"
            raise SelectionError(penalty.path, problem)


def _refuse_penalties_before(chain: ProcessorChain, penalties: Sequence[Requested]) -> None:
    """Refuse penalties that V2 applies before processors, where the law has them after."""
    for penalty in penalties:
        for member in chain.members:
            if member.stage < Stage.PENALTY:
                problem = f"vLLM applies it before the processor {member.name}; give it as a processor too"
                raise SelectionError(penalty.path, problem)


def _draws(chain: ProcessorChain, params: Params, penalties: Sequence[Requested], model: ServedModel) -> bool:
    """Whether the chain draws, because vLLM's later steps, or its draw, would not be the law's."""
    if chain.shapes_late or params.seed is not None:
        return True
    if model.facts.penalises_first:
        return chain.observes_logits  # which drafts are accepted must be known in the step
    return bool(penalties) and any(Stage.PENALTY <= member.stage <= Stage.SOFT for member in chain.members)


def _take_over(
    chain: ProcessorChain, params: Params, fields: Sequence[Requested], context: Context, model: ServedModel
) -> None:
    """Add the fields that vLLM applies after the chain, and the draw."""
    names = {member.name for member in chain.members}
    greedy = params.temperature < GREEDY_BELOW and Temperature.name not in names
    if greedy:  # temperature 0 leaves one token, and vLLM ignores what truncates
        names |= {each.processor.name for each in _LATE[1:]}
    wanted = [each for each in fields if each.name not in names]
    chain.add([processor for each in wanted for processor in model.catalog.find(each).build(each, context)])
    chain.add([SeededSampler(None if greedy else context.seed, context.choice)], last=True)


def selection_of(value: object) -> Selection:
    """The selection in ``extra_args``: JSON text, as ``vllm_xargs`` carries it, or an object.

    Raises:
        SelectionError: it is malformed.
    """
    if value is None:
        return Selection()
    if isinstance(value, Mapping):
        try:
            value = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SelectionError("", f"is not JSON: {error}") from None
    if not isinstance(value, str):
        raise SelectionError("", f"expected a JSON object or its text, got {type(value).__name__}")
    return parse_selection(value)


def _left_to_vllm(params: Params) -> list[Requested]:
    """The processors that do what vLLM's other fields do, for the operator's policy."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    if params.min_tokens:
        found.append(("min_tokens", "min_tokens", {"n": params.min_tokens}))
    if params.logit_bias:
        bias = {str(token_id): value for token_id, value in params.logit_bias.items()}
        found.append(("logit_bias", "logit_bias", {"bias": bias}))
    if params.allowed_token_ids:
        found.append(("allowed_token_ids", "allowed_tokens", {"token_ids": params.allowed_token_ids}))
    if params.bad_words:
        found.append(("bad_words", "bad_words", {"words": params.bad_words}))
    if params.structured_outputs is not None:
        found += [
            (f"structured_outputs.{name}", processor, {argument: value})
            for name, processor, argument in _GRAMMAR_FIELDS
            if (value := getattr(params.structured_outputs, name, None)) is not None
        ]
    return [Requested(processor, args, path=path) for path, processor, args in found]


def _refuse_misspelt(extra: Mapping[str, Any]) -> None:
    for key in extra.keys() - {SELECTION, REPORT}:
        for close in get_close_matches(key, (SELECTION, REPORT), n=1, cutoff=_ALIKE):
            raise SelectionError(f"extra_args.{key}", f"is unknown; did you mean {close}?")


def _refuse_what_vllm_lacks(selection: Selection, report: object) -> None:
    if report is not None and not isinstance(report, str):
        raise SelectionError(REPORT, f"expected a text, got {type(report).__name__}")
    if selection.receipt and report is None:
        raise SelectionError("receipt", "vLLM's answers have no place for it; use this project's worker")
    if selection.deadline is not None:
        raise SelectionError("deadline", "vLLM cannot end an answer for it; use this project's worker")


def _refuse_other_masters(selection: Selection, params: Params) -> None:
    """Refuse vLLM's own controls that would undo what the chain did, or contradict it."""
    if params.thinking_token_budget is not None:
        problem = "vLLM forces its tokens over those of processors; name the processor thinking_budget instead"
        raise SelectionError("thinking_token_budget", problem)
    grammar = next((each.name for each in selection.processors if each.name in GRAMMARS), None)
    if params.structured_outputs is not None and grammar is not None:
        raise SelectionError(
            "structured_outputs", f"is set, and the processor {grammar} is named too; give one of them"
        )
    if getattr(params, "trace_decode_token_ids", None) is not None:
        raise SelectionError("trace_decode_token_ids", "replays tokens, which leaves processors nothing to do")


def _ends(params: Params, model: ServedModel) -> frozenset[int]:
    vocabulary = model.context.vocabulary
    for token_id in params.stop_token_ids or ():  # vLLM takes any number, and processors write to their logits
        if not 0 <= token_id < vocabulary.size:
            expected = f"expected token ids between 0 and {vocabulary.size - 1}"
            raise SelectionError("stop_token_ids", f"{expected}, got {token_id}")
    ends = frozenset() if params.ignore_eos else vocabulary.eos_token_ids
    return ends | frozenset(params.stop_token_ids or ())
