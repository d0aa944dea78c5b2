"""Clients with the rights to ask one model, who try for more: with a real server and its users."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from effort import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import MaxPayloadError
from nats_workers import running
from raw_nats import RawNats
from servers import NatsServer

from worker.migration.nats_store import INBOX
from worker.runtimes.nats import protocol
from worker.runtimes.nats.client import WorkerClient
from worker.runtimes.nats.connection import ConnectionOptions, connect
from worker.runtimes.nats.runtime import NatsWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 30, 41, 77]
SHORT: dict[str, Any] = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 3, "ignore_eos": True}}
LONG: dict[str, Any] = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 1900, "ignore_eos": True}}

CONFIG = """
accounts {
  serving: { jetstream: enabled, users: [
    { user: worker, password: p },
    { user: operator, password: p },
    { user: app, password: p, permissions: { publish: "dlw.M.1.>", subscribe: "_INBOX.>" } },
    { user: other, password: p, permissions: { publish: "dlw.other.1.>", subscribe: "_INBOX.>" } },
    { user: private, password: p, permissions: { publish: "dlw.M.1.>", subscribe: "_INBOX_private.>" } },
  ], exports: [ { service: "dlw.M.1.>", response: stream } ] }
  neighbours: { users: [ { user: neighbour, password: p } ],
    imports: [ { service: { account: serving, subject: "dlw.M.1.>" } } ] }
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    made = NatsServer(tmp_path_factory.mktemp("nats"), config=CONFIG)
    made.start()
    yield made
    made.kill()


def url(server: NatsServer, user: str) -> str:
    return f"nats://{user}:p@127.0.0.1:{server.port}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(server: NatsServer, tiny_model: Path) -> AsyncIterator[tuple[NatsWorker, NatsWorker]]:
    """Workers of the model M, and of another one."""
    async with (
        running(
            tiny_model, url(server, "worker"), "M", "--nats-reply-prefixes", "_INBOX.,_INBOX_private.,_R_."
        ) as ours,
        running(tiny_model, url(server, "worker"), "other") as other,
    ):
        yield ours, other


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def operator(server: NatsServer) -> AsyncIterator[Client]:
    client = await connect(ConnectionOptions(url=url(server, "operator")), "operator")
    yield client
    await client.close()


async def client_of(server: NatsServer, user: str, model: str = "M", **options: Any) -> WorkerClient:
    return await WorkerClient.connect(model, "1", ConnectionOptions(url=url(server, user), **options))


async def test_a_request_cannot_make_the_worker_publish_elsewhere(
    server: NatsServer, workers: tuple[NatsWorker, NatsWorker], operator: Client
) -> None:
    js = operator.jetstream()
    await js.add_stream(name="PRECIOUS", subjects=["precious"])
    seen: list[str] = []

    async def note(message: Any) -> None:
        seen.append(message.subject)

    watch = await operator.subscribe("elsewhere.>", cb=note)
    async with await client_of(server, "other", "other") as asking, RawNats(server.port, "app") as app:
        stream = asking.stream(request_id="victim", **LONG)
        await anext(stream)
        for reply in (
            "$JS.API.STREAM.DELETE.PRECIOUS",
            "dlw.other.1.cancel.victim",
            "elsewhere.a",
            "dlw.M.1.generate",
            f"{INBOX}.a",
            "_INBOX.a.>",
            "_INBOX.*",
            "_INBOX",
            "_INBOX_elsewhere.a",
        ):
            for subject in ("generate", "info", "cancel.x", "ack.x.y"):
                app.publish(f"dlw.M.1.{subject}".encode(), reply.encode(), protocol.encoded(SHORT))
            assert await app.flushed() == []
        async with await client_of(server, "app") as friendly:
            assert (await friendly.generate(**SHORT)).choices[0].finish_reason == "length"
        await operator.flush()
        assert (await js.stream_info("PRECIOUS")).config.name == "PRECIOUS"
        assert (await anext(stream)).get("finish_reason") is None
        await stream.aclose()
    assert seen == []
    assert workers[0]._service is not None
    assert workers[0]._service.stats()["refused_replies"] >= 9
    await watch.unsubscribe()


async def test_probes_answer_to_inboxes_alone(
    server: NatsServer, workers: tuple[NatsWorker, NatsWorker], operator: Client
) -> None:
    heard = asyncio.Event()

    async def note(message: Any) -> None:
        heard.set()

    watch = await operator.subscribe("elsewhere.>", cb=note)
    for verb in ("PING", "INFO", "STATS"):
        await operator.publish(f"$SRV.{verb}", reply="elsewhere.probe")
        assert json.loads((await operator.request(f"$SRV.{verb}.dlw-M-1", timeout=5)).data)["name"] == "dlw-M-1"
    await operator.flush()
    assert not heard.is_set()
    await watch.unsubscribe()


async def test_private_inboxes_and_other_accounts_are_served(
    server: NatsServer, workers: tuple[NatsWorker, NatsWorker]
) -> None:
    async with await client_of(server, "private", inbox_prefix="_INBOX_private") as private:
        assert (await private.info())["model"] == "M"
        assert (await private.generate(**SHORT)).choices[0].finish_reason == "length"
    async with await client_of(server, "neighbour") as neighbour:
        assert (await neighbour.info())["model"] == "M"


MALFORMED: dict[str, tuple[bytes, bytes, bytes | None]] = {
    "a status that is not UTF-8": (b"dlw.M.1.generate", b"_INBOX.a", b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
    "headers that end at once": (b"dlw.M.1.generate", b"_INBOX.a", b"NATS/1.0"),
    "headers that are none": (b"dlw.M.1.info", b"_INBOX.a", b"\x00" * 12),
    "a description that is not UTF-8": (b"dlw.M.1.ack.x.y", b"", b"NATS/1.0 503 \xff\xfe\r\n\r\n"),
    "a subject that is not UTF-8": (b"dlw.M.1.cancel.\xff\xfe", b"", None),
    "a reply that is not UTF-8": (b"dlw.M.1.generate", b"_INBOX.\xff", None),
    "a form feed in a subject": (b"dlw.M.1.cancel.a\x0cb", b"", None),
    "the number of another subscription in a subject": (b"dlw.M.1.cancel.a\x0b1", b"_INBOX.a", None),
    "a vertical tab in a reply": (b"dlw.M.1.generate", b"_INBOX.a\x0b9", None),
    "a reply that fills a line": (b"dlw.M.1.generate", b"_INBOX." + b"a" * 4060, None),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_bytes_do_not_make_the_worker_deaf(
    server: NatsServer, workers: tuple[NatsWorker, NatsWorker], name: str
) -> None:
    """Neither deaf nor disconnected: answers without a window would lose messages."""
    subject, reply, headers = MALFORMED[name]
    assert workers[0]._client is not None
    reconnects = workers[0]._client.stats["reconnects"]
    async with RawNats(server.port, "app") as app, await client_of(server, "app") as asking:
        app.publish(subject, reply, b"{}", headers)
        assert await app.flushed() == []
        assert (await asking.generate(**SHORT)).choices[0].finish_reason == "length"
    assert workers[0]._client.stats["reconnects"] == reconnects


async def test_part_of_a_subject_is_not_taken_for_a_subscription(server: NatsServer) -> None:
    """``MSG a<VT>1 5 2`` is a message to ``a<VT>1``, not one to the first subscription."""
    got: list[tuple[int, str]] = []
    client = await connect(ConnectionOptions(url=url(server, "operator")), "test")

    async def first(message: Any) -> None:
        got.append((1, message.subject))

    async def second(message: Any) -> None:
        got.append((2, message.subject))

    await client.subscribe("first", cb=first)
    await client.subscribe("second.*", cb=second)
    async with RawNats(server.port, "operator") as raw:
        raw.publish(b"second.a\x0b1", data=b"{}")
        raw.publish(b"second.end", data=b"{}")
        await raw.flushed()
    while not any(subject == "second.end" for _, subject in got):
        await asyncio.sleep(0.005)
    assert got == [(2, "second.a\x0b1"), (2, "second.end")]
    await client.close()


_headers = st.binary(max_size=60).map(lambda tail: b"NATS/1.0" + tail) | st.binary(min_size=1, max_size=40)
_parts = st.binary(max_size=12).map(lambda part: bytes(each for each in part if each not in b" \t\r\n\0*>"))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"generate", b"info", b"cancel.", b"ack.x.", b"ack."]),
            _parts,
            st.sampled_from([b"", b"_INBOX.", b"$JS.API.INFO", b"elsewhere.", b"dlw.other.1.cancel."]),
            _parts,
            st.none() | _headers,
            st.binary(max_size=30)
            | st.sampled_from([b"{}", b'{"prompt": "\\ud800"}', b"[" * 20_000, b'{"token_ids": 1}']),
        ),
        min_size=1,
        max_size=20,
    )
)
@example([(b"info", b"", b"elsewhere.", b"a", None, b"{}"), (b"cancel.", b"\xff", b"", b"", None, b"")])
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_message_makes_the_worker_deaf_or_publish_elsewhere(
    server: NatsServer,
    workers: tuple[NatsWorker, NatsWorker],
    operator: Client,
    messages: list[tuple[bytes, bytes, bytes, bytes, bytes | None, bytes]],
) -> None:
    seen: list[str] = []

    async def note(message: Any) -> None:
        if not message.subject.startswith(("_INBOX.", "dlw.M.1.", "_R_.", "$SYS.")):
            seen.append(message.subject)

    assert workers[0]._client is not None
    reconnects = workers[0]._client.stats["reconnects"]
    watch = await operator.subscribe(">", cb=note)
    async with RawNats(server.port, "app") as app, await client_of(server, "app") as asking:
        for subject, end, prefix, rest, headers, data in messages:
            reply = prefix + rest if prefix.endswith(b".") and rest else prefix.removesuffix(b".")
            app.publish(b"dlw.M.1." + subject + end, reply, data, headers)
        await app.flushed()
        assert (await asking.generate(**SHORT)).choices[0].finish_reason == "length"
    await operator.flush()
    await watch.unsubscribe()
    assert seen == []
    assert workers[0]._client.stats["reconnects"] == reconnects
    while any(each.server.engine.num_unfinished() for each in workers):
        await asyncio.sleep(0.005)


