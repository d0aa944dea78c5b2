"""Processor, memory and limits: what makes a worker slow, or fail under load, before it serves."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from worker.doctor.finding import Finding
from worker.engines.embedded.host.threads import cpu_quota
from worker.engines.embedded.native import choose_path, cpu_flags, unavailable
from worker.engines.free_memory import free_in_container
from worker.models import model_cache
from worker.models.beside import num_cpus

SMALLEST_MEMORY = 2 * 2**30
"""Bytes that the default model, its packed weights and a small KV cache need."""

SMALLEST_SHARED_MEMORY = 2**30
"""Bytes of ``/dev/shm`` for a weight update of a small model; containers get 64 MiB by default."""

SMALLEST_DISK = 2**30
"""Bytes for the default model, converted, and its packed copies."""

FEWEST_OPEN_FILES = 64
"""Open files without which a worker behind Dynamo does not start."""

OPEN_FILES = 4096
"""Open files that a worker, or a front door with two sockets a stream, needs for 1,000 streams."""

BACKLOG = 1024
"""Connections that may wait to be accepted when many clients connect at once."""

FRONTEND_WATCHES = 13
"""Inotify instances of a frontend with discovery by files, the KV router and prefill workers;
without these it takes 5, and a worker none. One that gets no more watches in a loop, or ends.
"""


def machine(root: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about the machine.

    Args:
        root: Root of the file system that is looked at: ``/``, or a tree of a test.
        environ: The environment.
    """
    yield _cores(root)
    yield from _instructions()
    yield _memory(root)
    yield _huge_pages(root)
    yield _shared_memory(root)
    yield _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _backlog(root)
    yield from _inotify(root)
    yield from _governor(root)
    yield _disk(model_cache(environ))


def _cores(root: Path) -> Finding:
    cores = num_cpus()
    quota = cpu_quota(root / "sys/fs/cgroup", root / "proc/self/cgroup")
    found = f"{cores} of {_model(root)}"
    if quota is None:
        return Finding("cores", "ok", f"{found}, no quota")
    if quota < 1 or quota % 1:
        whole = max(1, int(quota + 0.5))
        return Finding(
            "cores",
            "note",
            f"{found}, but a quota of {quota:g}: for part of each period every thread stands still",
            f"a CPU limit of whole cores, such as {whole}, or none",
        )
    return Finding("cores", "ok", f"{found}, quota {quota:g}")


def _model(root: Path) -> str:
    lines = _text(root / "proc/cpuinfo").splitlines()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.machine())


def _instructions() -> Iterator[Finding]:
    """The native kernels of each data type, or the reason why there are none."""
    for dtype in (torch.float32, torch.bfloat16):
        name = f"kernels {str(dtype).removeprefix('torch.')}"
        reason = unavailable(dtype)
        if reason is None:
            yield Finding(name, "ok", f"native, {choose_path(dtype)}")
        else:
            mend = "install a C compiler (Debian: gcc), then install this package again"
            yield Finding(name, "note", f"torch's, several times slower: {reason}", mend)
    if "amx_bf16" in cpu_flags() and (reason := unavailable(torch.bfloat16, "amx")) is not None:
        yield Finding(
            "AMX", "note", f"the processor has it, but {reason}", "Linux 5.16 or newer; a C compiler with AMX"
        )


def _memory(root: Path) -> Finding:
    available = re.search(r"^MemAvailable:\s*([0-9]+)", _text(root / "proc/meminfo"), re.MULTILINE)
    free = int(available[1]) * 1024 if available else 0
    contained = free_in_container(root / "sys/fs/cgroup", root / "proc/self/cgroup")
    where = "free"
    if contained is not None and contained < free:
        free, where = contained, "free below the container's limit"
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY and addresses < free:
        free, where = addresses, "of address space (ulimit -v)"
    if free < SMALLEST_MEMORY:
        mend = f"at least {_size(SMALLEST_MEMORY)} for the default model; less with --kv-cache-memory"
        return Finding("memory", "lacks", f"{_size(free)} {where}", mend)
    return Finding("memory", "ok", f"{_size(free)} {where}")


