"""How requests of OpenEngine end otherwise: aborted, cancelled, late, unread, drained, migrated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from openengine_workers import GeneratedAnswer, OpenEngineClient, connected, engine_error_of, running, serving

from worker.engines import EngineRequest, RequestHints
from worker.runtimes.direct.server import DirectServer
from worker.runtimes.openengine import inference, wire
from worker.runtimes.openengine.answer import Answer
from worker.runtimes.openengine.runtime import OpenEngineWorker

LONG = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture
async def worker(tiny_model: Path) -> AsyncIterator[OpenEngineWorker]:
    async with running(tiny_model) as found:
        yield found


@pytest.fixture
async def client(worker: OpenEngineWorker) -> AsyncIterator[OpenEngineClient]:
    async with connected(worker.port) as found:
        yield found


async def idle(worker: OpenEngineWorker) -> None:
    """Until the engine has no request and no KV of one."""
    async with asyncio.timeout(20):
        while worker.server.engine.num_unfinished() or len(worker.server.in_flight):
            await asyncio.sleep(0.01)
    assert worker.server.engine.load().num_used_blocks == 0  # type: ignore[attr-defined]


async def test_abort_ends_one_request(client: OpenEngineClient, worker: OpenEngineWorker) -> None:
    stream = client.generate(request_id="long", stopping=LONG, sampling={"num_sequences": 2, "temperature": 1.0})
    first = await anext(aiter(stream))
    other = asyncio.create_task(client.answer(stopping={"max_tokens": 40}))
    aborted = await client.call("Control.Abort", wire.AbortRequest(request_id="long"))
    assert aborted.status == wire.ABORT_STATUS_ABORTED
    answer = GeneratedAnswer([first, *[event async for event in stream]])
    assert [one.reason for one in answer.finished] == [wire.FINISH_REASON_CANCELLED] * 2
    assert answer.usage.completion_tokens < 3000
    assert len((await other).ids()) == 40
    await idle(worker)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await client.call("Control.Abort", wire.AbortRequest(request_id="long"))
    assert late.value.code() == grpc.StatusCode.NOT_FOUND
    assert engine_error_of(late.value).code == wire.ERROR_CODE_REQUEST_NOT_FOUND


async def test_abort_ends_all_requests(client: OpenEngineClient, worker: OpenEngineWorker) -> None:
    streams = [client.generate(stopping=LONG) for _ in range(3)]
    for stream in streams:
        await anext(aiter(stream))
    everything = wire.AbortRequest(all_requests=wire.AllRequests())
    assert (await client.call("Control.Abort", everything)).status == wire.ABORT_STATUS_ABORTED
    for stream in streams:
        events = [event async for event in stream]
        assert events[-1].finished.reason == wire.FINISH_REASON_CANCELLED
    assert (await client.call("Control.Abort", everything)).status == wire.ABORT_STATUS_ALREADY_FINISHED
    for target in (wire.AbortRequest(), wire.AbortRequest(kv_session=wire.KvSessionRef(session_id="s"))):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.call("Control.Abort", target)
        assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    await idle(worker)


async def test_abort_before_the_engine_has_it(
    client: OpenEngineClient, worker: OpenEngineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, read_on = asyncio.Event(), asyncio.Event()
    parsed = DirectServer.parsed

    async def slowly(self: Any, message: Any) -> Any:
        reading.set()
        await read_on.wait()
        return await parsed(self, message)

    monkeypatch.setattr(DirectServer, "parsed", slowly)
    answering = asyncio.create_task(client.answer(request_id="early"))
    await reading.wait()
    assert (await client.call("Control.Abort", wire.AbortRequest(request_id="early"))).status
    read_on.set()
    answer = await answering
    assert answer.kinds == ["finished"]
    assert answer.finished[0].reason == wire.FINISH_REASON_CANCELLED
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    await idle(worker)


async def test_cancelled_and_late_requests_are_freed(client: OpenEngineClient, worker: OpenEngineWorker) -> None:
    stream = client.generate(request_id="gone", stopping=LONG)
    await anext(aiter(stream))
    stream.cancel()
    await idle(worker)
    late = client.generate(request_id="late", stopping=LONG, timeout=0.3)
    assert await rest_of(late, []) == grpc.StatusCode.DEADLINE_EXCEEDED
    await idle(worker)
    assert (await client.answer(request_id="gone")).kinds[-1] == "finished"


async def test_trace_and_priority_reach_the_engine(
    client: OpenEngineClient, worker: OpenEngineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, preparation = worker.server.engine, worker.server.preparation
    assert preparation is not None
    monkeypatch.setattr(preparation, "info", replace(preparation.info, honours_priority=True))
    hints: list[RequestHints] = []
    generate = engine.generate

    def spied(request: EngineRequest) -> Any:
        hints.append(request.hints)
        return generate(request)

    monkeypatch.setattr(engine, "generate", spied)
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    await client.answer([*trace.items(), ("openengine-priority", "-3")])
    assert hints == [RequestHints(trace, -3)]
    info = await client.call("Control.GetModelInfo", wire.GetModelInfoRequest())
    assert info.generation.supports_priority


async def test_an_id_is_in_use_once(client: OpenEngineClient, worker: OpenEngineWorker) -> None:
    stream = client.generate(request_id="same", stopping=LONG)
    await anext(aiter(stream))
    error = await client.refusal(request_id="same")
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert engine_error_of(error).code == wire.ERROR_CODE_DUPLICATE_REQUEST
    stream.cancel()
    await idle(worker)


async def test_a_full_queue_is_an_event(tiny_model: Path) -> None:
    """The status of an overload would take the worker out of the sidecar's rotation."""
    async with serving(tiny_model, "--max-num-seqs", "1", "--max-queue", "0") as client:
        stream = client.generate(stopping=LONG)
        await anext(aiter(stream))
        answer = await client.answer()
        assert answer.kinds == ["error"]
        assert (answer.errors[0].code, answer.errors[0].retryable) == (wire.ERROR_CODE_OVERLOADED, True)
        stream.cancel()


