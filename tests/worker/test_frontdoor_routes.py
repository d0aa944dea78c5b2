"""Paths that are served, names that are taken, and what the front door says of those behind it."""

from __future__ import annotations

import asyncio
import json
import re
import string
from ipaddress import IPv6Address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_frontdoor_server import CATALOG, CHAT_BODY, Frontend, error_of, get, house, post, say_ok

from worker.frontdoor.clients import Hosts, host_name, label_of
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT, TABLES
from worker.frontdoor.request_reader import Head
from worker.frontdoor.routes import CATALOGUE, OPENAPI, ROUTES, Routes, openapi
from worker.frontdoor.upstreams import Upstream

NAT64 = ip_network("64:ff9b::/96")

FRONTENDS = (
    "/busy_threshold",
    "/health",
    "/live",
    "/metrics",
    "/openapi.json",
    "/v1/audio/speech",
    "/v1/chat/completions",
    "/v1/classify",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/generate",
    "/v1/images/edits",
    "/v1/images/generations",
    "/v1/models",
    "/v1/models/{*model_id}",
    "/v1/models/{model_id}/ready",
    "/v1/pooling",
    "/v1/realtime",
    "/v1/responses",
    "/v1/videos",
    "/v1/videos/stream",
)
"""Paths of Dynamo's frontends; `tests/e2e/test_frontdoor_e2e.py` asks one of them."""

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "BREW"]


def is_served(path: str, method: str) -> bool:
    """By the table's own words, apart from the code that reads it."""
    for route in ROUTES:
        if route.path == path and "{" not in path:
            return method in route.methods
    parts = path.split("/")
    allowed = set(string.ascii_letters + string.digits + "._~%:@+-")
    names = parts[3:]
    dots = {".", ".."}
    is_name = all(name and dots.isdisjoint(unquote(name).split("/")) and set(name) <= allowed for name in names)
    return parts[:3] == ["", "v1", "models"] and bool(names) and is_name and method in ("GET", "HEAD")


KNOWN = st.sampled_from([*FRONTENDS, *(route.path for route in ROUTES), "/v1/models/a", "/v1/models/a/ready"])
SEGMENTS = st.sampled_from(
    ["v1", "models", "..", ".", "", "%2e%2e", "%2E", "a%2f..", "b%2Fc", "chat", "busy_threshold"]
)


