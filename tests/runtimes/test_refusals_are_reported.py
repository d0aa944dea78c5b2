"""Refusals of the runtimes themselves, before a worker serves a request, are counted and logged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats_workers import connected
from nats_workers import running as running_on_nats
from openengine_workers import connected as connected_to
from openengine_workers import running
from raw_nats import RawNats
from request_lines import kept_lines
from servers import NatsServer

from worker.metrics import OUTCOMES
from worker.runtimes.direct.process import DirectWorker
from worker.runtimes.nats.protocol import REQUEST_ID

OPENENGINE: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": "none"}, "model"),
    "an unknown key": ({"extra": {"zzz": 1}}, "other"),
    "a list of texts": ({"extra": {"annotations": 5}}, "annotations"),
    "too many choices": ({"sampling": {"num_sequences": 1000}}, "sampling_options.n"),
    "a value out of range": ({"sampling": {"top_p": 7.0}}, "sampling_options.top_p"),
}
"""Fields of requests that are refused, and the label of the field."""

NATS: dict[str, tuple[bytes, str]] = {
    "no json": (b"{", "other"),
    "another model": (b'{"token_ids": [1], "model": "none"}', "model"),
    "no prompt": (b'{"prompt": 5}', "other"),
    "kv of a worker": (b'{"token_ids": [1], "prefill_result": {"disaggregated_params": {}}}', "prefill_result"),
    "choices": (b'{"token_ids": [1], "sampling_options": {"n": 1000}}', "sampling_options.n"),
    "a value out of range": (b'{"token_ids": [1], "sampling_options": {"top_p": 7}}', "sampling_options.top_p"),
}


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    with kept_lines() as kept:
        yield kept


def counted(worker: DirectWorker) -> dict[str, float]:
    """Outcomes and refused fields, those that any request had."""
    value = worker.server.metrics.registry.get_sample_value
    ended = {name: value("dlw_requests_total", {"outcome": name}) or 0 for name in OUTCOMES}
    (fields,) = [family for family in worker.server.metrics.registry.collect() if family.name == "dlw_refused_fields"]
    refused = {one.labels["field"]: one.value for one in fields.samples if one.name.endswith("_total")}
    return {name: number for name, number in (ended | refused).items() if number}


async def has_lines(lines: list[dict[str, Any]], number: int) -> None:
    async with asyncio.timeout(20):
        while len(lines) < number:
            await asyncio.sleep(0.01)


async def test_refusals_of_openengine(
    tiny_model: Path, lines: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    wanted: dict[str, float] = {"refused": len(OPENENGINE)}
    async with running(tiny_model, "--log-requests") as worker, connected_to(worker.port) as client:
        for number, (fields, label) in enumerate(OPENENGINE.values()):
            await client.refusal(request_id=f"id-{number}", **fields)
            wanted[label] = wanted.get(label, 0) + 1
        await has_lines(lines, len(OPENENGINE))
        assert counted(worker) == wanted
    said = [message.partition(": ")[0] for message in caplog.messages if "refused" in message]
    assert said == [f"request id-{number} refused" for number in range(len(OPENENGINE))]
    assert [(line["request_id"], line["error"]) for line in lines][-1] == (f"id-{number}", "InvalidRequest")


async def test_refusals_on_nats(
    nats_server: NatsServer, tiny_model: Path, lines: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    wanted: dict[str, float] = {"refused": len(NATS) + 1}
    async with running_on_nats(tiny_model, nats_server.url, "refusing", "--log-requests") as worker:
        async with await connected(nats_server.url, "refusing") as client:
            for number, (data, label) in enumerate(NATS.values()):
                headers = {REQUEST_ID: f"id-{number}"}
                reply = await client.connection.request(client.subjects.generate, data, headers=headers)
                assert reply.headers is not None
                assert reply.headers["Nats-Service-Error-Code"] == "400"
                wanted[label] = wanted.get(label, 0) + 1
            await client.connection.request(client.subjects.generate, b"{}", headers={REQUEST_ID: "\x1b[2K" * 2000})
            wanted["other"] += 1
        await has_lines(lines, len(NATS) + 1)
        assert counted(worker) == wanted
    said = [message for message in caplog.messages if message.startswith("request ")]
    assert [each.partition(": ")[0] for each in said][:-1] == [f"request id-{n} refused" for n in range(len(NATS))]
    assert {record.levelname for record in caplog.records if "refused: " in record.getMessage()} == {"WARNING"}
    assert said[-1].isprintable()
    assert len(said[-1]) < 2000
    assert len(lines[-1]["request_id"]) <= 200


async def test_a_flood_without_reply_subjects_fills_no_log(
    own_server: NatsServer, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_on_nats(tiny_model, own_server.url, "flooded") as worker, RawNats(own_server.port) as client:
        for _ in range(500):
            client.publish(b"dlw.flooded.1.generate", data=b"{}")
        assert await client.flushed() == []
        async with asyncio.timeout(20):
            while worker._service is None or worker._service.stats()["refused_replies"] < 500:
                await asyncio.sleep(0.01)
    assert len([message for message in caplog.messages if "dropped a message" in message]) == 1
