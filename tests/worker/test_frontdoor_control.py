"""SGLang's control routes at the front door, before workers that are scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_frontdoor_server import House, error_of, get, house, post
from test_frontdoor_service import body_of

from worker.errors import ConfigurationError, StartupError
from worker.frontdoor.encoding import encoded
from worker.frontdoor.options import parse_options
from worker.frontdoor.process import make_front_door
from worker.frontdoor.routes import CONTROLS
from worker.frontdoor.upstreams import Upstream


class Engines:
    """Servers in the place of workers' engine ports, which answer as they are told to."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[bytes, bytes, Any]] = []
        self._servers: list[asyncio.Server] = []

    async def start(self) -> tuple[Upstream, ...]:
        for status, answer in self.answers:
            self._servers.append(await asyncio.start_server(self._script(status, answer), "127.0.0.1", 0))
        return tuple(Upstream("127.0.0.1", each.sockets[0].getsockname()[1]) for each in self._servers)

    def _script(self, status: int, answer: Any) -> Any:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(lines.get("content-length", "0")))
            self.asked.append((head.split("\r\n")[0].encode(), lines["authorization"].encode(), body))
            sent = encoded(answer)
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(sent), sent))
            await writer.drain()
            writer.close()

        return say

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
            await server.wait_closed()


async def ask(request: bytes, *answers: tuple[int, Any]) -> tuple[bytes, Engines]:
    engines = Engines(*answers)
    async with house(engine_url=await engines.start(), engine_key_file="k", engine_key="secret") as at:
        found = await at.ask(request)
    await engines.stop()
    return found, engines


async def test_every_worker_is_asked() -> None:
    answers = [(200, {"status": "ok", "success": True})] * 3
    found, engines = await ask(post(encoded({"abort_all": True}), path="/abort_request"), *answers)
    assert body_of(found) == {"status": "ok", "success": True}
    line, key = b"POST /abort_request HTTP/1.1", b"Bearer secret"
    assert engines.asked == [(line, key, b'{"abort_all":true}')] * 3


async def test_their_loads_are_together() -> None:
    answers = [(200, {"dp_rank_count": 1, "loads": [{"dp_rank": 0, "num_total_reqs": n}]}) for n in (3, 0)]
    found, engines = await ask(get("/v1/loads?include=core"), *answers)
    loads = [{"dp_rank": 0, "num_total_reqs": 3}, {"dp_rank": 1, "num_total_reqs": 0}]
    assert body_of(found) == {"dp_rank_count": 2, "loads": loads}
    assert {line for line, _, _ in engines.asked} == {b"GET /v1/loads?include=core HTTP/1.1"}


async def test_other_weights_are_said() -> None:
    found, _ = await ask(get("/get_weight_version"), (200, {"weight_version": "7"}), (200, {"weight_version": "8"}))
    status, error = error_of(found)
    assert (status, error["message"]) == (409, "weight_version: workers have different weights: 7, 8")


@pytest.mark.parametrize("refusal", [(409, {"status": "error", "message": "the engine sleeps"}), (500, [])])
async def test_the_first_refusal_is_the_answer(refusal: tuple[int, Any]) -> None:
    found, _ = await ask(post(b"{}", path="/pause_generation"), (200, {"status": "ok"}), refusal)
    status, error = error_of(found)
    said = "the engine sleeps" if refusal[1] else "does not answer at its --engine-port"
    assert (status, error["message"]) == (refusal[0], f"worker 1: {said}")


async def test_a_worker_that_is_gone() -> None:
    async with house(engine_url=(Upstream("127.0.0.1", 9),), engine_key_file="k", engine_key="secret") as at:
        status, error = error_of(await at.ask(post(b"", path="/continue_generation")))
    assert (status, error["message"]) == (503, "worker 0: does not answer at its --engine-port")


@pytest.mark.parametrize("route", CONTROLS, ids=lambda route: route.path)
async def test_without_the_option_none_is_served(route: Any) -> None:
    async with house() as at:
        status, error = error_of(await at.ask(get(route.path)))
    assert status == 404
    assert "--engine-url" in error["message"] or "use " in error["message"] or "closes" in error["message"]


async def test_a_web_page_cannot_ask() -> None:
    """A form of another origin sends no JSON; and GET changes nothing but the cache."""
    request = post(b'{"abort_all": true}', path="/abort_request").replace(b"application/json", b"text/plain")
    found, engines = await ask(request, (200, {}))
    assert error_of(found)[0] == 415
    assert not engines.asked
    assert error_of((await ask(get("/abort_request"), (200, {})))[0])[0] == 405


def test_options_need_each_other(tmp_path: Path) -> None:
    upstream, engine = ("--upstream", "http://127.0.0.1:1"), ("--engine-url", "http://127.0.0.1:2")
    for argv in ((*upstream, *engine), (*upstream, "--engine-key-file", "k")):
        with pytest.raises(ConfigurationError, match="--engine-url and --engine-key-file need each other"):
            parse_options(argv, {})
    keys = tmp_path / "keys"
    options = parse_options((*upstream, *engine, "--engine-key-file", str(keys)), {})
    with pytest.raises(StartupError, match="--engine-key-file"):
        make_front_door(options)
    keys.write_text("# keys\nfirst\nsecond\n")
    assert make_front_door(options).engine_key == "first"


def test_a_house_may_have_them() -> None:
    assert House([], engine_url=(Upstream("a", 1),)).door.routes.at("/abort_request") is not None
