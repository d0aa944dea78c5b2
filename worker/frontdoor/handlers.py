"""The handlers of all paths that are answered by coroutines, by method and path."""

from __future__ import annotations

from collections.abc import Mapping

from worker.frontdoor.exchange import Handler
from worker.frontdoor.responses import handlers as responses

HANDLERS: Mapping[tuple[str, str], Handler] = {**responses.HANDLERS}
"""Each row of `ROUTES` that a handler answers has one per method; a test compares the two."""