async def test_headers_count_for_the_size_of_a_message(server: NatsServer) -> None:
    """The server would close the connection for good, and the worker would leave."""
    client = await connect(ConnectionOptions(url=url(server, "operator")), "operator")
    headers = {protocol.KIND: protocol.CHUNK, protocol.SEQUENCE: "0"}
    most = client.max_payload - len("NATS/1.0\r\nDlw-Kind: chunk\r\nDlw-Seq: 0\r\n\r\n")
    with pytest.raises(MaxPayloadError):
        await client.publish("a", b"a" * (most + 1), headers=headers)
    await client.publish("a", b"a" * most, headers=headers)
    await client.flush()
    assert client.is_connected
    await client.close()


async def test_a_refused_request_cannot_touch_the_one_whose_id_it_has(
    server: NatsServer, workers: tuple[NatsWorker, NatsWorker]
) -> None:
    async with await client_of(server, "app") as first, await client_of(server, "app") as second:
        stream = first.stream(request_id="taken", **LONG)
        await anext(stream)
        reply = await second.connection.request(
            second.subjects.generate,
            protocol.encoded(SHORT),
            headers={protocol.REQUEST_ID: "taken", protocol.WINDOW: "8"},
        )
        assert "is being served already" in json.loads(reply.data)["error"]["message"]
        assert not reply.reply  # there is nowhere to acknowledge it, or to say that it is not wanted
        assert (await anext(stream)).get("finish_reason") is None
        await stream.aclose()


