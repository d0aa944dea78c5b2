"""The handlers of all paths that are answered by coroutines, by method and path."""

from __future__ import annotations

from collections.abc import Mapping

from worker.frontdoor import service
from worker.frontdoor.batch_handlers import BATCH_HANDLERS
from worker.frontdoor.exchange import Handler

HANDLERS: Mapping[tuple[str, str], Handler] = {
    ("GET", "/version"): service.version,
    ("GET", "/ping"): service.ping,
    ("POST", "/ping"): service.ping,
    ("POST", "/tokenize"): service.tokenize,
    ("POST", "/detokenize"): service.detokenize,
    **BATCH_HANDLERS,
}
"""Each row of `ROUTES` that a handler answers has one per method; a test compares the two."""