@st.composite
def paths(draw: st.DrawFn) -> str:
    """A path that is served, nearly so, or not at all."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(KNOWN)
    if kind == 1:
        known = draw(KNOWN)
        return draw(
            st.sampled_from([known + "/", "/" + known, known.upper(), known + "/..", known + ";a", known + "%00"])
        )
    if kind == 2:
        return "/" + "/".join(draw(st.lists(SEGMENTS, max_size=6)))
    return "/" + draw(
        st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="?"), max_size=20)
    )


@given(paths(), st.sampled_from(METHODS))
@settings(max_examples=examples(1000))
def test_what_is_not_in_the_table_is_refused_by_name(path: str, method: str) -> None:
    refused = refusal(path, method)
    if is_served(path, method):
        assert refused is None
        return
    assert refused is not None
    assert refused.status in (404, 405)
    assert refused.message.startswith(json.dumps(path)[1:-1][:40])
    assert (refused.status == 405) == bool(refused.headers)


@pytest.mark.parametrize("name", ["%2e%2e", ".%2E", "%2e", "a/%2e%2e/%2e%2e/busy", "a%2F..%2fbusy", "..%2f", "a%2f."])
def test_no_name_of_a_model_leads_elsewhere(name: str) -> None:
    """A proxy before a frontend may decode what is behind /v1/models, and follow its dots."""
    refused = refusal(f"/v1/models/{name}", "GET")
    assert refused is not None
    assert refused.status == 404
    assert refusal("/v1/models/org%2Fname-1.5/ready", "GET") is None


def refusal(path: str, method: str) -> Refused | None:
    routes = Routes()
    try:
        routes.check(routes.at(path), method, path)
    except Refused as refused:
        return refused
    return None


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.tuples(paths().filter(lambda path: " " not in path), st.sampled_from(METHODS)), min_size=1, max_size=12)
)
def test_what_is_refused_never_reaches_a_frontend(asked: list[tuple[str, str]]) -> None:
    async def ask_all() -> None:
        async with house(say_ok) as at:
            for path, method in asked:
                before = len(at.frontends[0].requests)
                said = await at.ask(get(path, method=method))
                if not is_served(path, method):
                    assert said.split()[1] in (b"404", b"405"), (path, method)
                    assert len(at.frontends[0].requests) == before

    asyncio.run(ask_all())


async def test_the_router_is_out_of_reach() -> None:
    async with house(say_ok) as at:
        for method in ("GET", "POST"):
            status, error = error_of(await at.ask(get("/busy_threshold", method=method)))
            assert (status, error["code"]) == (404, "unsupported_endpoint")
            assert "/busy_threshold" in error["message"]
        said = await at.ask(post(b"{}", path="/v1/models"))
        assert error_of(said)[0] == 405
        assert b"\r\nallow: GET, HEAD\r\n" in said
        assert at.frontends[0].requests == []


def test_every_path_of_a_frontend_that_writes_is_out_of_reach() -> None:
    """Paths that generate text, or change something, are served only where fields are checked."""
    routes = Routes()
    for path in FRONTENDS:
        route = routes.at(path)
        if path not in TABLES and (route is None or route.by != "handler"):
            with pytest.raises(Refused):
                routes.check(route, "POST", path)


def test_the_document_shows_the_routes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "front-door.md").read_text()
    shown = re.findall(r"^\| `(/\S+)` \| ([A-Z, ]+) \| (.*) \|$", text, re.MULTILINE)
    assert shown == [(route.path, ", ".join(route.methods), route.summary) for route in ROUTES]


async def test_openapi_has_what_is_served() -> None:
    async with house(say_ok, playground=True) as at:
        spec = json.loads((await at.ask(get(OPENAPI))).partition(b"\r\n\r\n")[2])
        assert spec == json.loads(json.dumps(openapi(at.door.routes, CATALOG)))
        assert at.frontends[0].requests == []
    assert "/playground" in spec["paths"]
    assert set(spec["paths"]) >= {route.path for route in ROUTES}
    body = spec["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(TABLES[CHAT])
    assert body["properties"]["modalities"]["enum"] == [None, [], ["text"]]
    assert set(spec["paths"][CATALOGUE]) == {"get"}
    assert body["required"] == ["model"]
    assert body["anyOf"] == [{"required": ["messages"]}, {"required": ["prompt"]}]  # the latter of token ids


def head_for(host: str | None) -> Head:
    headers = {} if host is None else {b"host": host.encode("latin-1")}
    return Head(b"GET", b"/", b"1.1", list(headers.items()), headers)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:9", "127.0.0.9:1"],
)
def test_names_of_loopback(host: str) -> None:
    Hosts("127.0.0.9", (), False).check(head_for(host))


FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.2",
    "",
    "a b",
]


@pytest.mark.parametrize(
    "host", [*FOREIGN, "localhost:80@evil.example", "[::1", "::1", "localhost:x", "10.0.0.1", "\xe9"]
)
def test_foreign_names_are_refused_on_loopback_without_keys(host: str) -> None:
    for served_on in ("127.0.0.1", "::1", "localhost"):
        with pytest.raises(Refused) as refused:
            Hosts(served_on, (), False).check(head_for(host))
        assert (refused.value.status, refused.value.code) == (403, "host_not_allowed")
    Hosts("127.0.0.1", (), True).check(head_for(host))
    Hosts("0.0.0.0", (), False).check(head_for(host))


def test_further_names_may_be_allowed() -> None:
    for served_on, has_keys in (("127.0.0.1", False), ("0.0.0.0", True)):
        hosts = Hosts(served_on, ("Api.Example",), has_keys)
        for host in ("api.example", "API.EXAMPLE:443", "localhost"):
            hosts.check(head_for(host))
        with pytest.raises(Refused):
            hosts.check(head_for("evil.example"))
    assert host_name("[::1]:80") == "::1"


async def test_a_web_page_with_a_name_of_its_own_reads_nothing() -> None:
    async with house(say_ok) as at:
        for request in (get("/v1/models"), get(CATALOGUE), get("/health"), post()):
            said = await at.ask(request.replace(b"Host: localhost", b"Host: evil.example:8000"))
            assert error_of(said)[0] == 403
        assert at.frontends[0].requests == []
    async with house(say_ok, keys=("secret",)) as at:
        request = post(CHAT_BODY, "Authorization: Bearer secret").replace(b"Host: localhost", b"Host: api.example")
        assert (await at.ask(request)).endswith(b"{}")


def answers(status: str, body: Any) -> Any:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()

    return say


HEALTH = {
    "status": "healthy",
    "endpoints": ["dyn://dynamo.backend.generate"],
    "instances": [{"instance_id": 14924665441779891682, "transport": {"tcp": "10.1.2.3:46193/cf1f/generate"}}] * 2,
}


async def test_health_does_not_say_where_the_workers_are() -> None:
    async with house(answers("200 OK", HEALTH)) as at:
        head, _, body = (await at.ask(get("/health", "X-Request-Id: a"))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert json.loads(body) == {"status": "healthy", "instances": 2}
        same, _, nothing = (await at.ask(get("/health", "X-Request-Id: a", method="HEAD"))).partition(b"\r\n\r\n")
        assert (same, nothing) == (head, b"")
    for script in (
        answers("503 Service Unavailable", {"status": "unhealthy", "message": "10.1.2.3"}),
        answers("503 x", b"["),
    ):
        async with house(script) as at:
            said = await at.ask(get("/health"))
            assert said.startswith(b"HTTP/1.1 503 ")
            assert said.endswith(b'{"status": "unhealthy"}')
    async with house(say_ok) as at:
        await at.frontends[0].stop()
        assert (await at.ask(get("/health"))).startswith(b"HTTP/1.1 503 ")


FRONTEND_METRICS = b"""# HELP dynamo_frontend_requests_total Requests.
# TYPE dynamo_frontend_requests_total counter
dynamo_frontend_requests_total{model="m"} 3
# HELP process_threads Threads.
# TYPE process_threads gauge
process_threads 7
"""
WORKER_METRICS = b"""# HELP dlw_requests_total Requests.
# TYPE dlw_requests_total counter
dlw_requests_total{outcome="stop"} 2
# HELP process_threads Threads, in the words of another version.
# TYPE process_threads gauge
process_threads 9
"""


async def test_metrics_have_the_workers_series() -> None:
    worker = Frontend(answers("200 OK", WORKER_METRICS))
    await worker.start()
    port = Upstream("127.0.0.1", worker.port)
    async with house(answers("200 OK", FRONTEND_METRICS), worker_metrics=(port,)) as at:
        head, _, body = (await at.ask(get("/metrics"))).decode().partition("\r\n\r\n")
        assert "content-type: text/plain; version=0.0.4" in head
        assert body.splitlines() == [
            *FRONTEND_METRICS.decode().splitlines(),
            f'process_threads{{worker="{port}"}} 9',
            "# HELP dlw_requests_total Requests.",
            "# TYPE dlw_requests_total counter",
            f'dlw_requests_total{{worker="{port}",outcome="stop"}} 2',
        ]
        await worker.stop()
        body = (await at.ask(get("/metrics"))).decode()
        assert FRONTEND_METRICS.decode() in body
        assert f"# {port} does not answer.\n" in body


async def test_labels_of_metrics_stay_whole() -> None:
    """Only a line feed ends a line in Prometheus' format, and there it is written as an escape."""
    line = 'dlw_requests_total{model="a\\n\x0b\x0c\x1c\x85\u2028b"} 2\n'
    worker = Frontend(answers("200 OK", line.encode()))
    await worker.start()
    port = Upstream("127.0.0.1", worker.port)
    async with house(answers("200 OK", FRONTEND_METRICS), worker_metrics=(port,)) as at:
        body = (await at.ask(get("/metrics"))).decode()
        assert line.replace("{", f'{{worker="{port}",') in body
    await worker.stop()


