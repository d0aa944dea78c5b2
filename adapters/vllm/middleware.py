"""`Middleware`: what ``--middleware adapters.vllm.Middleware`` adds to vLLM's API server."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from adapters.grammars.sandbox import SandboxUnavailable
from adapters.processors.grammar import grammar_cache
from adapters.vllm.grammars import BEAMS, NotApplied, NotCompiled, admitted_grammars, are_slow
from adapters.vllm.metrics import publish
from adapters.vllm.model import POLICY, model_of
from adapters.vllm.requests import SELECTION

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Middleware:
    """ASGI middleware: a request waits until its grammars are compiled, and no other one does.

    The end of a request's body is held back meanwhile, so that authentication comes first. A
    grammar compiles in this process, and one that takes long in the engine's processes too, where
    `Extension` is loaded. Admission finds the grammars, or the refusal. Beam search with them, and
    processors named where vLLM does not look, are refused here: admission does not see them.

    Args:
        app: The application inside.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar-reader")

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve a request, or the start of the server, which loads the tokenizer."""
        engine = getattr(scope["app"].state, "engine_client", None)
        if engine is not None and scope["type"] == "lifespan":
            publish(engine.vllm_config)
            self._threads.submit(_load, engine.vllm_config)
        if engine is not None and scope["type"] == "http" and _has_json(scope):
            receive = _Held(receive, lambda body: self._prepare(engine, body)).receive
        await self._app(scope, receive, send)

    async def _prepare(self, engine: Any, body: bytes) -> None:
        """Wait until the grammars that a body names are compiled, or refused.

        Raises:
            HTTPException: it asks for processors where vLLM applies none.
        """
        names_any = any(name.encode() in body for name in (SELECTION, BEAMS))
        if not names_any and POLICY not in os.environ:
            return
        in_thread = asyncio.get_running_loop().run_in_executor
        try:
            model = await in_thread(self._threads, model_of, engine.vllm_config)
            wanted = await in_thread(self._threads, admitted_grammars, body, model)
        except NotApplied as error:
            http = importlib.import_module("fastapi")  # of vLLM's server, which answers it as its own refusals
            raise http.HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        except (ValueError, RecursionError, NotCompiled):
            return  # admission refuses it, with the reason
        cache = grammar_cache(model.context.vocabulary)
        compiling = [asyncio.wrap_future(cache.request(grammar)) for _, grammar in wanted]
        slow = are_slow(await asyncio.gather(*compiling, return_exceptions=True), wanted)
        if slow and engine.vllm_config.parallel_config.worker_extension_cls:
            await model.prepared.compile_ahead(slow, lambda: engine.collective_rpc("prepare_grammars", args=(slow,)))


class _Held:
    """The messages of a request; the one that ends its body is held back while `prepare` runs.

    Args:
        receive: Receives the messages.
        prepare: Is given the body; cancelled when the client leaves.
    """

    def __init__(self, receive: Receive, prepare: Callable[[bytes], Awaitable[None]]) -> None:
        self._receive, self._prepare = receive, prepare
        self._body: bytearray | None = bytearray()
        self._next: asyncio.Future[Message] | None = None

    async def receive(self) -> Message:
        """The next message."""
        if self._next is not None:
            following, self._next = self._next, None
            return await following
        message = await self._receive()
        if self._body is None or message["type"] != "http.request":
            return message
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return message
        body, self._body = bytes(self._body), None
        preparing, following = asyncio.ensure_future(self._prepare(body)), asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((preparing, following), return_when=asyncio.FIRST_COMPLETED)
            if following.done() and following.result()["type"] == "http.disconnect":
                return following.result()
            await preparing
            self._next = following
            return message
        finally:
            preparing.cancel()
            if self._next is None:
                following.cancel()


def _has_json(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request has a body of JSON."""
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return scope["method"] == "POST" and any(b"json" in kind.lower() for kind in kinds)


def _load(config: Any) -> None:
    """Load the tokenizer and start the sandbox: no request should wait for them."""
    try:
        model = model_of(config)
        model.warm_up()
        model.guard_grammars()
    except (OSError, ValueError, SandboxUnavailable) as error:  # the start of the engine, and admission, tell it too
        logger.warning("no grammar can be compiled: %s", error)
