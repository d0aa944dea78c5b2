"""``--log-requests``: one line for each request, whatever became of it; nothing that it said."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from queue import Queue
from typing import Any

import pytest
from dynamo.llm import exceptions
from test_llm_engine import ARGUMENTS, Context, FakeEngine, Script, chains, raising, request, two_tokens

from adapters.client import processor, selection
from worker import request_log
from worker.arguments import parse_arguments
from worker.engines import TokenDelta
from worker.errors import EngineBroken, Overloaded
from worker.request_log import LOGGER, RequestEntry, RequestLog, known_field
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.sampling import SamplingParams

SECRET = "the secret of the prompt"
LOGGED = parse_arguments(["--model-path", "/models/tiny", "--drain-timeout-s", "0.01", "--log-requests"], {})


class Lines(logging.Handler):
    """Keeps what is logged, and waits for `in_flight` before each line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Queue[str] = Queue()
        self.in_flight = threading.Event()
        self.in_flight.set()

    def emit(self, record: logging.LogRecord) -> None:
        self.in_flight.wait()
        self.lines.put(record.getMessage())

    def next(self) -> dict[str, Any]:
        return json.loads(self.lines.get(timeout=60))  # type: ignore[no-any-return]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logging.getLogger(LOGGER).addHandler(handler)
    yield handler
    handler.in_flight.set()
    logging.getLogger(LOGGER).removeHandler(handler)


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.lifecycle.drain.FLUSH_S", 0.0)


async def started(script: Script = two_tokens) -> WorkerEngine:
    worker = WorkerEngine(FakeEngine(script), LOGGED, shut_down=lambda: None, make_chains=chains)  # type: ignore[arg-type]
    await worker.start(1)
    return worker


async def ask(worker: WorkerEngine, raw: Any, raised: type[Exception] | None = None) -> None:
    stream = worker.generate(raw, Context("a"))
    if raised is None:
        assert [chunk async for chunk in stream]
    else:
        with pytest.raises(raised):
            _ = [chunk async for chunk in stream]


def annotated(*processors: Any, **fields: Any) -> Any:
    return request(annotations=["logits_processors:" + selection(*processors)], **fields)


