"""Grammars' sources, kept for requests that send the same arguments again, as agents do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from adapters.grammars.json_schema import MAX_WORK_OF_ALL, count_cases, limited

MAX_KEPT = 32 * 1024 * 1024
"""Most characters of all keys and grammars that are kept."""

MAX_KEPT_EACH = MAX_KEPT // 32
"""Most characters of one: of a pattern with classes of Unicode it is thousands of times as long as
its schema.
"""


class KeptGrammars:
    """Grammars by what they are made of, those used last; with the work for each. Thread-safe.

    Attributes:
        num_characters: Characters of the keys and grammars that are kept.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._lock = Lock()
        self.num_characters = 0

    def __len__(self) -> int:
        return len(self._kept)

    def grammar(self, key: str, make: Callable[[], str]) -> str:
        """The grammar that ``make`` makes of ``key``.

        The work for it counts whether it was kept or not: a request is refused each time, or never.

        Raises:
            SchemaRefused: it was kept, and the work for it is more than is left of a limit.
        """
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is not None:
            grammar, work = found
            count_cases(work)
            return grammar
        with limited(MAX_WORK_OF_ALL) as work_done:
            grammar = make()
        self._keep(key, grammar, work_done())
        return grammar

    def _keep(self, key: str, grammar: str, work: int) -> None:
        if len(key) + len(grammar) > MAX_KEPT_EACH:
            return
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = grammar, work
            self.num_characters += len(key) + len(grammar)
            while self.num_characters > MAX_KEPT:
                oldest, (text, _) = self._kept.popitem(last=False)
                self.num_characters -= len(oldest) + len(text)
