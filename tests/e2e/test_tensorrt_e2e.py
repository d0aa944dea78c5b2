"""``--engine trtllm`` through Dynamo's own frontend, on the stand-in for TensorRT-LLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import MODEL, STAND_IN, Stack, http, running_stack
from processor_requests import PATIENT

from adapters.client import logits_processors, processor

pytestmark = pytest.mark.timeout(300)  # several processes start, each loads torch


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, trtllm: Stack) -> Iterator[tuple[Stack, Stack]]:
    """A stack with TensorRT-LLM's stand-in, and one with the embedded engine."""
    with running_stack(tmp_path_factory.mktemp("embedded"), tiny_model) as embedded:
        embedded.start_frontend()
        embedded.start_worker("--device", "cpu", "--dtype", "float32", *PATIENT)
        yield trtllm, embedded


def chat(stack: Stack, *entries: dict[str, Any], **options: Any) -> tuple[int, Any]:
    nvext = logits_processors(*entries) if entries else {}
    messages = [{"role": "user", "content": "Hello there"}]
    status, text = stack.post("chat/completions", messages=messages, **{"max_tokens": 16, **nvext, **options})
    return status, json.loads(text) if status == 200 else text


REQUESTS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([], {}),
    ([], {"temperature": 0.8, "seed": 12}),
    ([], {"frequency_penalty": 1.5, "logprobs": True, "top_logprobs": 2}),
    ([processor("forced_sequence", text="Hello world!")], {}),
    ([processor("regex", pattern="[a-c]+( yes| no)?")], {"max_tokens": 24}),
    ([processor("banned_tokens", token_ids=[37, 38]), processor("repetition_penalty", penalty=1.5)], {}),
]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_answers_are_the_embedded_engines(both: tuple[Stack, Stack], number: int) -> None:
    entries, options = REQUESTS[number]
    answers = []
    for stack in both:
        status, reply = chat(stack, *entries, **options)
        assert status == 200, reply
        choice = reply["choices"][0]
        entries_ = (choice.get("logprobs") or {}).get("content") or []
        tokens = [entry["token"] for entry in entries_]
        answers.append((choice["message"]["content"], choice["finish_reason"], tokens, reply["usage"]["total_tokens"]))
    assert answers[0] == answers[1]


def test_a_priority_is_a_hint(both: tuple[Stack, Stack]) -> None:
    """The frontend passes it on as an integer, and no token depends on it."""
    answers = []
    for stack in both:
        for priority in (-5, 0, 5):
            status, reply = chat(stack, nvext={"agent_hints": {"priority": priority}})
            assert status == 200, reply
            answers.append(reply["choices"][0]["message"]["content"])
    assert len(set(answers)) == 1


def test_a_stream(both: tuple[Stack, Stack]) -> None:
    ours, theirs = both
    texts = []
    for stack in (ours, theirs):
        stream = stack.client().completions.create(model=MODEL, prompt="hi", max_tokens=12, stream=True)
        texts.append("".join(chunk.choices[0].text for chunk in stream if chunk.choices))
    assert texts[0] == texts[1]


def test_refusals_and_receipts(both: tuple[Stack, Stack]) -> None:
    ours, _ = both
    assert chat(ours, processor("no_such_processor"))[0] == 400
    assert chat(ours, processor("banned_tokens", token_ids=[99999]))[0] == 400
    asked = logits_processors(processor("banned_tokens", token_ids=[37]), receipt=True)
    status, text = ours.post("chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=5, **asked)
    assert status == 200, text
    (record,) = json.loads(text)["nvext"]["engine_data"]["logits_processors"]["processors"]
    assert (record["name"], record["steps_active"], record["tokens_masked"]) == ("banned_tokens", 5, 5)


def test_the_seed_in_a_receipt_is_that_of_the_tokens(both: tuple[Stack, Stack]) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "temperature": 1.2}
    for stack, engine in zip(both, ("trtllm", "embedded"), strict=True):
        answers = []  # type: ignore[var-annotated]
        for seed in ({}, {"seed": 0}):
            if seed:
                seed["seed"] = answers[0][1]["seed"]
            status, text = stack.post("chat/completions", **asked, **seed, **logits_processors(receipt=True))
            assert status == 200, text
            reply = json.loads(text)
            answers.append((reply["choices"][0]["message"], reply["nvext"]["engine_data"]["logits_processors"]))
        (first, receipt), (second, again) = answers
        assert first == second
        assert again == receipt
        assert receipt["engine"]["name"] == engine
        assert (receipt["preemptions"] is None) == (engine == "trtllm")
        assert receipt["model"]["name"] == MODEL


