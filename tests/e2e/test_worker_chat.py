"""A stock OpenAI client, Dynamo's own frontend, our worker, a real model."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from e2e_stack import DYNAMO, MODEL, Stack, Worker, http, leave_until_cancelled, wait_for

MESSAGES = [{"role": "user", "content": "Hello there"}]

Shared = tuple[Stack, Worker]


def chat(stack: Stack, **options: object) -> str:
    answer = stack.client().chat.completions.create(model=MODEL, messages=MESSAGES, **options)  # type: ignore[call-overload]
    return answer.choices[0].message.content


def test_chat_and_its_stream_say_the_same(shared: Shared) -> None:
    stack, _ = shared
    whole = stack.client().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)  # type: ignore[arg-type]
    chunks = list(
        stack.client().chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=MESSAGES, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content != ""
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 20
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens > 2


def test_completion_and_its_stream_say_the_same(shared: Shared) -> None:
    stack, _ = shared
    whole = stack.client().completions.create(model=MODEL, prompt="Once upon", max_tokens=20)
    chunks = stack.client().completions.create(model=MODEL, prompt="Once upon", max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""


def test_nothing_set_is_greedy(shared: Shared) -> None:
    stack, _ = shared
    assert chat(stack, max_tokens=16) == chat(stack, max_tokens=16) == chat(stack, max_tokens=16, temperature=0)


def test_seeded_draws_repeat(shared: Shared) -> None:
    stack, _ = shared
    first = chat(stack, max_tokens=24, temperature=1.5, seed=-7)
    assert chat(stack, max_tokens=24, temperature=1.5, seed=-7) == first
    assert chat(stack, max_tokens=24, temperature=1.5, seed=8) != first


async def test_64_at_once_say_what_each_says_alone(shared: Shared) -> None:
    stack, worker = shared
    prompts = [f"{'word ' * (i % 7)}prompt number {i}" for i in range(64)]

    async with stack.async_client() as client:

        async def complete(prompt: str) -> str:
            answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=24)
            return answer.choices[0].text

        together = await asyncio.gather(*map(complete, prompts))
        alone = [await complete(prompt) for prompt in prompts[::8]]
    assert together[::8] == alone
    assert len(set(together)) > 32
    wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "requests freed")
    assert worker.metric("dlw_waiting_requests") == 0
    assert worker.metric("dlw_time_to_first_token_seconds_count") >= len(prompts)


def test_logprobs(shared: Shared) -> None:
    stack, _ = shared
    answer = stack.client().chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,  # type: ignore[arg-type]
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 6
    for position in content:
        assert len(position.top_logprobs) == 3
        assert position.logprob == position.top_logprobs[0].logprob <= 0  # greedy takes the likeliest
        values = [top.logprob for top in position.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_logprobs_of_the_chosen_token_alone(shared: Shared) -> None:
    stack, _ = shared
    status, text = stack.post("completions", prompt="Once", max_tokens=3, logprobs=0)
    assert status == 200, text
    logprobs = json.loads(text)["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 3
    assert all(value <= 0 for value in logprobs["token_logprobs"])


def test_stop_string_ends_the_answer_and_frees_the_request(shared: Shared) -> None:
    stack, worker = shared
    text = stack.client().completions.create(model=MODEL, prompt="Once upon", max_tokens=60).choices[0].text
    stop = next(letter for letter in text[4:] if letter.isalpha())
    cancelled = worker.metric("dlw_requests_total", outcome="cancelled")
    answer = stack.client().completions.create(model=MODEL, prompt="Once upon", max_tokens=1500, stop=[stop])
    assert stop not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "request freed")
    assert worker.metric("dlw_requests_total", outcome="cancelled") >= cancelled


@pytest.mark.parametrize("shown", [False, True])
def test_stop_token_ids(shared: Shared, shown: bool) -> None:
    stack, _ = shared
    body = {"prompt": "Once upon", "max_tokens": 30, "logprobs": 1, "return_tokens_as_token_ids": True}
    status, text = stack.post("completions", **body)
    assert status == 200, text
    ids = [int(t.removeprefix("token_id:")) for t in json.loads(text)["choices"][0]["logprobs"]["tokens"]]
    stop = next(i for i in ids[3:] if i not in ids[:3])
    status, text = stack.post("completions", **body, stop_token_ids=[stop], include_stop_str_in_output=shown)
    assert status == 200, text
    choice = json.loads(text)["choices"][0]
    answer = [int(t.removeprefix("token_id:")) for t in choice["logprobs"]["tokens"]]
    assert answer == ids[: ids.index(stop) + shown]
    assert choice["finish_reason"] == "stop"


def test_max_tokens_absent_means_the_end_of_the_context(shared: Shared) -> None:
    stack, _ = shared
    status, text = stack.post("completions", prompt=[40] * 2000, ignore_eos=True)
    assert status == 200, text
    usage = json.loads(text)["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == 2048
    assert json.loads(text)["choices"][0]["finish_reason"] == "length"


async def test_cancellation_frees_the_slot(shared: Shared) -> None:
    stack, worker = shared
    async with stack.async_client() as client:
        await leave_until_cancelled(client, worker)


def test_requests_are_counted(shared: Shared) -> None:
    stack, worker = shared

    def generated() -> float:
        return worker.metric("dlw_tokens_total", kind="generated")

    # tokens count when the stream has ended, a moment after its client has the answer
    wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "the end of those before")
    before = worker.metric("dlw_requests_total", outcome="length"), generated()
    chat(stack, max_tokens=5)
    assert worker.metric("dlw_requests_total", outcome="length") == before[0] + 1
    wait_for(lambda: generated() > before[1], "the tokens")
    assert generated() == before[1] + 5


def test_info_control(shared: Shared) -> None:
    _, worker = shared
    status, text = http(f"http://127.0.0.1:{worker.port}/engine/control/info", {})
    assert status == 200, text
    info = json.loads(text)
    assert info["engine"] == "embedded"
    assert info["context_length"] == 2048
    assert info["draining"] is False


IMAGE = [
    {"type": "text", "text": "What is it?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
]

REFUSALS = {
    "n": ("chat", {"n": 2}, "sampling_options.n: more than one choice cannot be streamed"),
    "best_of": ("completions", {"best_of": 3}, "sampling_options.best_of: best_of above 1 is not supported"),
    "allowed": ("chat", {"allowed_token_ids": [99_999]}, "allowed_token_ids"),
    "prompt logprobs": ("chat", {"prompt_logprobs": 101}, "output_options.prompt_logprobs: must be between 0 and 100"),
    "too many of them": (
        "completions",
        {"prompt": [5] * 1500, "prompt_logprobs": 100},
        "output_options.prompt_logprobs: a prompt of 1500 tokens with 100 alternatives",
    ),
    "image": ("chat", {"messages": [{"role": "user", "content": IMAGE}]}, "multi_modal_data: this worker serves text"),
    "white space": (
        "chat",
        # 1.4.2 lets it through alone, where 1.6.1 drops what has nothing to act on
        {"guided_whitespace_pattern": "[ ]?"} | ({"guided_json": {"type": "object"}} if DYNAMO >= (1, 6) else {}),
        "guided_decoding.whitespace_pattern: is not supported",
    ),
    "stop id": ("chat", {"stop_token_ids": [999_999]}, "stop_conditions.stop_token_ids: token id 999999 is not in"),
    "processors": ("chat", {"nvext": {"annotations": ["logits_processors:["]}}, "logits_processors: "),
    "misspelt": ("chat", {"nvext": {"annotations": ["logits_procesors:{}"]}}, "annotations: 'logits_procesors' is not"),
    "annotation size": ("chat", {"nvext": {"annotations": ["a" * 70_000]}}, "annotations: must have at most 65536"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_refusal(shared: Shared, name: str, stream: bool) -> None:
    """Status and message as far as the installed frontend lets them through (docs/failures.md)."""
    stack, worker = shared
    endpoint, fields, message = REFUSALS[name]
    base = {"messages": MESSAGES} if endpoint == "chat" else {"prompt": "Once"}
    path = "chat/completions" if endpoint == "chat" else "completions"
    before = worker.metric("dlw_requests_total", outcome="refused")
    status, text = stack.post(path, **{**base, **fields, "stream": stream, "max_tokens": 4})  # type: ignore[dict-item]
    if DYNAMO < (1, 6) and (stream or endpoint == "completions"):
        assert status == (200 if stream else 500)
        assert '"code":500' in text
        assert '"choices":' not in text
    else:
        assert status == (200 if stream else 400)
        assert message in text
        assert '"code":400' in text
        assert '"choices":' not in text
    assert worker.metric("dlw_requests_total", outcome="refused") == before + 1
    refusals = [line for line in worker.log.splitlines() if " refused: " in line]
    assert len(refusals) == worker.metric("dlw_requests_total", outcome="refused")
    assert message in refusals[-1]


def test_token_outside_the_vocabulary(shared: Shared) -> None:
    """1.6.1 refuses it in the frontend, 1.4.2 lets it through to us."""
    stack, worker = shared
    with pytest.raises(openai.APIStatusError) as refused:
        stack.client().completions.create(model=MODEL, prompt=[40, 999_999], max_tokens=4)
    assert refused.value.status_code == (500 if DYNAMO < (1, 6) else 400)
    if DYNAMO < (1, 6):
        assert "refused: token_ids: token id 999999 is not in the vocabulary of 1024" in worker.log
        status, text = stack.post("chat/completions", messages=MESSAGES, nvext={"token_data": [40, 999_999]})
        assert (status, "token_ids: token id 999999 is not in" in text) == (400, True), text


FEW_STOPS: dict[str, dict[str, object]] = {
    "stop strings": {"stop": ["a1", "b1", "c1", "d1", "e1"]},
    "stop ids": {"stop_token_ids": [10, 11, 12, 13, 14]},
}
FRONTEND_REFUSALS: dict[str, tuple[dict[str, object], str]] = {
    "897 stop ids": ({"stop_token_ids": list(range(10, 907))}, "stop token IDs must be less than 4"),
}
if DYNAMO < (1, 6):
    FRONTEND_REFUSALS |= {
        "5 stop strings": (FEW_STOPS["stop strings"], "stop conditions must be less than 4"),
        "5 stop ids": (FEW_STOPS["stop ids"], "stop token IDs must be less than 4"),
        "white space": (
            {"guided_json": {"type": "object"}, "guided_whitespace_pattern": "[ ]?"},
            "Only one of json, regex, choice, grammar",
        ),
    }


@pytest.mark.parametrize("name", FRONTEND_REFUSALS)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_frontend_refuses_itself(shared: Shared, name: str, path: str, stream: bool) -> None:
    """A 500 on 1.4.2, whose reason is in the frontend's log alone: the worker never sees the
    request.
    """
    stack, worker = shared
    fields, reason = FRONTEND_REFUSALS[name]
    prompt = {"messages": MESSAGES} if path.startswith("chat") else {"prompt": "Once"}
    before = worker.metric("dlw_requests_total")
    status, text = stack.post(path, **prompt, **fields, stream=stream, max_tokens=4)
    assert '"choices":' not in text
    assert worker.metric("dlw_requests_total") == before
    if DYNAMO < (1, 6):
        assert status == 500
        wait_for(lambda: reason in stack.frontend.log, "the reason")
    else:
        assert status in (400, 500)


@pytest.mark.parametrize("name", FEW_STOPS)
def test_as_many_stops_as_the_frontend_takes_are_served(shared: Shared, name: str) -> None:
    """Four on 1.4.2; 1.6.1 takes more of them."""
    stack, _ = shared
    ((field, stops),) = FEW_STOPS[name].items()
    assert isinstance(stops, list)
    fields = {field: stops[: 4 if DYNAMO < (1, 6) else 5]}
    status, text = stack.post("chat/completions", messages=MESSAGES, **fields, max_tokens=4)
    assert status == 200, text


@pytest.mark.parametrize("length", [2048, 2049])
def test_prompt_that_leaves_no_room(shared: Shared, length: int) -> None:
    """1.4.2 refuses it in the frontend, 1.6.1 lets it through to us."""
    stack, _ = shared
    status, text = stack.post("completions", prompt=[40] * length, max_tokens=4)
    assert status == 400
    assert f"{length} tokens" in text


NAME_AND_AGE = {
    "type": "object",
    "properties": {"name": {"const": "Ann"}, "age": {"const": 3}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_json_answers_beside_a_tool_call_parser(stack: Stack) -> None:
    """Dynamo's hermes takes an object with a name for a call, unless the answer is streamed
    (docs/request.md).
    """
    stack.start_frontend()
    stack.start_worker("--device", "cpu", "--dyn-tool-call-parser", "hermes")
    inside = {**NAME_AND_AGE, "properties": {"person": NAME_AND_AGE}, "required": ["person"]}
    ask = {"messages": MESSAGES, "max_tokens": 60}
    status, text = stack.post("chat/completions", **ask, guided_json=NAME_AND_AGE)
    assert status == 200, text
    if DYNAMO < (1, 6):
        message = json.loads(text)["choices"][0]["message"]
        assert message["content"] is None
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["Ann"]
    status, text = stack.post("chat/completions", **ask, guided_json=NAME_AND_AGE, stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    parts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(parts) == '{"name":"Ann","age":3}'
    status, text = stack.post("chat/completions", **ask, guided_json=inside)
    assert json.loads(text)["choices"][0]["message"]["content"] == '{"person":{"name":"Ann","age":3}}'


def test_a_worker_that_refused_still_serves(shared: Shared) -> None:
    stack, _ = shared
    for _ in range(20):
        assert stack.post("chat/completions", messages=MESSAGES, n=3)[0] == 400
    assert chat(stack, max_tokens=4)
