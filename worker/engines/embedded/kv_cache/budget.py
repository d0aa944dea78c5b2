"""How large the KV store may be."""

from __future__ import annotations

from pathlib import Path

import torch

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.plan import Model
from worker.errors import StartupError

_SHARE = {"cuda": 0.85, "cpu": 0.5}
"""Part of the memory that is free once the weights are loaded; activations and the rest of the
machine need some.
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


def choose_kv_blocks(config: EmbeddedConfig, model: Model, context_length: int) -> int:
    """Blocks of the KV store: those asked for, or enough for every slot's full context, as far as
    memory goes.

    They make whole pages; what is left of the blocks asked for is not used.

    Raises:
        StartupError: not even one full context fits.
    """
    page_size = choose_page_size(config.kv_block_size, context_length)
    per_page = page_size // config.kv_block_size
    per_context = -(-context_length // page_size) * per_page
    if config.kv_blocks is not None:
        if config.kv_blocks < per_context:
            raise StartupError(
                f"--kv-blocks {config.kv_blocks} cannot hold one context of {context_length} tokens, "
                f"which takes {per_context}"
            )
        return config.kv_blocks // per_page * per_page
    wanted = per_context * config.max_num_seqs
    block_bytes = model.kv_bytes_per_token * config.kv_block_size
    free_bytes = free_memory(model.device)
    if not block_bytes or free_bytes is None:
        return wanted
    fitting = int(free_bytes * _SHARE.get(model.device.type, 0.5)) // block_bytes
    if fitting < per_context:
        raise StartupError(
            f"--context-length {context_length} needs {per_context * block_bytes / 2**30:.1f} GiB of KV store, "
            f"{fitting * block_bytes / 2**30:.1f} GiB are available: lower it"
        )
    return min(wanted, fitting // per_page * per_page)


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
    known = [free for free in (_free_on_machine(), free_in_container(CGROUPS)) if free is not None]
    return min(known, default=None)


def _free_on_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Limit, use, and the cached files in use that the kernel gives back first; of cgroups version 2
and 1.
"""


def free_in_container(root: Path) -> int | None:
    """Bytes below the memory limit of this process's container; None if it has no limit.

    Args:
        root: Where the control groups are mounted.
    """
    for limit, used, stat, cached in _LIMITS:
        try:
            bound = (root / limit).read_text(encoding="ascii").strip()
            in_use = int((root / used).read_text(encoding="ascii"))
            stats = dict(line.split() for line in (root / stat).read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):
            continue
        return None if bound == "max" else max(0, int(bound) - in_use + int(stats.get(cached, 0)))
    return None