def _huge_pages(root: Path) -> Finding:
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    choices = _text(file).split()
    chosen = next((word.strip("[]") for word in choices if word.startswith("[")), "absent")
    if chosen in ("always", "madvise"):
        return Finding("huge pages", "ok", chosen)
    mend = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, on the node"
    return Finding("huge pages", "note", f"{chosen}: a decode step takes about a tenth longer", mend)


def _shared_memory(root: Path) -> Finding:
    path = root / "dev/shm"
    if not path.is_dir():
        mend = "mount a tmpfs there"
        return Finding("/dev/shm", "note", "absent: weight updates through shared memory are refused", mend)
    free = shutil.disk_usage(path).free
    if free < SMALLEST_SHARED_MEMORY:
        mend = "docker run --shm-size 1g; in Kubernetes an emptyDir of medium Memory"
        return Finding("/dev/shm", "note", f"{_size(free)} free: less than a weight update may need", mend)
    return Finding("/dev/shm", "ok", f"{_size(free)} free")


def _open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    room = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
    mend = "ulimit -n 65536" if room else "LimitNOFILE=65536 of the service, or --ulimit nofile=65536 of the container"
    if soft < FEWEST_OPEN_FILES:
        return Finding("open files", "lacks", f"{soft:,}: too few for a worker to start", mend)
    return Finding("open files", "note", f"{soft:,}: too few for 1,000 streams", mend)


def _backlog(root: Path) -> Finding:
    text = _text(root / "proc/sys/net/core/somaxconn").strip()
    if text.isdecimal() and int(text) < BACKLOG:
        found = f"{text} connections wait at most: others are refused when many come at once"
        return Finding("backlog", "note", found, f"sysctl -w net.core.somaxconn={4 * BACKLOG}")
    return Finding("backlog", "ok", text or "unknown")


def _inotify(root: Path) -> Iterator[Finding]:
    """Inotify instances that this user has left, where the kernel says its limit."""
    text = _text(root / "proc/sys/fs/inotify/max_user_instances").strip()
    if not text.isdecimal():
        return
    left = int(text) - sum(map(inotify_instances, (root / "proc").glob("[0-9]*")))
    found = f"{left:,} of {int(text):,} instances left"
    if left < FRONTEND_WATCHES:
        found += f": a frontend with discovery by files takes up to {FRONTEND_WATCHES}, or ends"
        mend = "sysctl -w fs.inotify.max_user_instances=1024, or discovery by etcd"
        yield Finding("inotify", "note", found, mend)
    else:
        yield Finding("inotify", "ok", found)


def inotify_instances(process: Path) -> int:
    """Inotify instances of a process of this user."""
    try:
        if process.stat().st_uid != os.getuid():
            return 0
        files = list((process / "fd").iterdir())
    except OSError:  # it has ended, or may not be looked at
        return 0
    return sum(_target(file) == "anon_inode:inotify" for file in files)


def _target(link: Path) -> str:
    """Path in a link; empty if it cannot be read."""
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _governor(root: Path) -> Iterator[Finding]:
    """The frequency governor, where the machine has one."""
    chosen = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    if chosen == "powersave" and "intel_pstate" not in _text(
        root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"
    ):
        yield Finding("governor", "note", "powersave: the lowest frequency", "cpupower frequency-set -g performance")
    elif chosen:
        yield Finding("governor", "ok", chosen)


def _disk(cache: Path) -> Finding:
    """The directory of converted checkpoints; of what is not there yet, the nearest that is. Other
    checkpoints are served without it.
    """
    existing = next(path for path in (cache, *cache.parents) if _exists(path))
    if not os.access(existing, os.W_OK | os.X_OK):
        mend = "set XDG_CACHE_HOME to a directory that this user may write"
        found = f"{cache}: {existing} cannot be written: no GGUF file is served, nor the default model kept"
        return Finding("model cache", "note", found, mend)
    free = shutil.disk_usage(existing).free
    if free < SMALLEST_DISK:
        mend = "free space there, or set XDG_CACHE_HOME to another disk"
        found = f"{cache}: {_size(free)} free: less than the default model takes"
        return Finding("model cache", "note", found, mend)
    return Finding("model cache", "ok", f"{cache}: {_size(free)} free")


def _exists(path: Path) -> bool:
    """Whether a path is there; not if this user may not know."""
    try:
        return path.exists()
    except OSError:
        return False


def _text(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
