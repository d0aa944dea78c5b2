"""The NATS runtime when the server, a worker or the way between them fails; and who is let in."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import nkeys
import pytest
from nats_workers import EXACT, connected, running
from ports import free_port
from running_workers import make_certificate
from servers import NatsServer
from warm_start import WarmProcess

from worker.errors import StartupError
from worker.runtimes.nats.client import (
    BlockingWorkerClient,
    RequestError,
    WorkerClient,
    WorkerLost,
)
from worker.runtimes.nats.connection import ConnectionOptions, connect

LONG: dict[str, Any] = {"token_ids": [9, 30, 41, 77], "stop_conditions": {"max_tokens": 300, "ignore_eos": True}}
SHORT: dict[str, Any] = {"token_ids": [9, 30, 41, 77], "stop_conditions": {"max_tokens": 5, "ignore_eos": True}}


async def test_a_server_that_is_killed_and_comes_back(own_server: NatsServer, tiny_model: Path) -> None:
    """Answers under way go on where they were, the worker serves on without a restart."""
    async with (
        running(tiny_model, own_server.url, "tiny") as worker,
        await connected(own_server.url, "tiny", window=16, lost_s=60.0) as client,
    ):
        expected = (await client.generate(**LONG)).choices[0].token_ids
        streams = [client.stream(retries=0, **LONG) for _ in range(4)]
        tokens = [list((await anext(stream))["token_ids"]) for stream in streams]
        own_server.kill()
        while client.connection.is_connected:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(own_server.start)
        for stream, begun in zip(streams, tokens, strict=True):
            async for chunk in stream:
                begun += chunk["token_ids"]
        assert tokens == [expected] * 4
        assert (await client.generate(**SHORT)).choices[0].finish_reason == "length"
        assert worker.server.broken is None


def probe(port: int, path: str) -> tuple[int, str]:
    """Status and text."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
            return reply.status, str(reply.read(), "utf-8")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, str(error.read(), "utf-8")


def worker_process(model: Path, url: str, log: Path, *argv: str) -> WarmProcess:
    given = ["-m", "worker", "--runtime", "nats", "--nats-url", url, "--model-path", str(model)]
    return WarmProcess([*given, "--served-model-name", "tiny", *EXACT, *argv], dict(os.environ), log)


async def until_served(client: WorkerClient, process: WarmProcess, log: Path) -> None:
    while True:
        try:
            await client.info()
            return
        except RequestError:
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.05)


async def test_a_worker_drains_at_sigterm_and_its_death_is_noticed(
    nats_server: NatsServer, tiny_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    port = free_port()
    first = worker_process(tiny_model, nats_server.url, log, "--metrics-port", str(port))
    second = None
    try:
        async with await connected(nats_server.url, "tiny", window=8, lost_s=10.0) as client:
            await until_served(client, first, log)
            stream = client.stream(retries=0, **LONG)
            tokens = list((await anext(stream))["token_ids"])
            first.send_signal(signal.SIGTERM)
            while (await asyncio.to_thread(probe, port, "/health")) != (503, "draining\n"):
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(probe, port, "/live") == (200, "ok\n")
            async for chunk in stream:
                tokens += chunk["token_ids"]
            assert len(tokens) == 300
            assert await asyncio.to_thread(first.wait, 60) == 0, log.read_text()

            second = worker_process(tiny_model, nats_server.url, log)
            await until_served(client, second, log)
            stream = client.stream(retries=0, **LONG)
            await anext(stream)
            second.kill()
            with pytest.raises(WorkerLost):
                async for _ in stream:
                    pass
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait(30)


@pytest.mark.campaign
async def test_a_death_is_noticed_within_two_seconds(nats_server: NatsServer, tiny_model: Path, tmp_path: Path) -> None:
    """With the default `LOST_S`; half a second more is the busy machine's."""
    log = tmp_path / "log"
    for _ in range(5):
        worker = worker_process(tiny_model, nats_server.url, log)
        try:
            async with await connected(nats_server.url, "tiny", window=8) as client:
                await until_served(client, worker, log)
                stream = client.stream(retries=0, **LONG)
                await anext(stream)
                worker.kill()
                killed_s = time.monotonic()
                with pytest.raises(WorkerLost):
                    async for _ in stream:
                        pass
                assert time.monotonic() - killed_s <= 2.5
        finally:
            worker.kill()
            worker.wait(30)


async def test_credentials(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "server", config='authorization { token: "right" }\n')
    server.start()
    try:
        for token in ("wrong", None):
            with pytest.raises(StartupError, match=r"cannot connect to NATS at .*: .*[Aa]uthorization"):
                await connect(ConnectionOptions(url=server.url, token=token), "test")
        client = await connect(ConnectionOptions(url=server.url, token="right"), "test")
        await client.close()
    finally:
        server.kill()


async def test_nkeys(tmp_path: Path) -> None:
    seeds = [nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER) for _ in range(2)]
    public = nkeys.from_seed(seeds[0]).public_key.decode()
    for name, seed in zip(("right", "wrong"), seeds, strict=True):
        (tmp_path / name).write_bytes(seed)
    server = NatsServer(tmp_path / "server", config=f"authorization {{ users: [{{ nkey: {public} }}] }}\n")
    server.start()
    try:
        with pytest.raises(StartupError, match="cannot connect to NATS"):
            await connect(ConnectionOptions(url=server.url, nkey_seed=str(tmp_path / "wrong")), "test")
        client = await connect(ConnectionOptions(url=server.url, nkey_seed=str(tmp_path / "right")), "test")
        await client.close()
        with pytest.raises(StartupError, match="nkey seed: no such file"):
            await connect(ConnectionOptions(url=server.url, nkey_seed="/nowhere"), "test")
    finally:
        server.kill()


