"""One request of the front door to workers behind OpenEngine, and its answer in HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from adapters.vocabulary import ReasoningTokens
from worker.engines.images import FIELD as IMAGES
from worker.errors import InvalidRequest, shown
from worker.frontdoor import http
from worker.frontdoor.encoding import encoded, encoded_in_turns
from worker.frontdoor.errors import Refused, internal_error
from worker.frontdoor.exchange import annotation_event, server_sent
from worker.frontdoor.fields import CHAT, COMPLETIONS
from worker.frontdoor.openengine.answer import AnswerForm
from worker.frontdoor.openengine.body import AskedAnswer, client_name, read_body
from worker.frontdoor.openengine.generation import Chunk, Generation
from worker.frontdoor.openengine.prompts import Prompts
from worker.frontdoor.openengine.state import state_of
from worker.frontdoor.openengine.thinking import Thinking, ThinkingSplit, reasoning_tokens
from worker.frontdoor.openengine.workers import Metadata, Workers
from worker.frontdoor.request_ids import DYNAMO_ID, REQUEST_ID
from worker.frontdoor.requests import TOO_DEEP
from worker.frontdoor.rewriting import AT_ONCE
from worker.requests.fields import SEED_BITS
from worker.runtimes.direct.answer import ChoiceText
from worker.runtimes.direct.pictures import picture_places
from worker.runtimes.direct.request import DirectRequest
from worker.runtimes.openengine.request import CLIENT_METADATA

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PASSED_ON = (b"traceparent", b"tracestate", CLIENT_METADATA.encode())
_SHOWN_BEFORE = ("request_id", "token_ids", "formatted_prompt")
"""Annotations that are answered with an event before the chunks."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the front door.

    Attributes:
        method: HTTP method.
        path: Path, without the query.
        headers: Values by name in lower case.
        body: Bytes of the body.
    """

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes


@dataclass(frozen=True, slots=True)
class Engines:
    """The workers, and what is known of their model.

    Attributes:
        workers: The workers.
        prompts: Tokenizer of their model.
        thinking: Marks of its thinking, None if that is part of the answer.
        started: Time at which the front door was started, seconds since 1970.
    """

    workers: Workers
    prompts: Prompts
    thinking: Thinking | None
    started: int


async def answer(engines: Engines, request: Request, writer: asyncio.StreamWriter) -> None:
    """Answer a request of the front door, whatever becomes of it."""
    answering = _Answering(engines, request, writer)
    try:
        if request.path in (CHAT, COMPLETIONS):
            await answering.generate()
        else:
            status, content_type, body = state_of(engines.workers, request.path, engines.started)
            await answering.whole(status, body, content_type)
    except Refused as refused:
        await answering.fail(refused)
    except ConnectionError:
        raise
    except RecursionError:  # a worker's request is made by functions that call themselves
        await answering.fail(Refused(400, TOO_DEEP))
    except Exception:  # the request's boundary
        logger.exception("request %s failed", request.headers.get(REQUEST_ID, b"").decode("latin-1"))
        await answering.fail(internal_error())


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that workers can be asked for."""

    asked: AskedAnswer
    request: DirectRequest
    metadata: Metadata
    split: ThinkingSplit | None
    reasoning: ReasoningTokens | None


