"""Connections to frontends are kept by those alone who take kept ones."""

from __future__ import annotations

import asyncio

from test_frontdoor_choices import Recorder, Transport

from worker.frontdoor.choices import Choices
from worker.frontdoor.forwarding import ForwardedRequest
from worker.frontdoor.summaries import served_models
from worker.frontdoor.upstreams import Upstream, UpstreamConnection, Upstreams

BODY = b'{"data":[],"choices":[],"usage":{}}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
"""An answer that leaves the connection open, though it may not have been asked to."""


class Prompt(Upstream):
    """A frontend that answers each request at once.

    Attributes:
        transports: Transports of its connections.
        num_kept: Connections that were kept, though they may have been closed since.
    """

    def __init__(self) -> None:
        super().__init__("frontend", 80)
        self.transports: list[Transport] = []
        self.num_kept = 0

    async def open(self, connection: UpstreamConnection) -> None:
        transport = Transport(connection)
        self.transports.append(transport)
        connection.connection_made(transport)
        asyncio.get_running_loop().call_later(0.01, connection.data_received, ANSWER)

    def keep(self, connection: UpstreamConnection) -> bool:
        self.num_kept += 1
        return super().keep(connection)


def frontend() -> tuple[Prompt, Upstreams]:
    upstream = Prompt()
    return upstream, Upstreams([upstream], 1.0)


async def test_an_inquiry_keeps_no_connection() -> None:
    """It closed the connection under a request that had taken it, which got no byte, for ever."""
    upstream, upstreams = frontend()
    assert await served_models(upstreams) == {}
    assert upstream.num_kept == 0
    assert [each.is_open for each in upstream.transports] == [False]


async def test_choices_keep_no_connections() -> None:
    """256 were kept for 30 s each, which none of them took: of 400 descriptors none was left."""
    upstream, upstreams = frontend()
    client = Recorder()
    Choices(client, [b"first", b"second"], chunked=True, refused=client.refused).ask(upstreams)
    await client.over.wait()
    assert client.ends == ["answered"]
    assert upstream.num_kept == 0
    assert [each.is_open for each in upstream.transports] == [False, False]


async def test_a_request_that_is_passed_on_keeps_its_connection() -> None:
    upstream, upstreams = frontend()
    client = Recorder()
    ForwardedRequest(client, upstreams, head_only=False, free=lambda: None).ask(b"a request")
    await client.over.wait()
    assert (client.ends, client.data) == (["answered"], ANSWER)
    assert upstream.num_kept == len(upstream.idle) == 1
    assert [each.is_open for each in upstream.transports] == [True]
    upstreams.close()
