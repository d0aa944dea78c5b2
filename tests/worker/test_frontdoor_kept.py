"""A connection that is kept belongs to the next request: who had it before leaves it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from test_frontdoor_choices import Recorder, Transport

from worker.frontdoor.answers import ParsedAnswer
from worker.frontdoor.choice_requests import ChoiceRequests
from worker.frontdoor.http import AnswerEnd
from worker.frontdoor.summaries import served_models
from worker.frontdoor.upstreams import Upstream, UpstreamConnection, Upstreams

ANSWER = b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"data":[]}'


class Ended:
    """A `Whole` of which nothing is wanted."""

    def headed(self, answer: ParsedAnswer) -> None: ...

    def data(self, answer: ParsedAnswer, data: bytes) -> None: ...

    def ended(self, answer: ParsedAnswer) -> None: ...

    def failed(self, answer: ParsedAnswer, reason: str) -> None: ...


async def test_an_inquiry_leaves_the_next_request_alone() -> None:
    """A client whose request took the connection of a list of models got no byte, for ever."""
    client, opened = Recorder(), list[Transport]()

    class Quick(Upstream):
        """A frontend that another client asks as soon as one of its connections is kept."""

        async def open(self, connection: UpstreamConnection) -> None:
            opened.append(Transport(connection))
            connection.connection_made(opened[0])
            asyncio.get_running_loop().call_later(0.01, connection.data_received, ANSWER)

        def keep(self, connection: UpstreamConnection) -> bool:
            asyncio.get_running_loop().call_soon(connection.begin, client, AnswerEnd(), b"another")
            return True

    assert await served_models(Upstreams([Quick("openengine", 80)], 1.0)) == {}
    assert opened[0].is_open
    opened[0].connection.data_received(ANSWER)
    assert client.ends == ["answered"]
    assert client.data == ANSWER


@pytest.mark.parametrize(
    "call",
    [ChoiceRequests.pause, ChoiceRequests.abort, lambda requests: requests.keep(requests.answers[0])],
    ids=["pause", "abort", "keep"],
)
async def test_choices_leave_the_next_request_alone(call: Callable[[ChoiceRequests], None]) -> None:
    requests = ChoiceRequests(Ended(), [b"first", b"second"], lambda: None)
    requests.ask(Upstreams([], 1.0))
    await asyncio.sleep(0)
    connection, client = requests.answers[1].connection, Recorder()
    connection.upstream = Upstream("openengine", 80)
    transport = Transport(connection)
    connection.connection_made(transport)
    connection.begin(requests.answers[1], AnswerEnd(), b"second")
    connection.data_received(ANSWER)
    assert connection.upstream.idle.pop() is connection
    connection.begin(client, AnswerEnd(), b"another")
    call(requests)
    assert (transport.is_open, transport.is_read) == (True, True)
    connection.data_received(ANSWER)
    assert client.ends == ["answered"]
