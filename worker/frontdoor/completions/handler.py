"""Handlers of completions and chats that Dynamo's frontend would answer in another form, or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from worker.frontdoor.asking import Caller, Part
from worker.frontdoor.chat_stream import chat, joined_extensions
from worker.frontdoor.completions.asked import Asked
from worker.frontdoor.completions.openai_logprobs import extend
from worker.frontdoor.completions.prompt_answer import Chunk, PromptAnswer
from worker.frontdoor.completions.prompt_scores import SCORE_BYTES, num_scores
from worker.frontdoor.exchange import DONE, Exchange, error_event
from worker.frontdoor.fields import COMPLETIONS
from worker.frontdoor.returned_tokens import join_returned, joined_nvext
from worker.frontdoor.usage import usage_of_prompts

AT_ONCE = 32
"""Prompts of one request that are with the frontends at a time."""

Take = Callable[[Chunk], Awaitable[None]]


async def answer_completion(exchange: Exchange) -> None:
    """``POST /v1/completions`` with one of the fields of `is_translated`."""
    asked = await exchange.read(Asked.completion)
    if not asked.is_streamed:
        await exchange.answer(200, await _whole(exchange, asked))
        return
    async with _events(exchange) as send:
        usage = await _each_chunk(exchange, asked, send)
        if asked.has_usage:
            await send({"choices": [], "usage": usage})


async def whole_completion(caller: Caller, fields: dict[str, Any]) -> dict[str, Any]:
    """The whole answer to a completion, with all fields that the endpoint honours.

    Args:
        caller: Request on whose behalf a frontend is asked.
        fields: The request as a client writes it; its ``stream`` does not matter.

    Returns:
        OpenAI's ``text_completion``.

    Raises:
        Refused: a field is refused, or there is no answer.
    """
    fields = {name: value for name, value in fields.items() if name not in ("stream", "stream_options")}
    return await _whole(caller, Asked.completion(fields))


@contextlib.asynccontextmanager
async def _events(exchange: Exchange) -> AsyncIterator[Take]:
    """Function that sends a chunk as an event; the stream begins with the first.

    The stream has the id, time and model of the first chunk. An error is the answer, or the last
    event.
    """
    same: dict[str, Any] = {}

    async def send(chunk: Chunk) -> None:
        if not same:  # the first chunk, though a large one is not sent yet
            same.update({name: value for name, value in chunk.items() if name not in ("choices", "usage", "nvext")})
            same.pop("prompt_logprobs", None)
        first = {name: same[name] for name in ("id", "created") if name in same}
        await exchange.send_event(same | chunk | first)

    async with exchange.streaming(error_event):
        yield send
        await exchange.send(DONE)


async def _whole(caller: Caller, asked: Asked) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    extensions: dict[int, Any] = {}

    async def take(chunk: Chunk) -> None:
        (choice,) = chunk.pop("choices")
        if chunk.get("nvext"):
            extensions[choice["index"]] = joined_nvext(extensions.get(choice["index"]), chunk.pop("nvext"))
        if not answer:
            answer.update(chunk)
        _join(choices.setdefault(choice["index"], {}), choice)

    answer["usage"] = await _each_chunk(caller, asked, take)
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer | joined_extensions(extensions, choices)


def _join(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    """Add what a chunk has of a choice."""
    if not whole:
        whole.update(choice)
        return
    whole["text"] += choice["text"]
    join_returned(whole, choice)
    whole["finish_reason"] = choice.get("finish_reason") or whole.get("finish_reason")
    if whole["logprobs"] is not None:
        extend(whole["logprobs"], choice["logprobs"])


async def _each_chunk(caller: Caller, asked: Asked, take: Take) -> dict[str, Any]:
    """Ask for all prompts of a completion, and give each chunk to `take`; returns the usage.

    Raises:
        Refused: one of them failed, and the others have been given up.
    """
    answers = [PromptAnswer(asked, index) for index in range(len(asked.prompts))]
    limit = asyncio.Semaphore(AT_ONCE)

    async def follow(index: int, answer: PromptAnswer) -> None:
        async with limit:
            own = Part(caller, index * asked.num_choices)
            chunks = chat(own, asked.request(asked.prompts[index]), path=COMPLETIONS)
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    for made in await _taken(own, answer, chunk):
                        await take(made)
            answer.check_complete()

    try:
        async with asyncio.TaskGroup() as group:
            for index, answer in enumerate(answers):
                group.create_task(follow(index, answer))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return usage_of_prompts([answer.usage for answer in answers])


async def _taken(caller: Caller, answer: PromptAnswer, chunk: Chunk) -> list[Chunk]:
    """The client's chunks for a frontend's; log probabilities of a long prompt are put into them
    beside the event loop.
    """
    size = SCORE_BYTES * num_scores(chunk)
    return await caller.door.rewriting.by_size(caller.request.label, size, lambda: [*answer.take(chunk)])
