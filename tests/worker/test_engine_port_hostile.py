"""--engine-port before senders that die, lie or send what is no update: nothing changes, and it
answers on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from engine_port_client import BYTES_OPTIONS, KEY, Trainer, tensors_of, trained
from safetensors.torch import save

from worker.engines.weights import REASONS
from worker.errors import InvalidRequest
from worker.server.connection_threads import MOST_WAITING
from worker.server.engine_routes import new_memory
from worker.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

NORM = "model.norm.weight"
UPDATE = save({NORM: torch.linspace(0.5, 1.5, 64)})
HEAD = (
    "POST /engine/update_weights?weight_version=of-the-dead HTTP/1.1\r\nHost: a\r\n"
    f"Content-Type: application/octet-stream\r\nAuthorization: Bearer {KEY}\r\n"
).encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
AT_ONCE = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trainer]:
    root = tmp_path_factory.mktemp("served")
    async with trained(write_tiny_model(root / "model"), root / "keys.txt") as found:
        yield found


def request(framing: str) -> bytes:
    """A whole update."""
    if framing == "length":
        return HEAD + b"Content-Length: %d\r\n\r\n" % len(UPDATE) + UPDATE
    parts = [UPDATE[start : start + 100] for start in range(0, len(UPDATE), 100)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def send(port: int, content: bytes, *, resets: bool = False) -> bytes:
    """The answer to `content`, behind which the sender is gone: it closes, or resets."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(content)
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return b""
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer


async def die_everywhere(trainer: Trainer, framing: str, positions: range) -> None:
    before, answer = await trainer.tell("get_weight_version"), await trainer.generate(12)
    whole, limit = request(framing), asyncio.Semaphore(AT_ONCE)

    async def die(position: int, *, resets: bool) -> bytes:
        async with limit:
            return await asyncio.to_thread(send, trainer.port, whole[:position], resets=resets)

    deaths = (die(position, resets=resets) for position in positions for resets in (False, True))
    answers = await asyncio.gather(*deaths)
    assert not any(b" 200 OK" in each for each in answers)
    assert await trainer.tell("get_weight_version") == before
    assert (await trainer.generate(12)).token_ids == answer.token_ids
    assert b" 200 OK" in await asyncio.to_thread(send, trainer.port, whole)
    assert (await trainer.tell("get_weight_version"))["number"] == before["number"] + 1


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_sender_dies(trainer: Trainer, framing: str) -> None:
    await die_everywhere(trainer, framing, range(0, len(request(framing)), 23))


@pytest.mark.parametrize("route", ["pause", "sleep", "update_weights"])
async def test_nothing_is_done_before_the_whole_request_is_there(trainer: Trainer, route: str) -> None:
    """Half a key, half a length, or half of the empty line behind the head."""
    whole = f"POST /engine/{route} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    for position in range(len(whole)):
        assert b" 200 OK" not in await asyncio.to_thread(send, trainer.port, whole[:position])
    assert (await trainer.tell("get_weight_version"))["state"] == "serving"


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_sender_dies_at_every_byte(trainer: Trainer, framing: str) -> None:
    await die_everywhere(trainer, framing, range(len(request(framing))))


LIES = {
    "digits": HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "a huge body": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n",
    "a huge chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 900 + b"\r\n",
    "a negative chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n",
    "a chunk without an end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n0\r\n\r\n",
    "a chunk's size as Python writes it": CHUNKED + b"0x%x\r\n%b\r\n0\r\n\r\n" % (len(UPDATE), UPDATE),
    "a chunk's size with a sign": CHUNKED + b"+%x\r\n%b\r\n0\r\n\r\n" % (len(UPDATE), UPDATE),
    "two lengths": HEAD + b"Content-Length: %d\r\nContent-Length: 0\r\n\r\n%b" % (len(UPDATE), UPDATE),
    "chunked twice": CHUNKED[:-2] + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(UPDATE), UPDATE),
    "a host of half an address": HEAD.replace(b"/engine", b"http://[/engine") + b"Content-Length: 0\r\n\r\n",
    "two framings": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "another framing": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "no length": HEAD + b"Content-Length: -1\r\n\r\n",
    "a query twice": HEAD.replace(b"?", b"?weight_version=b&") + b"Content-Length: 0\r\n\r\n",
    "half a character": HEAD.replace(b"of-the-dead", b"%ed%a0%80%00") + b"Content-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("lie", LIES)
async def test_lies_about_a_body(trainer: Trainer, lie: str) -> None:
    before = await trainer.tell("get_weight_version")
    answer = await asyncio.to_thread(send, trainer.port, LIES[lie])
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 ")), answer
    assert await trainer.tell("get_weight_version") == before


async def test_senders_that_say_nothing_are_so_many(trainer: Trainer) -> None:
    """They need no key to connect, and would take all descriptors of a worker that serves; an
    update that is being sent stays.
    """
    whole, before = request("length"), await trainer.tell("get_weight_version")

    def come() -> tuple[list[bytes], bytes]:
        with contextlib.ExitStack() as stack:

            def connected() -> socket.socket:
                return stack.enter_context(socket.create_connection(("127.0.0.1", trainer.port), 20))

            update = connected()
            update.sendall(whole[:-100])
            for _ in range(5):  # meanwhile its head is read
                assert trainer.send("/engine/get_weight_version")[0] == 200
            silent = [connected() for _ in range(MOST_WAITING + 8)]
            assert trainer.send("/engine/get_weight_version")[0] == 200
            closed = [each.recv(1) for each in silent[:8]]
            update.sendall(whole[-100:])
            return closed, update.recv(65536)

    closed, answer = await asyncio.to_thread(come)
    assert closed == [b""] * 8
    assert b" 200 OK" in answer
    assert (await trainer.tell("get_weight_version"))["number"] == before["number"] + 1


