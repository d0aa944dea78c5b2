"""Answers that the front door makes of others': ``/health`` without the addresses behind it, and
``/metrics`` of frontend and workers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.frontdoor.answering import Asker
from worker.frontdoor.answers import ParsedAnswer
from worker.frontdoor.errors import Refused
from worker.frontdoor.http import INTERIM, AnswerEnd, Document
from worker.frontdoor.upstreams import NoUpstream, Upstream, Upstreams

TIMEOUT_S = 5.0
"""Seconds that the answer of one server may take."""

MAX_BYTES = 16 * 2**20
"""Bytes of the largest answer of one server."""

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Source:
    """One server that is asked, or several of which one is.

    Attributes:
        turn: Servers; the first that can be reached is asked.
        path: Path of the request.
        name: Name of the server in the answer.
        method: HTTP method.
        headers: Lines of further headers, each with its CRLF.
        body: Body of the request.
        timeout_s: Seconds that the answer may take.
    """

    turn: Sequence[Upstream]
    path: str
    name: str
    method: str = "GET"
    headers: bytes = b""
    body: bytes = b""
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of one source.

    Attributes:
        status: HTTP status; 503 if it cannot be reached, is too slow or sends too much.
        body: Body of the answer.
    """

    status: int
    body: bytes


UNREACHABLE = Reply(503, b"")


class Summary:
    """Asks several servers, and makes one answer of theirs.

    Args:
        client: Receiver of the answer.
        upstreams: The frontends, which make connections.
        sources: Servers that are asked, at least one.
        make: Function from the replies, in the order of the sources, to status and document.
        answer: Function from status and document to the bytes of an answer.
    """

    def __init__(
        self,
        client: Asker,
        upstreams: Upstreams,
        sources: Sequence[Source],
        make: Callable[[Sequence[Reply]], tuple[int, Document]],
        answer: Callable[[int, Document], bytes],
    ) -> None:
        self._client = client
        self._upstreams = upstreams
        self._sources = sources
        self._make = make
        self._answer = answer
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Begin to ask."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        replies = await asyncio.gather(*(reply_of(self._upstreams, source) for source in self._sources))
        status, document = self._make(replies)
        self._client.received(self._answer(status, document))
        self._client.answered(False)

    def pause(self) -> None:
        """Do nothing: the answer is small."""

    def resume(self) -> None:
        """See `pause`."""

    def abort(self) -> None:
        """End it. Idempotent."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def filler(self) -> bytes | None:
        """See `UpstreamConnection.filler`."""
        return INTERIM


async def reply_of(upstreams: Upstreams, source: Source) -> Reply:
    """The answer of a source."""
    return await _Asking(upstreams, source).reply()


async def served_models(upstreams: Upstreams) -> dict[str, Mapping[str, Any]]:
    """The entries of the frontend's list of models, by their names.

    Raises:
        Refused: 503, the frontend does not answer with such a list.
    """
    reply = await reply_of(upstreams, Source(upstreams.in_turn(), "/v1/models", "The frontend"))
    try:
        if reply.status == 200:
            return {str(entry["id"]): entry for entry in json.loads(reply.body)["data"]}
    except (ValueError, KeyError, TypeError):
        pass
    raise Refused(503, "the frontend does not say which models it serves", kind="server_error")


class _Asking:
    """One request to one server, on a connection of its own."""

    def __init__(self, upstreams: Upstreams, source: Source) -> None:
        self._upstreams = upstreams
        self._source = source
        self._answer = ParsedAnswer(self, 0)
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def reply(self) -> Reply:
        """Ask, and return the answer."""
        connection = self._answer.connection
        host = str(self._source.turn[0]).removeprefix("http://")
        source = self._source
        line = f"{source.method} {source.path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        length = b"content-length: %d\r\n" % len(source.body) if source.method == "POST" else b""
        request = line.encode("latin-1") + source.headers + length + b"\r\n" + source.body
        try:
            await self._upstreams.connect(self._source.turn, connection)
            connection.begin(self._answer, AnswerEnd(), request)
            async with asyncio.timeout(source.timeout_s):
                complete = await self._ended
        except (NoUpstream, TimeoutError):
            return UNREACHABLE
        finally:
            connection.abort()
        return Reply(self._answer.status, self._answer.body) if complete else UNREACHABLE

    def headed(self, answer: ParsedAnswer) -> None:
        """Do nothing: the whole answer counts."""

    def data(self, answer: ParsedAnswer, data: bytes) -> None:
        """Bytes of its body."""
        answer.take(data)
        if answer.num_bytes > MAX_BYTES:
            self._end(False)

    def ended(self, answer: ParsedAnswer) -> None:
        """The answer is complete."""
        self._end(True)

    def failed(self, answer: ParsedAnswer, reason: str) -> None:
        """The server has gone before the end of its answer."""
        self._end(False)

    def _end(self, is_complete: bool) -> None:
        if not self._ended.done():
            self._ended.set_result(is_complete)


def health(replies: Sequence[Reply]) -> tuple[int, Document]:
    """The frontend's health: its status, and how many workers it knows, but not where they are."""
    (reply,) = replies
    try:
        told = json.loads(reply.body)
        instances = told["instances"]
        shown = {"instances": len(instances)} if isinstance(instances, list) else {}
    except (ValueError, KeyError, TypeError):
        shown = {}
    status = "healthy" if reply.status == 200 else "unhealthy"
    return reply.status, Document(b"application/json", json.dumps({"status": status, **shown}).encode())


