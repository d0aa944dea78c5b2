"""The routes of ``--engine-port``: what each takes, checked, and what it does to the engine."""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.arguments import Arguments
from worker.engines import ServingEngine
from worker.engines.lora_adapters import UnknownAdapter
from worker.engines.weights import (
    PAUSE_MODES,
    ChangesWeights,
    NotSupported,
    PauseMode,
    Updated,
    UpdatesWeights,
    WeightsRefused,
    WrongState,
)
from worker.errors import Draining, EngineBroken, InvalidRequest, ServingError, StartupError, shown
from worker.models.regular_files import open_regular
from worker.server.adapters import MAX_NAME as MAX_ADAPTER_NAME
from worker.server.adapters import ServedAdapters
from worker.server.interruptible import Aborted, InPreparation

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 2**16

MAX_NAME = 128
"""Characters of the name of a version."""

_WIDEST = 8
"""Bytes of a tensor's element, at most."""

_MOST_HEADER = 2**20 + 2**10
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has no name for it before 3.13; Linux's number
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_NAME = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9._-]{0,250}")
_MODES: dict[str, PauseMode] = {"abort": "abort", "finish": "finish", "keep": "keep", "wait": "finish"}
"""Modes of a pause by name; ``wait`` is Dynamo's."""

LOADERS = ("reload_weights", "update_weights_from_path")
"""Values of ``engine_rpc``, methods of vLLM's workers that trainers of Dynamo name: they load a
checkpoint, as an update from disk does in any engine here.
"""

_UNSUPPORTED = {
    "embedded": "its weights do not change: it has not started",
    "trtllm": "its library changes weights in ways of its own, which this worker does not drive; weights change while "
    "serving with --engine embedded and vllm",
    "vllm": "weights change in aggregated serving, without --lora-modules",
}
"""Reasons why an engine has no `UpdatesWeights`."""

STATUS: tuple[tuple[type[ServingError], int], ...] = (
    (UnknownAdapter, 404),
    (InvalidRequest, 400),
    (WeightsRefused, 400),
    (WrongState, 409),
    (NotSupported, 501),
    (Draining, 503),
    (EngineBroken, 503),
)
"""HTTP status of errors; 500 of all others."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to a route.

    Attributes:
        fields: The JSON object in its body, or its query.
        content: Body that is no JSON, None for another one.
    """

    fields: Mapping[str, Any]
    content: memoryview | None = None


Answer = dict[str, Any]
Route = Callable[[Asked], Awaitable[Answer]]