async def test_a_sender_that_breaks_off_fills_no_log(trainer: Trainer, capfd: pytest.CaptureFixture[str]) -> None:
    for content in (b"", b"POST /eng", HEAD):
        await asyncio.to_thread(send, trainer.port, content, resets=True)
    assert (await trainer.tell("get_weight_version"))["state"] == "serving"
    assert "Traceback" not in capfd.readouterr().err


async def test_a_key_may_be_of_any_characters(trainer: Trainer) -> None:
    head = "GET /engine/get_weight_version HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer clé à molette à"
    assert b" 200 OK" in await asyncio.to_thread(send, trainer.port, f"{head}\r\n\r\n".encode())
    assert b" 401 " in await asyncio.to_thread(send, trainer.port, f"{head[:-1]}\r\n\r\n".encode())


async def test_what_cannot_be_looked_at_is_no_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    for path, said in ((tmp_path / (300 * "x"), "File name too long"), (tmp_path, "it has 2 GGUF files")):
        fields = json.dumps({"model_path": str(path)}).encode()
        status, answer = await trainer.ask("/engine/update_weights_from_disk", fields)
        assert status == 400, answer
        assert said in str(answer)


async def test_a_pipe_is_no_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    """Its reader would wait for ever, and no update could come after it."""
    (tmp_path / "directory").mkdir()
    pipes = [tmp_path / "pipe", tmp_path / "directory" / "model.safetensors"]
    for path in pipes:
        os.mkfifo(path)
    for path in (pipes[0], pipes[1].parent, Path("/dev/zero")):
        fields = json.dumps({"model_path": str(path)}).encode()
        status, answer = await asyncio.wait_for(trainer.ask("/engine/update_weights_from_disk", fields), 20)
        assert status == 400, answer
    assert (await trainer.tell("get_weight_version"))["state"] == "serving"


async def test_two_trainers_at_once(trainer: Trainer) -> None:
    """The weights are whole those of one; the other is told."""
    tensors = tensors_of(Path(trainer.worker.server.arguments.model_path))
    given = [{name: one * factor for name, one in tensors.items()} for factor in (0.5, 0.75)]
    alone = []
    for each in given:
        await trainer.give(each)
        alone.append((await trainer.tell("get_weight_version"))["digest"])
    for _ in range(5):
        names = [("weight_version", name) for name in ("one", "two")]
        both = (trainer.give(each, **dict([name])) for each, name in zip(given, names, strict=True))
        statuses = [status for status, _ in await asyncio.gather(*both)]
        found = await trainer.tell("get_weight_version")
        assert sorted(set(statuses)) in ([200], [200, 409])
        if statuses != [200, 200]:
            assert found["version"] == ("one", "two")[statuses.index(200)]
        assert found["digest"] == alone[("one", "two").index(found["version"])]
    await trainer.give(tensors)


async def test_a_checkpoint_that_is_gone_when_it_wakes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The engine wakes without weights, and an update brings them."""
    model = write_tiny_model(tmp_path / "model")
    tensors, weights = tensors_of(model), model / "model.safetensors"
    async with trained(model, tmp_path_factory.mktemp("keys") / "keys.txt") as trainer:
        before = await trainer.generate(12)
        await trainer.tell("sleep", level=2)
        weights.rename(tmp_path / "away")
        assert (await trainer.tell("wake"))["state"] == "needs_weights"
        for route, method in (("/engine/resume", "POST"), ("/engine/sleep", "POST"), ("/health_generate", "GET")):
            status, answer = await trainer.ask(route, method=method)
            assert (status, answer["message"]) == (409, REASONS["needs_weights"])
        status, _ = await trainer.give(tensors)
        assert status == 200
        assert (await trainer.generate(12)).token_ids == before.token_ids


async def test_a_checkpoint_that_has_changed_when_it_wakes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Other weights are not taken for those whose digest answers name: an update must come."""
    model, other = (write_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(("model", "other")))
    tensors = tensors_of(model)
    async with trained(model, tmp_path_factory.mktemp("keys") / "keys.txt") as trainer:
        before = await trainer.generate(12)
        await trainer.tell("sleep", level=2)
        (other / "model.safetensors").rename(model / "model.safetensors")
        assert (await trainer.tell("wake"))["state"] == "needs_weights"
        waiting = asyncio.create_task(trainer.generate(12))
        status, _ = await trainer.give(tensors, weight_version="again")
        assert status == 200
        found = await waiting
        assert found.token_ids == before.token_ids
        assert found.versions == [{"version": "again", "from_token": 0}]


@pytest.mark.parametrize("body", [UPDATE[:-1], UPDATE + b"\0", b"\xff" * 80, UPDATE[:8] + b"[" * 100_000])
async def test_what_is_no_update_changes_nothing(trainer: Trainer, body: bytes) -> None:
    before = await trainer.tell("get_weight_version")
    status, answer = await trainer.ask("/engine/update_weights", body, **BYTES_OPTIONS)
    assert (status, answer["status"]) == (400, "error")
    assert await trainer.tell("get_weight_version") == before


async def test_room_is_taken_when_it_is_written() -> None:
    """A body in chunks may have any size up to the largest, which need not be there."""
    content = new_memory(16 * psutil.virtual_memory().total)
    content[-1] = 7
    assert (content[0], content[-1]) == (0, 7)
    with pytest.raises(InvalidRequest, match="there is no memory for"):
        new_memory(2**60)
