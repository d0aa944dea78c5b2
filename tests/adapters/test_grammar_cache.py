"""Compiled grammars are kept by bytes, bad ones by digest; each is compiled once, and only after
the sandbox.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from weakref import ref

import pytest
from llguidance import LLMatcher, LLTokenizer
from test_grammar_sandbox import ENDLESS, FOREVER_S, GOOD, SLOW, TABLES, regex, rule_chain, tables

from adapters.grammars import cache as caches
from adapters.grammars import compile_threads, freed_memory
from adapters.grammars.cache import GrammarCache
from adapters.grammars.compile_threads import Compiled
from adapters.grammars.compiler import GrammarRefused, load_tokenizer, tokens_of
from adapters.grammars.sandbox import GrammarSandbox, SandboxBusy

WORDS = ["|".join(f"{number}word{i:04}" for i in range(1000)) for number in range(6)]


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(tokens_of(TABLES))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[GrammarSandbox]:
    with GrammarSandbox(tables, timeout_s=0.5, max_wait_s=FOREVER_S) as running:
        yield running


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def cache_of(tokenizer: LLTokenizer, sandbox: GrammarSandbox | None, max_bytes: int = caches.MAX_BYTES) -> GrammarCache:
    cache = GrammarCache(lambda: tokenizer, tokenizer.eos_token // 32, max_bytes, Clock())
    cache.sandbox = sandbox
    return cache


@pytest.mark.parametrize("pattern", ["[a-z]{1,8}", "|".join(f"word{number}" for number in range(40))])
def test_an_estimate_of_bytes_is_near_those_measured(
    tokenizer: LLTokenizer, sandbox: GrammarSandbox, pattern: str
) -> None:
    estimated, measured = (cache_of(tokenizer, each).compiled(regex(pattern)).num_bytes for each in (None, sandbox))
    assert measured / 2 < estimated < 4 * measured


@pytest.mark.parametrize("has_sandbox", [True, False])
def test_the_least_recently_used_goes_when_the_bytes_are_taken(
    tokenizer: LLTokenizer, sandbox: GrammarSandbox, has_sandbox: bool
) -> None:
    cache = cache_of(tokenizer, sandbox if has_sandbox else None)
    size = cache.compiled(regex(WORDS[0])).num_bytes
    assert cache.num_bytes == size > len(WORDS[0])
    cache.max_bytes = 3 * size + size // 2
    for words in (WORDS[1], WORDS[0], WORDS[2], WORDS[3]):
        cache.compiled(regex(words))
    assert len(cache) == 3
    assert cache.num_bytes <= cache.max_bytes
    gc.collect()
    misses = cache.num_misses
    for words in (WORDS[0], WORDS[2], WORDS[3]):
        cache.compiled(regex(words))
    assert cache.num_misses == misses
    cache.compiled(regex(WORDS[1]))
    assert cache.num_misses == misses + 1


def test_grammar_requests_are_freed_without_garbage_collection(tokenizer: LLTokenizer, sandbox: GrammarSandbox) -> None:
    """A grammar may have a megabyte, and a collection may be far away."""
    cache = cache_of(tokenizer, sandbox)
    gc.collect()
    gc.disable()
    try:
        for grammar, refusal in ((regex("a|b"), type(None)), (regex("("), GrammarRefused)):
            wanted = cache.request(grammar)
            assert isinstance(wanted.exception(FOREVER_S), refusal)
            left = ref(wanted)
            del wanted
            number = 0
            while left() is not None:  # until the threads that compiled it do something else
                number += 1
                cache.request(regex(f"other {number}")).result(FOREVER_S)
    finally:
        gc.enable()


def test_free_memory_goes_back_to_the_system_now_and_then(
    tokenizer: LLTokenizer, sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(tokenizer, sandbox)
    clock = cache._clock
    assert isinstance(clock, Clock)
    trims: SimpleQueue[float] = SimpleQueue()
    monkeypatch.setattr(freed_memory, "_trim", lambda: trims.put(clock.now))
    cache.compiled(regex(WORDS[0]))
    clock.now = freed_memory.TRIM_S
    cache.compiled(regex(WORDS[1]))
    assert trims.get(timeout=60) == clock.now
    cache.compiled(regex(WORDS[2]))
    clock.now *= 2
    with pytest.raises(GrammarRefused):  # as with memory that was needed to read what is refused
        cache.compiled(regex("("))
    assert trims.get(timeout=60) == clock.now
    assert trims.empty()


def test_what_is_in_use_is_found_however_little_is_kept(tokenizer: LLTokenizer) -> None:
    cache = cache_of(tokenizer, None, max_bytes=1)
    mine = cache.compiled(regex(WORDS[0]))
    assert len(cache) == 0
    assert cache.compiled(regex(WORDS[0])) is mine
    del mine
    gc.collect()
    cache.compiled(regex(WORDS[0]))
    assert cache.num_misses == 2


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that this process compiles, in the cache's threads."""
    grammars = []
    original = compile_threads.compile_grammar  # type: ignore[attr-defined]

    def counting(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        grammars.append(grammar)
        assert threading.current_thread().name.startswith("grammar-compiler")
        return original(tokenizer, grammar)

    monkeypatch.setattr(compile_threads, "compile_grammar", counting)
    return grammars


def test_only_what_came_through_the_sandbox_is_compiled_here(
    tokenizer: LLTokenizer, sandbox: GrammarSandbox, compiled_here: list[str]
) -> None:
    cache = cache_of(tokenizer, sandbox)
    for grammar, problem in ((rule_chain(4000), "of stack"), (SLOW, "of processor time"), (regex("(a"), "unclosed")):
        for _ in range(2):
            with pytest.raises(GrammarRefused, match=problem):
                cache.compiled(grammar)
    assert compiled_here == []
    assert isinstance(cache.compiled(GOOD), Compiled)
    assert compiled_here == [GOOD]


def test_known_bad_ones_are_refused_without_another_attempt(tokenizer: LLTokenizer, sandbox: GrammarSandbox) -> None:
    cache = cache_of(tokenizer, sandbox)
    attempts = sandbox.counts["stack"]
    for _ in range(3):
        with pytest.raises(GrammarRefused, match="of stack"):
            cache.compiled(rule_chain(3500))
    assert sandbox.counts["stack"] == attempts + 1


def test_bad_ones_are_bounded(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MAX_REFUSED", 2)
    cache = cache_of(tokenizer, None)
    for count in range(1, 6):
        with pytest.raises(GrammarRefused):
            cache.compiled(regex("(" * count))
    assert len(cache._refused) == 2


def test_who_ran_out_of_time_may_try_again_later(tokenizer: LLTokenizer, sandbox: GrammarSandbox) -> None:
    cache, clock = cache_of(tokenizer, sandbox), Clock()
    cache._clock = clock
    attempts = sandbox.counts["time"]
    for now, expected in ((0.0, 1), (caches.SLOW_FOR_S - 1, 1), (caches.SLOW_FOR_S + 1, 2)):
        clock.now = now
        with pytest.raises(GrammarRefused, match="of processor time"):
            cache.compiled(SLOW)
        assert sandbox.counts["time"] == attempts + expected


def test_many_who_want_the_same_at_once_compile_it_once(
    tokenizer: LLTokenizer, sandbox: GrammarSandbox, compiled_here: list[str]
) -> None:
    cache = cache_of(tokenizer, sandbox)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(cache.compiled, [regex(WORDS[4])] * 24))
    assert len({id(one) for one in found}) == 1
    assert len(compiled_here) == 1


def test_where_no_thread_can_be_started_it_is_said(
    tokenizer: LLTokenizer, sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the container on processes is one on threads, too."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    cache = cache_of(tokenizer, sandbox)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        with pytest.raises(SandboxBusy, match="can't start new thread"):
            cache.request(regex("x{7}")).result(100)
    assert isinstance(cache.compiled(regex("x{7}")), Compiled)


def test_cancelling_reaches_the_sandbox(tokenizer: LLTokenizer) -> None:
    with GrammarSandbox(tables, **ENDLESS, max_wait_s=FOREVER_S) as patient:
        cache = cache_of(tokenizer, patient)
        wanted = cache.request(SLOW, "a")
        assert isinstance(cache.compiled(GOOD), Compiled)
        assert wanted.cancel()
        assert isinstance(cache.request(regex("b"), "a").result(100), Compiled)
        assert patient.counts["cancelled"] == 1


def test_it_compiles_on_a_stack_that_is_larger_than_the_sandboxs(
    tokenizer: LLTokenizer, sandbox: GrammarSandbox
) -> None:
    """What the sandbox's stack cannot hold compiles in these threads, so what it can hold does
    for certain.
    """
    deep = rule_chain(1500)
    with pytest.raises(GrammarRefused, match="of stack"):
        cache_of(tokenizer, sandbox).compiled(deep)
    assert isinstance(cache_of(tokenizer, None).compiled(deep), Compiled)
    assert threading.stack_size() == 0
