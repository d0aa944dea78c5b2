"""A line of the doctor's report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "note", "lacks"]
"""``ok``: as it should be. ``note``: a worker runs, but slower, or without a feature. ``lacks``: a
worker does not start, or fails under load."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One property of the machine.

    Attributes:
        name: The property, for example ``huge pages``.
        level: Whether it is as it should be.
        found: Value or state that was found.
        mend: A command or a setting that mends it; empty if nothing needs to be mended.
    """

    name: str
    level: Level
    found: str
    mend: str = ""

    def line(self, width: int) -> str:
        """One line; the name takes `width` characters."""
        mend = f"; mend: {self.mend}" if self.mend else ""
        return f"{self.level:5} {self.name:{width}} {' '.join(self.found.split())}{mend}"

    def to_json(self) -> dict[str, str]:
        """The fields by name."""
        return asdict(self)
