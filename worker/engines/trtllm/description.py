"""The loaded engine's description: sizes of its model, its batch and its KV cache."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from worker.engines import EngineInfo
from worker.engines.trtllm.cache_reports import kv_blocks
from worker.engines.trtllm.placement import num_dp_ranks
from worker.errors import StartupError


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of the model that were found out.

    Attributes:
        vocab_size: Width of a row of logits.
        context_length: Longest sequence as the checkpoint has it, None if it does not say.
        eos_token_ids: Ids that end an answer.
    """

    vocab_size: int
    context_length: int | None
    eos_token_ids: tuple[int, ...]


async def describe(llm: Any, version: str, sizes: ModelSizes, max_num_seqs: int | None) -> EngineInfo:
    """The engine's description.

    Args:
        llm: The library's ``LLM``, which has served a request.
        version: Version of the library.
        sizes: Sizes of the model.
        max_num_seqs: Largest batch, None for the library's own.

    Raises:
        StartupError: nothing says how long a context may be.
    """
    args = llm.args
    length = args.max_seq_len or sizes.context_length
    if length is None:
        raise StartupError("the checkpoint does not say the context length; give --context-length")
    block, total = await _kv_capacity(llm)
    return EngineInfo(
        name="trtllm",
        version=version,
        context_length=int(length),
        vocab_size=sizes.vocab_size,
        eos_token_ids=sizes.eos_token_ids,
        kv_block_size=block,
        total_kv_blocks=total,
        max_num_seqs=max_num_seqs or int(args.max_batch_size),
        max_num_batched_tokens=int(args.max_num_tokens or length),
        draws_by_seed=False,
        computed_by="TensorRT-LLM",
        made_by="TensorRT-LLM",
        num_dp_ranks=num_dp_ranks(llm),
    )


async def _kv_capacity(llm: Any) -> tuple[int, int]:
    """Tokens per KV block, and number of blocks; (…, 0) if the version does not report it."""
    if hasattr(llm, "get_kv_cache_capacity"):
        capacity = llm.get_kv_cache_capacity()
        if capacity:  # empty if the version reports no KV cache, or no number of blocks
            return int(capacity["tokensPerBlock"]), int(capacity["maxNumBlocks"])
    block = int(llm.args.kv_cache_config.tokens_per_block)
    with contextlib.suppress(AssertionError, RuntimeError):
        async for record in llm.get_stats_async(timeout=1):
            found = kv_blocks(record)
            if found is not None:
                return block, found[1]
    return block, 0
