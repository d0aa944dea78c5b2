"""`LibraryEngine`: the common part of engines whose library decodes in processes of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic

from worker.engines import EngineInfo
from worker.engines.daemon_threads import done_in_time
from worker.engines.request_table import R, RequestTable
from worker.errors import Draining, EngineBroken

logger = logging.getLogger(__name__)

SHUTDOWN_S = 30.0
"""Time for a library's processes to end; those that are dead may hold up the call for ever."""


class LibraryEngine(Generic[R]):
    """The part of a `worker.engines.ServingEngine` that is the same for each library.

    Args:
        requests: Table of its unfinished requests.
    """

    library: ClassVar[str]
    """The library's name, for messages."""

    def __init__(self, requests: RequestTable[R]) -> None:
        self._llm: Any = None
        self._info: EngineInfo | None = None
        self._requests = requests
        self._on_broken: Callable[[str], None] | None = None

    def __repr__(self) -> str:
        refusal = self._requests.refusal
        state = "not started" if self._info is None else "serving" if refusal is None else repr(refusal)
        return f"{type(self).__name__}({state}, {len(self._requests)} unfinished)"

    def abort(self, request_id: str) -> None:
        """Abort a request; its stream ends as ``cancelled``."""
        self._requests.abort(request_id)

    def keep_alive(self) -> None:
        """Give an empty delta to each stream that has had none since the last call."""
        self._requests.keep_alive()

    def num_unfinished(self) -> int:
        """Requests admitted and not yet finished."""
        return len(self._requests)

    def migrate_all(self) -> int:
        """End every unfinished request with `Draining`, refuse new ones; how many were ended."""
        return self._requests.end_all(Draining("the worker is shutting down"))

    def tell_broken(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the reason when the library dies, with or without requests."""
        self._on_broken = callback

    def num_leased(self) -> int:
        """Always 0: the worker keeps no KV of a library for others."""
        return 0

    def transfers(self) -> Mapping[str, float]:
        """Always empty: the worker transfers no KV of a library."""
        return {}

    def _break(self, cause: str) -> None:
        """End every request, and tell the worker once that the library is dead."""
        if isinstance(self._requests.refusal, EngineBroken):
            return
        self._requests.end_all(EngineBroken(cause))
        if self._on_broken is not None:
            self._on_broken(cause)

    async def _shut_down(self) -> None:
        """End the library's processes, if it was loaded, within `SHUTDOWN_S`."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            await done_in_time(f"{self.library}-shutdown", llm.shutdown, SHUTDOWN_S)
        except TimeoutError:
            logger.warning("%s did not shut down within %g s", self.library, SHUTDOWN_S)
