"""Threads that compile grammars in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from adapters.grammars.compiler import compile_grammar, walk
from adapters.grammars.sandbox import Verdict

STACK_BYTES = 64 * 1024 * 1024
"""Stack of the threads; allocated as it is used.

Grammars that compiled in the sandbox need less.
"""

SLOW_S = 0.25
"""Processor time in the sandbox, seconds, above which a grammar compiles in a thread of its own.

Such grammars compile one at a time, so that others do not wait for them.
"""

NUM_THREADS = 2
"""Threads for all other grammars."""

BYTES_AT_LEAST, BYTES_PER_CHARACTER = 64 * 1024, 128
"""Bytes of a grammar of one character, and of each one more, where no sandbox has measured them.

About what JSON Schemas and lists of texts take, which take most: with other threads in the process
the allocator's counters do not say.
"""


@dataclass(eq=False)
class Compiled:
    """A compiled grammar.

    Attributes:
        matcher: Matcher in its initial state; copied, never advanced.
        num_bytes: Memory of the grammar once it has been used, bytes.
        cpu_s: Processor time that it took to compile, seconds.
    """

    matcher: LLMatcher
    num_bytes: int
    cpu_s: float

    @property
    def is_broken(self) -> bool:
        """Whether the lexer, which copies of a matcher share, has exceeded a limit on any path.

        Then it stays in an error for all of them.
        """
        copy = self.matcher.deep_copy()
        copy.compute_bitmask()
        return bool(copy.is_error())


class CompileThreads:
    """Compiles grammars in threads with a large stack.

    Args:
        tokenizer: Gives the tokenizer of the grammars' vocabulary; called in the threads.
    """

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar-compiler")
        self._slow_thread = ThreadPoolExecutor(1, thread_name_prefix="slow-grammar-compiler")

    def submit(self, grammar: str, verdict: Verdict | None) -> Future[Compiled]:
        """Compile ``grammar``; the future's error is `GrammarRefused`.

        Args:
            grammar: The grammar in llguidance's JSON form.
            verdict: The sandbox's; without one the grammar is advanced on trial, too.

        Raises:
            RuntimeError: no thread can be started.
        """
        is_slow = verdict is not None and verdict.cpu_s > SLOW_S
        with _large_stacks():
            threads = self._slow_thread if is_slow else self._threads
            return threads.submit(self._compile, grammar, verdict)

    def _compile(self, grammar: str, verdict: Verdict | None) -> Compiled:
        tokenizer = self._tokenizer()
        began_s = time.thread_time()
        matcher = compile_grammar(tokenizer, grammar)
        if verdict is not None:
            return Compiled(matcher, verdict.num_bytes, verdict.cpu_s)
        walk(matcher.deep_copy(), tokenizer)
        num_bytes = BYTES_AT_LEAST + BYTES_PER_CHARACTER * len(grammar)
        return Compiled(matcher, num_bytes, time.thread_time() - began_s)


_stack_size = threading.Lock()


@contextmanager
def _large_stacks() -> Iterator[None]:
    """Give new threads of this process a stack of `STACK_BYTES`."""
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)
