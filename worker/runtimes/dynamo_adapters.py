"""LoRA adapters as models of Dynamo's frontend, beside the model that they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

from worker.arguments import Arguments
from worker.engines import EngineInfo

logger = logging.getLogger(__name__)

PAUSES_S = (1.0, 4.0, 25.0)
"""Pauses before each registration: a frontend of ai-dynamo 1.4.2 drops an adapter whose model it
has not seen, and the runtime registers the model after it has said that the endpoint is ready.
"""

_TYPES = {"chat": "Chat", "completions": "Completions"}


async def register_adapters(
    endpoint: Any, info: EngineInfo, arguments: Arguments, is_leaving: Callable[[], bool]
) -> None:
    """Register every adapter of an engine at the endpoint that serves its model, until it leaves.

    Args:
        endpoint: The runtime's.
        info: Description of the engine.
        arguments: Options of the worker.
        is_leaving: Whether the worker shuts down.
    """
    for pause in PAUSES_S:
        await asyncio.sleep(pause)
        if is_leaving():
            return
        for name in info.adapters:
            try:
                await _register(endpoint, name, info, arguments)
            except Exception as error:  # the runtime's: discovery may be away for a while
                logger.warning("the LoRA adapter %s is not registered: %s", name, error)


async def _register(endpoint: Any, name: str, info: EngineInfo, arguments: Arguments) -> None:
    from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model

    kinds = [getattr(ModelType, kind) for each, kind in _TYPES.items() if each in arguments.endpoint_types.split(",")]
    config = ModelRuntimeConfig()
    config.context_length = info.context_length
    config.total_kv_blocks = info.total_kv_blocks
    config.max_num_seqs = info.max_num_seqs
    config.max_num_batched_tokens = info.max_num_batched_tokens
    config.tool_call_parser = arguments.dyn_tool_call_parser
    config.reasoning_parser = arguments.dyn_reasoning_parser
    config.exclude_tools_when_tool_choice_none = False
    config.enable_local_indexer = False
    config.kv_event_publishing_enabled = arguments.publishes_kv_events
    await register_model(
        ModelInput.Tokens,
        reduce(or_, kinds) if kinds else ModelType.Empty,
        endpoint,
        arguments.model_path,
        kv_cache_block_size=info.kv_block_size,
        runtime_config=config,
        lora_name=name,
        base_model_path=arguments.model_path,
        worker_type=WorkerType.Aggregated,
        needs=[],
        max_gpu_lora_count=len(info.adapters),
    )
