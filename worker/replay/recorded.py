"""A receipt, read back: its schema, the request in it, and the processors that the request had."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adapters.catalog import Catalog, Policy, PolicyError, Requested, Selection
from adapters.catalog.selection import Origin
from adapters.contract import Scope
from worker.arguments import OPTIONS, Arguments
from worker.errors import ConfigurationError
from worker.requests.receipts import CHANNEL, OPTIONS_OF_BITS
from worker.sampling import SamplingParams

STEP_BUDGET_S = 3600.0
"""CPU seconds per step of a third-party processor; the first run decided who was over budget."""

Schema = TypeVar("Schema", bound=BaseModel)


class RecordedEngine(BaseModel):
    """Section ``engine`` of a receipt; see `worker.requests.receipts.ServerRecord`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    version: str
    computed_by: str
    options: dict[str, Any]


class RecordedAdapter(BaseModel):
    """LoRA adapter of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    digest: str


class RecordedModel(BaseModel):
    """Section ``model`` of a receipt."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    digest: str | None
    adapter: RecordedAdapter | None = None
    draft_model: str | None = None


class RecordedToken(BaseModel):
    """One processor's part in one token."""

    model_config = ConfigDict(extra="forbid", strict=True)
    position: int
    token_id: int
    processor: str
    did: str


class RecordedLogprob(BaseModel):
    """Log probability of one token in what it was sampled from."""

    model_config = ConfigDict(extra="forbid", strict=True)
    position: int
    logprob: float


class RecordedControl(BaseModel):
    """Value of a sampling control, and where it came from."""

    model_config = ConfigDict(extra="forbid", strict=True)
    value: float
    source: Literal["request", "model", "default"] = Field(alias="from")


class RecordedWeights(BaseModel):
    """Version of updated weights, and the first token that is sampled from it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: str
    from_token: int
    digest: str


class RecordedReceipt(BaseModel):
    """A receipt, as `worker.requests.receipts.RequestReceipt.as_json` writes it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    engine: RecordedEngine
    model: RecordedModel
    mode: str
    numerics: str
    seed: int = Field(ge=0, lt=2**64)
    prompt_length: int = Field(ge=1)
    replayed_tokens: int
    processors: list[dict[str, Any]]
    tokens: list[RecordedToken] = []
    tokens_left_out: int = 0
    processed_logprobs: list[RecordedLogprob] = []
    sampling: dict[str, RecordedControl] = {}
    preemptions: int | None
    prompt_digest: str
    images: int = 0
    generated_tokens: int = Field(ge=1)
    answer_digest: str
    weights: list[RecordedWeights] = []
    request: str | None = None


class RecordedProcessor(BaseModel):
    """One processor of the request; arguments are recorded where they are the client's."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    scope: Scope
    args: dict[str, Any] = {}
    origin: Origin = "client"


class RecordedSampling(BaseModel):
    """Sampling controls whose types neither `SamplingParams` nor their processors check."""

    model_config = ConfigDict(extra="allow", strict=True)
    end_id: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False


class RecordedRequest(BaseModel):
    """The text ``request`` of a receipt."""

    model_config = ConfigDict(extra="forbid", strict=True)
    sampling: dict[str, Any]
    processors: list[RecordedProcessor]
    order: list[str] = []
    choice: int = Field(ge=0, lt=2**64)
    smoke_test: Literal[False]
    hidden_end_ids: list[int] = []


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer, as its receipt describes it."""

    receipt: RecordedReceipt
    request: RecordedRequest
    params: SamplingParams