_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(\{)?")
_FAMILY = re.compile(r"# (?:HELP|TYPE) (\S+)")
_DESCRIPTION = re.compile(r"# (?:HELP|TYPE) ")
"""Beginning of a line of which a family has one: that of the first server, whatever others say."""
_ELSEWHERE = (
    "# Series of the workers (dlw_*) are at /metrics of each worker's DYN_SYSTEM_PORT; with their addresses as "
    "--worker-metrics they are here too (docs/metrics.md).\n"
)


def metrics(sources: Sequence[Source]) -> Callable[[Sequence[Reply]], tuple[int, Document]]:
    """Makes one document, in Prometheus' text format, of the frontend's metrics and the workers'.

    Args:
        sources: The frontend, then workers; their series get the label ``worker``.
    """

    def make(replies: Sequence[Reply]) -> tuple[int, Document]:
        families: dict[str, list[str]] = {}
        comments = [] if len(sources) > 1 else [_ELSEWHERE]
        for number, (source, reply) in enumerate(zip(sources, replies, strict=True)):
            if reply.status != 200:
                comments.append(f"# {source.name} does not answer.\n")
                continue
            for family, line in _lines(reply.body.decode(errors="replace"), source.name if number else None):
                known = families.setdefault(family, [])
                described = _DESCRIPTION.match(line)
                if described is None or not any(each.startswith(described[0]) for each in known):
                    known.append(line)
        text = "".join("".join(lines) for lines in families.values()) + "".join(comments)
        only_comments = not families
        return (503 if only_comments else 200), Document(METRICS_TYPE, text.encode())

    return make


def _lines(text: str, worker: str | None) -> Iterator[tuple[str, str]]:
    """The lines of a document with the family that each belongs to."""
    family = ""
    for line in text.split("\n"):  # a label may have what else ends a line in Python
        described = _FAMILY.match(line)
        if described:
            family = described[1]
        sample = _SAMPLE.match(line)
        if sample is None and not described:
            continue
        if sample and not (family and sample[1].startswith(family)):
            family = sample[1]  # one without a description
        if sample and worker is not None:
            labels = f'{sample[1]}{{worker="{worker}"' + ("," if sample[2] else "}")
            line = labels + line[sample.end() :]
        yield family, line + "\n"
