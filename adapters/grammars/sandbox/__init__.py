"""Compiling grammars in a separate process first, where a crash is harmless."""

from adapters.grammars.sandbox.sandbox import GrammarSandbox
from adapters.grammars.sandbox.verdict import SandboxBusy, SandboxUnavailable, Verdict

__all__ = ["GrammarSandbox", "SandboxBusy", "SandboxUnavailable", "Verdict"]
