"""Size of the KV cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.plan import Model
from worker.engines.free_memory import free_host_memory
from worker.errors import StartupError

logger = logging.getLogger(__name__)

CUDA_SHARE = 0.9
"""Part of a GPU's memory that is free once the weights are loaded; activations need some."""

CPU_SHARE = 0.25
CPU_MAX_BYTES = 4 * 2**30
CPU_CONTEXT_SHARE = 0.5
"""Parts of a CPU machine's available memory: what the KV cache takes by default, up to a limit, and
the most that it takes for one whole context, which it has to hold.
"""

_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")

PAGE_TOKENS = 256
"""Tokens per page at most. Long pages make few calls per row of attention, short ones waste fewer
slots at the end of a sequence.
"""


def choose_page_size(block_size: int, context_length: int) -> int:
    """Tokens per page: whole blocks, `PAGE_TOKENS` at most, one context at most.

    One block at least, however large it is.

    Args:
        block_size: Tokens per block.
        context_length: Longest sequence, in tokens.
    """
    most = min(PAGE_TOKENS // block_size, -(-context_length // block_size))
    return block_size * max(1, most)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Memory of KV.

    Attributes:
        block_bytes: Size of a block of the KV store, with the draft model's KV of its tokens.
        beside_bytes: Size of the draft model's KV of one longest sequence, which it has beside; 0
            without a draft model.
        per_context: Blocks of one full context.
        context_length: Tokens of it.
    """

    block_bytes: int
    beside_bytes: int
    per_context: int
    context_length: int

    @property
    def context_bytes(self) -> int:
        """Least memory that there must be."""
        return self.bytes_of(self.per_context)

    def bytes_of(self, blocks: int) -> int:
        """Memory of a KV store of `blocks` blocks, and of the draft model's."""
        return blocks * self.block_bytes + self.beside_bytes

    def blocks_in(self, num_bytes: int) -> int:
        """Blocks of a KV store that takes `num_bytes` together with the draft model's."""
        return (num_bytes - self.beside_bytes) // self.block_bytes


def choose_kv_blocks(config: EmbeddedConfig, model: Model, context_length: int, draft: Model | None = None) -> int:
    """Blocks of the KV store: those asked for, those that the memory asked for holds, or enough for
    every slot's full context, as far as `_default_bytes` goes. A draft model keeps KV of as many
    tokens (`DraftModel`), which is counted.

    They make whole pages; what is left over is not used.

    Raises:
        StartupError: not even one full context fits, or there is less memory than was asked for.
    """
    page_size = choose_page_size(config.kv_block_size, context_length)
    per_page = page_size // config.kv_block_size
    per_context = -(-context_length // page_size) * per_page
    drafted_bytes = 0 if draft is None else draft.kv_bytes_per_token
    has_beside = draft is not None and config.max_num_seqs > 1
    sizes = _Sizes(
        block_bytes=(model.kv_bytes_per_token + drafted_bytes) * config.kv_block_size,
        beside_bytes=drafted_bytes * page_size * (per_context // per_page) if has_beside else 0,
        per_context=per_context,
        context_length=context_length,
    )
    available = free_memory(model.device) if sizes.block_bytes else None
    blocks = _blocks_asked_for(config, sizes)
    if blocks is None:
        blocks = _default_blocks(config, model.device, available, sizes)
    elif available is not None and sizes.bytes_of(blocks) > available:
        flag = "--kv-cache-memory" if config.kv_blocks is None else f"--kv-blocks {config.kv_blocks}"
        raise StartupError(
            f"{flag}: {_size(sizes.bytes_of(blocks))} of KV cache, {_size(available)} of memory are free"
        )
    blocks = blocks // per_page * per_page
    logger.info(
        "KV cache: %s%s%s for %d tokens, %.1f full contexts of %d",
        _size(sizes.bytes_of(blocks)),
        " with the draft model's" if draft is not None else "",
        ", taken as it is used," if model.device.type == "cpu" else "",
        blocks * config.kv_block_size,
        blocks / per_context,
        context_length,
    )
    return blocks


def _blocks_asked_for(config: EmbeddedConfig, sizes: _Sizes) -> int | None:
    """Blocks of ``--kv-blocks`` or ``--kv-cache-memory``; None if neither is given."""
    context = f"cannot hold one context of {sizes.context_length} tokens, which takes"
    if config.kv_blocks is not None:
        if config.kv_blocks < sizes.per_context:
            raise StartupError(f"--kv-blocks {config.kv_blocks} {context} {sizes.per_context}")
        return config.kv_blocks
    if config.kv_cache_memory is None or not sizes.block_bytes:
        return None
    if config.kv_cache_memory < sizes.context_bytes:
        asked, needed = _size(config.kv_cache_memory), _size(sizes.context_bytes)
        raise StartupError(f"--kv-cache-memory {asked} {context} {needed}")
    return sizes.blocks_in(config.kv_cache_memory)


def _default_blocks(config: EmbeddedConfig, device: torch.device, available: int | None, sizes: _Sizes) -> int:
    """Enough for every slot's full context, as far as memory goes."""
    wanted = sizes.per_context * config.max_num_seqs
    if available is None:
        return wanted
    share = _default_bytes(device, available // config.local_workers, sizes.context_bytes)
    if share < sizes.context_bytes:
        raise StartupError(
            f"--context-length {sizes.context_length} needs {_size(sizes.context_bytes)} of KV cache, "
            f"{_size(share)} of {_size(available)} are free for it: lower it, or set --kv-cache-memory"
        )
    return min(wanted, sizes.blocks_in(share))


def _default_bytes(device: torch.device, available: int, context_bytes: int) -> int:
    """Most of `available` memory that the KV cache takes unless an option sets it."""
    if device.type == "cuda":
        return int(available * CUDA_SHARE)
    share = min(int(available * CPU_SHARE), CPU_MAX_BYTES)
    return max(share, min(context_bytes, int(available * CPU_CONTEXT_SHARE)))


def _size(count: int) -> str:
    """Bytes as text."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch raises a plain `RuntimeError` on a CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(each in text for each in _OUT_OF_MEMORY)


def free_memory(device: torch.device) -> int | None:
    """Bytes that may still be allocated on `device`; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()