class EngineRoutes:
    """The routes of one worker, called in its event loop.

    Args:
        engine: Engine of the worker, started.
        arguments: Options of the worker.
        adapters: LoRA adapters of the worker.
        preparing: Requests that the engine does not have yet.

    Attributes:
        counts: Updates by outcome: ``done``, ``refused``, or ``interrupted``, whose sender left.
        by_name: Routes by the last part of their path.
    """

    READS: frozenset[str] = frozenset(("get_weight_version", "weights", "lora_adapters"))
    """Routes that may be asked by GET."""

    def __init__(
        self, engine: ServingEngine, arguments: Arguments, adapters: ServedAdapters, preparing: InPreparation
    ) -> None:
        self.engine = engine
        self.arguments = arguments
        self._adapters = adapters
        self._preparing = preparing
        self.counts: Counter[str] = Counter(done=0, refused=0, interrupted=0)
        self.by_name: Mapping[str, Route] = {
            "get_weight_version": self._version,
            "weights": self._tensors,
            "update_weights_from_disk": self._update_from_disk,
            "update_weights": self._update,
            "pause": self._pause,
            "pause_generation": self._pause,
            "resume": self._resume,
            "resume_generation": self._resume,
            "flush_cache": self._flush_cache,
            "abort_request": self._abort_request,
            "sleep": self._sleep,
            "wake": self._wake,
            "wake_up": self._wake,
            "liveness_probe": self._liveness_probe,
            "lora_adapters": self._list_adapters,
            "load_lora_adapter": self._load_adapter,
            "unload_lora_adapter": self._unload_adapter,
        }

    async def answer(self, name: str, asked: Asked, route: Route | None = None) -> tuple[int, Answer]:
        """HTTP status and JSON data for a request to the route called `name`, or to another one of
        this name.
        """
        is_update = name.startswith("update_weights")
        try:
            answer = await (route or self.by_name[name])(asked)
        except ServingError as error:
            self.counts["refused"] += is_update
            status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
            return status, {"status": "error", "message": str(error)}
        except Exception:  # the request's boundary
            self.counts["refused"] += is_update
            logger.exception("a request to %s failed", name)
            return 500, {"status": "error", "message": "internal error; the worker's log has it"}
        self.counts["done"] += is_update
        return 200, {"status": "ok", **answer}

    async def tell(self, body: Mapping[str, Any]) -> Answer:
        """The routes as Dynamo's registry wants one of each; it only names them."""
        raise NotSupported("routes are asked at --engine-port")

    def max_bytes(self, name: str, *, is_json: bool) -> int:
        """Bytes that the body of a request to a route may have."""
        if is_json or name != "update_weights":
            return MAX_JSON_BYTES
        try:
            shapes = [kind.shape for kind in self.weights.weight_tensors().values()]
        except ServingError:  # the route says why
            return MAX_JSON_BYTES
        return sum(_WIDEST * math.prod(shape) + _MOST_HEADER // 1024 for shape in shapes) + _MOST_HEADER

    @property
    def weights(self) -> UpdatesWeights:
        """Changes the weights of the engine. Raises `NotSupported`."""
        engine = self.engine
        if isinstance(engine, ChangesWeights) and engine.weights is not None:
            return engine.weights
        raise NotSupported(f"--engine {self.arguments.engine}: {_UNSUPPORTED[self.arguments.engine]}")

    async def _version(self, asked: Asked) -> Answer:
        check_names(asked, ())
        weights = self.weights
        version = weights.weight_version
        return {
            "version": version.name,
            "version_declared": version.is_named,
            "number": version.number,
            "digest": version.digest,
            "state": weights.weights_state,
        }

    async def _tensors(self, asked: Asked) -> Answer:
        check_names(asked, ())
        kinds = self.weights.weight_tensors().items()
        return {"tensors": {name: {"shape": list(kind.shape), "dtype": kind.dtype} for name, kind in kinds}}

    async def _update_from_disk(self, asked: Asked) -> Answer:
        check_names(asked, ("model_path", "weight_version", "mode", "engine_rpc"))
        rpc = asked.fields.get("engine_rpc", LOADERS[0])
        if rpc not in LOADERS:
            raise InvalidRequest(
                "engine_rpc", f"must be {' or '.join(LOADERS)}, which load model_path, got {shown(rpc)}"
            )
        path = Path(text_of(asked.fields, "model_path", 4096))
        return await self._done(self.update_from(path, version_name(asked.fields), _mode(asked.fields)))

    async def update_from(self, path: Path, name: str | None, mode: PauseMode) -> Updated:
        """Replace the weights by those of a checkpoint; see `UpdatesWeights.update_weights`."""
        weights = self.weights
        return await weights.update_weights(await asyncio.to_thread(self._checkpoint, path), name, mode)

    def _checkpoint(self, path: Path) -> Path:
        """The path itself, or the checkpoint that a GGUF file is converted into, as at a start."""
        from worker.models import convert_gguf, find_gguf, model_cache

        keeps_blocks = self.arguments.engine == "embedded" and self.arguments.quantization == "auto"
        try:
            file = find_gguf(path)
            if file is not None:
                return convert_gguf(file, model_cache(os.environ), lambda _: None, keeps_blocks)
            if not path.exists():
                raise InvalidRequest("model_path", f"there is no {shown(str(path))}")
            return path
        except StartupError as error:
            raise InvalidRequest("model_path", str(error).removeprefix("--model-path ")) from None

    async def _update(self, asked: Asked) -> Answer:
        weights, content = self.weights, asked.content
        if content is not None:
            check_names(asked, ("weight_version", "mode"))
        else:
            check_names(asked, ("shared_memory", "size", "weight_version", "mode"))
        name, mode = version_name(asked.fields), _mode(asked.fields)
        if content is None:
            shared = text_of(asked.fields, "shared_memory", 251)
            size = _integer(asked.fields, "size", 1, self.max_bytes("update_weights", is_json=False))
            content = await asyncio.to_thread(_copied, shared, size)
        return await self._done(weights.update_weights(content, name, mode))

    async def _done(self, update: Awaitable[Updated]) -> Answer:
        updated = await update
        return {
            **await self._version(Asked({})),
            "num_tensors": updated.num_tensors,
            "seconds": round(updated.seconds, 4),
            "formats": dict(updated.formats),
        }

    async def _pause(self, asked: Asked) -> Answer:
        check_names(asked, ("mode", "clear_cache"))
        mode, weights = _mode(asked.fields), self.weights
        clears = asked.fields.get("clear_cache", False)
        if not isinstance(clears, bool):
            raise InvalidRequest("clear_cache", f"must be true or false, got {shown(clears)}")
        await self.pause(mode)
        if clears:
            await weights.flush_cache()
        return {"mode": mode, "state": weights.weights_state}

    async def _resume(self, asked: Asked) -> Answer:
        check_names(asked, ())
        await self.weights.resume()
        return {"state": self.weights.weights_state}

    async def _flush_cache(self, asked: Asked) -> Answer:
        check_names(asked, ())
        await self.weights.flush_cache()
        return {}

    async def _abort_request(self, asked: Asked) -> Answer:
        check_names(asked, ("request_id", "abort_all"))
        if asked.fields.get("abort_all") is True and "request_id" not in asked.fields:
            await self.abort_all()
            return {"abort_all": True}
        if asked.fields.get("abort_all", False) is not False:
            raise InvalidRequest("abort_all", "must be true, without request_id, or false")
        request_id = text_of(asked.fields, "request_id", 1024)
        self.abort(request_id)
        return {"request_id": request_id}

    @property
    def num_unfinished(self) -> int:
        """Requests that the engine has, and those that are prepared for it."""
        return len(self._preparing) + self.engine.num_unfinished()

    def abort(self, request_id: str) -> None:
        """End a request wherever it is, with its tokens so far. Ignores unknown ids."""
        self._preparing.interrupt(request_id, Aborted())
        self.engine.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        """See `UpdatesWeights.pause`; ``abort`` ends requests that are prepared, too."""
        weights = self.weights
        if mode == "abort":
            self._preparing.interrupt_all(Aborted("abort"))
        await weights.pause(mode)

    async def abort_all(self) -> None:
        """End every request, with its tokens so far."""
        weights = self.weights
        self._preparing.interrupt_all(Aborted("abort"))
        await weights.abort_all()

    async def _sleep(self, asked: Asked) -> Answer:
        check_names(asked, ("level",))
        await self.weights.sleep(_integer(asked.fields, "level", 1, 2) if "level" in asked.fields else 1)
        return {"state": self.weights.weights_state}

    async def _wake(self, asked: Asked) -> Answer:
        check_names(asked, ())
        await self.weights.wake()
        return {"state": self.weights.weights_state}

    async def _list_adapters(self, asked: Asked) -> Answer:
        check_names(asked, ())
        return {"adapters": self._adapters.digests}

    async def _load_adapter(self, asked: Asked) -> Answer:
        """Fields and message are vLLM's."""
        check_names(asked, ("lora_name", "lora_path", "load_inplace"))
        name, path = text_of(asked.fields, "lora_name", MAX_ADAPTER_NAME), text_of(asked.fields, "lora_path", 4096)
        replaces = asked.fields.get("load_inplace", False)
        if not isinstance(replaces, bool):
            raise InvalidRequest("load_inplace", f"must be true or false, got {shown(replaces)}")
        digest = await self._adapters.load(name, path, replaces=replaces)
        return {"message": f"Success: LoRA adapter '{name}' added successfully.", "lora_name": name, "digest": digest}

    async def _unload_adapter(self, asked: Asked) -> Answer:
        check_names(asked, ("lora_name", "lora_int_id"))
        name = text_of(asked.fields, "lora_name", MAX_ADAPTER_NAME)
        await self._adapters.unload(name)
        return {"message": f"Success: LoRA adapter '{name}' removed successfully.", "lora_name": name}

    async def _liveness_probe(self, asked: Asked) -> Answer:
        check_names(asked, ())
        return {"alive": True}


def check_names(asked: Asked, names: tuple[str, ...]) -> None:
    """Raises `InvalidRequest` of a field that is not one of `names`."""
    for name in asked.fields:
        if name not in names:
            known = f"this route has {', '.join(names)}" if names else "this route has none"
            raise InvalidRequest(shown(name), f"unknown field; {known}")


def text_of(fields: Mapping[str, Any], name: str, most: int) -> str:
    """The text that a field must be. Raises `InvalidRequest`."""
    value = fields.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= most or "\0" in value:
        raise InvalidRequest(name, f"must be a text of 1 to {most} characters, got {shown(value)}")
    return value


def _integer(fields: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequest(name, f"must be an integer from {least} to {most}, got {shown(value)}")
    return value


def version_name(fields: Mapping[str, Any]) -> str | None:
    """The name of a new version, None for its number. Raises `InvalidRequest`."""
    return None if fields.get("weight_version") is None else text_of(fields, "weight_version", MAX_NAME)


def _mode(fields: Mapping[str, Any]) -> PauseMode:
    value = fields.get("mode", "keep")
    if not isinstance(value, str) or value not in _MODES:
        raise InvalidRequest("mode", f"must be {', '.join(PAUSE_MODES)}, got {shown(value)}")
    return _MODES[value]


def new_memory(size: int) -> memoryview:
    """Bytes that take memory once they are written. Raises `InvalidRequest` if there is no room."""
    try:
        return memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE))
    except OSError as error:
        raise InvalidRequest("body", f"there is no memory for {size} bytes: {error.strerror}") from None


def _copied(name: str, size: int) -> memoryview:
    """The first bytes of shared memory, in memory of our own: what the sender does next is its own
    matter.
    """
    if _SHARED_NAME.fullmatch(name) is None:
        raise InvalidRequest("shared_memory", f"must be the name of shared memory, got {shown(name)}")
    content = new_memory(size)
    try:
        with open_regular(_SHARED_MEMORY / name.removeprefix("/")) as file:
            read = 0
            while read < size and (more := file.readinto(content[read:])):
                read += more
    except OSError as error:
        raise InvalidRequest("shared_memory", f"{shown(name)} cannot be read: {error.strerror}") from None
    if read < size:
        raise InvalidRequest("size", f"must be at most that of the shared memory, {read} bytes, got {size}")
    return content
