"""Receipts of answers, typed: what each processor did, the seed, and what computed the logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


@dataclass(frozen=True)
class ProcessorWork:
    """Counts of what one processor did.

    Attributes:
        name: Name in the catalogue.
        version: Version of its arithmetic.
        steps_active: Positions at which it asked for an edit.
        tokens_forced: Positions at which it chose the token.
        tokens_masked: Vocabulary entries masked, summed over positions.
        first_position: First position at which it was active, prompt included; None if never.
        last_position: Last such position.
        rollbacks: Number of its rewinds; None for a processor that does not backtrack.
    """

    name: str
    version: int
    steps_active: int
    tokens_forced: int
    tokens_masked: int
    first_position: int | None = None
    last_position: int | None = None
    rollbacks: int | None = None


@dataclass(frozen=True)
class TokenEdit:
    """One processor's part in one token; ``did`` is biased, masked, forced or shaped."""

    position: int
    token_id: int
    processor: str
    did: str


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token in what it was sampled from, after all controls."""

    position: int
    logprob: float


@dataclass(frozen=True)
class EngineRecord:
    """Engine that computed the logits, and the worker's options that their bits depend on."""

    name: str
    version: str
    computed_by: str
    options: dict[str, Any]


@dataclass(frozen=True)
class AdapterRecord:
    """Name and digest of a LoRA adapter."""

    name: str
    digest: str | None = None


@dataclass(frozen=True)
class ModelRecord:
    """Model that an answer is of.

    Attributes:
        name: Served name.
        digest: Digest of the checkpoint; None if it could not be read.
        adapter: LoRA adapter of the answer; None without one.
        draft_model: Digest of the draft model that a processor computes with; None without one.
    """

    name: str
    digest: str | None = None
    adapter: AdapterRecord | None = None
    draft_model: str | None = None


@dataclass(frozen=True)
class WeightsRecord:
    """Version of updated weights, and the first token of the answer that it was used for."""

    version: str
    from_token: int
    digest: str


@dataclass(frozen=True)
class ControlValue:
    """Value of a sampling control; ``source`` is request, model or default."""

    value: float
    source: str


