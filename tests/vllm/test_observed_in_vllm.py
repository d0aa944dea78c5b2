"""One request of the openai client to vLLM, in its answer, its receipt, the log and its trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from e2e_stack import MODEL, Stack, Worker, wait_for
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_collector import Collector, attributes_of, collecting
from processor_requests import PATIENT, of
from vllm_stack import vllm_workers

from adapters.client import processor

pytestmark = [pytest.mark.real_model, pytest.mark.campaign, pytest.mark.timeout(900)]

CLIENT_SPAN = bytes.fromhex("b7ad6b7169203331")
RAISES = "acme/raises=third_party_e2e:Raises"
WHOLE = f"text_completion {MODEL}"

Observed = tuple[Stack, Worker, Collector]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    directory = tmp_path_factory.mktemp("observed") / "stack"
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "OTEL_EXPORT_ENABLED": "1",  # Dynamo passes the context of a trace on
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }.items():
            patch.setenv(name, value)
        options = ["--log-requests", "--otlp-endpoint", collector.url, "--logits-processor", RAISES]
        with vllm_workers(directory, 1, *PATIENT, *options, warm=False) as (stack, workers):  # it reads them at import
            yield stack, workers[0], collector


def ask(observed: Observed, trace: str, *processors: Any, **body: Any) -> Any:
    """A chat's answer, whose client has a trace of its own."""
    return (
        observed[0]
        .client()
        .chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Is water wet?"}],
            extra_body=of(*processors, receipt=True),
            extra_headers={"traceparent": f"00-{trace}-{CLIENT_SPAN.hex()}-01"},
            **body,
        )
    )


def spans_of(observed: Observed, trace: str, name: str) -> list[Span]:
    """The worker's spans of a trace, once the one of this name is among them."""

    def found() -> list[Span] | None:
        spans = observed[2].spans("dynamo-logits-worker")
        spans = [span for span in spans if span.trace_id.hex() == trace]
        return spans if name in {span.name for span in spans} else None

    return list(wait_for(found, f"the span {name}", 30))


def line_of(observed: Observed, request_id: object) -> dict[str, Any]:
    """The line of a request in the worker's log."""

    def found() -> dict[str, Any] | None:
        lines = [line for line in observed[1].log.splitlines() if line.startswith('{"request_id"')]
        return next((line for line in map(json.loads, lines) if line["request_id"] == request_id), None)

    return dict(wait_for(found, f"the line of {request_id}", 30))


def test_one_answer_seen_from_everywhere(observed: Observed) -> None:
    """Answer, receipt, log and trace agree on tokens, seed and processors."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    answer = ask(observed, trace, processor("choice", choices=["yes", "no"]), seed=7, temperature=1.0, max_tokens=8)
    assert answer.choices[0].message.content in ("yes", "no")
    receipt = answer.model_extra["nvext"]["engine_data"]["logits_processors"]
    spans = spans_of(observed, trace, WHOLE)
    (whole,) = (span for span in spans if span.name == WHOLE)
    told = attributes_of(whole)
    line = line_of(observed, told["gen_ai.response.id"])
    usage = answer.usage

    assert {span.name for span in spans if span.parent_span_id == whole.span_id} >= {"prefill", "decode"}
    assert receipt["engine"]["name"] == "vllm"
    assert receipt["seed"] == line["seed"] == told["gen_ai.request.seed"] == 7
    assert receipt["numerics"] == line["numerics"] == "fast"
    assert [record["name"] for record in receipt["processors"]][:1] == line["processors"] == ["choice"]
    assert receipt["prompt_length"] == usage.prompt_tokens
    counted = (usage.prompt_tokens, usage.completion_tokens, answer.choices[0].finish_reason)
    assert (line["prompt_tokens"], line["generated_tokens"], line["finish_reason"]) == counted
    in_trace = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.response.finish_reasons")
    assert tuple(told[name] for name in in_trace) == (*counted[:2], ["stop"])
    assert 0 < line["time_to_first_token_s"] <= line["total_s"]


def test_a_failure_in_the_log_and_in_the_trace(observed: Observed) -> None:
    trace = "1af7651916cd43dd8448eb211c80319c"
    with pytest.raises(openai.APIStatusError):  # `test_engine_e2e` has its message
        ask(observed, trace, processor("acme/raises"), max_tokens=100)
    name = "logits_processor acme/raises"
    (failed,) = (span for span in spans_of(observed, trace, name) if span.name == name)
    (whole,) = (span for span in spans_of(observed, trace, WHOLE) if span.name == WHOLE)
    assert attributes_of(failed) == {"dlw.processor.name": "acme/raises", "dlw.processor.reason": "raised"}
    assert failed.parent_span_id == whole.span_id
    assert whole.status.code == failed.status.code == Status.STATUS_CODE_ERROR
    line = line_of(observed, attributes_of(whole)["gen_ai.response.id"])
    assert (line["finish_reason"], line["error"], line["processors"]) == (None, "RequestFailed", ["acme/raises"])
    assert observed[1].metric("dlw_processor_errors_total", processor="acme/raises", reason="raised") == 1
