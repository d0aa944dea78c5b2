"""The processor that figures were measured on."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path


def processor_name() -> str:
    """Name, family and model of the processor where Linux tells them: the first alone may be that
    of several generations.
    """
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, found, value = line.partition(":")
            if found:
                facts.setdefault(name.strip(), value.strip())
    if "model name" not in facts:
        return platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family', '-')}, model {facts.get('model', '-')})"