async def test_absurd_acknowledgements_are_ignored(server: NatsServer, workers: tuple[NatsWorker, NatsWorker]) -> None:
    errors: list[Exception] = []
    connection = workers[0]._client
    assert connection is not None
    before = connection._error_cb

    async def note(error: Exception) -> None:
        errors.append(error)

    connection._error_cb = note
    try:
        async with await client_of(server, "app") as asking:
            stream = asking.stream(request_id="long", **LONG)
            await anext(stream)
            (receiver,) = asking._inbox.receivers.values()
            assert receiver.acknowledge is not None
            for number in ("9" * 5000, "-1", "x", "\u0663", ""):
                await asking.connection.publish(
                    receiver.acknowledge, headers={protocol.SEQUENCE: number, protocol.KIND: protocol.RESUME}
                )
            assert (await anext(stream)).get("finish_reason") is None
            await stream.aclose()
    finally:
        connection._error_cb = before
    assert errors == []


@pytest.mark.slow
async def test_a_client_that_never_reads_is_cut_off_and_holds_nothing(tmp_path: Path, tiny_model: Path) -> None:
    """Without a window everything is sent to it at once; the server gives it up."""
    server = NatsServer(tmp_path / "server", config='write_deadline: "100ms"\nmax_payload: 32KB\nmax_pending: 64KB\n')
    server.start()
    try:
        async with (
            running(tiny_model, server.url, "M", "--max-num-seqs", "8") as worker,
            RawNats(server.port) as slow,
            await client_of(server, "app") as quick,
        ):
            await slow.subscribe_and_read_no_more(b"_INBOX.slow")
            options = {"sampling_options": {"n": 8, "seed": 1}, "output_options": {"logprobs": 5}}
            for number in range(4):
                headers = b"NATS/1.0\r\nDlw-Request-Id: slow-%d\r\n\r\n" % number
                slow.publish(b"dlw.M.1.generate", b"_INBOX.slow", protocol.encoded(LONG | options), headers)
            while not len(worker.server.in_flight):
                await asyncio.sleep(0.001)
            assert (await quick.generate(**SHORT)).choices[0].finish_reason == "length"
            while len(worker.server.in_flight) or worker.server.engine.num_unfinished():
                await asyncio.sleep(0.01)
            assert (await quick.generate(**SHORT)).choices[0].finish_reason == "length"
            assert worker._service is not None
            while worker._service._answers.streams:
                await asyncio.sleep(0.01)
        assert "Slow Consumer" in (server.directory / "log").read_text()
    finally:
        server.kill()


async def test_a_flood_of_acknowledgements_holds_nobody_up(
    server: NatsServer, workers: tuple[NatsWorker, NatsWorker]
) -> None:
    async with await client_of(server, "app") as asking, RawNats(server.port, "app") as raw:
        stream = asking.stream(request_id="flooded", **LONG)
        await anext(stream)
        (receiver,) = asking._inbox.receivers.values()
        assert receiver.acknowledge is not None
        headers = b"NATS/1.0\r\nDlw-Seq: 0\r\nDlw-Kind: resume\r\n\r\n"
        for _ in range(20_000):
            raw.publish(receiver.acknowledge.encode(), headers=headers)
        await raw.flushed()
        async with await client_of(server, "app") as other:
            assert (await other.generate(**SHORT)).choices[0].finish_reason == "length"
        assert (await anext(stream)).get("finish_reason") is None
        await stream.aclose()
