"""Verdicts on grammars: the limits, and which of them ended a child."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, Literal

TIMEOUT_S = 2.0
"""Processor time for compiling, seconds."""

MEMORY_BYTES = 256 * 1024 * 1024
"""Memory for compiling, bytes."""

STACK_BYTES = 2 * 1024 * 1024
"""Stack for compiling, bytes: a quarter of a thread's default, enough for 200 nested objects."""

TIME_SIGNALS = frozenset({signal.SIGPROF, signal.SIGXCPU})
"""Signals that end a child whose processor time is used up."""

Outcome = Literal["compiled", "refused", "time", "memory", "stack", "crashed"]


class SandboxBusy(Exception):
    """The queue is full, or the grammar waited too long; it may be tried again."""

    outcome = "busy"


class SandboxUnavailable(Exception):
    """The process cannot be started, or the sandbox is closed."""

    outcome = "unavailable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The sandbox's result for one grammar.

    Attributes:
        outcome: ``compiled``, ``refused`` by llguidance, or the limit that was exceeded.
        problem: Reason of a refusal, one short line; empty if it compiled.
        num_bytes: Memory of the compiled grammar once it has run on trial, bytes.
        cpu_s: Processor time of compiling, seconds.
    """

    outcome: Outcome
    problem: str = ""
    num_bytes: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a child that compiles one grammar.

    Attributes:
        timeout_s: Processor time, seconds.
        memory_bytes: Memory, bytes.
        stack_bytes: Stack, bytes.
    """

    timeout_s: float
    memory_bytes: int
    stack_bytes: int

    def verdict(self, signal_number: int, result: dict[str, Any] | None) -> Verdict:
        """Verdict on the grammar of a child that ended.

        Args:
            signal_number: Signal that killed it, 0 if none did.
            result: Message of the child (`adapters.grammars.sandbox_process`), None without one.
        """
        if result is not None and "bytes" in result:
            return Verdict("compiled", num_bytes=result["bytes"], cpu_s=result["cpu_s"])
        if result is not None:
            return Verdict("refused", result["refused"])
        if signal_number in TIME_SIGNALS:
            return Verdict("time", f"takes more than {self.timeout_s:g} s of processor time to compile")
        if signal_number == signal.SIGABRT:
            return Verdict("memory", f"takes more than {self.memory_bytes / 2**20:g} MiB of memory to compile")
        if signal_number in (signal.SIGSEGV, signal.SIGBUS):
            limit = f"takes more than {self.stack_bytes / 2**20:g} MiB of stack to compile"
            return Verdict("stack", f"{limit}: it is chained or nested too deeply")
        return Verdict("crashed", "crashes the compiler")
