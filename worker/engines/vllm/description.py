"""The description of a loaded vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.engines import EngineInfo


def describe(
    config: Any,
    version: str,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    adapters: Mapping[str, str],
    takes_images: bool = False,
) -> EngineInfo:
    """The description of the engine with a ``VllmConfig``; ``adapters`` are digests by name."""
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    dtype = str(model.dtype).removeprefix("torch.")
    made_by = f"vLLM, {dtype}"
    made_by += f", {model.quantization} weights" if model.quantization else ""
    return EngineInfo(
        name="vllm",
        version=version,
        context_length=int(model.max_model_len),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        kv_block_size=int(cache.block_size),
        total_kv_blocks=int(cache.num_gpu_blocks or 0),
        max_num_seqs=int(scheduler.max_num_seqs),
        max_num_batched_tokens=int(scheduler.max_num_batched_tokens),
        draws_by_seed=False,
        honours_priority=scheduler.policy == "priority",
        reports_blocks=config.kv_events_config is not None,
        computed_by=f"{made_by}, {config.device_config.device_type}",
        made_by=made_by,
        # the model's own goes without saying, as it did in versions that said none
        kv_dtype="" if cache.cache_dtype in ("auto", dtype) else str(cache.cache_dtype),
        adapters=adapters,
        takes_images=takes_images,
        runs_all_processors=False,
    )
