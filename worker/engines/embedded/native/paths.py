"""The choice of the path whose instructions compute in a data type."""

from __future__ import annotations

import logging

import torch

from worker.engines.embedded.native import libraries
from worker.engines.embedded.native.libraries import DATA_TYPES, PATHS, KernelLibrary

logger = logging.getLogger(__name__)

_chosen: dict[torch.dtype, str] = {}
"""The path that computes in each data type."""


def unavailable(dtype: torch.dtype, path: str | None = None) -> str | None:
    """The reason why there are no native kernels for `dtype` here; None if there are.

    Args:
        dtype: Data type of the tensors.
        path: One of `PATHS`; None for any of them.
    """
    if path is None:
        reasons = [unavailable(dtype, each) for each in PATHS]
        return None if None in reasons else reasons[-1]
    try:
        libraries.open_library(dtype, path)
    except (OSError, RuntimeError, AttributeError) as error:
        return str(error)
    return None


def choose_path(dtype: torch.dtype, path: str | None = None) -> str:
    """Compute in `dtype` with the instructions of `path`, or of the fastest that runs here.

    It holds for the process: packed weights are the same in all of them. Returns the path. A faster
    one for which the processor has the instructions, but which does not run, is logged.
    """
    path = path or next(path for path in PATHS if path == PATHS[-1] or _runs(dtype, path))
    _chosen[dtype] = path
    return path


def _runs(dtype: torch.dtype, path: str) -> bool:
    reason = unavailable(dtype, path)
    if reason is not None and not libraries.missing_flags(dtype, path):
        logger.warning("kernels native-%s are not used in %s: %s", path, dtype, reason)
    return reason is None


def is_torch_faster(dtype: torch.dtype, path: str) -> bool:
    """Whether torch's kernels are much faster on this CPU than those of `path`.

    Plain C is slow where the processor has no FMA, which it then emulates.
    """
    return not libraries.open_library(dtype, path).kernels_have_fma()


def no_bfloat16_rows(path: str | None = None) -> str | None:
    """The reason why rows that meet quantised weights cannot be rounded to bfloat16, which AMX
    alone multiplies; None if they can.

    Args:
        path: See `unavailable`.
    """
    if path not in (None, "amx"):
        return f"native-{path} does not use it"
    return unavailable(torch.bfloat16, "amx") or unavailable(torch.float32, "amx")


def sums_as_others(dtype: torch.dtype, path: str) -> bool:
    """Whether `path` sums in the order of plain C on this processor, so that their bits are equal.

    AMX in bfloat16 does not, and AVX512-BF16 might do otherwise on some processor.
    """
    return path not in DATA_TYPES[dtype].own_order and bool(libraries.open_library(dtype, path).kernels_sum_in_order())


def chosen_path(dtype: torch.dtype) -> str:
    """The path that computes in `dtype`."""
    return _chosen.get(dtype) or choose_path(dtype)


def library(dtype: torch.dtype) -> KernelLibrary:
    """The C library of `dtype` in the chosen path; raises as `libraries.open_library` does."""
    return libraries.open_library(dtype, chosen_path(dtype))


def compute_alone() -> None:
    """Let torch compute with one thread for the thread that calls this, from now on.

    For threads that share the processors already: OpenMP would give each of them others, which poll
    at the end of every operation. Without kernels nothing changes.
    """
    if unavailable(torch.float32) is None:
        torch.get_num_threads()  # torch sets its own number the first time
        library(torch.float32).kernels_compute_alone()