async def test_an_unread_answer_is_bounded_and_given_up(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "STALL_S", 1.0)
    made: list[int] = []
    events = Answer.events

    def counted(self: Any, chunk: Any) -> Any:
        for event in events(self, chunk):
            made.append(event.ByteSize())
            yield event

    monkeypatch.setattr(Answer, "events", counted)
    async with running(tiny_model) as worker:
        options = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
        async with connected(worker.port, options=options) as slow, connected(worker.port) as other:
            scores = {"output_candidates": {"top_n": 100}}
            stream = slow.generate(stopping={"max_tokens": 2000, "ignore_eos": True}, response=scores)
            await anext(aiter(stream))
            whole = await other.answer(stopping={"max_tokens": 60})  # meanwhile others are served
            assert len(whole.ids()) == 60
            async with asyncio.timeout(60):
                while len(worker.server.in_flight) or worker.server.engine.num_unfinished():
                    await asyncio.sleep(0.05)
            assert sum(made) < 2_000_000  # of 5 MB
            assert await rest_of(stream, []) == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_drain_lets_requests_finish(client: OpenEngineClient, worker: OpenEngineWorker) -> None:
    stream = client.generate(stopping={"max_tokens": 400, "ignore_eos": True})
    first = await anext(aiter(stream))
    worker.shut_down()
    await asyncio.sleep(0)
    health = await client.call("Control.Health", wire.HealthRequest(include_inference_probe=True))
    assert health.state == wire.HEALTH_STATE_DRAINING
    error = await client.refusal()
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert engine_error_of(error).code == wire.ERROR_CODE_DRAINING
    answer = GeneratedAnswer([first, *[event async for event in stream]])
    assert len(answer.ids()) == 400
    assert answer.finished[0].reason == wire.FINISH_REASON_LENGTH


async def test_a_request_goes_on_in_another_worker(tiny_model: Path, tmp_path: Path) -> None:
    store = ("--migration", "on", "--boundary-store", f"file:{tmp_path / 'store'}", "--drain-timeout-s", "0")
    sampling = {"temperature": 1.0, "seed": 7}
    stopping = {"max_tokens": 300, "ignore_eos": True}
    processors = [{"name": "no_repeat_ngram", "args": {"n": 4}}]
    fields: dict[str, Any] = {"sampling": sampling, "extra": {"logits_processors": processors}}
    ids = [5, 6, 7]
    async with (
        running(tiny_model, *store) as first,
        running(tiny_model, *store) as second,
        connected(first.port) as one,
        connected(second.port) as two,
    ):
        whole = (await one.answer(token_ids={"ids": ids}, stopping=stopping, **fields)).ids()
        stream = one.generate(request_id="moves", token_ids={"ids": ids}, stopping=stopping, **fields)
        sent = [info.token_id for info in (await anext(aiter(stream))).token.tokens]
        first.shut_down()
        first.shut_down()  # the second one ends the drain
        code = await rest_of(stream, sent)
        assert code == grpc.StatusCode.UNAVAILABLE  # which Dynamo's frontend migrates
        assert 0 < len(sent) < 300
        rest = {"max_tokens": 300 - len(sent), "ignore_eos": True}
        answer = await two.answer(request_id="moves", token_ids={"ids": ids + sent}, stopping=rest, **fields)
        assert sent + answer.ids() == whole
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 300)


async def rest_of(stream: Any, token_ids: list[int]) -> grpc.StatusCode:
    """Append the tokens that still come; the status of the stream."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for event in stream:
            token_ids += [info.token_id for info in event.token.tokens]
    return await stream.code()
