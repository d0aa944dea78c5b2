"""Spans of requests: they continue the frontend's trace, and cost nothing when they are off."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from dynamo.llm.exceptions import InvalidArgument
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from otlp_collector import collecting
from served_worker import Client, serving

from adapters.chain import ProcessorFailed
from adapters.client import processor
from worker.arguments import parse_arguments
from worker.engines import QueueTimes
from worker.errors import ConfigurationError
from worker.lifecycle.drain import InFlightRequests
from worker.metrics import WorkerMetrics
from worker.request_log import RequestEntry
from worker.sampling import SamplingParams
from worker.server.reports import RequestReports
from worker.tiny_model import write_tiny_model
from worker.tracing import CLOSE_S, RequestTracer, check_endpoint, phases, to_endpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 30, 41, 77, 30]
TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
SAMPLED = f"00-{TRACE:032x}-{PARENT:016x}-01"


class Traced:
    """A worker with a tracer, and the spans of one request."""

    def __init__(self, client: Client, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter
        self.client = client

    def take(self) -> dict[str, ReadableSpan]:
        """The spans since the last call, by name."""
        spans = self._exporter.get_finished_spans()
        self._exporter.clear()
        found = {span.name: span for span in spans}
        assert len(found) == len(spans)
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serving(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")) as client:
        assert client.worker.server.reports.tracer is None
        client.worker.server.reports.tracer = RequestTracer(provider, "model")
        client.headers = {"traceparent": SAMPLED}
        yield Traced(client, exporter)


async def test_an_answer_is_a_span_with_its_phases(traced: Traced) -> None:
    options = {"temperature": 0.5, "seed": 11}
    stop = {"max_tokens": 3, "ignore_eos": True}
    await traced.client.ask(PROMPT, processor("min_tokens", n=2), sampling_options=options, stop_conditions=stop)
    spans = traced.take()
    whole = spans["text_completion model"]
    assert set(spans) == {"text_completion model", "queue", "prefill", "decode"}
    assert {span.context.trace_id for span in spans.values() if span.context} == {TRACE}
    assert whole.kind is SpanKind.SERVER
    assert (whole.parent and whole.parent.span_id) == PARENT
    assert whole.status.status_code is StatusCode.UNSET
    attributes = dict(whole.attributes or {})
    assert str(attributes.pop("gen_ai.response.id")).startswith("request-")
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "dynamo",
        "gen_ai.request.model": "model",
        "gen_ai.response.model": "model",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 11,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "dlw.logits_processors": ("min_tokens",),
    }
    assert whole.context is not None
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {part.parent.span_id for part in parts if part.parent} == {whole.context.span_id}
    moments = [whole.start_time, *(part.end_time for part in parts)]
    assert [part.start_time for part in parts] == moments[:-1]
    assert moments[-1] == whole.end_time
    assert moments == sorted(moments, key=lambda moment: moment or 0)


async def test_a_processor_s_failure_is_a_span(traced: Traced) -> None:
    chosen = processor("forced_prefix", token_ids=[60, 61, 60, 61]), processor("no_repeat_ngram", n=2)
    with pytest.raises(InvalidArgument):
        await traced.client.ask(PROMPT, *chosen, stop_conditions={"max_tokens": 9})
    spans = traced.take()
    failed, whole = spans["logits_processor forced_prefix"], spans["text_completion model"]
    assert failed.attributes == {"dlw.processor.name": "forced_prefix", "dlw.processor.reason": "unsatisfiable"}
    assert failed.status.status_code is whole.status.status_code is StatusCode.ERROR
    assert (whole.attributes or {})["error.type"] == "RequestFailed"
    assert set(spans) > {"queue", "prefill"}  # and "decode", if a chunk came before the failure


async def test_a_refused_request_has_no_phases(traced: Traced) -> None:
    with pytest.raises(InvalidArgument):
        await traced.client.ask(PROMPT, sampling_options={"n": 2})
    (span,) = traced.take().values()
    assert (span.attributes or {})["error.type"] == "InvalidRequest"


async def test_a_dropped_request_is_a_cancelled_span(traced: Traced) -> None:
    stream = traced.client.worker.generate(
        {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 1500, "ignore_eos": True}}, traced.client
    )
    await anext(stream)
    await stream.aclose()
    attributes = traced.take()["text_completion model"].attributes or {}
    assert attributes["gen_ai.response.finish_reasons"] == ("cancelled",)


@pytest.mark.parametrize(
    ("headers", "traces"),
    [({"traceparent": SAMPLED[:-1] + "0"}, 0), ({"traceparent": "nonsense"}, 1), (None, 1)],
)
async def test_a_trace_that_is_not_sampled_or_not_there(
    traced: Traced, headers: dict[str, str] | None, traces: int
) -> None:
    before, traced.client.headers = traced.client.headers, headers
    await traced.client.ask(PROMPT, stop_conditions={"max_tokens": 2})
    traced.client.headers = before
    found = traced.take()
    assert len(found) == traces * 4
    assert all(span.context and span.context.trace_id != TRACE for span in found.values())


def entry(**values: Any) -> RequestEntry:
    ticks = iter((10.0, 12.5))
    made = RequestEntry(request_id="r", clock=lambda: next(ticks), params=SamplingParams(), **values)
    made.first_token_s = 11.5
    return made


async def test_a_transfer_is_a_phase_of_its_own() -> None:
    one = entry(queue_times=QueueTimes(10.25, 11.0, 10.75))
    assert list(phases(one, 12.5)) == [
        ("queue", 10.0, 10.25),
        ("transfer", 10.25, 10.75),
        ("slot", 10.75, 11.0),
        ("prefill", 11.0, 11.5),
        ("decode", 11.5, 12.5),
    ]


async def test_a_collector_that_sends_a_byte_at_a_time_holds_no_end_up() -> None:
    """Each byte is in time for its library."""
    answering: list[asyncio.Task[Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(cast("asyncio.Task[Any]", asyncio.current_task()))
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 1000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.5)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reports = RequestReports("model", WorkerMetrics(InFlightRequests()))
        reports.tracer = to_endpoint(f"http://127.0.0.1:{port}/v1/traces", "model")
        reports.tracer.ended(RequestEntry(request_id="one"), {})
        began_s = time.monotonic()
        await reports.close()
        assert time.monotonic() - began_s < 2 * CLOSE_S
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)


async def test_spans_arrive_at_an_otlp_endpoint() -> None:
    with collecting() as collector:
        tracer = to_endpoint(collector.url, "m")
        tracer.ended(entry(), {"traceparent": SAMPLED})
        tracer.close()
    names = {span.name for span in collector.spans("dynamo-logits-worker")}
    assert names == {"text_completion m", "prefill", "decode"}


@pytest.mark.parametrize("reason", ["raised", "nan", "infinite", "empty", "unsatisfiable", "budget"])
async def test_each_failure_of_each_processor_is_a_span(reason: str) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    one = entry(error="RequestFailed", failure=ProcessorFailed("a, b/c", reason, "secret"))
    RequestTracer(provider, "m").ended(one, None)
    failures = {span.name: span for span in exporter.get_finished_spans() if span.name.startswith("logits_processor ")}
    assert failures.keys() == {"logits_processor a", "logits_processor b/c"}
    for span in failures.values():
        assert (span.attributes or {})["dlw.processor.reason"] == reason
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, reason)
        assert "secret" not in span.to_json()


async def test_nothing_is_imported_without_an_endpoint() -> None:
    code = "import sys, worker.tracing, worker.arguments; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


async def test_an_endpoint_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_endpoint(None)
    check_endpoint("http://collector:4318/v1/traces")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_endpoint(None)
    with pytest.raises(ConfigurationError, match=r"--otlp-endpoint needs opentelemetry.sdk: pip install .*\[otel\]"):
        check_endpoint("http://collector:4318/v1/traces")


@pytest.mark.parametrize("text", ["collector:4318", "ftp://x/", "http://", "http://x/?a=b"])
async def test_an_endpoint_that_is_no_url(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--otlp-endpoint must be an http:// or https:// URL"):
        parse_arguments(["--model-path", "m", "--otlp-endpoint", text], {})