async def test_metrics_say_where_the_workers_series_are() -> None:
    async with house(answers("200 OK", FRONTEND_METRICS)) as at:
        body = (await at.ask(get("/metrics"))).partition(b"\r\n\r\n")[2]
        assert body.startswith(FRONTEND_METRICS)
        (line,) = body[len(FRONTEND_METRICS) :].decode().splitlines()
        assert line.startswith("# ")
        assert "dlw_" in line
        assert "--worker-metrics" in line


@given(st.ip_addresses(v=6), st.ip_addresses(v=6))
@example(IPv6Address("64:ff9b::102:304"), IPv6Address("64:ff9b::506:708"))
def test_a_public_network_of_64_bits_is_one_client(one: IPv6Address, other: IPv6Address) -> None:
    """As addresses of one subscriber are; private ones, as those of pods, are clients each."""
    neighbour = IPv6Address(int(one) & ~(2**64 - 1) | int(other) & 2**64 - 1)
    labels = {label_of(b"", str(each).encode()) for each in (one, neighbour)}
    holds_ipv4 = any(each.ipv4_mapped is not None or each in NAT64 for each in (one, neighbour))
    is_public = one.is_global and neighbour.is_global and not holds_ipv4
    assert len(labels) == (1 if is_public or one == neighbour else 2)
    assert label_of(b"", str(IPv6Address(int(one) ^ 1 << 64)).encode()) not in labels


async def test_a_request_says_whose_it_is() -> None:
    """By key, or address, or what a proxy says; never what the client itself says."""
    forged = "X-Dynamo-Meta-Client: someone"

    async def label(at: Any, *headers: str) -> bytes:
        assert (await at.ask(post(CHAT_BODY, *headers, forged))).endswith(b"{}")
        found = re.findall(rb"(?i)\r\nx-dynamo-meta-client: (\S+)", at.frontends[0].requests[-1])
        assert len(found) == 1
        return bytes(found[0])

    async with house(say_ok, keys=("one", "two")) as at:
        one = await label(at, "Authorization: Bearer one")
        assert one == await label(at, "Authorization: bearer one") == label_of(b"one", b"")
        assert one != await label(at, "Authorization: Bearer two")
        assert b"one" not in one
    async with house(say_ok) as at:
        assert await label(at) == await label(at, "Authorization: Bearer any") == label_of(b"", b"127.0.0.1")
    async with house(say_ok, client_header="X-Forwarded-For") as at:
        assert await label(at, "x-forwarded-for: 10.0.0.1") == label_of(b"", b"10.0.0.1")
        assert await label(at) == label_of(b"", b"127.0.0.1")
