"""LoRA adapters as models of Dynamo's frontend, beside the model that they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any
from urllib.parse import unquote, urlsplit

from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    lora_name_to_id,
    register_model,
    unregister_model,
)

from worker.arguments import Arguments, discovery_key
from worker.engines import EngineInfo
from worker.errors import one_line, shown
from worker.runtimes.dynamo_rl import OwnEndpoints
from worker.server.adapters import ServedAdapters

logger = logging.getLogger(__name__)

PAUSES_S = (1.0, 4.0, 25.0)
"""Pauses before each registration: a frontend of ai-dynamo 1.4.2 drops an adapter whose model it
has not seen, and the runtime registers the model after it has said that the endpoint is ready.
"""

_TYPES = {"chat": "Chat", "completions": "Completions"}


class AdapterModels:
    """Registers the adapters of an engine at the endpoint that serves its model.

    Args:
        endpoint: The runtime's.
        info: Description of the engine.
        arguments: Options of the worker.
        forget: Called with the name of an adapter before it is unregistered, so that nobody
            registers it again.
        remember: Called with the name of an adapter before it is registered.
    """

    def __init__(
        self,
        endpoint: Any,
        info: EngineInfo,
        arguments: Arguments,
        forget: Callable[[str], None],
        remember: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._endpoint = endpoint
        self._info = info
        self._arguments = arguments
        self._forget = forget
        self._remember = remember
        self._again: dict[str, asyncio.Task[None]] = {}

    def begin(self) -> None:
        """Register the adapters that the engine has started with, soon."""
        for name in self._info.adapters:
            self._again[name] = asyncio.create_task(self._keep_registering(name))

    async def publish(self, name: str) -> None:
        """Register an adapter.

        Raises whatever the runtime does, and `ValueError` of a name that it takes for another one.
        """
        key = discovery_key(name)
        if not key:
            raise ValueError("the name needs an ASCII letter, a digit or - for Dynamo's discovery")
        if taken := [other for other in self._info.adapters if other != name and discovery_key(other) == key]:
            raise ValueError(f"it and {shown(taken[0])} are both {key} in Dynamo's discovery")
        self._remember(name)
        await _register(self._endpoint, name, self._info, self._arguments)
        self._again[name] = asyncio.create_task(self._keep_registering(name))

    async def withdraw(self, name: str) -> None:
        """Unregister an adapter. Raises whatever the runtime does."""
        if (task := self._again.pop(name, None)) is not None:
            task.cancel()
        self._forget(name)
        await unregister_model(self._endpoint, lora_name=name)

    def close(self) -> None:
        """Register nothing any more."""
        for task in self._again.values():
            task.cancel()

    async def _keep_registering(self, name: str) -> None:
        for pause in PAUSES_S:
            await asyncio.sleep(pause)
            try:
                await _register(self._endpoint, name, self._info, self._arguments)
            except Exception as error:  # the runtime's: discovery may be away for a while
                logger.warning("the LoRA adapter %s is not registered: %s", name, error)


async def _register(endpoint: Any, name: str, info: EngineInfo, arguments: Arguments) -> None:
    kinds = [getattr(ModelType, kind) for each, kind in _TYPES.items() if each in arguments.endpoint_types.split(",")]
    if arguments.disaggregation_mode == "prefill":
        kinds = [ModelType.Prefill]
    worker_type, needs = {
        "aggregated": (WorkerType.Aggregated, []),
        "prefill": (WorkerType.Prefill, [[WorkerType.Decode]]),
        "decode": (WorkerType.Decode, [[WorkerType.Prefill]]),
    }[arguments.disaggregation_mode]
    config = ModelRuntimeConfig()
    config.context_length = info.context_length
    config.total_kv_blocks = info.total_kv_blocks
    config.max_num_seqs = info.max_num_seqs
    config.max_num_batched_tokens = info.max_num_batched_tokens
    config.tool_call_parser = arguments.dyn_tool_call_parser
    config.reasoning_parser = arguments.dyn_reasoning_parser
    config.exclude_tools_when_tool_choice_none = False
    config.enable_local_indexer = config.kv_event_publishing_enabled = arguments.publishes_kv_events
    await register_model(
        ModelInput.Tokens,
        reduce(or_, kinds) if kinds else ModelType.Empty,
        endpoint,
        arguments.model_path,
        kv_cache_block_size=info.kv_block_size,
        runtime_config=config,
        lora_name=name,
        base_model_path=arguments.model_path,
        worker_type=worker_type,
        needs=needs,
        max_gpu_lora_count=max(1, len(info.adapters)),
    )


class AdapterEndpoints:
    """Dynamo's endpoints ``load_lora``, ``unload_lora`` and ``list_loras``, beside the one that
    generates; requests and answers as of its vLLM workers.

    They are served where Dynamo's ``DYN_LORA_ENABLED`` asks for them: whoever reaches the request
    plane may ask them.

    Args:
        arguments: Options of the worker.
        adapters: Adapters of the worker.
    """

    def __init__(self, arguments: Arguments, adapters: ServedAdapters) -> None:
        self._adapters = adapters
        handlers = {"load_lora": self._load, "unload_lora": self._unload, "list_loras": self._list}
        self._endpoints = OwnEndpoints(arguments, handlers)

    async def close(self) -> None:
        """Leave discovery."""
        await self._endpoints.close()

    async def _load(self, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        fields = request if isinstance(request, Mapping) else {}
        source = fields.get("source")
        uri = source.get("uri") if isinstance(source, Mapping) else None
        name = fields.get("lora_name")
        if not isinstance(name, str) or not isinstance(uri, str):
            yield _failed("lora_name and source.uri must be texts", name)
            return
        url = urlsplit(uri)
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            yield _failed(f"source.uri must be file:// and a directory, got {shown(uri)}", name)
            return
        try:
            if name not in self._adapters.digests:  # as vLLM's: once more is no error
                await self._adapters.load(name, unquote(url.path))
        except Exception as error:  # the runtime's too, where it cannot register the adapter
            yield _failed(one_line(error), name)
            return
        yield _done(f"LoRA adapter '{name}' loaded successfully", name)

    async def _unload(self, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        name = request.get("lora_name") if isinstance(request, Mapping) else None
        if not isinstance(name, str):
            yield _failed("lora_name must be a text", name)
            return
        try:
            await self._adapters.unload(name)
        except Exception as error:  # as above
            yield _failed(one_line(error), name)
            return
        yield _done(f"LoRA adapter '{name}' unloaded successfully", name)

    async def _list(self, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        loras = {name: lora_name_to_id(name) for name in self._adapters.digests}
        yield {"status": "success", "loras": loras, "count": len(loras)}


def endpoints_wanted(environ: Mapping[str, str]) -> bool:
    """Whether Dynamo's variable asks for the endpoints that load adapters."""
    return environ.get("DYN_LORA_ENABLED", "").strip().lower() in ("1", "true", "yes", "on")


def _done(message: str, name: str) -> dict[str, Any]:
    return {"status": "success", "message": message, "lora_name": name, "lora_id": lora_name_to_id(name)}


def _failed(message: str, name: object) -> dict[str, Any]:
    return {"status": "error", "message": message, **({"lora_name": name} if isinstance(name, str) else {})}
