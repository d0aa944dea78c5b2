"""The front door before real workers behind OpenEngine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from engine_doors import CHAT, COMPLETIONS, HELLO, ask, door, events, refusal
from openengine_workers import running
from running_workers import make_certificate

from worker.frontdoor.openengine.prompts import Prompts
from worker.runtimes.openengine.runtime import OpenEngineWorker

SAMPLED: dict[str, Any] = {"messages": HELLO, "max_tokens": 40, "temperature": 1.0, "seed": 3}
BIASED: dict[str, Any] = {"logit_bias": {"40": 100}}


def url_of(worker: OpenEngineWorker) -> str:
    return f"grpc://127.0.0.1:{worker.port}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tiny_model: Path) -> AsyncIterator[tuple[OpenEngineWorker, httpx.AsyncClient]]:
    async with running(tiny_model) as worker, door(tiny_model, url_of(worker)) as client:
        yield worker, client


Served = tuple[OpenEngineWorker, httpx.AsyncClient]
in_module_loop = pytest.mark.asyncio(loop_scope="module")

ANSWERS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "bias": {**BIASED, "max_tokens": 4},
    "allowed": {"allowed_token_ids": [40, 41], "max_tokens": 5},
    "stop": {**BIASED, "stop": ["DDD"]},
    "shown stop": {**BIASED, "stop": ["DDD"], "include_stop_str_in_output": True},
    "guide": {"guided_regex": "[ab]{9}"},
    "schema": {"response_format": {"type": "json_object"}, "max_tokens": 60},
    "processors": {
        "logits_processors": {"processors": [{"name": "no_repeat_ngram", "args": {"n": 2}}], "receipt": True}
    },
    "logprobs": {"logprobs": True, "top_logprobs": 3, "max_tokens": 5},
    "two": {"n": 2},
}


@pytest.mark.parametrize("fields", ANSWERS.values(), ids=ANSWERS)
@in_module_loop
async def test_a_stream_is_the_whole_answer(served: Served, fields: dict[str, Any]) -> None:
    client = served[1]
    body = {**SAMPLED, **fields}
    whole = await ask(client, **body)
    found = [one async for one in events(client, CHAT, **body, stream_options={"include_usage": True})]
    for choice in whole["choices"]:
        own = [one for event in found for one in event["choices"] if one["index"] == choice["index"]]
        assert "".join(one["delta"].get("content", "") for one in own) == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        scores = [each for one in own if one["logprobs"] for each in one["logprobs"]["content"]]
        assert scores == ((choice["logprobs"] or {}).get("content") or [])
    counts = ("prompt_tokens", "completion_tokens")
    assert [found[-1]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]


@in_module_loop
async def test_controls_arrive(served: Served) -> None:
    client = served[1]

    async def text(**fields: Any) -> str:
        (choice,) = (await ask(client, **{**SAMPLED, **fields}))["choices"]
        return str(choice["message"]["content"])

    assert await text(**ANSWERS["bias"]) == "DDDD"
    assert set(await text(**ANSWERS["allowed"])) <= {"D", "E"}
    assert await text(**ANSWERS["stop"]) == ""
    assert await text(**ANSWERS["shown stop"]) == "DDD"
    assert set(await text(guided_regex="[ab]{9}")) <= {"a", "b"}
    assert await text(structured_outputs={"choice": ["cab"]}) == "cab"
    json.loads(await text(response_format={"type": "json_object"}, temperature=0, max_tokens=900))
    whole = await ask(client, **{**SAMPLED, **ANSWERS["processors"]})
    receipt = whole["nvext"]["engine_data"]["logits_processors"]
    assert ([one["name"] for one in receipt["processors"]], receipt["seed"]) == (["no_repeat_ngram"], 3)
    repeated = await ask(client, **{**SAMPLED, "messages": [{"role": "user", "content": "again " * 30}]})
    again = await ask(client, **{**SAMPLED, "messages": [{"role": "user", "content": "again " * 30}]})
    assert repeated["choices"] == again["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@in_module_loop
async def test_tools_thinking_responses_messages(served: Served, tiny_model: Path) -> None:
    worker, client = served
    tool = {"type": "function", "function": {"name": "f", "parameters": {"const": {}}}}
    called = await ask(client, messages=HELLO, tools=[tool], tool_choice="required", max_tokens=60)
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], called["choices"][0]["finish_reason"]) == ("f", "tool_calls")
    forced = [{"name": "forced_sequence", "args": {"text": "<think>Hm</think>Yes"}}]
    async with door(tiny_model, url_of(worker), arguments=("--", "--dyn-reasoning-parser", "qwen3")) as thinks:
        said = await ask(thinks, messages=HELLO, logits_processors=forced)
        message, usage = said["choices"][0]["message"], said["usage"]
        assert (message["reasoning_content"], message["content"]) == ("Hm", "Yes")
        count = len(Prompts.load(tiny_model, None).vocabulary.encode("Hm"))
        assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    answer = await client.post("/v1/responses", json={"model": "tiny", "input": "Hello", "max_output_tokens": 16})
    assert answer.json()["usage"]["output_tokens"] == 16
    answer = await client.post("/v1/messages", json={"model": "tiny", "messages": HELLO, "max_tokens": 7})
    assert answer.json()["usage"]["output_tokens"] == 7


@in_module_loop
async def test_paths_about_the_workers(served: Served) -> None:
    worker, client = served
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["context_window"]) == ("tiny", 2048)
    assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
    assert (await client.get("/v1/models/tiny/ready")).json()["ready"] is True
    assert (await client.get("/v1/models/other")).status_code == 404
    assert (await client.get("/health")).json() == {"status": "healthy", "instances": 1}
    assert (await client.get("/live")).status_code == 200
    assert f'dlw_upstream_ready{{worker="{url_of(worker)}"}} 1' in (await client.get("/metrics")).text
    counted = (await client.post("/tokenize", json={"model": "tiny", "messages": HELLO})).json()
    assert (await ask(client, messages=HELLO, max_tokens=1))["usage"]["prompt_tokens"] == counted["count"]


@in_module_loop
async def test_prompts_of_completions(served: Served) -> None:
    client = served[1]
    text = await ask(client, COMPLETIONS, prompt="Hello world", max_tokens=5)
    ids = (await client.post("/tokenize", json={"model": "tiny", "prompt": "Hello world"})).json()["tokens"]
    for prompt in (ids, ["Hello world"], [ids]):
        assert (await ask(client, COMPLETIONS, prompt=prompt, max_tokens=5))["choices"] == text["choices"]
    several = await ask(client, COMPLETIONS, prompt=["Hello world", "a"], max_tokens=5)
    assert several["choices"][0]["text"] == text["choices"][0]["text"]
    scored = await ask(client, COMPLETIONS, prompt="Hello world", echo=True, logprobs=1, max_tokens=0)
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(ids)


@pytest.mark.parametrize(
    ("path", "field", "beside"),
    [
        (CHAT, "messages", {}),
        ("/v1/messages", "messages", {"max_tokens": 5}),
        ("/v1/responses", "input", {}),
        (COMPLETIONS, "prompt", {}),
    ],
)
@in_module_loop
async def test_a_prompt_beyond_the_context(served: Served, path: str, field: str, beside: dict[str, Any]) -> None:
    """Agents that know an overflow by its code, or by its words, shorten the prompt and go on."""
    text = "a " * 5000
    prompt: Any = [{"role": "user", "content": text}] if field == "messages" else text
    answer = await served[1].post(path, json={"model": "tiny", field: prompt, **beside})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(f"{field}: prompt is too long: ")
    assert "this model's maximum context length is" in error["message"]
    assert (error["details"]["error_code"] if beside else error["code"]) == "context_length_exceeded"


INFERENCE = "/inference/v1/generate"


@in_module_loop
async def test_most_tokens_of_vllms_endpoint(served: Served) -> None:
    """An answer that names none had 16, and false was taken for 0, at which a prompt is scored."""
    client = served[1]
    asked: dict[str, Any] = {"token_ids": [5, 9], "output_mode": "text"}
    guide = {"structured_outputs": {"regex": "[ab]{40}"}}
    answer = await client.post(INFERENCE, json={**asked, "sampling_params": guide})
    (choice,) = answer.json()["choices"]
    assert (len(choice["text"]), choice["finish_reason"]) == (40, "stop")
    for wrong in (False, 0.0, -1):
        answer = await client.post(INFERENCE, json={**asked, "sampling_params": {"max_tokens": wrong}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "sampling_params.max_tokens")


@in_module_loop
async def test_an_id_without_a_token_has_no_text(served: Served, tiny_model: Path) -> None:
    """The answer was an error about a field that there is not, once all was computed."""
    unknown = 1 + max(Prompts.load(tiny_model, None).tokenizer.get_vocab().values())
    asked = {"input_ids": [5, unknown, 9], "return_logprob": True, "logprob_start_len": 0}
    asked |= {"return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 1}}
    answer = await served[1].post("/generate", json=asked)
    assert answer.status_code == 200, answer.text
    texts = [entry[1:] for entry in answer.json()["meta_info"]["input_token_logprobs"]]
    assert texts[1] == [unknown, ""]
    assert all(text for _, text in (texts[0], texts[2]))


@pytest.mark.parametrize("logprobs", [0, 1])
@in_module_loop
async def test_offsets_behind_a_token_that_is_not_shown(served: Served, tiny_model: Path, logprobs: int) -> None:
    """Its name counted, which the text does not have."""
    vocabulary = Prompts.load(tiny_model, None).vocabulary
    special = min(vocabulary.special_token_ids)
    forced = [*vocabulary.encode("ab"), special, special, *vocabulary.encode("cd"), special, special]
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": len(forced), "logprobs": logprobs, "echo": True}
    asked["logits_processors"] = [{"name": "forced_prefix", "args": {"token_ids": forced}}]
    for shown in (False, True):
        answer = await ask(served[1], COMPLETIONS, **asked, skip_special_tokens=not shown)
        (choice,) = answer["choices"]
        text, lists = choice["text"], choice["logprobs"]
        name = vocabulary.decode([special])
        assert text == f"xab{2 * name * shown}cd{2 * name * shown}"
        assert lists["tokens"].count(name) == 4
        ends = [*lists["text_offset"][1:], len(text)]
        words = [text[start:end] for start, end in zip(lists["text_offset"], ends, strict=True)]
        assert [word for word in words if word] == [token for token in lists["tokens"] if token in text and token]


ERRORS: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "other"}, 404, "model"),
    ({"top_p": 7}, 400, "top_p"),
    ({"stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    ({"stop": ["a"], "stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ({"guided_regex": "("}, 400, "guided_regex"),
    ({"messages": [{"role": "user", "content": "a " * 4000}]}, 400, "messages"),
    ({"nvext": {"agent_hints": {"priority": 1}}}, 400, "nvext.agent_hints.priority"),
    ({"nvext": {"agent_hints": {"priority": "h\u00f6her"}}}, 400, "nvext.agent_hints.priority"),
    ({"nvext": {"extra_fields": ["timing"]}}, 400, "nvext.extra_fields[0]"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"logits_processors": [{"name": "none"}]}, 400, "logits_processors[0].name"),
]


@pytest.mark.parametrize(("fields", "status", "param"), ERRORS, ids=[each[2] for each in ERRORS])
@pytest.mark.parametrize("stream", [False, True])
@in_module_loop
async def test_errors_name_the_client_s_field(
    served: Served, fields: dict[str, Any], status: int, param: str, stream: bool
) -> None:
    found, error = await refusal(served[1], **fields, stream=stream)
    assert (found, error["param"]) == (status, param)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("value", [b"\xc3\xa9", b"a\tb", b"", b"00-a"])
@pytest.mark.parametrize("name", [b"traceparent", b"tracestate"])
@in_module_loop
async def test_a_trace_that_is_none_is_ignored(served: Served, name: bytes, value: bytes) -> None:
    """It was a 502: metadata of gRPC is printable ASCII."""
    headers = [(b"content-type", b"application/json"), (name, value)]
    content = json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 2})
    assert (await served[1].post(CHAT, content=content, headers=headers)).status_code == 200


@in_module_loop
async def test_an_id_that_workers_do_not_take_is_named(served: Served) -> None:
    body = {"model": "tiny", "messages": HELLO}
    answer = await served[1].post(CHAT, json=body, headers={"x-dynamo-request-id": "a" * 257})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-dynamo-request-id")


@pytest.mark.parametrize("headers", [{"content-type": "text/plain"}, {}])
@pytest.mark.parametrize("num_choices", [1, 2])
@in_module_loop
async def test_a_body_of_another_type_is_refused(served: Served, num_choices: int, headers: dict[str, str]) -> None:
    body = json.dumps({"model": "tiny", "messages": HELLO, "n": num_choices})
    answer = await served[1].post(CHAT, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")


@in_module_loop
async def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    worker, client = served
    long = {**SAMPLED, "max_tokens": 2000, "n": 2, "ignore_eos": True}
    async with contextlib.aclosing(events(client, CHAT, **long)) as stream:
        async for _ in stream:
            break
        async with asyncio.timeout(20):
            while len(worker.server.in_flight) < 2:  # the first choice may have a token before the other begins
                await asyncio.sleep(0.01)
        assert len(worker.server.in_flight) == 2
    async with asyncio.timeout(20):
        while len(worker.server.in_flight):
            await asyncio.sleep(0.01)


FORCED = [{"name": "forced_sequence", "args": {"text": "a" * 1500 + "END and more"}}]
"""Up to 64 tokens of it come in one step."""

LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 400}
MOVED: dict[str, dict[str, Any]] = {
    "processors": {**LONG, "logits_processors": [{"name": "no_repeat_ngram", "args": {"n": 2}}]},
    "logprobs": {**LONG, "logprobs": True, "top_logprobs": 2, "max_tokens": 200},
    "stop": {
        "logits_processors": FORCED,
        "stop": ["END"],
        "max_tokens": 1600,
        "logprobs_mode": "train",
        "return_token_ids": True,
    },
    "penalties": {**LONG, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "min_tokens": 390},
    "guide": {"guided_regex": "[a-f]{150}"},
    "greedy": {**LONG, "seed": None, "temperature": 0},
    "two": {**LONG, "n": 2},
}
IN_CI = ("processors", "stop")


@pytest.mark.parametrize(
    "fields",
    [pytest.param(each, id=name, marks=() if name in IN_CI else pytest.mark.campaign) for name, each in MOVED.items()],
)
async def test_an_answer_goes_on_where_a_worker_leaves(tiny_model: Path, fields: dict[str, Any]) -> None:
    """No worker has a record of the request, and the answer is the one that never moved."""
    body = {**SAMPLED, "max_tokens": 200, "stream_options": {"include_usage": True}, **fields}
    leaves = ("--drain-timeout-s", "0.001")
    async with (
        running(tiny_model, *leaves) as one,
        running(tiny_model, *leaves) as other,
        door(tiny_model, url_of(one), url_of(other)) as client,
    ):
        still = [each async for each in events(client, CHAT, **body)]
        moved: list[Any] = []
        async for each in events(client, CHAT, **body):
            moved.append(each)
            if len(moved) == 5:
                (one if len(one.server.in_flight) else other).shut_down()
        metrics = (await client.get("/metrics")).text
    assert len(re.findall(r"^dlw_upstream_moves_total.* [12]$", metrics, re.MULTILINE)) == 1
    assert joined(moved) == joined(still)


def joined(found: list[Any]) -> Any:
    """What the events of an answer say, however it was cut into chunks."""
    texts: dict[int, str] = {}
    scores: dict[int, list[Any]] = {}
    returned: dict[str, list[Any]] = {}
    ends: dict[int, str | None] = {}
    for event in found:
        assert "error" not in event, event
        for one in event["choices"]:
            index = one["index"]
            texts[index] = texts.get(index, "") + (one["delta"].get("content") or "")
            scores.setdefault(index, []).extend((one["logprobs"] or {}).get("content") or ())
            for key, values in {"ids": one.get("token_ids", []), **one.get("train_logprobs", {})}.items():
                returned[f"{key} {index}"] = returned.get(f"{key} {index}", []) + values
            ends[index] = one["finish_reason"] or ends.get(index)
    usage = found[-1]["usage"]
    prompts = [event["prompt_token_ids"] for event in found if "prompt_token_ids" in event]
    return texts, scores, returned, prompts, ends, usage["prompt_tokens"], usage["completion_tokens"]


async def test_tls_and_a_token(tiny_model: Path, tmp_path: Path) -> None:
    certificate, key, tokens = (tmp_path / name for name in ("cert.pem", "key.pem", "tokens"))
    make_certificate(tmp_path)
    tokens.write_text("secret\n")
    flags = ("--grpc-tls-cert", str(certificate), "--grpc-tls-key", str(key), "--grpc-token-file", str(tokens))
    async with running(tiny_model, *flags) as worker:
        url = f"grpcs://localhost:{worker.port}"
        trusted = ("--upstream-ca-file", str(certificate), "--upstream-token-file", str(tokens))
        async with door(tiny_model, url, arguments=trusted) as client:
            assert (await ask(client, messages=HELLO, max_tokens=3))["usage"]["completion_tokens"] == 3
        async with door(tiny_model, url, arguments=trusted[:2], num_ready=0) as client:
            async with asyncio.timeout(20):
                while (found := await refusal(client))[1]["message"].endswith("it has not answered yet"):
                    await asyncio.sleep(0.05)
            assert (found[0], "UNAUTHENTICATED" in found[1]["message"]) == (503, True)
