"""Memory of the host that a process may still take: what is free, and the limits of containers."""

from __future__ import annotations

import resource
from pathlib import Path

from worker.engines.control_groups import CGROUPS, OWN_CGROUPS, groups_of


def free_host_memory() -> int | None:
    """Bytes that this process may still allocate: of the machine, below the limit of its container
    or service, and of its addresses; None where the system does not tell.
    """
    found = (_free_on_machine(), free_in_container(CGROUPS, OWN_CGROUPS), _free_addresses())
    return min((free for free in found if free is not None), default=None)


def _free_on_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _free_addresses() -> int | None:
    """Bytes below the limit of this process's addresses (``ulimit -v``), which KV takes whole."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return soft
    return max(0, soft - pages * resource.getpagesize())


_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and the cached files in use that the kernel gives back first; of cgroups version 2
and 1.
"""


def free_in_container(root: Path, own: Path) -> int | None:
    """Bytes below the memory limits of this process's control groups; None if they have none.

    Args:
        root: Mount point of the control groups.
        own: The file that names this process's groups.
    """
    groups = list(groups_of("memory", root, own))
    found = [free for group in groups for names in _LIMITS if (free := _free_in_group(group, *names)) is not None]
    return min(found, default=None)


def _free_in_group(group: Path, limit: str, used: str, cached: str) -> int | None:
    try:
        bound = (group / limit).read_text(encoding="ascii").strip()
        in_use = int((group / used).read_text(encoding="ascii"))
        stats = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return None if bound == "max" else max(0, int(bound) - in_use + int(stats.get(cached, 0)))
    except (OSError, ValueError):
        return None
