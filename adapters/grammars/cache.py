"""Compiled grammars of one vocabulary: a cache bounded in bytes, filled through the sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary, ref

from llguidance import LLMatcher, LLTokenizer

from adapters.grammars.compiler import GrammarRefused, compile_grammar, walk
from adapters.grammars.masks import GrammarMasks
from adapters.grammars.sandbox import GrammarSandbox, SandboxBusy, Verdict

MAX_BYTES = 256 * 1024 * 1024
"""Bytes of compiled grammars to keep."""

MAX_BAD = 4096
"""Refused grammars to remember, by digest."""

SLOW_FOR_S = 60.0
"""How long a grammar that timed out is refused without another attempt.

Processor time varies with the machine's load by a factor of two or three at worst; a crash or a
refusal is deterministic.
"""

STACK_BYTES = 64 * 1024 * 1024
"""Stack of the threads that compile in this process; allocated as it is used.

What came through the sandbox needs less.
"""

SLOW_S = 0.25
"""Processor time in the sandbox, seconds, above which a grammar compiles in a thread of its own.

Such grammars compile one at a time in this process, so that others do not wait for them.
"""

BYTES_PER_CHARACTER = 128
"""Compiled bytes per character of source, where no sandbox has measured them.

More than JSON Schemas take, which take most: with other threads in the process the allocator's
counters do not say.
"""

FAST_S = 0.05
"""Processor time of compiling, seconds, up to which a grammar is compiled again within a step."""

TRIM_S = 10.0
"""Seconds of compiling and refusing after which freed memory is returned to the system.

