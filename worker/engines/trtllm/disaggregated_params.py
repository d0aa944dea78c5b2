"""Versioned JSON codec of ``DisaggregatedParams``, sent from a prefill to a decode worker.

Bytes are encoded as base64, log probabilities as ``[[{token_id, logprob, rank}]]``, the form of
trtllm-serve and of Dynamo's codec. A field that a version adds (ids of the hand-off, an endpoint)
travels as it is if it is JSON data; one that is private or that its constructor does not take is
the object's own state and stays. Any other set field is an error: nothing is silently dropped.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from worker.engines.library_outputs import finite
from worker.errors import InvalidRequest, RequestFailed, one_line, shown

VERSION = 1
FIELD = "prefill_result.disaggregated_params"

NOT_SENT = frozenset(
    {
        "first_gen_logits",
        "multimodal_embedding_handles",
        "multimodal_hashes",
        "mrope_position_ids_handle",
        "mrope_position_deltas_handle",
    }
)
"""Fields of requests that this worker refuses (raw logits, pictures): set, they stop a hand-off."""

GOES_ON = ("length", "not_finished")
"""Finish reasons of a context-only request that the generation phase continues.

TensorRT-LLM sets its length limit to one token, so that the sampler ends it with ``length``; one
whose KV is still being sent may end as ``not_finished``.
"""

_BYTES = "opaque_state"
_LOGPROBS = "first_gen_log_probs"
_TOKENS = frozenset({"first_gen_tokens", "draft_tokens"})
_INTEGERS = frozenset({"ctx_request_id", "disagg_request_id", "ctx_dp_rank"})


@dataclasses.dataclass(frozen=True, slots=True)
class HandOffFacts:
    """Facts that must be the same on both sides of a hand-off: TensorRT-LLM compares none of them.

    Attributes:
        tensorrt_llm: Version of TensorRT-LLM.
        model: Digest of the checkpoint; empty where it cannot be read.
        dtype: Argument ``dtype`` of the library.
        kv_cache_dtype: Argument ``kv_cache_config.dtype`` of the library.
    """

    tensorrt_llm: str
    model: str
    dtype: str
    kv_cache_dtype: str

    def check(self, data: Mapping[str, Any]) -> None:
        """Raises `InvalidRequest` where a hand-off comes from a worker that is not like this one.

        Args:
            data: JSON data that `encode` made; that of an earlier version of this worker has none.
        """
        theirs = data.get("facts", {})
        if not isinstance(theirs, Mapping):
            raise InvalidRequest(f"{FIELD}.facts", f"must be a mapping, got {shown(theirs)}")
        for field in dataclasses.fields(self):
            ours, there = getattr(self, field.name), theirs.get(field.name, "")
            if ours and there and ours != there:
                problem = f"the prefill worker has {shown(there)}, and this decode worker {ours!r}"
                raise InvalidRequest(f"{FIELD}.facts.{field.name}", problem)


def complete(output: Any, given: Any) -> Any:
    """The generation phase's parameters from a finished context-only ``CompletionOutput``.

    The output may have no parameters, or those that it was `given`. Missing fields are taken from
    the given ones, such as the request's id, and from the output: the sampled token and its log
    probabilities.

    Raises:
        RequestFailed: there is no token.
    """
    found = given if output.disaggregated_params is None else output.disaggregated_params
    names = _names_sent(found)
    lacking = {name: getattr(given, name) for name in names if getattr(found, name) is None}
    if not found.first_gen_tokens:
        if not output.token_ids:
            raise RequestFailed("TensorRT-LLM's context phase returned no token")
        lacking["first_gen_tokens"] = list(output.token_ids)
        if output.logprobs and _LOGPROBS in names:
            lacking[_LOGPROBS] = list(output.logprobs)
    return dataclasses.replace(found, **lacking)


def encode(params: Any, **extra: Any) -> dict[str, Any]:
    """JSON data for a ``DisaggregatedParams``, with ``extra`` fields such as the seed.

    Raises:
        RequestFailed: a field cannot be encoded.
    """
    data: dict[str, Any] = {}
    for name in _names_sent(params):
        value = getattr(params, name)
        if value is None:
            continue
        if name in NOT_SENT:
            raise RequestFailed(f"DisaggregatedParams has {name}, which cannot be sent")
        data[name] = _encode_value(name, value)
    try:
        text = json.dumps({"version": VERSION, "engine": "trtllm", "params": data, **extra}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestFailed(f"DisaggregatedParams cannot be sent: {error}") from error
    return json.loads(text)  # type: ignore[no-any-return]


def _names_sent(params: Any) -> list[str]:
    """Fields of a ``DisaggregatedParams``, object or class, but its own state."""
    return [field.name for field in dataclasses.fields(params) if field.init and not field.name.startswith("_")]


def _encode_value(name: str, value: Any) -> Any:
    if name == _BYTES:
        return base64.b64encode(value).decode()
    if name == _LOGPROBS:
        return [_encode_position(each) for each in value]
    if not _is_json(value):
        raise RequestFailed(f"DisaggregatedParams has {name} as {type(value).__name__}, which cannot be sent")
    return value


def _is_json(value: Any) -> bool:
    """Whether a value arrives as what it was sent as; an integer's subclass (an enumeration) counts
    as its number.
    """
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float))


def _encode_position(position: Any) -> list[dict[str, Any]]:
    if isinstance(position, Mapping):
        return [{"token_id": t, "logprob": finite(each.logprob), "rank": each.rank} for t, each in position.items()]
    raise RequestFailed(f"DisaggregatedParams has log probabilities as {type(position).__name__}")


def decode(data: Any, cls: Any, make_logprob: Any) -> Any:
    """A ``DisaggregatedParams`` for the generation phase.

    Args:
        data: JSON data that `encode` made, untrusted.
        cls: The installed ``DisaggregatedParams``.
        make_logprob: The installed ``Logprob``.

    Raises:
        InvalidRequest: it is malformed, of another version or engine, or has a field that this
            version lacks.
    """
    if not isinstance(data, Mapping) or data.get("engine") != "trtllm" or data.get("version") != VERSION:
        raise InvalidRequest(FIELD, f"must be of version {VERSION} from a trtllm prefill worker")
    params = data.get("params")
    if not isinstance(params, Mapping):
        raise InvalidRequest(f"{FIELD}.params", "must be a mapping")
    known = set(_names_sent(cls)) - NOT_SENT
    values: dict[str, Any] = {}
    for name, value in params.items():
        if name not in known:
            raise InvalidRequest(f"{FIELD}.params", f"the installed TensorRT-LLM has no {str(name)[:60]!r}")
        values[name] = _decode_value(name, value, make_logprob)
    if not values.get("first_gen_tokens"):
        raise InvalidRequest(f"{FIELD}.params.first_gen_tokens", "must hold the first token")
    values["request_type"] = "generation_only"
    try:
        return cls(**values)
    except (TypeError, ValueError, AssertionError) as error:  # what a version checks itself
        raise InvalidRequest(f"{FIELD}.params", one_line(error)) from None


def _decode_value(name: str, value: Any, make_logprob: Any) -> Any:
    path = f"{FIELD}.params.{name}"
    try:
        if name == _BYTES:
            return base64.b64decode(value, validate=True)
        if name == _LOGPROBS:
            return [{int(e["token_id"]): make_logprob(float(e["logprob"]), e["rank"]) for e in each} for each in value]
    except (TypeError, ValueError, KeyError, binascii.Error):
        raise InvalidRequest(path, "is malformed") from None
    if name in _TOKENS and not _are_ids(value):
        raise InvalidRequest(path, "must be a list of token ids")
    if name in _INTEGERS and type(value) is not int:
        raise InvalidRequest(path, "must be an integer")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
