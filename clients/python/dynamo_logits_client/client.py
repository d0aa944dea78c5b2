"""A client on the standard library alone."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

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

_PIECE = 64 * 1024


class Client:
    """A client of a worker's front door; every request has a connection of its own.

    Args:
        base_url: Address with the path before ``/chat/completions``.
        api_key: API key, if the server has keys.
        timeout_s: Seconds for which the server may send nothing.
        headers: Further headers of every request.

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
    ) -> None:
        self._server = Server(base_url, api_key, headers)
        self._timeout_s = checked_timeout(timeout_s)

    def chat(self, *, model: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Answer:
        """Answer a chat.

        Args:
            model: Served name of the model.
            messages: The conversation, as OpenAI's.
            **fields: Further fields of the request (docs/request.md of dynamo-logits-worker);
                ``**logits_processors(...)`` selects processors.

        Raises:
            Refused: the server refuses the request; ``param`` names the field.
            Unreachable: there is no server, or it sends nothing in time (`TimedOut`).
            ValueError, TypeError: a field is not JSON data.
        """
        return Answer(self._post(CHAT, {"model": model, "messages": list(messages), **fields}))

    def complete(self, *, model: str, prompt: str | Sequence[Any], **fields: Any) -> Answer:
        """Continue a text.

        Args:
            model: Served name of the model.
            prompt: Text, token ids, or a list of either.
            **fields: Further fields, as of `chat`.

        Raises:
            Refused, Unreachable, ValueError, TypeError: as `chat`.
        """
        return Answer(self._post(COMPLETIONS, {"model": model, "prompt": prompt, **fields}))

    def stream_chat(self, *, model: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Stream:
        """Answer a chat in chunks. Arguments and errors are those of `chat`.

        Raises:
            AnswerFailed: while the stream is read: the answer ended with an error, or too early.
        """
        return self._stream(CHAT, {"model": model, "messages": list(messages), **fields})

    def stream_completion(self, *, model: str, prompt: str | Sequence[Any], **fields: Any) -> Stream:
        """Continue a text in chunks. Arguments and errors are those of `complete`.

        Raises:
            AnswerFailed: while the stream is read: the answer ended with an error, or too early.
        """
        return self._stream(COMPLETIONS, {"model": model, "prompt": prompt, **fields})

    def models(self) -> list[str]:
        """Names of the models that are served.

        Raises:
            Refused, Unreachable: as `chat`.
        """
        return [each["id"] for each in self._get(MODELS)["data"]]

    def catalogue(self) -> list[dict[str, Any]]:
        """The processors that requests may name, third parties' included, with their arguments.

        Raises:
            Refused, Unreachable: as `chat`.
        """
        return list(self._get(CATALOGUE)["processors"])

    def _get(self, path: str) -> dict[str, Any]:
        return self._whole("GET", path, None)

    def _post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return self._whole("POST", path, body_of(fields, stream=False))

    def _whole(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        with _broken(self._server.url(path)):
            connection = self._connection()
            try:
                response = self._sent(connection, method, path, body)
                status, data = response.status, response.read()
            finally:
                connection.close()
        return data_of(status, data)

    def _stream(self, path: str, fields: Mapping[str, Any]) -> Stream:
        body = body_of(fields, stream=True)
        with _broken(self._server.url(path)):
            connection = self._connection()
            try:
                response = self._sent(connection, "POST", path, body)
                refusal = response.read() if response.status != 200 else None
            except BaseException:
                connection.close()
                raise
        if refusal is not None:
            connection.close()
            raise Refused(response.status, refusal)
        return Stream(connection, response, self._server.url(path))

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self._server.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        # Without a port it would take the last part of an IPv6 address for one.
        return kind(str(parts.hostname), parts.port or kind.default_port, timeout=self._timeout_s)

    def _sent(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        headers = self._server.request_headers(has_body=body is not None)
        connection.request(method, urlsplit(self._server.url(path)).path, body, headers)
        return connection.getresponse()


class Stream:
    """The chunks of a streamed answer; leaving its ``with`` block early cancels the request.

    Attributes:
        read: Reader of the body, which has texts, receipts, usage and the prompt's token ids.
    """

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, url: str) -> None:
        self._connection = connection
        self._response = response
        self._url = url
        self.read = StreamReader()

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while not self.read.is_done:
                with _broken(self._url):
                    piece = self._response.read1(_PIECE)
                if not piece:
                    break
                yield from self.read.chunks(piece)
            self.read.end()
        finally:
            self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._response.close()
        self._connection.close()


@contextmanager
def _broken(url: str) -> Iterator[None]:
    """Errors of sockets and of HTTP as the client's own."""
    try:
        yield
    except TimeoutError as error:
        raise TimedOut(f"{url}: nothing arrived in time") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{url}: {str(error) or type(error).__name__}") from error
