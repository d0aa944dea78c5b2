"""One trace from a client through the front door, Dynamo's frontend, and both workers of a
disaggregated pair to an OTLP collector.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import MODEL, running_stack, wait_for
from front_door_process import Door
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_collector import Collector, attributes_of, collecting
from test_disagg_e2e import start_pair

from adapters.client import processor

pytestmark = pytest.mark.campaign  # Dynamo reads its variables for traces when it is imported: cold processes
CLIENT_SPAN = bytes.fromhex("b7ad6b7169203331")
PHASES = {"queue", "transfer", "slot", "prefill", "decode"}
ANSWER = f"text_completion {MODEL}"
OURS = "dynamo-logits-worker"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Door, Collector]]:
    directory = tmp_path_factory.mktemp("traced")
    with collecting() as collector, running_stack(directory, tiny_model, warm=False) as stack:
        stack.environ |= {
            "OTEL_EXPORT_ENABLED": "1",  # Dynamo's own spans, and its context for the worker's
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",  # milliseconds
        }
        stack.start_frontend()
        start_pair(stack, "--otlp-endpoint", collector.url)
        yield Door(stack), collector


def ask(door: Door, trace: str, **body: Any) -> str:
    """The body of a chat's answer, or of its error, with the context of a client's trace.

    The prompt has some blocks of KV, so that it is transferred.
    """
    data = {"model": MODEL, "messages": [{"role": "user", "content": "Hello there! " * 20}], **body}
    headers = {"content-type": "application/json", "traceparent": f"00-{trace}-{CLIENT_SPAN.hex()}-01"}
    request = urllib.request.Request(f"{door.url}/v1/chat/completions", json.dumps(data).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def awaited(collector: Collector, trace: str, names: Mapping[str, int]) -> list[Span]:
    """The workers' spans of a trace, once as many with these names are among them."""

    def found() -> list[Span] | None:
        spans = [span for span in collector.spans(OURS) if span.trace_id.hex() == trace]
        return spans if Counter(names) <= Counter(span.name for span in spans) else None

    try:
        return list(wait_for(found, f"spans {names}", 20))
    except AssertionError as late:
        came = [(span.trace_id.hex(), span.name) for span in collector.spans()]
        raise AssertionError(f"{late}; there are {came}") from None


def test_one_trace_from_the_client_to_both_workers(traced: tuple[Door, Collector]) -> None:
    door, collector = traced
    trace = "0af7651916cd43dd8448eb211c80319c"
    answer = json.loads(ask(door, trace, max_tokens=4, ignore_eos=True))
    assert answer["usage"]["completion_tokens"] == 4
    spans = awaited(collector, trace, {ANSWER: 2, **dict.fromkeys(PHASES, 1)})  # of prefill and decode
    wholes = [span for span in spans if span.name == ANSWER]
    assert len(wholes) == 2
    assert {span.name for span in spans} == {ANSWER, *PHASES}
    (decode,) = (span for span in spans if span.name == "decode")
    (whole,) = (span for span in wholes if span.span_id == decode.parent_span_id)
    parts = {span.name: span for span in spans if span.parent_span_id == whole.span_id}
    assert parts.keys() == PHASES
    moments = [whole.start_time_unix_nano, *(parts[name].end_time_unix_nano for name in parts)]
    assert moments == sorted(moments)
    assert moments[-1] == whole.end_time_unix_nano
    assert attributes_of(whole)["gen_ai.usage.output_tokens"] == 4

    # Dynamo's spans lead from the workers' to the client's.
    def outermost() -> set[bytes]:
        known = parents(collector, trace)
        return {path_of(span, known)[-1] for span in wholes}

    wait_for(lambda: outermost() == {CLIENT_SPAN}, "the spans between", 20)


def parents(collector: Collector, trace: str) -> dict[bytes, bytes]:
    """Of each span of a trace the span that it is in."""
    return {span.span_id: span.parent_span_id for span in collector.spans() if span.trace_id.hex() == trace}


def path_of(span: Span, known: dict[bytes, bytes]) -> list[bytes]:
    """The spans around one, from the inside."""
    path = [span.span_id]
    while path[-1] in known:
        path.append(known[path[-1]])
    return path[1:]


def test_a_processor_that_fails_is_a_span_of_the_trace(traced: tuple[Door, Collector]) -> None:
    door, collector = traced
    trace = "1af7651916cd43dd8448eb211c80319c"
    failing = [processor("forced_prefix", token_ids=[60, 61, 60, 61]), processor("no_repeat_ngram", n=2)]
    assert "choices" not in json.loads(ask(door, trace, max_tokens=9, logits_processors=failing))
    name = "logits_processor forced_prefix"
    failures = [span for span in awaited(collector, trace, {name: 1}) if span.name == name]
    for failed in failures:  # a second one if the front door has asked for the reason, which may come later
        assert attributes_of(failed) == {"dlw.processor.name": "forced_prefix", "dlw.processor.reason": "unsatisfiable"}
        whole = wait_for(lambda failed=failed: parent(collector, failed), "its parent", 20)
        assert whole.status.code == failed.status.code == Status.STATUS_CODE_ERROR
        assert attributes_of(whole)["error.type"] == "RequestFailed"


def parent(collector: Collector, span: Span) -> Span | None:
    """The span of ours that a span is in, once it has come."""
    return next((each for each in collector.spans(OURS) if each.span_id == span.parent_span_id), None)
