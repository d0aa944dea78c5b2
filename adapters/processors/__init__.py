"""The built-in processors, one file per family. They do not know which engine runs them."""

from __future__ import annotations

from adapters.contract import Processor

BUILTINS: tuple[type[Processor], ...] = ()
"""Every built-in, in the order law's order and within a stage in the order of the documentation."""
