"""Chats whose answers are made of chunks: those with tools, those with token ids or log
probabilities of their prompt, and those that a frontend would misread.

All other chats are forwarded byte for byte.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from worker.frontdoor.chat_prompt import with_prompt_as_messages
from worker.frontdoor.chat_stream import assembled, chat
from worker.frontdoor.completions.chat_scores import scored_request, with_scores
from worker.frontdoor.completions.prompt_answer import Chunk
from worker.frontdoor.errors import Refused
from worker.frontdoor.exchange import DONE, Exchange, annotation_event, error_event, server_sent
from worker.frontdoor.returned_tokens import Returned, ReturnedData


async def answer_chat(exchange: Exchange) -> None:
    """Answer a chat, as a stream of events or whole: both are made of the same chunks."""
    fields = exchange.fields()
    annotations: dict[str, Any] = {}
    returned = Returned.of(fields)
    asked_for = fields if fields.get("prompt") is None else await exchange.read(with_prompt_as_messages)
    request = returned.request(scored_request(asked_for))
    asked = _renamed(chat(exchange, request, annotations=annotations), fields)
    data = ReturnedData(returned, in_chat=True)
    async with aclosing(with_scores(exchange, asked, fields, data)) as chunks:
        if fields.get("stream"):
            await _stream(exchange, chunks, annotations, with_usage=_asks_for_usage(fields))
        else:
            await exchange.answer(200, assembled([chunk async for chunk in chunks]))


async def _renamed(chunks: AsyncGenerator[Chunk, None], fields: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
    """The chunks of a chat; errors about a prompt of token ids name the client's field."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except Refused as refused:
            if fields.get("prompt") is None or refused.param not in ("messages", "nvext.token_data"):
                raise
            raise refused.renamed("prompt") from None


async def _stream(
    exchange: Exchange,
    chunks: AsyncIterator[dict[str, Any]],
    annotations: Mapping[str, Any],
    *,
    with_usage: bool,
) -> None:
    async with exchange.streaming(error_event):
        async for chunk in chunks:
            if not exchange.has_begun:
                for name, value in annotations.items():
                    await exchange.send(annotation_event(name, value))
            if not with_usage:
                if not chunk.get("choices"):
                    continue
                chunk.pop("usage", None)
            if "prompt_logprobs" in chunk:
                await exchange.send_event(chunk)
            else:
                await exchange.send(server_sent(chunk))
        await exchange.send(DONE)


def _asks_for_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True