Grammars are freed in pieces of every size: without trimming, resident memory grows although the
allocated bytes do not. It takes some 10 ms.
"""

NUM_THREADS = 2
"""Compile threads for all other grammars."""


@dataclass(eq=False)
class Compiled:
    """A compiled grammar.

    Attributes:
        matcher: In its initial state; copied, never advanced.
        num_bytes: Its memory, bytes.
        cpu_s: Processor time that it took to compile, seconds.
    """

    matcher: LLMatcher
    num_bytes: int
    cpu_s: float

    @property
    def is_broken(self) -> bool:
        """Whether the lexer, which copies of a matcher share, has exceeded a limit, on whose path
        ever: then it stays in an error for all of them.
        """
        copy = self.matcher.deep_copy()
        copy.compute_bitmask()
        return bool(copy.is_error())


class GrammarCache:
    """LRU cache of compiled grammars. Thread-safe.

    Args:
        tokenizer: Of the vocabulary.
        max_bytes: Bytes of compiled grammars to keep. A grammar in use is always found again.
        clock: Seconds, monotonic.

    Attributes:
        sandbox: Compiles every grammar first; None trusts grammars.
        masks: Of its grammars.
        num_bytes: Bytes of the cached grammars.
        num_hits: Look-ups that found the grammar.
        num_misses: Look-ups that did not.
    """

    def __init__(
        self, tokenizer: LLTokenizer, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tokenizer = tokenizer
        self.sandbox: GrammarSandbox | None = None
        self.masks = GrammarMasks(tokenizer.eos_token // 32)  # its end token is the first bit behind a row's words
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._clock = clock
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._in_use: WeakValueDictionary[bytes, Compiled] = WeakValueDictionary()
        self._bad: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()
        self._trimmed_at = clock()
        self._compiling: dict[bytes, Future[Compiled]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar-compiler")
        self._slow_thread = ThreadPoolExecutor(1, thread_name_prefix="slow-grammar-compiler")

    def __len__(self) -> int:
        return len(self._kept)

    def compiled(self, grammar: str) -> Compiled:
        """``grammar``, from the cache or compiled now; waits for it.

        Args:
            grammar: In llguidance's JSON form.

        Raises:
            GrammarRefused: it is malformed, matches no text, or exceeded a limit.
            SandboxBusy, SandboxUnavailable: the sandbox could not compile it.
        """
        found = self._find(_digest(grammar))  # not counted: `request` was called for it just before
        return found if isinstance(found, Compiled) else self.request(grammar).result()

    def renewed(self, grammar: str, broken: Compiled) -> Compiled | None:
        """``grammar`` with a lexer that works, in the place of ``broken``.

        It compiles in the caller's thread. None if that would take long.
        """
        digest = _digest(grammar)
        found = self._find(digest)
        if isinstance(found, Compiled) or broken.cpu_s > FAST_S:
            return found if isinstance(found, Compiled) else None
        compiled = Compiled(compile_grammar(self.tokenizer, grammar), broken.num_bytes, broken.cpu_s)
        with self._lock:
            self._insert(digest, compiled)
        return compiled

    def request(self, grammar: str, client: Hashable | None = None) -> Future[Compiled]:
        """As `compiled`, without waiting; cancelling the future leaves the sandbox's queue at once.

        Args:
            grammar: In llguidance's JSON form.
            client: For round robin over clients in the sandbox; None counts as a separate client.
        """
        digest = _digest(grammar)
        wanted: Future[Compiled] = Future()
        found = self._find(digest)
        if found is not None:
            self.num_hits += 1
            _settle(wanted, found)
            return wanted
        self.num_misses += 1
        if self.sandbox is None:
            self._compile(digest, grammar, None, wanted)
            return wanted
        trial = self.sandbox.submit(grammar, client, partial(self._known, digest))
        wanted.add_done_callback(partial(_cancel_too, ref(trial)))  # each would keep the other, and the grammar
        trial.add_done_callback(partial(self._tried, digest, grammar, wanted))
        return wanted

    def _find(self, digest: bytes) -> Compiled | Verdict | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            elif digest in self._bad:
                verdict, until = self._bad[digest]
                if self._clock() < until:
                    return verdict
                del self._bad[digest]
            found = self._in_use.get(digest)
            if found is None or not found.is_broken:
                return found
            del self._in_use[digest]
            if self._kept.pop(digest, None) is not None:
                self.num_bytes -= found.num_bytes
            return None

    def _known(self, digest: bytes) -> Verdict | None:
        """For the sandbox: the verdict, if the same grammar has been compiled meanwhile."""
        found = self._find(digest)
        return Verdict("compiled", num_bytes=found.num_bytes) if isinstance(found, Compiled) else found

    def _tried(self, digest: bytes, grammar: str, wanted: Future[Compiled], trial: Future[Verdict]) -> None:
        if trial.cancelled():
            return
        error = trial.exception()
        if error is not None:
            _settle(wanted, error)
            return
        verdict = trial.result()
        if verdict.outcome == "compiled":
            try:
                self._compile(digest, grammar, verdict, wanted)
            except RuntimeError as error:
                _settle(wanted, SandboxBusy(f"no thread could be started to compile it: {error}"))
        else:
            self._remember(digest, verdict)
            _settle(wanted, verdict)
            self._trim_now_and_then()

    def _remember(self, digest: bytes, verdict: Verdict) -> None:
        lasts_s = SLOW_FOR_S if verdict.outcome == "time" else float("inf")
        with self._lock:
            self._bad[digest] = verdict, self._clock() + lasts_s
            self._bad.move_to_end(digest)
            while len(self._bad) > MAX_BAD:
                self._bad.popitem(last=False)

    def _compile(self, digest: bytes, grammar: str, tried: Verdict | None, wanted: Future[Compiled]) -> None:
        """Compile in this process, once for all concurrent requests."""
        with self._lock:
            found = self._in_use.get(digest)
            running = self._compiling.get(digest) if found is None else None
            is_first = found is None and running is None
            if is_first:
                is_slow = tried is not None and tried.cpu_s > SLOW_S
                with _stack_of_threads:
                    threads = self._slow_thread if is_slow else self._threads
                    running = threads.submit(self._compile_here, grammar, tried)
                self._compiling[digest] = running
        if running is None:
            assert found is not None
            _settle(wanted, found)
            return
        if is_first:
            running.add_done_callback(partial(self._keep, digest))
        running.add_done_callback(partial(_pass_on, wanted))

    def _compile_here(self, grammar: str, tried: Verdict | None) -> Compiled:
        began_s = time.thread_time()
        matcher = compile_grammar(self.tokenizer, grammar)
        if tried is not None:
            return Compiled(matcher, tried.num_bytes, tried.cpu_s)
        walk(matcher.deep_copy(), self.tokenizer)
        return Compiled(matcher, BYTES_PER_CHARACTER * len(grammar), time.thread_time() - began_s)

    def _keep(self, digest: bytes, done: Future[Compiled]) -> None:
        error = done.exception()
        if isinstance(error, GrammarRefused):
            self._remember(digest, Verdict("refused", str(error)))
        with self._lock:
            del self._compiling[digest]
            if error is not None:
                return
            self._insert(digest, done.result())
        self._trim_now_and_then()

    def _insert(self, digest: bytes, compiled: Compiled) -> None:
        """Keep ``compiled``; the lock is held."""
        self._in_use[digest] = compiled
        if compiled.num_bytes <= self.max_bytes and digest not in self._kept:
            self._kept[digest] = compiled
            self.num_bytes += compiled.num_bytes
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def _trim_now_and_then(self) -> None:
        now = self._clock()
        with self._lock:
            if now < self._trimmed_at + TRIM_S:
                return
            self._trimmed_at = now
        _trim()


def _trim() -> None:
    """Return free memory to the system, if the allocator is glibc's."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()


def _cancel_too(trial: ref[Future[Verdict]], done: Future[Compiled]) -> None:
    other = trial()
    if done.cancelled() and other is not None:
        other.cancel()


def _pass_on(wanted: Future[Compiled], done: Future[Compiled]) -> None:
    error = done.exception()
    _settle(wanted, done.result() if error is None else error)


def _settle(wanted: Future[Compiled], found: Compiled | Verdict | BaseException) -> None:
    if not wanted.set_running_or_notify_cancel():
        return
    if isinstance(found, Compiled):
        wanted.set_result(found)
    elif isinstance(found, Verdict):
        wanted.set_exception(GrammarRefused(found.problem))
    else:
        wanted.set_exception(found)


class _StackOfThreads:
    """While entered, new threads of this process get a stack of `STACK_BYTES`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._before = threading.stack_size(STACK_BYTES)

    def __exit__(self, *error: object) -> None:
        threading.stack_size(self._before)
        self._lock.release()


_stack_of_threads = _StackOfThreads()
