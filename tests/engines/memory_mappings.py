"""What the kernel says of this process's memory."""

from __future__ import annotations

import re
from pathlib import Path


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