def test_what_it_says_of_itself(both: tuple[Stack, Stack]) -> None:
    worker = both[0].workers[0]
    assert worker.metric("dlw_engine_info", engine="trtllm", version="1.3.0rc29") == 1
    status, text = http(f"http://127.0.0.1:{worker.port}/engine/control/info", {})
    if status == 200:
        assert json.loads(text)["engine"] == "trtllm"
    assert worker.metric("dlw_requests_total", outcome="unknown_error") == 0


def test_the_smoke_test_and_a_clean_end(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker("--engine", "trtllm", DYN_ENABLE_TEST_LOGITS_PROCESSOR="1", **STAND_IN)  # type: ignore[arg-type]
    for options in ({}, {"temperature": 1.3, "seed": 4}, {"temperature": 1.3}):
        status, reply = chat(stack, **options)
        assert status == 200, reply
        assert reply["choices"][0]["message"]["content"] == "Hello world!"
        assert reply["choices"][0]["finish_reason"] == "stop"
    worker.signal(15)
    assert worker.wait() == 0


def test_an_executor_that_dies_takes_the_worker_with_it(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker("--engine", "trtllm", TRTLLM_STANDIN=json.dumps({"dies_on_prompt": True}), **STAND_IN)  # type: ignore[arg-type]
    status, _ = chat(stack, max_tokens=400)
    assert status >= 500
    assert worker.wait() == 1
    assert "engine broken" in worker.log


def test_a_deployment_of_dynamos_worker_is_taken_over(stack: Stack, tmp_path: Path) -> None:
    """Its flags, its variables, and the keys of its file qwen3/agg.yaml."""
    path = tmp_path / "agg.yaml"
    path.write_text(
        "tensor_parallel_size: 1\nmoe_expert_parallel_size: 1\nenable_attention_dp: false\nmax_num_tokens: 8192\n"
        "max_batch_size: 16\ntrust_remote_code: true\nbackend: pytorch\nenable_chunked_prefill: true\n"
        "disable_overlap_scheduler: false\nkv_cache_config: {free_gpu_memory_fraction: 0.5}\n"
        "cuda_graph_config: {max_batch_size: 16}\n"
    )
    stack.start_frontend()
    worker = stack.start_worker(
        *("--engine", "trtllm", "--modality", "text", "--connector", "none", "--publish-events-and-metrics"),
        *(
            "--free-gpu-memory-fraction",
            "0.5",
            "--disaggregation-mode",
            "pd",
            "--dyn-endpoint-types",
            "chat,completions",
        ),
        *(
            "--extra-engine-args",
            str(path),
            "--override-engine-args",
            '{"max_beam_width": 1, "return_perf_metrics": true}',
        ),
        DYN_TRTLLM_MAX_BATCH_SIZE="16",
        DYN_TRTLLM_TENSOR_PARALLEL_SIZE="1",
        **STAND_IN,  # type: ignore[arg-type]
    )
    status, reply = chat(stack, processor("forced_sequence", text="Hello world!"))
    assert status == 200, reply
    assert reply["choices"][0]["message"]["content"].startswith("Hello world!")
    assert "disable_overlap_scheduler: false gives way to true" in worker.log
    assert worker.metric("trtllm_request_success_total", engine_type="trtllm") == 1


STARTUP: dict[str, tuple[list[str], int, str]] = {
    "unknown argument": (["no_such_argument: 1"], 2, "no_such_argument: is in no row of this worker's table"),
    "of another version": (["sleep_config: {}"], 1, "TensorRT-LLM 1.3.0rc29 has no argument 'sleep_config'"),
    "of no known drafts": (["speculative_config: {}"], 2, "PARD, SA, got None: others are not known"),
    "bad value": (["kv_cache_config: {no_such_key: 1}"], 1, "no_such_key"),
}


@pytest.mark.parametrize("name", STARTUP)
def test_startup_failure_is_one_line(stack: Stack, tmp_path: Path, name: str) -> None:
    lines, expected, message = STARTUP[name]
    path = tmp_path / "extra.yaml"
    path.write_text("\n".join(lines))
    worker = stack.start_worker("--engine", "trtllm", "--extra-engine-args", str(path), wait=False, **STAND_IN)  # type: ignore[arg-type]
    assert worker.wait() == expected, worker.log
    assert message in worker.complaint
