"""The sandbox process as its owner sees it: its start, its socket, and whether it still answers.

The process itself is `adapters.grammars.sandbox_process`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapters.grammars.sandbox.feedback_queue import Level
from adapters.grammars.sandbox.verdict import Limits
from adapters.grammars.sandbox_process import Frames, frame

START_TIMEOUT_S = 60.0
"""Time for the process to load the tokenizer."""

KILL_TIMEOUT_S = 5.0
"""Time for the process to confirm that a killed child is gone."""

_BOOT = (
    "import sys, types; package = types.ModuleType('adapters'); package.__path__ = [sys.argv[2]]; "
    "sys.modules['adapters'] = package; sys.path[:] = sys.argv[3:]; "
    "from adapters.grammars.sandbox_process import main; main()"
)
"""Imports the process's module without `adapters` itself, which would import torch."""


class SandboxProcess:
    """The sandbox process, starting with its tokenizer.

    Args:
        tables: Makes the bytes of every id (`adapters.grammars.compiler.byte_tables`); called while
            the process imports its modules.

    Attributes:
        channel: Non-blocking socket, because the driving thread has deadlines.
        pid: Process id.
        is_ready: Whether it has loaded the tokenizer.
        unsent: Bytes that the process has not read yet.

    Raises:
        OSError: it cannot be started.
        Exception: whatever ``tables`` raises; the process has ended then.
    """

    def __init__(self, tables: Callable[[], dict[str, Any]]) -> None:
        package = Path(__file__).resolve().parents[2]
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        command = [sys.executable, "-I", "-c", _BOOT, str(theirs.fileno()), str(package), *filter(None, sys.path)]
        # One arena, so that the allocator's count is the grammar's and no arena's address space
        # counts towards its limit.
        environ = {**os.environ, "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        quiet = subprocess.DEVNULL
        try:
            with theirs:
                fds = [theirs.fileno()]
                self._child = subprocess.Popen(command, stdin=quiet, stdout=quiet, env=environ, pass_fds=fds)
        except OSError:
            self.channel.close()
            raise
        self.pid = self._child.pid
        self.is_ready = False
        try:
            self.unsent = bytearray(frame(tables()))  # megabytes, read once it has started
        except BaseException:
            self.end()
            raise
        self._start_deadline = time.monotonic() + START_TIMEOUT_S
        self._frames = Frames()
        self._killed: dict[int, float] = {}

    @property
    def events(self) -> int:
        """Events to select on `channel`."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)

    def compile(self, job_id: int, grammar: str, level: Level, limits: Limits) -> None:
        """Compile ``grammar`` in a child.

        Args:
            job_id: Number in the message that the child has ended.
            grammar: The grammar in llguidance's JSON form.
            level: Processor time and niceness.
            limits: Memory and stack.

        Raises:
            OSError: the process has closed the socket.
        """
        message = {"id": job_id, "grammar": grammar, "cpu_s": level.cpu_s, "nice": level.nice}
        self._send({**message, "memory": limits.memory_bytes, "stack": limits.stack_bytes})

    def _send(self, message: dict[str, Any]) -> None:
        self.unsent += frame(message)
        self.flush()

    def flush(self) -> None:
        """Write as many of the unsent bytes as possible now.

        Raises:
            OSError: the process has closed the socket.
        """
        if self.unsent:
            with contextlib.suppress(BlockingIOError):
                del self.unsent[: self.channel.send(self.unsent)]

    def kill_child(self, job_id: int) -> None:
        """Kill the child of a job; the process confirms it like any other end.

        Raises:
            OSError: the process has closed the socket.
        """
        self._killed[job_id] = time.monotonic()
        self._send({"id": job_id})

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have come in completely; None if the process has ended."""
        try:
            data = self.channel.recv(1 << 16)
        except OSError:
            return None
        messages = self._frames.feed(data)
        for message in messages:
            self._killed.pop(message.get("id", 0), None)
        return messages if data else None

    @property
    def deadlines(self) -> list[float]:
        """Monotonic times at which an answer of the process is overdue, seconds."""
        start = [] if self.is_ready else [self._start_deadline]
        return [*start, *(since + KILL_TIMEOUT_S for since in self._killed.values())]

    def overdue(self, now: float) -> str | None:
        """Problem of a process that should have answered before ``now``; None if there is none."""
        if not self.is_ready and now >= self._start_deadline:
            return f"was not ready within {START_TIMEOUT_S:g} s"
        if any(now - since > KILL_TIMEOUT_S for since in self._killed.values()):
            return "does not answer"
        return None

    def end(self) -> None:
        """Kill it, and with it its children."""
        self.channel.close()
        self._child.kill()
        self._child.wait()
