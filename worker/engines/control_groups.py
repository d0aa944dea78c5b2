"""The control groups of this process, of versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def groups_of(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Directories of the groups that this process is in, outermost first; inside a container the
    outermost is its own, and in a service of the system its own is further in.

    Args:
        controller: The resource that is limited, ``cpu`` or ``memory``.
        root: Mount point of the control groups.
        own: The file that names this process's groups.
    """
    yield from (root, root / controller, root / f"{controller},{controller}acct")
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:  # of version 2: 0::/path; of version 1: 4:cpu,cpuacct:/path
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        mounted = root / controllers
        for depth in range(1, len(Path(path).parts)):
            yield mounted.joinpath(*Path(path).parts[1 : depth + 1])
