"""The receipt of a request: its processors' work, and everything that determines its tokens.

`python -m worker replay` (`worker.replay`) makes the answer again from its receipt and the prompt.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

from adapters.catalog import Selection
from adapters.chain import Receipt
from worker.arguments import Arguments
from worker.engines import EngineInfo, EngineRequest, TokenDelta
from worker.errors import StartupError
from worker.requests.sampling_defaults import FROM_MODEL, same_control
from worker.requests.token_weights import TokenWeights
from worker.sampling.field_processors import is_sampled

CHANNEL = "logits_processors"
"""Key of the receipt in ``engine_data``."""

MAX_REPEATED = 2048
"""Characters of ``request`` that every chunk may carry; a longer one is in the last chunk alone."""

OPTIONS_OF_BITS = (
    *("dtype", "numerics", "kernels", "quantization", "activation_dtype", "kv_cache_dtype"),
    *("kv_block_size", "context_length"),
)
"""Options of the embedded engine that the bits of a logit depend on; the last two give the size of
a KV page.
"""

RECORDED_OPTIONS = {"embedded": OPTIONS_OF_BITS, "vllm": ("dtype",)}
"""The options in the receipts of each engine; ``--engine-args`` are the operator's own."""

_UNRECORDED = frozenset({"logits_processor", "pad_id", "best_of", "detokenize", "prompt_logprobs"})
"""Fields of `SamplingParams` that are recorded as processors, or change no token here."""


class TokenDigest:
    """128 bits of a sequence of token ids, as hexadecimal digits; the same on every machine."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._hash = blake2b(digest_size=16)
        self.num_tokens = 0
        self.update(token_ids)

    def update(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self._hash.update(array("q", token_ids).tobytes())
        self.num_tokens += len(token_ids)

    def __str__(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """Record of the worker that served a request.

    Attributes:
        engine: ``embedded``, ``trtllm`` or ``vllm``.
        version: Version of the library that decodes.
        computed_by: See `EngineInfo.computed_by`.
        options: The worker's options that bits depend on, by name; see `RECORDED_OPTIONS`.
        model: Served model name.
        model_digest: Digest of the checkpoint; see `worker.engines.embedded.transfer.fingerprint`.
            None if it cannot be read.
        adapters: Digests of the LoRA adapters, by name.
        draft_model: See `EngineInfo.draft_model`.
    """

    engine: str
    version: str
    computed_by: str
    options: Mapping[str, Any]
    model: str
    model_digest: str | None
    adapters: Mapping[str, str]
    draft_model: str

    @classmethod
    def of(cls, info: EngineInfo, arguments: Arguments, digest: Future[str]) -> ServerRecord:
        """The record of an engine that has started.

        Args:
            info: The engine.
            arguments: The worker's options.
            digest: Result of `digest_of_model`, begun before the engine; it is waited for.
        """
        try:
            found = digest.result()
        except StartupError:
            found = None
        options = {name: getattr(arguments, name) for name in RECORDED_OPTIONS.get(info.name, ())}
        model = arguments.served_model_name
        return cls(info.name, info.version, info.computed_by, options, model, found, info.adapters, info.draft_model)

    def as_json(self, request: EngineRequest) -> dict[str, Any]:
        """JSON data for the receipt of a request to the model or to one of its adapters."""
        model: dict[str, Any] = {"name": self.model, "digest": self.model_digest}
        if request.lora_name is not None:
            model["adapter"] = {"name": request.lora_name, "digest": request.lora_digest}
        if request.draft_model is not None:
            model["draft_model"] = request.draft_model
        return {
            "engine": {
                "name": self.engine,
                "version": self.version,
                "computed_by": self.computed_by,
                "options": dict(self.options),
            },
            "model": model,
        }


def digest_of_model(arguments: Arguments) -> Future[str]:
    """The digest of the checkpoint that is about to be loaded, computed meanwhile."""
    from worker.engines.embedded.transfer import fingerprint_beside  # imports the engine

    return fingerprint_beside(arguments.model_path, arguments.packed_copy)


class RequestReceipt:
    """The receipt of one request, cumulative over its chunks.

    Args:
        server: Record of the worker that serves it.
        engine_request: The engine's request.
        selection: Processors of the request. Of the operator's only the names are recorded, for
            their arguments are the operator's own.
        smoke: Whether the smoke test forces its answer.
    """

    def __init__(
        self, server: ServerRecord, engine_request: EngineRequest, selection: Selection, *, smoke: bool = False
    ) -> None:
        self._server = server.as_json(engine_request)
        self._prompt = TokenDigest(engine_request.prompt_token_ids)
        self._answer = TokenDigest(engine_request.generated_token_ids)
        self._num_images = len(engine_request.images)
        self._num_preemptions: int | None = None
        self._counted: Receipt | None = None
        self._weights = TokenWeights()
        self._sampling = _sources(engine_request, selection)
        self._request = _recorded(engine_request, selection, smoke)

    def take(self, delta: TokenDelta) -> None:
        """Count a delta of the engine's."""
        self._answer.update(delta.sampled_ids)
        self._weights.take(delta.weights)
        at_string = delta.finish_reason == "stop" and delta.stop_reason is None
        self._counted = delta.receipt if at_string else None  # it may count what was sampled behind the string
        if delta.num_preemptions is not None:
            self._num_preemptions = delta.num_preemptions

    def as_json(self, report: Mapping[str, Any], *, ends: bool) -> dict[str, Any]:
        """JSON data for the chunk of what `take` took last; the key order is stable.

        Args:
            report: Report on the processors; see `adapters.chain.Receipt.as_json`.
            ends: The chunk has the finish reason.
        """
        if self._counted is not None:
            report = self._counted.before(report["prompt_length"] + self._answer.num_tokens).as_json()
        data = {"version": report["version"], **self._server, **report}
        data["sampling"] = self._sampling
        data["preemptions"] = self._num_preemptions
        data["prompt_digest"] = str(self._prompt)
        if self._num_images:  # which the digest does not cover
            data["images"] = self._num_images
        data["generated_tokens"] = self._answer.num_tokens
        data["answer_digest"] = str(self._answer)
        if self._weights.are_updated:  # those of the start are the model's digest
            data["weights"] = self._weights.as_json(self._answer.num_tokens, digests=True)
        if ends or len(self._request) <= MAX_REPEATED:
            data["request"] = self._request
        return data


