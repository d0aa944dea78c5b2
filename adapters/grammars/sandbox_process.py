"""The sandbox process: holds the tokenizer and forks one child per grammar, which may crash.

It is a fresh process with one thread, so that forking it is safe, and it imports nothing but the
standard library and llguidance, so that forking it takes a millisecond. Started and driven by
`adapters.grammars.sandbox`. Messages in both directions are JSON with a four-byte length prefix;
closing the socket ends the process and all its children.

To the process: the bytes of every id first, then ``{"id", "grammar", "cpu_s", "memory", "stack",
"nice"}`` to compile one, or ``{"id"}`` alone to kill it. From it: ``{"ready", "rss"}`` or
``{"failed"}`` once, then ``{"id", "status", "result"}`` for every child that ended: its wait
status, and ``{"bytes", "cpu_s"}`` or ``{"refused"}`` if it got that far.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from llguidance import LLTokenizer

from adapters.grammars.compiler import GrammarRefused, compile_grammar, load_tokenizer, tokens_of, walk

HEADER = struct.Struct("<I")
NICE = 10
"""Niceness of the process and its children: the engine on the same cores has priority."""

CANNOT_BEGIN = 1 << 8
"""Wait status of a child that exited with 1, before it compiled."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_LIBC = ctypes.CDLL(None, use_errno=True)


def frame(message: dict[str, Any]) -> bytes:
    """Bytes of ``message`` on the socket."""
    data = json.dumps(message).encode()
    return HEADER.pack(len(data)) + data


class Frames:
    """Incremental decoder: bytes to messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages completed by ``data``."""
        self._data += data
        found = []
        while len(self._data) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            found.append(json.loads(self._data[HEADER.size : end]))
            del self._data[:end]
        return found


def serve(channel: socket.socket) -> None:
    """Serve ``channel`` until its other end is closed."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a draining worker still needs grammars; closing the socket ends this process
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    os.nice(NICE)
    frames = Frames()
    began = time.perf_counter()
    messages: list[dict[str, Any]] = []
    while not messages:
        messages = frames.feed(_received(channel))
    try:
        tokenizer = load_tokenizer(tokens_of(messages.pop(0)))
    except Exception as error:  # the process boundary: the worker logs the reason
        channel.sendall(frame({"failed": f"{type(error).__name__}: {error}"[:500]}))
        return
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        channel.sendall(frame({"failed": f"loading the tokenizer left {num_threads} threads: forking is not safe"}))
        return
    gc.collect()
    gc.freeze()
    channel.sendall(frame({"ready": round(time.perf_counter() - began, 3), "rss": resident_bytes()}))
    _Children(channel, tokenizer, frames).run(messages)


class _Children:
    """One child for each grammar that is being compiled."""

    def __init__(self, channel: socket.socket, tokenizer: LLTokenizer, frames: Frames) -> None:
        self._channel = channel
        self._tokenizer = tokenizer
        self._frames = frames
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}
        self._results: dict[int, bytearray] = {}

    def run(self, messages: list[dict[str, Any]]) -> None:
        try:
            while True:
                for message in messages:
                    self._take(message)
                messages = []
                for key, _ in self._selector.select():
                    if key.fileobj is self._channel:
                        messages = self._frames.feed(_received(self._channel))
                    else:
                        self._read(key.fd, key.data)
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)

    def _take(self, message: dict[str, Any]) -> None:
        job_id = message["id"]
        if "grammar" in message:
            self._start(job_id, message)
        elif job_id in self._pids:  # not reaped yet, so the pid is still valid
            os.kill(self._pids[job_id], signal.SIGKILL)

    def _start(self, job_id: int, message: dict[str, Any]) -> None:
        parent = os.getpid()
        try:
            reader, writer, pid = _forked()
        except OSError:  # no process, descriptor or memory: as of a child that could not begin
            self._channel.sendall(frame({"id": job_id, "status": CANNOT_BEGIN, "result": None}))
            return
        if pid == 0:
            _child(parent, writer, lambda: self._channel.close(), self._tokenizer, message)
        os.close(writer)
        self._pids[job_id] = pid
        self._results[job_id] = bytearray()
        self._selector.register(reader, selectors.EVENT_READ, job_id)

    def _read(self, reader: int, job_id: int) -> None:
        data = os.read(reader, 65536)
        if data:
            self._results[job_id] += data
            return
        self._selector.unregister(reader)
        os.close(reader)
        _, status = os.waitpid(self._pids.pop(job_id), 0)
        data = bytes(self._results.pop(job_id))
        result = json.loads(data) if data and status == 0 else None
        self._channel.sendall(frame({"id": job_id, "status": status, "result": result}))


def _forked() -> tuple[int, int, int]:
    """Both ends of a pipe to a new child, and its process id, 0 in the child. Raises `OSError`."""
    reader, writer = os.pipe()
    try:
        return reader, writer, os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise


def _received(channel: socket.socket) -> bytes:
    data = channel.recv(1 << 20)
    if not data:
        raise SystemExit(0)
    return data


def _child(
    parent: int, writer: int, leave: Callable[[], None], tokenizer: LLTokenizer, message: dict[str, Any]
) -> None:
    """The forked child: compile within the limits of ``message``, write the result, exit."""
    status = 1
    with contextlib.suppress(BaseException):  # never return into the parent's loop
        _die_with_parent()
        if os.getppid() == parent:
            leave()
            _confine(message)
            thread = threading.Thread(target=_compile, args=(tokenizer, message["grammar"], writer))
            thread.start()
            thread.join()
            status = 0
    os._exit(status)


def _confine(message: dict[str, Any]) -> None:
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # Rust reports panics and allocation failures on stderr
        os.dup2(quiet, stream)
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no core file
    os.nice(message["nice"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    threading.stack_size(message["stack"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _virtual_bytes() + message["stack"] + message["memory"])
    _limit(resource.RLIMIT_CPU, int(message["cpu_s"]) + 2)  # whole seconds only; the timer below is the actual limit
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, message["cpu_s"])


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _compile(tokenizer: LLTokenizer, grammar: str, writer: int) -> None:
    before = heap_bytes()
    try:
        matcher = compile_grammar(tokenizer, grammar)
        walk(matcher.deep_copy(), tokenizer)
        used = heap_bytes() - before  # with the states of the lexer, which all copies of the matcher share
    except GrammarRefused as error:
        result: dict[str, Any] = {"refused": str(error)}
    except MemoryError:
        os.abort()  # as Rust does
    else:
        del matcher  # on this small stack as well
        result = {"bytes": max(0, used), "cpu_s": time.process_time()}
    os.write(writer, json.dumps(result).encode())


class _Mallinfo2(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        *((name, ctypes.c_size_t) for name in ("hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


def heap_bytes() -> int:
    """Bytes allocated in this process; resident bytes without glibc."""
    try:
        mallinfo2 = _LIBC.mallinfo2
    except AttributeError:
        return resident_bytes()
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return _statm()[1]


def _virtual_bytes() -> int:
    return _statm()[0]


def _statm() -> tuple[int, int]:
    with open("/proc/self/statm") as file:
        virtual, resident = file.read().split()[:2]
    return int(virtual) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Serve the socket whose descriptor is the only argument."""
    with contextlib.suppress(BrokenPipeError):  # the worker has gone, without having read what this had to say
        serve(socket.socket(fileno=int(sys.argv[1])))