async def test_tls(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    paths = {name: str(tmp_path / f"{name}.pem") for name in ("cert", "key")}
    config = f'tls {{ cert_file: "{paths["cert"]}", key_file: "{paths["key"]}" }}\n'
    server = NatsServer(tmp_path / "server", config=config)
    server.start()
    url = server.url.replace("nats://127.0.0.1", "tls://localhost")
    try:
        client = await connect(ConnectionOptions(url=url, tls_ca=paths["cert"]), "test")
        await client.close()
        with pytest.raises(StartupError, match="certificate verify failed"):
            await connect(ConnectionOptions(url=url), "test")
        (tmp_path / "bad.pem").write_text("no certificate")
        with pytest.raises(StartupError, match="TLS"):
            await connect(ConnectionOptions(url=url, tls_ca=str(tmp_path / "bad.pem")), "test")
    finally:
        server.kill()


async def test_the_blocking_client_and_metrics(nats_server: NatsServer, tiny_model: Path) -> None:
    port = free_port()

    def use() -> tuple[list[int], list[int], str]:
        with BlockingWorkerClient("blocking", options=ConnectionOptions(url=nats_server.url)) as client:
            streamed = [token for chunk in client.stream(**SHORT) for token in chunk["token_ids"]]
            return streamed, client.generate(**SHORT).choices[0].token_ids, client.info()["model"]

    async with running(tiny_model, nats_server.url, "blocking", "--metrics-port", str(port)):
        streamed, whole, model = await asyncio.to_thread(use)
        assert 'dlw_requests_total{outcome="length"} 2.0' in (await asyncio.to_thread(probe, port, "/metrics"))[1]
        assert await asyncio.to_thread(probe, port, "/elsewhere") == (404, "there are /metrics, /live and /health\n")
    assert streamed == whole
    assert model == "blocking"


async def test_a_stream_may_outlive_its_blocking_client(nats_server: NatsServer, tiny_model: Path) -> None:
    """Its end was an error of a loop that is closed."""

    def use() -> None:
        with BlockingWorkerClient("left", options=ConnectionOptions(url=nats_server.url)) as client:
            stream = client.stream(**LONG)
            next(stream)
        stream.close()  # type: ignore[attr-defined]

    async with running(tiny_model, nats_server.url, "left"):
        await asyncio.to_thread(use)


async def test_probes_say_what_is_wrong(own_server: NatsServer, tiny_model: Path) -> None:
    port = free_port()
    get = partial(probe, port)
    async with running(tiny_model, own_server.url, "probed", "--metrics-port", str(port)) as worker:
        assert await asyncio.to_thread(get, "/live") == (200, "ok\n")
        assert await asyncio.to_thread(get, "/health") == (200, "ok\n")
        with ThreadPoolExecutor() as pool:
            status, reason = pool.submit(get, "/live").result()  # the loop stands still
        assert (status, "has not answered" in reason) == (503, True)
        own_server.kill()
        while (await asyncio.to_thread(get, "/health"))[0] == 200:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(get, "/health") == (503, "the NATS server is away\n")
        assert await asyncio.to_thread(get, "/live") == (200, "ok\n")  # a restart would not help
        worker.ready.clear()
        assert await asyncio.to_thread(get, "/live") == (503, "starting\n")
        worker.ready.set()


async def test_a_port_that_is_taken(nats_server: NatsServer, tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(StartupError, match=f"--metrics-port {port}: Address already in use"):
            async with running(tiny_model, nats_server.url, "taken", "--metrics-port", port):
                pass


async def test_no_message_has_the_password(tmp_path: Path) -> None:
    port = free_port()
    url = f"nats://user:secret@127.0.0.1:{port},nats://token@127.0.0.1:{port}"
    with pytest.raises(StartupError, match="cannot connect to NATS at") as raised:
        await connect(ConnectionOptions(url=url), "test")
    assert f"nats://127.0.0.1:{port},nats://127.0.0.1:{port}: " in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "token@" not in str(raised.value)


@pytest.mark.slow
async def test_a_full_disk_for_logs_stops_nothing(nats_server: NatsServer, tiny_model: Path) -> None:
    """Both streams have no room from the start: the worker starts, serves, drains, exits with 0."""
    given = ["--runtime", "nats", "--nats-url", nats_server.url, "--model-path", str(tiny_model), "--log-requests"]
    command = [sys.executable, "-m", "worker", *given, "--served-model-name", "unlogged", *EXACT]
    with Path("/dev/full").open("w") as full:
        worker = subprocess.Popen(command, stdout=full, stderr=full, cwd=Path(__file__).parents[2])
    try:
        async with await connected(nats_server.url, "unlogged") as client:
            while True:
                try:
                    await client.info()
                    break
                except RequestError:
                    assert worker.poll() is None
                    await asyncio.sleep(0.05)
            for _ in range(3):
                assert (await client.generate(**SHORT)).choices[0].finish_reason == "length"
            with pytest.raises(RequestError, match="unknown field"):
                await client.generate(**SHORT, temprature=1)
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, 60) == 0
    finally:
        worker.kill()
        worker.wait(30)