@dataclass(frozen=True)
class Receipt:
    """The receipt of one answer, cumulative over its chunks.

    Attributes:
        version: Version of the receipt's form.
        engine: Engine that computed the logits.
        model: The checkpoint.
        mode: ``aggregated``, ``disaggregated``, ``local prefill`` or ``migrated at k``.
        numerics: ``exact``: the same tokens in any batch, bit for bit; or ``fast``.
        seed: Seed of the random numbers, the client's or the worker's.
        prompt_length: Tokens of the prompt.
        replayed_tokens: Tokens that an earlier worker chose.
        processors: Counts of what each processor did.
        prompt_digest: Digest of the prompt's token ids; see `digest`.
        images: Pictures of the prompt, which its digest does not cover.
        generated_tokens: Tokens of the answer, its end token included.
        answer_digest: Digest of the answer's token ids.
        weights: Versions of the weights; empty for those that the worker started with.
        sampling: Temperature, truncation and repetition penalty, with where each value came from,
            but for those that a processor takes the place of.
        preemptions: Preemptions of the request; None where the engine does not say.
        request: Sampling controls and processors as JSON text, which a replay reads; None in chunks
            before the last one if it is long.
        tokens: Each processor's part in each token, in the last chunk of a receipt of ``"debug"``.
        tokens_left_out: Entries beyond the most that `tokens` has.
        processed_logprobs: Log probabilities after all controls, with ``"debug"`` and ``logprobs``.
        raw: The receipt as it came, fields included that this version does not know.
    """

    version: int
    engine: EngineRecord
    model: ModelRecord
    mode: str
    numerics: str
    seed: int
    prompt_length: int
    replayed_tokens: int
    processors: tuple[ProcessorWork, ...]
    prompt_digest: str
    generated_tokens: int
    answer_digest: str
    sampling: dict[str, ControlValue] = field(default_factory=dict)
    preemptions: int | None = None
    images: int = 0
    weights: tuple[WeightsRecord, ...] = ()
    request: str | None = None
    tokens: tuple[TokenEdit, ...] = ()
    tokens_left_out: int = 0
    processed_logprobs: tuple[TokenLogprob, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def controls(self) -> dict[str, Any] | None:
        """The recorded request as JSON data; None where the receipt has none."""
        return None if self.request is None else dict(json.loads(self.request))

    def processor(self, name: str) -> ProcessorWork:
        """The counts of the first processor of a name.

        Raises:
            KeyError: the request had no processor of that name.
        """
        for each in self.processors:
            if each.name == name:
                return each
        raise KeyError(name)


def parse_receipt(data: Mapping[str, Any]) -> Receipt:
    """The receipt that is ``engine_data.logits_processors``.

    Raises:
        ValueError: it is none; the message names the field.
    """
    raw = {"raw": dict(data)} if isinstance(data, Mapping) else {}
    return _record(Receipt, {**data, **raw} if raw else data, "logits_processors")


def receipts_of(answer: Any) -> tuple[Receipt | None, ...]:
    """Receipts by choice, of a whole answer or of one chunk of a stream.

    Args:
        answer: JSON data, an `Answer` or a `Chunk`, or an object of the ``openai`` package, whose
            extra fields are kept.

    Raises:
        ValueError: a receipt is malformed; the message names the field.
    """
    nvext = _field(answer, "nvext")
    if not isinstance(nvext, Mapping):
        return ()
    choices = nvext.get("choices")
    each_choice = choices if isinstance(choices, list) else [nvext]
    found = [_find(each, "engine_data", "logits_processors") for each in each_choice]
    if all(each is None for each in found):
        return ()
    return tuple(None if each is None else parse_receipt(each) for each in found)


def receipt_of(answer: Any, choice: int = 0) -> Receipt | None:
    """The receipt of one choice; None if the answer has none.

    Raises:
        ValueError: a receipt is malformed; the message names the field.
    """
    found = receipts_of(answer)
    return found[choice] if choice < len(found) else None


def last_receipts(chunks: Iterable[Any]) -> dict[int, Receipt]:
    """The receipt of each choice of a streamed answer, by its index: the last that came.

    Raises:
        ValueError: a receipt is malformed; the message names the field.
    """
    found: dict[int, Receipt] = {}
    for chunk in chunks:
        receipt = receipt_of(chunk)
        if receipt is not None:
            found[choice_of(chunk)] = receipt
    return found


def choice_of(chunk: Any) -> int:
    """Index of the choice that a chunk of a stream belongs to."""
    choices = _field(chunk, "choices")
    if not choices:
        return 0
    first = choices[0]
    return int(first.get("index", 0) if isinstance(first, Mapping) else first.index)


def _field(answer: Any, name: str) -> Any:
    """A field of JSON data, or of an answer or chunk of this package or the openai package."""
    data = answer if isinstance(answer, Mapping) else getattr(answer, "data", None)
    return data.get(name) if isinstance(data, Mapping) else getattr(answer, name, None)


def _find(data: Any, *path: str) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _record(kind: Callable[..., Record], data: Any, path: str) -> Record:
    """A record of ``kind`` of JSON data; fields that it does not know are left out."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: expected an object, got {data!r:.80}")
    values: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        if name in data:
            values[name] = _value(hint, data[name], f"{path}.{name}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{path}: {str(error).partition(' ')[2]}") from None


@cache
def _hints(kind: Callable[..., Any]) -> dict[str, Any]:
    """Types of a record's fields, once for each kind: every chunk of a stream has a receipt."""
    return get_type_hints(kind)


def _value(hint: Any, value: Any, path: str) -> Any:
    """The value of a field, checked against the field's type."""
    origin = get_origin(hint)
    if origin is UnionType:
        return None if value is None else _value(get_args(hint)[0], value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path}: expected a list, got {value!r:.80}")
        return tuple(_record(get_args(hint)[0], each, f"{path}[{place}]") for place, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}: expected an object, got {value!r:.80}")
        kind = get_args(hint)[1]
        if kind is Any:
            return dict(value)
        return {key: _record(kind, _renamed(each), f"{path}.{key}") for key, each in value.items()}
    if hint in (int, str, float):
        is_number = hint is float and type(value) is int
        if type(value) is not hint and not is_number:
            raise ValueError(f"{path}: expected {hint.__name__}, got {value!r:.80}")
        return value
    return _record(hint, value, path)


def _renamed(data: Any) -> Any:
    """The object with ``source`` for ``from``, which is no name in Python."""
    return (
        {"source" if key == "from" else key: each for key, each in data.items()} if isinstance(data, Mapping) else data
    )
