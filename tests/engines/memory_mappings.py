"""What the kernel says of this process's memory."""

from __future__ import annotations

import platform
import re
from pathlib import Path

CAN_POPULATE = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (5, 14)
"""Whether the kernel gives memory before it is written to (MADV_POPULATE_WRITE)."""


def mapping_field(address: int, name: str) -> str:
    """A field of the mapping at `address` in `/proc/self/smaps`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if mapping:
            inside = int(mapping[1], 16) <= address < int(mapping[2], 16)
        elif inside and line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    raise AssertionError(f"no mapping at {address:x} with {name}")


def resident_bytes(address: int) -> int:
    """Bytes in memory of the mapping at `address`, as the kernel counts them."""
    return 1024 * int(mapping_field(address, "Rss").split()[0])
