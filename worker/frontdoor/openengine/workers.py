"""The workers behind OpenEngine: channels, their state as they tell it, and the choice of one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from worker.errors import one_line
from worker.frontdoor.engine_address import EngineAddress
from worker.frontdoor.errors import MODEL_NOT_FOUND, Refused
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.identity import ENGINE_NAME, SCHEMA_REVISION

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two looks at a worker's health and load."""

CALL_S = 5.0
"""Seconds that an answer about a worker's state may take."""

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options of a channel: a worker whose machine is gone is noticed within 20 seconds, one that was
started again is found within 2, and no request is sent twice but by `generation`.
"""

Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials for all workers.

    Attributes:
        certificates: Root certificates in PEM, None for those of gRPC.
        token: Token of every call, None without one.
    """

    certificates: bytes | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties of a worker that its answers depend on: one goes on only in a worker of its kind.

    Attributes:
        numerics: Numerics of the engine; see `EngineInfo.made_by`.
        kv_dtype: See `EngineInfo.kv_dtype`.
        model: Digest of the checkpoint that it has loaded, empty where that is not known, or where
            an update has replaced what was loaded.
    """

    numerics: str
    kv_dtype: str
    model: str = ""

    def goes_on(self, other: Kind) -> bool:
        """Whether a worker of this kind goes on with an answer of a worker of another one."""
        same = (self.numerics, self.kv_dtype) == (other.numerics, other.kv_dtype)
        return same and (self.model == other.model or not (self.model and other.model))


class EngineWorker:
    """One worker.

    Args:
        address: Address of its gRPC server.
        access: Credentials.
        tokens_digest: `Vocabulary.digest` of the tokenizer that prompts are made with; empty
            compares none.

    Attributes:
        problem: Reason why it is given no request; empty if it is ready.
        model: Description of its model, as it told it last; None before.
        adapters: Names of its LoRA adapters, as it told them last.
        num_asked: Requests that it answers for this front door.
        num_left: Answers that it has begun for this front door and could not end.
    """

    def __init__(self, address: EngineAddress, access: Access, tokens_digest: str = "") -> None:
        self.address = address
        self._tokens_digest = tokens_digest
        self.problem = "it has not answered yet"
        self.model: wire.ModelInfo | None = None
        self.adapters: frozenset[str] = frozenset()
        self.num_asked = self.num_left = 0
        self._kind: Kind | None = None
        self._instance = ""
        self._num_foreign = 0
        self._metadata: Metadata = () if access.token is None else (("authorization", f"Bearer {access.token}"),)
        self._access = access
        self._channel: grpc.aio.Channel

    @property
    def kind(self) -> Kind:
        """Kind of the worker, known once it was ready."""
        assert self._kind is not None, "the worker was ready"
        return self._kind

    @property
    def instance(self) -> str:
        """Id of its process; empty while it is not ready."""
        return self._instance

    @property
    def is_ready(self) -> bool:
        """Whether it is given requests."""
        return not self.problem

    @property
    def load(self) -> int:
        """Requests that it has, those of others as it told them last."""
        return self.num_asked + self._num_foreign

    def serves(self, model: str) -> bool:
        """Whether it has, or had, a model or an adapter of this name."""
        names = () if self.model is None else (self.model.served_model_name, *self.model.served_model_aliases)
        return model in names or model in self.adapters

    async def watch(self) -> None:
        """Follow its state until this is cancelled."""
        self._channel = _channel(self.address, self._access)
        while True:
            try:
                await self._look()
            except grpc.aio.AioRpcError as error:
                self.failed(f"{error.code().name}: {error.details()}")
            except Exception as error:  # the boundary of one look: another version may tell what this one does not know
                self.failed(f"its state cannot be read: {type(error).__name__}: {one_line(error)}")
            await asyncio.sleep(POLL_S)

    def failed(self, problem: str) -> None:
        """Give it no request until it says that it is ready."""
        if self.is_ready:
            logger.warning("worker %s is not ready: %s", self.address, problem)
        self.problem, self._instance = problem, ""

    @contextlib.asynccontextmanager
    async def generate(self, request: wire.GenerateRequest, metadata: Metadata) -> AsyncIterator[Any]:
        """The stream of the events of a request, which ends with the context."""
        self.num_asked += 1
        method = self._channel.unary_stream(
            "/openengine.v1.Inference/Generate",
            request_serializer=wire.GenerateRequest.SerializeToString,
            response_deserializer=wire.GenerateResponse.FromString,
        )
        call = method(request, metadata=(*self._metadata, *metadata))
        try:
            yield call
        finally:
            self.num_asked -= 1
            call.cancel()

    async def close(self) -> None:
        """End its channel, if it has been watched."""
        if hasattr(self, "_channel"):
            await self._channel.close()

    async def _look(self) -> None:
        health = await self._ask("Health", wire.HealthRequest(), wire.HealthResponse)
        if health.state != wire.HEALTH_STATE_READY:
            told = "; ".join(filter(None, (check.message for check in health.checks)))
            name = wire.HealthState.Name(health.state).removeprefix("HEALTH_STATE_")
            self.failed(f"{name}{': ' * bool(told)}{told}")
            return
        load = await self._ask("GetLoad", wire.GetLoadRequest(), wire.LoadInfo)
        self._num_foreign = max(0, load.running_requests + load.queued_requests - self.num_asked)
        if load.instance_id != self._instance:
            await self._describe()
            return
        if self.model is not None and self.model.supports_lora:
            await self._list_adapters()
        if not self.is_ready:
            self.problem = ""

    async def _describe(self) -> None:
        info = await self._ask("GetServerInfo", wire.GetServerInfoRequest(), wire.ServerInfo)
        if info.engine_name != ENGINE_NAME or info.schema_revision != SCHEMA_REVISION:
            # another engine may ignore keys of `extra`, in which controls arrive
            self.failed(f"it is {info.engine_name!r} of schema revision {info.schema_revision}, not {ENGINE_NAME}")
            return
        self.model = await self._ask("GetModelInfo", wire.GetModelInfoRequest(), wire.ModelInfo)
        if self.model.supports_lora:
            await self._list_adapters()
        told = dict(info.extra)
        theirs = told.get("tokens_digest", "")
        if theirs and self._tokens_digest and theirs != self._tokens_digest:
            self.failed(f"its tokens have the digest {theirs}, those of --model-path here {self._tokens_digest}")
            return
        self._kind = Kind(told["numerics"], told["kv_dtype"], told.get("model_digest", ""))
        self._instance, self.problem = info.instance_id, ""
        logger.info("worker %s serves %s", self.address, self.model.served_model_name)

    async def _list_adapters(self) -> None:
        found = await self._ask("ListLoras", wire.ListLorasRequest(), wire.ListLorasResponse)
        self.adapters = frozenset(one.lora_name for one in found.adapters)

    async def _ask(self, method: str, request: Any, answer: Any) -> Any:
        ask = self._channel.unary_unary(
            f"/openengine.v1.Control/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return await ask(request, metadata=self._metadata, timeout=CALL_S)


class Workers:
    """All workers.

    Args:
        workers: The workers, at least one.
    """

    def __init__(self, workers: Sequence[EngineWorker]) -> None:
        self._workers = list(workers)
        self._watching: list[asyncio.Task[None]] = []
        self._num_chosen = 0

    def __iter__(self) -> Iterator[EngineWorker]:
        return iter(self._workers)

    @property
    def ready(self) -> list[EngineWorker]:
        """Workers that are given requests."""
        return [each for each in self._workers if each.is_ready]

    @property
    def models(self) -> dict[str, wire.ModelInfo]:
        """Descriptions of the models of the workers that are ready, by name; those of adapters are
        their base model's.
        """
        described = [(each, each.model) for each in self.ready if each.model is not None]
        adapters = {name: model for each, model in described for name in each.adapters}
        return adapters | {model.served_model_name: model for _, model in described}

    def choose(self, model: str, without: Collection[EngineWorker] = (), kind: Kind | None = None) -> EngineWorker:
        """The ready worker with the fewest requests; of several one after the other.

        Args:
            model: Name of the model.
            without: Workers that are not asked again.
            kind: Kind that it must be of, for an answer that goes on.

        Raises:
            Refused: 404, no worker has such a model; 503, none that has is ready.
        """
        if any(each.model is not None for each in self._workers) and not any(w.serves(model) for w in self._workers):
            raise Refused(404, MODEL_NOT_FOUND, "model", code="model_not_found")
        able = [each for each in self.ready if each.serves(model) and each not in without]
        same = [each for each in able if kind is None or each.kind.goes_on(kind)]
        if not same:
            raise Refused(503, _no_worker(self._workers, able, kind), kind="server_error")
        self._num_chosen += 1
        start = self._num_chosen % len(same)
        return min(same[start:] + same[:start], key=lambda each: each.load)

    def start(self) -> None:
        """Begin to follow the states of the workers."""
        self._watching = [asyncio.create_task(each.watch()) for each in self._workers]

    async def close(self) -> None:
        """End the channels."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in self._workers))


def _no_worker(workers: Sequence[EngineWorker], able: Sequence[EngineWorker], kind: Kind | None) -> str:
    if able and kind is not None:
        began = f"{kind.numerics}, KV of {kind.kv_dtype}{', model ' * bool(kind.model)}{kind.model}"
        return f"no worker that is ready computes the answer as it began: {began}"
    problems = {each.problem for each in workers if each.problem}
    return f"no worker is ready{': ' * bool(problems)}{'; '.join(sorted(problems))}"


def _channel(address: EngineAddress, access: Access) -> grpc.aio.Channel:
    if not address.has_tls:
        return grpc.aio.insecure_channel(address.target, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(access.certificates)
    return grpc.aio.secure_channel(address.target, credentials, options=CHANNEL_OPTIONS)
