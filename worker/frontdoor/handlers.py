"""The handlers of all paths that are answered by coroutines, by method and path."""

from __future__ import annotations

from collections.abc import Mapping

from worker.frontdoor import service
from worker.frontdoor.batch_handlers import BATCH_HANDLERS
from worker.frontdoor.chat_answers import answer_chat
from worker.frontdoor.completions import answer_completion
from worker.frontdoor.exchange import Handler
from worker.frontdoor.fields import CHAT, COMPLETIONS
from worker.frontdoor.messages.handlers import count_tokens, create_message
from worker.frontdoor.responses import handlers as responses
from worker.frontdoor.rollouts.control import control
from worker.frontdoor.rollouts.inference import answer_inference
from worker.frontdoor.rollouts.sglang import answer_generate
from worker.frontdoor.routes import CONTROLS, COUNT_TOKENS, MESSAGES

HANDLERS: Mapping[tuple[str, str], Handler] = {
    **responses.HANDLERS,
    ("POST", MESSAGES): create_message,
    ("POST", COUNT_TOKENS): count_tokens,
    ("POST", "/generate"): answer_generate,
    ("POST", "/inference/v1/generate"): answer_inference,
    ("GET", "/version"): service.version,
    ("GET", "/ping"): service.ping,
    ("POST", "/ping"): service.ping,
    ("POST", "/tokenize"): service.tokenize,
    ("POST", "/detokenize"): service.detokenize,
    **BATCH_HANDLERS,
    **{(method, route.path): control for route in CONTROLS for method in route.methods},
}
"""Each row of `ROUTES` and `CONTROLS` that a handler answers has one per method; a test compares
them.
"""

TRANSLATORS: Mapping[str, Handler] = {CHAT: answer_chat, COMPLETIONS: answer_completion}
"""Handlers of the requests for which `is_translated` says so; all others are forwarded."""
