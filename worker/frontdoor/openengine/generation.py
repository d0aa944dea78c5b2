"""`Generation`: the chunks of one answer, from whichever workers generate it.

A worker that dies or leaves does so with the status ``UNAVAILABLE``. Another one of the same kind
then goes on: it gets the prompt with the tokens of the answer so far, how many those are, the seed
and the whole budgets, so that processors, random numbers and limits are those of an answer that
never moved, and no record of the request is needed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from google.rpc import status_pb2

from worker.engines import TokenLogprob
from worker.errors import path_within
from worker.frontdoor.errors import INVALID, Refused, code_of
from worker.frontdoor.openengine.workers import EngineWorker, Kind, Metadata, Workers
from worker.requests.continuation import COMPUTED_WITH
from worker.requests.prompt_scores import TokenText, scores_json
from worker.requests.request import asks_for_rollout
from worker.requests.response import STOP_STRING, STOP_TOKEN
from worker.requests.rollout import ABORT, MATCHED, ROLLOUT
from worker.runtimes.direct.request import DirectRequest
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.asking import copied, own_name, written
from worker.runtimes.openengine.errors import DETAILS

logger = logging.getLogger(__name__)

MOST_WORKERS = 4
"""Workers that may end with one request: one that ends each of them must not end all. Those that
leave in order do not count.
"""

_STATUS = {
    wire.ERROR_CODE_INVALID_ARGUMENT: 400,
    wire.ERROR_CODE_UNSUPPORTED_FEATURE: 400,
    wire.ERROR_CODE_ROLE_MISMATCH: 400,
    wire.ERROR_CODE_MODEL_NOT_FOUND: 404,
    wire.ERROR_CODE_DUPLICATE_REQUEST: 409,
    wire.ERROR_CODE_OVERLOADED: 529,
    wire.ERROR_CODE_DRAINING: 503,
}
"""HTTP statuses of the protocol's errors; another one is 503 if it may pass, else 500."""

_REASONS = {wire.FINISH_REASON_STOP: "stop", wire.FINISH_REASON_LENGTH: "length"}

Chunk = dict[str, Any]


@dataclass(slots=True)
class Generation:
    """One answer.

    Attributes:
        workers: The workers.
        request: The request as it was parsed, its prompt as token ids.
        request_id: Id of the request.
        metadata: Metadata of its calls.
        token_text: Text of each token.
        token_ids: The answer so far.
        digests: Digests that its newest token was computed with, the fields of
            `worker.requests.continuation.Continuation`.
    """

    workers: Workers
    request: DirectRequest
    request_id: str
    metadata: Metadata
    token_text: TokenText
    token_ids: list[int] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    _kind: Kind | None = None
    _has_scores: bool = False

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The chunks, in the form that `worker.runtimes.direct` gives them, without text.

        Raises:
            Refused: the request is refused, or has failed.
        """
        left: list[tuple[EngineWorker, str]] = []  # with the processes that were asked
        num_ended = 0
        refusal: Refused | None = None
        has_ended = False
        while not has_ended:
            try:
                without = [each for each, instance in left if each.instance == instance]
                worker = self.workers.choose(str(self.request.fields["model"]), without, self._kind_to_go_on())
            except Refused as none:
                raise none if refusal is None else _nowhere(refusal) from None
            self._kind, instance = worker.kind, worker.instance
            try:
                async with worker.generate(self._ask(worker), self.metadata) as events:
                    async for event in events:
                        for chunk in self._chunks(event):
                            yield chunk
                            has_ended |= "finish_reason" in chunk
                if not has_ended:
                    raise _failed("its answer has no end")
            except grpc.aio.AioRpcError as error:
                if has_ended:
                    return
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    refusal = _refused(error, self.request.fields)
                    if path_within(refusal.param or "", "continues") is None:
                        raise refusal from None
                    left.append((worker, instance))  # it has other weights
                    continue
                worker.failed(f"UNAVAILABLE: {error.details()}")
                left.append((worker, instance))
                worker.num_left += 1
                num_ended += not _is_leaving(error)
                if num_ended == MOST_WORKERS:
                    problem = f"{num_ended} workers have ended with this request; it is not tried again"
                    raise Refused(503, problem, kind="server_error") from None
                logger.warning("request %s goes on, at token %d", self.request_id, len(self.token_ids))

    def _kind_to_go_on(self) -> Kind | None:
        """Kind of the worker that must be asked; None for any, where nothing has been answered."""
        if self._kind is None or not (self.token_ids or self._has_scores):
            return None
        return replace(self._kind, model="") if self.digests.get("weights") else self._kind

    def _ask(self, worker: EngineWorker) -> wire.GenerateRequest:
        """The request to the next worker."""
        message = copied(self.request.fields)
        message["text"] = False  # which is made where it can go on
        message["annotations"] = [*(message.get("annotations") or ()), COMPUTED_WITH]
        if message["model"] in worker.adapters:
            message["routing"] = {**(message.get("routing") or {}), "lora_name": message.pop("model")}
        if self._has_scores:
            message.get("output_options", {}).pop("prompt_logprobs", None)
        if self.token_ids:
            message["token_ids"] = message["token_ids"] + self.token_ids
            known = {"numerics": worker.kind.numerics, "kv_dtype": worker.kind.kv_dtype, **self.digests}
            message["continues"] = {"generated_tokens": len(self.token_ids), **known}
        return written(message, self.request_id)

    def _chunks(self, event: wire.GenerateResponse) -> list[Chunk]:
        kind = event.WhichOneof("event")
        if kind == "error":
            raise _error(event.error, self.request.fields)
        if kind == "prompt":
            self._has_scores = True
            return [{"token_ids": [], "engine_data": self._scores(event.prompt)}]
        if kind not in ("token", "finished"):
            return []
        if kind == "token":
            self.token_ids += [token.token_id for token in event.token.tokens]
            if event.HasField("computed_with"):
                told = event.computed_with
                controls = told.controls or self.digests.get("controls", "")
                digests = {"weights": told.weights, "adapter": told.adapter, "controls": controls}
                self.digests = {name: digest for name, digest in digests.items() if digest}
            chunk = _tokens(event.token)
        else:
            chunk = _finished(event)
        if asks_for_rollout(self.request.fields.get("annotations") or ()):
            self._add_rollout(chunk, event.engine_data)
        return [chunk]

    def _add_rollout(self, chunk: Chunk, text: str) -> None:
        """Add what the worker says of the tokens of an event, and what has ended them."""
        if chunk["token_ids"] and not text:
            raise _failed("it does not tell what is asked of tokens; is it of an older version?")
        data = chunk.get("engine_data", {}) | ({ROLLOUT: text} if text else {})
        match = chunk.get(STOP_STRING, chunk.get(STOP_TOKEN))
        data |= {} if match is None else {MATCHED: match}
        if data:
            chunk["engine_data"] = data

    def _scores(self, prompt: wire.PromptOutput) -> dict[str, Any]:
        """Log probabilities of the prompt as the worker's own data have them."""
        positions = [_position(token) if token.HasField("logprob") else None for token in prompt.tokens]
        return scores_json([token.token_id for token in prompt.tokens], positions, self.token_text)


