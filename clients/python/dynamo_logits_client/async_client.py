"""An asynchronous client; needs httpx (``pip install 'dynamo-logits-client[httpx]'``)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any

import httpx

from dynamo_logits_client.answers import Answer, Chunk, StreamReader
from dynamo_logits_client.calls import (
    BASE_URL,
    CATALOGUE,
    CHAT,
    COMPLETIONS,
    MODELS,
    TIMEOUT_S,
    Server,
    body_of,
    checked_timeout,
    data_of,
)
from dynamo_logits_client.errors import Refused, TimedOut, Unreachable


class AsyncClient:
    """`dynamo_logits_client.Client` with coroutines; its connections are shared and kept.

    Args:
        base_url: Address with the path before ``/chat/completions``.
        api_key: API key, if the server has keys.
        timeout_s: Seconds for which the server may send nothing.
        headers: Further headers of every request.
        http: Client of httpx to send with, whose timeouts then count; it is not closed.

    Raises:
        ValueError: the address is no ``http://`` or ``https://`` one, no header can have the key,
            or the timeout is not positive.
    """

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._server = Server(base_url, api_key, headers)
        self._owns_http = http is None
        # Waiting for one of the client's own connections is not the server's silence.
        timeout = httpx.Timeout(checked_timeout(timeout_s), pool=None)
        self._http = httpx.AsyncClient(timeout=timeout, trust_env=False) if http is None else http

    async def chat(self, *, model: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Answer:
        """Answer a chat. Arguments and errors are those of `Client.chat`."""
        return Answer(await self._post(CHAT, {"model": model, "messages": list(messages), **fields}))

    async def complete(self, *, model: str, prompt: str | Sequence[Any], **fields: Any) -> Answer:
        """Continue a text. Arguments and errors are those of `Client.complete`."""
        return Answer(await self._post(COMPLETIONS, {"model": model, "prompt": prompt, **fields}))

    def stream_chat(self, *, model: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> AsyncStream:
        """Answer a chat in chunks; see `AsyncStream`."""
        return AsyncStream(self._sent(CHAT, {"model": model, "messages": list(messages), **fields}))

    def stream_completion(self, *, model: str, prompt: str | Sequence[Any], **fields: Any) -> AsyncStream:
        """Continue a text in chunks; see `AsyncStream`."""
        return AsyncStream(self._sent(COMPLETIONS, {"model": model, "prompt": prompt, **fields}))

    async def models(self) -> list[str]:
        """Names of the models that are served."""
        return [each["id"] for each in (await self._whole("GET", MODELS, None))["data"]]

    async def catalogue(self) -> list[dict[str, Any]]:
        """The processors that requests may name, third parties' included, with their arguments."""
        return list((await self._whole("GET", CATALOGUE, None))["processors"])

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return await self._whole("POST", path, body_of(fields, stream=False))

    async def _whole(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers = self._server.request_headers(has_body=body is not None)
        with _broken(self._server.url(path)):
            response = await self._http.request(method, self._server.url(path), content=body, headers=headers)
        return data_of(response.status_code, response.content)

    @asynccontextmanager
    async def _sent(self, path: str, fields: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """The answer to a streamed request, whose body has not been read."""
        url, body = self._server.url(path), body_of(fields, stream=True)
        headers = self._server.request_headers(has_body=True)
        request = self._http.build_request("POST", url, content=body, headers=headers)
        with _broken(url):
            response = await self._http.send(request, stream=True)
        try:
            if response.status_code != 200:
                with _broken(url):
                    raise Refused(response.status_code, await response.aread())
            yield response
        finally:
            await response.aclose()


class AsyncStream:
    """The chunks of a streamed answer: ``async with client.stream_chat(...) as stream``.

    The request is sent when the block is entered; leaving it early cancels the request.

    Attributes:
        read: Reader of the body, which has texts, receipts, usage and the prompt's token ids.
    """

    def __init__(self, sent: AbstractAsyncContextManager[httpx.Response]) -> None:
        self._sent = sent
        self._response: httpx.Response | None = None
        self.read = StreamReader()

    async def __aenter__(self) -> AsyncStream:
        self._response = await self._sent.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._sent.__aexit__(kind, error, trace)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        if self._response is None:
            raise RuntimeError("expected to be read within its async with block")
        try:
            with _broken(str(self._response.url)):
                async for piece in self._response.aiter_bytes():
                    for chunk in self.read.chunks(piece):
                        yield chunk
        except Unreachable:
            if not self.read.is_done:  # else only the end of the connection is missing
                raise
        self.read.end()


@contextmanager
def _broken(url: str) -> Iterator[None]:
    """Errors of httpx as the client's own."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise TimedOut(f"{url}: nothing arrived in time") from error
    except httpx.TransportError as error:
        raise Unreachable(f"{url}: {str(error) or type(error).__name__}") from error
