"""A fair lock: a loop that takes it again at once does not starve other threads."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """Reentrant lock; a thread that releases it gets it again only after one that has waited."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held by the thread that is next
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    @property
    def is_awaited(self) -> bool:
        """Whether a thread is waiting for it."""
        return self._turn.locked()

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._turn:
                self._lock.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()