def _position(token: wire.TokenInfo) -> list[TokenLogprob]:
    own = TokenLogprob(token_id=token.token_id, logprob=token.logprob, rank=token.rank)
    return [own, *(TokenLogprob(token_id=o.token_id, logprob=o.logprob, rank=o.rank) for o in token.candidates)]


def _tokens(output: wire.TokenOutput) -> Chunk:
    chunk: Chunk = {"token_ids": [token.token_id for token in output.tokens]}
    if output.tokens and all(token.HasField("logprob") for token in output.tokens):
        chunk["log_probs"] = [token.logprob for token in output.tokens]
        chunk["top_logprobs"] = [
            [{"token_id": one.token_id, "logprob": one.logprob} for one in token.candidates] for token in output.tokens
        ]
    return chunk


def _finished(event: wire.GenerateResponse) -> Chunk:
    finished, usage = event.finished, event.usage
    told = json.loads(finished.message) if finished.message else {}
    reason = ABORT if told.get(ABORT) else _REASONS.get(finished.reason)
    if reason is None:
        raise Refused(503, "the worker ended the request", kind="server_error")
    chunk: Chunk = {
        "token_ids": [],
        "finish_reason": reason,
        "completion_usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        },
    }
    if usage.HasField("reasoning_tokens"):
        chunk["completion_usage"]["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    if told:
        chunk["engine_data"] = told
    match = finished.stop_match.WhichOneof("match")
    if match == "stop_text":
        chunk[STOP_STRING] = finished.stop_match.stop_text
    elif match is not None:
        chunk[STOP_TOKEN] = getattr(finished.stop_match, match)
    return chunk


def _told(error: grpc.aio.AioRpcError) -> wire.EngineError | None:
    """The protocol's error with a status, None if there is none."""
    details: Mapping[Any, Any] = dict(error.trailing_metadata() or ())
    found = wire.EngineError()
    if DETAILS in details:
        status = status_pb2.Status.FromString(details[DETAILS])
        if status.details and status.details[0].Unpack(found):
            return found
    return None


def _is_leaving(error: grpc.aio.AioRpcError) -> bool:
    """Whether a worker hands its requests on because it was told to leave."""
    told = _told(error)
    return told is not None and told.code == wire.ERROR_CODE_DRAINING


def _refused(error: grpc.aio.AioRpcError, fields: Mapping[str, Any]) -> Refused:
    """The error of a call that ended with a status."""
    told = _told(error)
    if told is not None:
        return _error(told, fields)
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return _failed("the worker does not take the token of --upstream-token-file")
    text = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:  # gRPC's own, of a message
        return Refused(413, f"the request is larger than the worker takes: {error.details()}")
    return _failed(text)


def _error(error: wire.EngineError, fields: Mapping[str, Any]) -> Refused:
    """The protocol's error, with the field of docs/request.md that it is about."""
    status = _STATUS.get(error.code, 503 if error.retryable else 500)
    if status != 400:
        return Refused(status, error.message, kind=INVALID if status < 500 else "server_error")
    theirs, colon, problem = error.message.partition(": ")
    if not colon or " " in theirs:
        return Refused(400, error.message)
    ours = own_name(theirs, fields)
    return Refused(400, f"{ours}: {problem}", ours, code=code_of(problem))


def _nowhere(refusal: Refused) -> Refused:
    """The error of an answer that no worker goes on with, since each computes something else."""
    return Refused(503, f"no worker that is ready computes the answer as it began: {refusal}", kind="server_error")


def _failed(reason: str) -> Refused:
    return Refused(502, f"the worker did not answer: {reason}", kind="server_error")