def read_receipt(path: Path) -> Recorded:
    """The receipt in a file: by itself, as ``engine_data``, or in the response that it came with.

    Raises:
        ConfigurationError: it cannot be read, or is malformed; the message names the field.
    """
    data = _json(path)
    for key in ("nvext", "engine_data", CHANNEL):
        if isinstance(data, dict) and key in data:
            data = data[key]
    _refuse_several(path, data)
    if not isinstance(data, dict) or not data.keys() & RecordedReceipt.model_fields.keys() - {"model"}:
        raise ConfigurationError(
            f"{path}: holds no receipt: a request gets one with its answer if its selection of processors says "
            '"receipt": true'
        )
    receipt = _validated(RecordedReceipt, data, str(path))
    if receipt.images:
        raise ConfigurationError(f"{path}: images: the prompt has pictures, which no receipt has")
    if receipt.request is None:
        raise ConfigurationError(f"{path}: request: is not in this chunk's receipt; it comes with the finish reason")
    try:
        text = json.loads(receipt.request)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: request: is not JSON: {error}") from None
    request = _validated(RecordedRequest, text, f"{path}: request")
    _validated(RecordedSampling, request.sampling, f"{path}: request.sampling")
    try:
        params = SamplingParams(**{**request.sampling, "seed": receipt.seed})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{path}: request.sampling: {error}") from None
    return Recorded(receipt, request, params)


def _refuse_several(path: Path, nvext: Any) -> None:
    """Raises `ConfigurationError` for the part of a response that has a receipt for each choice."""
    choices = nvext.get("choices") if isinstance(nvext, dict) else None
    listed = choices if isinstance(choices, list) else []
    found = [one for one in listed if isinstance(one, dict) and "engine_data" in one]
    if found:
        raise ConfigurationError(
            f"{path}: holds the receipts of {len(found)} choices: give one of nvext.choices in a file of its own"
        )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: is not JSON: {error}") from None


def _validated(schema: type[Schema], data: object, where: str) -> Schema:
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{where}: {field + ': ' if field else ''}{first['msg']}") from None


def as_recorded(arguments: Arguments, receipt: RecordedReceipt) -> Arguments:
    """The options, with the receipt's where bits depend on them and none are given.

    The engine is the receipt's if that is vLLM; TensorRT-LLM's answers are replayed on the embedded
    engine.
    """
    values: dict[str, Any] = {"disaggregation_mode": "aggregated"}
    if receipt.engine.name == "vllm":
        values["engine"] = "vllm"
    readers = {option.name: option for option in OPTIONS}
    for name, value in receipt.engine.options.items():
        if name not in OPTIONS_OF_BITS:
            raise ConfigurationError(f"engine.options.{name}: is not known; known are {', '.join(OPTIONS_OF_BITS)}")
        if value is not None:
            values[name] = readers[name].read(str(value), f"engine.options.{name}")
    recorded = arguments.given | values.keys() | {"served_model_name"}
    values |= {"max_num_seqs": 2, "served_model_name": receipt.model.name, "processor_step_budget_s": STEP_BUDGET_S}
    given = arguments.given - {"disaggregation_mode"}
    return replace(arguments, **{name: value for name, value in values.items() if name not in given}, given=recorded)


def selection_of(recorded: Recorded, policy_file: str | None, catalog: Catalog) -> Selection:
    """The processors of a recorded request; the arguments of the operator's are in the policy.

    Raises:
        ConfigurationError: one is malformed, or is not in the policy; the message names it.
    """
    try:
        whole = Policy() if policy_file is None else Policy.load(policy_file, catalog)
    except PolicyError as error:
        raise ConfigurationError(str(error)) from None
    policy = whole.for_model(recorded.receipt.model.name)
    operators = {"mandatory": policy.mandatory, "default": policy.default}
    found = []
    for place, entry in enumerate(recorded.request.processors):
        path = f"request.processors[{place}]"
        if entry.origin != "client":
            found.append(_of_operator(entry, operators[entry.origin], path, recorded.receipt.model.name))
            continue
        found.append(Requested(entry.name, entry.args, entry.scope, path))
    return Selection(tuple(found), receipt=True, order=tuple(recorded.request.order))


def _of_operator(entry: RecordedProcessor, operators: Sequence[Requested], path: str, model: str) -> Requested:
    for requested in operators:
        if requested.name == entry.name and requested.scope == entry.scope:
            return requested
    raise ConfigurationError(
        f"{path}: {entry.name} is the operator's ({entry.origin}) and not in the policy of {model}; "
        "give the worker's own --processor-policy"
    )