def _sources(request: EngineRequest, selection: Selection) -> dict[str, dict[str, Any]]:
    """The controls of `FROM_MODEL` that count, each with its value and where that came from.

    One that a processor has taken the place of is left out; the processors say where they are from.
    """
    named = {one.name for one in selection.processors}
    found = {}
    for name in FROM_MODEL:
        value = getattr(request.params, name)
        if same_control(name) & named:
            continue
        if value is not None:
            found[name] = {"value": value, "from": "model" if name in request.defaulted else "request"}
        elif name == "temperature":
            found[name] = {"value": 1.0 if is_sampled(request.params, request.chain) else 0.0, "from": "default"}
    return found


def _recorded(request: EngineRequest, selection: Selection, smoke: bool) -> str:
    """The request for `worker.replay`, as JSON text: no JSON library on the way rounds a number."""
    params = request.params
    sampling = {
        one.name: value
        for one in fields(params)
        if one.name not in _UNRECORDED and (value := getattr(params, one.name)) != one.default
    }
    processors = [
        {"name": one.name, "scope": one.scope, "args": one.args}
        if one.origin == "client"
        else {"name": one.name, "scope": one.scope, "origin": one.origin}
        for one in selection.processors
    ]
    data: dict[str, Any] = {
        "sampling": sampling,
        "processors": processors,
        "choice": request.choice,
        "smoke_test": smoke,
    }
    if selection.order:
        data["order"] = selection.order
    if params.include_stop_str_in_output and request.hidden_end_ids:  # else all are hidden
        data["hidden_end_ids"] = sorted(request.hidden_end_ids)
    return json.dumps(data, separators=(",", ":"))
