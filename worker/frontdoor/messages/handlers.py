"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

from worker.frontdoor.chat_stream import chat
from worker.frontdoor.error_forms import error_content
from worker.frontdoor.errors import Refused
from worker.frontdoor.exchange import Exchange
from worker.frontdoor.messages.events import Event, MessageEvents
from worker.frontdoor.messages.message import server_sent, whole_message, written
from worker.frontdoor.messages.request import TranslatedRequest, counted, translated
from worker.frontdoor.requests import TOO_DEEP, deadline_of
from worker.frontdoor.tokens import num_prompt_tokens


async def create_message(exchange: Exchange) -> None:
    """Answer ``POST /v1/messages``.

    Raises:
        Refused: before the answer has begun.
    """
    request = await _translated(exchange, translated)
    async with aclosing(_events(exchange, request)) as batches:
        if request.streams:
            await _stream(exchange, batches)
        else:
            message = whole_message([event async for batch in batches for event in batch])
            await exchange.answer(200, written(message))


async def count_tokens(exchange: Exchange) -> None:
    """Answer ``POST /v1/messages/count_tokens``.

    Raises:
        Refused: the request would be refused as a message.
    """
    request = await _translated(exchange, counted)
    try:
        number = await num_prompt_tokens(exchange, request.chat)
    except Refused as refused:
        raise request.paths.renamed(refused) from None
    await exchange.answer(200, {"input_tokens": number})


async def _stream(exchange: Exchange, batches: AsyncIterator[list[Event]]) -> None:
    def failed(refused: Refused) -> bytes:
        return server_sent([error_content(refused, "anthropic", exchange.request_id)])

    async with exchange.streaming(failed):
        async for events in batches:
            if events:
                await exchange.send(server_sent(events))


async def _events(exchange: Exchange, request: TranslatedRequest) -> AsyncGenerator[list[Event]]:
    """The events of an answer, those of a chunk together.

    Raises:
        Refused: the request is refused, or the answer ended before its end.
    """
    events = MessageEvents(request)
    try:
        async with aclosing(chat(exchange, request.chat)) as chunks:
            async for chunk in chunks:
                yield events.take(chunk)
    except Refused as refused:
        raise request.paths.renamed(refused) from None
    yield events.end(deadline_of(request.chat, exchange.head.headers))


async def _translated(exchange: Exchange, translate: Callable[..., TranslatedRequest]) -> TranslatedRequest:
    """The chat of the request; of a large one, made outside the event loop. Raises `Refused`."""
    models_think = exchange.door.options.dyn_reasoning_parser is not None
    try:
        return await exchange.read(partial(translate, models_think=models_think))
    except RecursionError:
        raise Refused(400, TOO_DEEP) from None