async def test_a_request_that_finished(lines: Lines) -> None:
    async def script(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([5], num_cached_tokens=2, num_preemptions=0)
        yield TokenDelta([6, 7], finish_reason="length", num_preemptions=3)

    worker = await started(script)
    chosen = [processor("min_tokens", n=4), processor("banned_tokens", token_ids=[9])]
    await ask(worker, annotated(*chosen, sampling_options={"seed": 17}))
    line = lines.next()
    assert 0 <= line.pop("time_to_first_token_s") <= line.pop("total_s")
    assert line == {
        "request_id": "a",
        "model": "tiny",
        "seed": 17,
        "numerics": "fast",
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "generated_tokens": 3,
        "finish_reason": "length",
        "error": None,
        "error_field": None,
        "preemptions": 3,
        "processors": ["min_tokens", "banned_tokens"],
    }
    await worker.cleanup()


async def test_the_seed_is_the_one_that_was_drawn(lines: Lines) -> None:
    seeds: list[int | None] = []

    async def script(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        seeds.append(params.seed)
        yield TokenDelta([5], finish_reason="length")

    worker = await started(script)
    await ask(worker, request())
    assert lines.next()["seed"] == seeds[0]
    assert isinstance(seeds[0], int)
    await worker.cleanup()


def failing(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
    async def script() -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([5])
        yield TokenDelta([6], finish_reason="error", error=f"processor raised: {SECRET}")

    return script()


ENDINGS: dict[str, tuple[Callable[[], Script], Any, type[Exception], str, str | None, int]] = {
    "refused": (
        lambda: two_tokens,
        request(token_ids=[50]),
        exceptions.InvalidArgument,
        "InvalidRequest",
        "token_ids",
        0,
    ),
    "arguments": (
        lambda: two_tokens,
        annotated(processor("bad_words", words=[SECRET, 7])),
        exceptions.InvalidArgument,
        "InvalidRequest",
        "logits_processors.processors[0].args",
        0,
    ),
    "unknown": (
        lambda: two_tokens,
        request(**{SECRET: 1}),
        exceptions.InvalidArgument,
        "InvalidRequest",
        "other",
        0,
    ),
    "overloaded": (lambda: raising(Overloaded(SECRET)), request(), exceptions.HttpError, "Overloaded", None, 0),
    "failed": (lambda: failing, request(), exceptions.InvalidArgument, "RequestFailed", None, 2),
    "broken": (lambda: raising(EngineBroken("lost"), 2), request(), exceptions.EngineShutdown, "EngineBroken", None, 2),
    "bug": (lambda: raising(KeyError(SECRET), 1), request(), exceptions.Unknown, "KeyError", None, 1),
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_requests_that_end_with_an_error(name: str, lines: Lines) -> None:
    script, raw, raised, error, field, number = ENDINGS[name]
    worker = await started(script())
    await ask(worker, raw, raised)
    line = lines.next()
    assert (line["finish_reason"], line["error"], line["error_field"]) == (None, error, field)
    assert line["generated_tokens"] == number
    assert SECRET not in json.dumps(line)
    assert lines.lines.empty()
    await worker.cleanup()


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\x1b[2K", "\u202e"])
async def test_a_client_writes_no_line_of_the_log(end: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = await started()
    chosen = {"name": "min_tokens", "args": {"n": 1, f"x{end}ERROR engine broken": 2}}
    await ask(worker, annotated(chosen), exceptions.InvalidArgument)
    (said,) = [message for message in caplog.messages if "refused: " in message]
    assert said.isprintable()
    assert "ERROR engine broken: unknown argument; known are n, scope" in said
    await worker.cleanup()


async def test_a_dropped_stream_is_cancelled(lines: Lines) -> None:
    worker = await started()
    stream = worker.generate(request(), Context("a"))
    await anext(stream)
    await stream.aclose()
    line = lines.next()
    assert (line["finish_reason"], line["error"], line["generated_tokens"]) == ("cancelled", None, 1)
    await worker.cleanup()


async def test_a_stream_dropped_after_its_last_chunk_has_finished(lines: Lines) -> None:
    worker = await started()
    stream = worker.generate(request(), Context("a"))
    while "finish_reason" not in await anext(stream):
        pass
    await stream.aclose()
    assert lines.next()["finish_reason"] == "length"
    await worker.cleanup()
    assert lines.lines.empty()


async def test_health_probes_and_other_workers_are_not_logged(lines: Lines) -> None:
    worker = await started()
    await ask(worker, await worker.health_check_payload())
    await worker.cleanup()
    quiet = WorkerEngine(FakeEngine(two_tokens), ARGUMENTS, shut_down=lambda: None, make_chains=chains)  # type: ignore[arg-type]
    await quiet.start(1)
    await ask(quiet, request())
    await quiet.cleanup()
    assert lines.lines.empty()


async def test_a_slow_reader_blocks_nobody_and_lost_lines_are_counted(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MAX_PENDING", 2)
    lines.in_flight.clear()
    log = RequestLog()
    for _ in range(50):
        log.write(RequestEntry(request_id="a"))  # returns though nobody reads
    lost = log.num_lost
    assert lost >= 47  # one may have been taken from the queue, two wait there
    lines.in_flight.set()
    for _ in range(50 - lost):
        assert "lines_lost_before" not in lines.next()
    log.write(RequestEntry(request_id="b"))
    assert lines.next()["lines_lost_before"] == lost
    await asyncio.to_thread(log.close)


def test_lines_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog()
    log.write(RequestEntry(request_id="a", model="tiny"))
    log.close()
    log.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["request_id"] == "a"


def test_a_worker_without_standard_output_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    log = RequestLog()
    for number in range(3):
        log.write(RequestEntry(request_id=str(number)))
    log.close()
    assert caplog.messages == ["--log-requests: lines are lost: there is no standard output"]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("sampling_options.top_p", "sampling_options.top_p"),
        ("stop_conditions.word", "stop_conditions"),
        ("sampling_options.guided_decoding.json", "sampling_options.guided_decoding"),
        ("logits_processors.processors[3].args.bias.word", "logits_processors.processors[3].args"),
        ("logits_processors.processors[3].name", "logits_processors.processors[3].name"),
        ("logits_processors.deadline", "logits_processors"),
        ("sampling_params.top_k", "sampling_params.top_k"),
        ("prefill_result.disaggregated_params.word", "prefill_result"),
        ("word", "other"),
    ],
)
def test_fields_are_shown_as_far_as_their_names_are_known(path: str, shown: str) -> None:
    assert known_field(path) == shown
