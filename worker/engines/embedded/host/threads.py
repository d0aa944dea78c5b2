"""Number of CPU threads that compute a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from worker.engines.control_groups import CGROUPS, OWN_CGROUPS, groups_of

SMALL_CHECKPOINT = 32 * 2**20
"""Bytes of a checkpoint up to which one thread computes a step as fast as two do. Where the
frontend or a client needs the other processor, two take ten times as long: each operation then ends
when the scheduler lets the second one run."""


def limit_threads(
    model_path: str | Path, local_workers: int = 1, environ: Mapping[str, str] = os.environ, quota: float | None = None
) -> None:
    """Let torch compute with as many threads as this process has cores, unless
    ``OMP_NUM_THREADS`` says how many.

    It holds for this thread and for all that begin after it. A fraction of a core is no thread: the
    kernel would stop all of them for part of each period.

    Args:
        model_path: Directory of the checkpoint; a small one is computed by one thread.
        local_workers: Workers that share the cores.
        environ: The environment.
        quota: Cores that the container may use; `cpu_quota` by default.
    """
    if environ.get("OMP_NUM_THREADS"):
        return
    cores = torch.get_num_threads()  # torch respects the process's affinity, not its quota
    quota = cpu_quota() if quota is None else quota
    size = sum(path.stat().st_size for path in Path(model_path).glob("*.safetensors"))
    share = 1 if size <= SMALL_CHECKPOINT else int(min(cores, quota or cores) / local_workers)
    if share < cores:
        torch.set_num_threads(max(1, share))


def cpu_quota(root: Path | None = None, own: Path | None = None) -> float | None:
    """Cores' worth of time that the control groups of this process let it use; None without a
    limit.

    Args:
        root: Mount point of the control groups.
        own: The file that names this process's groups.
    """
    root, own = root or CGROUPS, own or OWN_CGROUPS
    quotas = [
        quota for group in groups_of("cpu", root, own) for quota in (_version_2(group), _version_1(group)) if quota
    ]
    return min(quotas, default=None)


def _version_2(group: Path) -> float | None:
    quota, period = _numbers(group / "cpu.max")
    return quota / period if quota > 0 and period > 0 else None


def _version_1(group: Path) -> float | None:
    quota, period = (_numbers(group / f"cpu.cfs_{name}_us")[0] for name in ("quota", "period"))
    return quota / period if quota > 0 and period > 0 else None


def _numbers(path: Path) -> tuple[int, int]:
    """The first two numbers in a file; -1 for what is no number: ``max`` is no limit."""
    try:
        words = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        words = []
    first, second = ([int(word) if word.isdecimal() else -1 for word in words] + [-1, -1])[:2]
    return first, second