class _Answering:
    """The answer to one request."""

    def __init__(self, engines: Engines, request: Request, writer: asyncio.StreamWriter) -> None:
        self._engines = engines
        self._request = request
        self._writer = writer
        self._has_begun = False
        request_id = request.headers.get(REQUEST_ID)
        self._lines = b"" if request_id is None else b"%b: %b\r\n" % (REQUEST_ID, request_id)

    async def generate(self) -> None:
        """Answer a chat or a completion. Raises `Refused`, with the field of the body."""
        if not self._request.headers.get(b"content-type", b"").lower().startswith(b"application/json"):
            raise Refused(415, "the body must have the content type application/json", "content-type")
        body: Mapping[str, Any] = {}
        try:
            body = await self._by_size(partial(json.loads, self._request.body))
            await self._generate(await self._by_size(partial(_prepared, self._engines, self._request, body)))
        except InvalidRequest as error:
            name = client_name(error.field, body)
            raise Refused(400, f"{name}: {error.problem}", name) from None
        except Refused as refused:
            raise refused.renamed(None if refused.param is None else client_name(refused.param, body)) from None

    async def _by_size(self, read: Callable[[], T]) -> T:
        """The result of ``read``, which reads the body: a large one beside the event loop."""
        return read() if len(self._request.body) <= AT_ONCE else await asyncio.to_thread(read)

    async def _generate(self, made: _Prepared) -> None:
        request, engines = self._request, self._engines
        given = request.headers.get(DYNAMO_ID)
        request_id = str(uuid.uuid4()) if given is None else given.decode("latin-1")
        token_text = engines.prompts.token_text
        generation = Generation(engines.workers, made.request, request_id, made.metadata, token_text)
        special = engines.prompts.vocabulary.hidden_token_ids
        hidden = special if made.request.skip_special_tokens else ()
        form = AnswerForm(
            made.asked,
            request_id,
            int(time.time()),
            token_text,
            made.split,
            made.reasoning,
            hidden,
            num_prompt_tokens=made.request.num_prompt_tokens,
        )
        async with aclosing(_with_text(generation, engines.prompts.tokenizer, made.reasoning)) as chunks:
            if made.asked.is_streamed:
                await self._stream(made, request_id, form, chunks)
            else:
                whole = form.whole([chunk async for chunk in chunks])
                await self.whole(200, await encoded_in_turns(whole))

    async def whole(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """Write a whole answer."""
        head_only = self._request.method == "HEAD"
        data = http.answer(
            status, body, keep_alive=True, head_only=head_only, content_type=content_type, headers=self._lines
        )
        await self._write(data)

    async def fail(self, refused: Refused) -> None:
        """Write an error: the answer, or the last event of a stream that has begun, whose code is
        the status, as in an event of Dynamo's frontend.
        """
        content = refused.content()
        if not self._has_begun:
            await self.whole(refused.status, encoded(content))
            return
        content["error"]["code"] = refused.status
        await self._send(server_sent(content))
        await self._end()

    async def _stream(
        self, made: _Prepared, request_id: str, form: AnswerForm, chunks: AsyncGenerator[Chunk, None]
    ) -> None:
        async for chunk in chunks:
            for event in form.events(chunk):
                if not self._has_begun:
                    self._has_begun = True
                    await self._write(http.stream_head(b"text/event-stream", self._lines, chunked=True))
                    for name, value in self._before(made, request_id):
                        await self._send(annotation_event(name, value))
                await self._send(server_sent(event))
        if made.asked.has_usage:
            await self._send(server_sent(form.usage_event()))
        await self._send(b"data: [DONE]\n\n")
        await self._end()

    def _before(self, made: _Prepared, request_id: str) -> Iterator[tuple[str, str]]:
        """Names and values of the annotations that come before the chunks."""
        token_ids = made.request.fields["token_ids"]
        for name in _SHOWN_BEFORE:
            if name not in made.asked.annotations:
                continue
            if name == "formatted_prompt":
                yield name, str(self._engines.prompts.tokenizer.decode(token_ids))
            else:
                yield name, request_id if name == "request_id" else json.dumps(token_ids, separators=(",", ":"))

    async def _send(self, data: bytes) -> None:
        await self._write(http.chunk(data))

    async def _end(self) -> None:
        await self._write(b"0\r\n\r\n")

    async def _write(self, data: bytes) -> None:
        if self._writer.is_closing():  # where uvloop raises a plain RuntimeError
            raise ConnectionResetError("the connection has ended")
        self._writer.write(data)
        await self._writer.drain()


def _prepared(engines: Engines, request: Request, body: Mapping[str, Any]) -> _Prepared:
    """The request for the workers. Raises `InvalidRequest`."""
    prompts, thinking = engines.prompts, engines.thinking
    asked = read_body(request.path, body, request.headers, thinks=thinking is not None)
    if picture_places(asked.message.get("messages")):
        _check_pictures(engines.workers, asked.model)
    priority = asked.message["routing"].pop("priority", None)
    direct = prompts.request(asked.message)
    sampling = direct.fields["sampling_options"]
    if sampling.get("seed") is None:
        sampling["seed"] = secrets.randbits(SEED_BITS)  # another worker could not go on without it
    metadata = _metadata(request.headers, priority)
    split = reasoning = None
    if thinking is not None and asked.is_chat:
        is_opened = prompts.ends_with(direct.fields["token_ids"], thinking.begin)
        may_open = not is_opened and _begins_unmarked(prompts, direct.fields["token_ids"], thinking)
        split = ThinkingSplit(thinking, is_inside=is_opened or may_open, may_open=may_open)
        reasoning = reasoning_tokens(prompts.vocabulary, thinking, is_inside=is_opened or may_open, may_open=may_open)
    return _Prepared(asked, direct, metadata, split, reasoning)


def _metadata(headers: Mapping[bytes, bytes], priority: Any) -> Metadata:
    """Metadata of the calls that ask for an answer. A trace that no call can carry is none, as W3C
    Trace Context has it. Raises `InvalidRequest`.
    """
    values = [(name.decode(), headers[name].decode("latin-1")) for name in _PASSED_ON if name in headers]
    found = [(name, value) for name, value in values if value.isascii() and value.isprintable()]
    if priority is not None and type(priority) is not int:
        raise InvalidRequest("routing.priority", f"must be an integer, got {shown(priority)}")
    return found if priority is None else [*found, ("openengine-priority", str(priority))]


def _begins_unmarked(prompts: Prompts, prompt: list[int], thinking: Thinking) -> bool:
    """Whether the answer begins with thinking that the chat template has not opened; it may have
    closed it for a client that wants none.
    """
    return thinking.begins_inside and not prompts.ends_with(prompt, thinking.end)


def _check_pictures(workers: Workers, model: str) -> None:
    """Raises `InvalidRequest` where no worker that is ready takes the pictures of a chat: its
    template may show none, which a client could not understand.
    """
    able = [each.model for each in workers.ready if each.model is not None and each.serves(model)]
    if able and not any(each.supports_multimodal for each in able):
        raise InvalidRequest(IMAGES, "the workers of this model serve text only")


async def _with_text(
    generation: Generation, tokenizer: Any, reasoning: ReasoningTokens | None
) -> AsyncGenerator[Chunk, None]:
    """The chunks of an answer with their text, which ends at a stop string; ``reasoning`` is fed
    the tokens that its usage counts, those of the stop string among them.
    """
    text, num_fed = ChoiceText(generation.request, tokenizer), 0
    async with aclosing(generation.chunks()) as chunks:
        async for chunk in chunks:
            is_last = "finish_reason" in chunk
            sent = text.chunk(chunk)
            if reasoning is not None:
                reasoning.feed(generation.token_ids[num_fed : text.num_taken])
                num_fed = text.num_taken
            if text.has_stopped and not is_last and sent is not None:
                last: Chunk = await anext(chunks, {})  # the worker, too, ends at the stop string
                sent |= {key: last[key] for key in ("completion_usage",) if key in last}
                sent["engine_data"] = {**last.get("engine_data", {}), **sent.get("engine_data", {})}
            if sent is not None:
                yield sent
            if text.has_stopped:
                return
