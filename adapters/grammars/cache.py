"""Compiled grammars of one vocabulary: a cache bounded in bytes, filled through the sandbox."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from functools import partial
from weakref import WeakValueDictionary, ref

from llguidance import LLTokenizer

from adapters.grammars.compile_threads import Compiled, CompileThreads
from adapters.grammars.compiler import GrammarRefused, compile_grammar
from adapters.grammars.freed_memory import FreedMemory
from adapters.grammars.masks import GrammarMasks
from adapters.grammars.sandbox import GrammarSandbox, SandboxBusy, Verdict

MAX_BYTES = 256 * 1024 * 1024
"""Bytes of compiled grammars to keep."""

MAX_REFUSED = 4096
"""Refused grammars to remember, by digest."""

SLOW_FOR_S = 60.0
"""Time for which a grammar that timed out is refused without another attempt.

Processor time varies with the machine's load by a factor of two or three at worst; a crash or a
refusal is deterministic.
"""

FAST_S = 0.05
"""Processor time of compiling, seconds, up to which a grammar is compiled again within a step."""


class GrammarCache:
    """LRU cache of compiled grammars. Thread-safe.

    Args:
        load: Loads the tokenizer of the vocabulary, which takes long (`compiler.load_tokenizer`).
        num_words: Words of 32 bits that a mask of the vocabulary has.
        max_bytes: Bytes of compiled grammars to keep. A grammar in use is always found again.
        clock: Monotonic clock, seconds.

    Attributes:
        sandbox: Compiles every grammar first; None trusts grammars.
        masks: Masks of the grammars.
        num_bytes: Bytes of the cached grammars.
        num_hits: Look-ups that found the grammar.
        num_misses: Look-ups that did not.
    """

    def __init__(
        self,
        load: Callable[[], LLTokenizer],
        num_words: int,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self.sandbox: GrammarSandbox | None = None
        self.masks = GrammarMasks(num_words)
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._clock = clock
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._in_use: WeakValueDictionary[bytes, Compiled] = WeakValueDictionary()
        self._refused: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()
        self._freed_memory = FreedMemory(clock)
        self._compiling: dict[bytes, Future[Compiled]] = {}
        self._lock = threading.Lock()
        self._threads = CompileThreads(self.tokenizer)

    def tokenizer(self) -> LLTokenizer:
        """The tokenizer, loaded now if it has not been."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    def __len__(self) -> int:
        return len(self._kept)

    def compiled(self, grammar: str) -> Compiled:
        """``grammar``, from the cache or compiled now; waits for it.

        Args:
            grammar: The grammar in llguidance's JSON form.

        Raises:
            GrammarRefused: it is malformed, matches no text, or exceeded a limit.
            SandboxBusy, SandboxUnavailable: the sandbox could not compile it.
        """
        found = self._find(_digest(grammar))  # not counted: `request` was called for it just before
        return found if isinstance(found, Compiled) else self.request(grammar).result()

    def renewed(self, grammar: str, broken: Compiled) -> Compiled | None:
        """Compile ``grammar`` again in the caller's thread, since the lexer of ``broken`` failed.

        None if that would take long.
        """
        digest = _digest(grammar)
        found = self._find(digest)
        if isinstance(found, Compiled) or broken.cpu_s > FAST_S:
            return found if isinstance(found, Compiled) else None
        compiled = Compiled(compile_grammar(self.tokenizer(), grammar), broken.num_bytes, broken.cpu_s)
        with self._lock:
            self._insert(digest, compiled)
        return compiled

    def request(self, grammar: str, client: Hashable | None = None) -> Future[Compiled]:
        """Start what `compiled` waits for; cancelling the future leaves the queue at once.

        Args:
            grammar: The grammar in llguidance's JSON form.
            client: Clients are served round robin in the sandbox; None counts as a separate client.
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
        wanted.add_done_callback(partial(_cancel_too, ref(trial)))  # a weak reference: no cycle keeps the grammar alive
        trial.add_done_callback(partial(self._tried, digest, grammar, wanted))
        return wanted

    def prepare(self, grammars: Iterable[str]) -> bool:
        """Start to compile grammars; whether all of them are compiled, or refused."""
        compiling = [self.request(grammar) for grammar in grammars]
        return all(each.done() for each in compiling)

    def _find(self, digest: bytes) -> Compiled | Verdict | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            elif digest in self._refused:
                verdict, until = self._refused[digest]
                if self._clock() < until:
                    return verdict
                del self._refused[digest]
            found = self._in_use.get(digest)
            if found is None or not found.is_broken:
                return found
            del self._in_use[digest]
            if self._kept.pop(digest, None) is not None:
                self.num_bytes -= found.num_bytes
            return None

    def _known(self, digest: bytes) -> Verdict | None:
        """Verdict for the sandbox, if the same grammar has been compiled meanwhile."""
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
            self._freed_memory.trim_if_due()

    def _remember(self, digest: bytes, verdict: Verdict) -> None:
        lasts_s = SLOW_FOR_S if verdict.outcome == "time" else float("inf")
        with self._lock:
            self._refused[digest] = verdict, self._clock() + lasts_s
            self._refused.move_to_end(digest)
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def _compile(self, digest: bytes, grammar: str, tried: Verdict | None, wanted: Future[Compiled]) -> None:
        """Compile in this process, once for all concurrent requests."""
        with self._lock:
            found = self._in_use.get(digest)
            running = self._compiling.get(digest) if found is None else None
            is_first = found is None and running is None
            if is_first:
                running = self._threads.submit(grammar, tried)
                self._compiling[digest] = running
        if running is None:
            assert found is not None
            _settle(wanted, found)
            return
        if is_first:
            running.add_done_callback(partial(self._keep, digest))
        running.add_done_callback(partial(_settle_as, wanted))

    def _keep(self, digest: bytes, done: Future[Compiled]) -> None:
        error = done.exception()
        if isinstance(error, GrammarRefused):
            self._remember(digest, Verdict("refused", str(error)))
        with self._lock:
            del self._compiling[digest]
            if error is not None:
                return
            self._insert(digest, done.result())
        self._freed_memory.trim_if_due()

    def _insert(self, digest: bytes, compiled: Compiled) -> None:
        """Keep ``compiled``; the lock is held."""
        self._in_use[digest] = compiled
        if compiled.num_bytes <= self.max_bytes and digest not in self._kept:
            self._kept[digest] = compiled
            self.num_bytes += compiled.num_bytes
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()


def _cancel_too(trial: ref[Future[Verdict]], done: Future[Compiled]) -> None:
    other = trial()
    if done.cancelled() and other is not None:
        other.cancel()


def _settle_as(wanted: Future[Compiled], done: Future[Compiled]) -> None:
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
