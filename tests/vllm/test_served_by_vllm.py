"""A real ``vllm serve`` with the class, processes of its own, and the stock ``openai`` client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from stock_server import MODEL, client_of, metrics_of, running_server

POLICY = """
keys: {kit: {env: KIT_KEY}}
models:
  smol:
    mandatory: [{name: banned_tokens, args: {token_ids: [504]}}]
    forbidden: [mirostat, top_k]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("served")
    policy = directory / "policy.yaml"
    policy.write_text(POLICY, encoding="utf-8")
    with running_server(directory, DLW_PROCESSOR_POLICY=str(policy)) as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with client_of(server) as found:
        yield found


def named(*processors: dict[str, Any], **more: Any) -> dict[str, Any]:
    """``extra_body`` of a request with processors."""
    selection = json.dumps({"version": 1, "processors": processors})
    return {"vllm_xargs": {"logits_processors": selection, **more}}


CHOICE = {"name": "choice", "args": {"choices": ["yes", "no"]}}


def ask(client: openai.OpenAI, prompt: str, extra: dict[str, Any], **fields: Any) -> Any:
    return client.completions.create(
        **{"model": MODEL, "prompt": prompt, "max_tokens": 12, "extra_body": extra, **fields}
    )


def test_chat_and_completions_take_processors(client: openai.OpenAI) -> None:
    assert ask(client, "Yes or no?", named(CHOICE)).choices[0].text in {"yes", "no"}
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Yes or no?"}], extra_body=named(CHOICE), max_tokens=5
    )
    assert chat.choices[0].message.content in {"yes", "no"}


def test_a_stream_is_what_the_whole_answer_is(client: openai.OpenAI) -> None:
    extra = named({"name": "xtc", "args": {"threshold": 0.1, "probability": 0.5}})
    whole = ask(client, "Once", extra, seed=4).choices[0].text
    parts = [chunk.choices[0].text for chunk in ask(client, "Once", extra, seed=4, stream=True)]
    assert "".join(parts) == whole
    assert len(parts) > 3


@pytest.mark.parametrize(
    ("processor", "path"),
    [
        ({"name": "nope"}, "logits_processors.processors[0].name"),
        (
            {"name": "json_schema", "args": {"schema": {"type": "nonsense"}}},
            "logits_processors.processors[0].args.schema",
        ),
        (
            {"name": "regex", "args": {"pattern": "((a{1,300}){1,300}){1,300}"}},
            "logits_processors.processors[0].args.pattern",
        ),
        ({"name": "mirostat"}, "logits_processors.processors[0].name"),
        ({"name": "banned_tokens", "args": {"token_ids": [1]}}, "logits_processors.processors[0]"),
    ],
)
def test_a_refusal_is_a_400_with_the_path(client: openai.OpenAI, processor: dict[str, Any], path: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x", named(processor))
    assert path in caught.value.message


def test_beam_search_with_processors_is_a_400(client: openai.OpenAI) -> None:
    """The operator's count too: without them vLLM's beams would go by their masks."""
    for extra in (named(CHOICE), {}):
        with pytest.raises(openai.BadRequestError, match=r"use_beam_search: .*banned_tokens"):
            ask(client, "x", {**extra, "use_beam_search": True}, n=2, temperature=0)


@pytest.mark.parametrize("place", ["nvext", "extra_body"])
def test_processors_that_vllm_would_ignore_are_a_400(client: openai.OpenAI, place: str) -> None:
    named_here = {"version": 1, "processors": [CHOICE]}
    for extra in ({"logits_processors": named_here}, {place: {"logits_processors": named_here}}):
        with pytest.raises(openai.BadRequestError, match=r"logits_processors: vLLM looks for it in vllm_xargs alone"):
            ask(client, "Yes or no?", extra)


def test_the_policy_holds_for_fields_and_plain_requests(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_k"):
        ask(client, "x", {"top_k": 5})
    answer = ask(client, "Once upon a time", {"return_token_ids": True}, temperature=0)  # 504 is " The" at a beginning
    assert 504 not in answer.choices[0].token_ids


def test_equal_prompts_share_their_kv(client: openai.OpenAI, server: str) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 16
    extra = named({"name": "gen_length", "args": {"boost": 1.0, "power": 1.1}})
    first, second = (ask(client, prompt, extra, temperature=0).choices[0].text for _ in range(2))
    hits = sum(
        float(line.split()[-1]) for line in metrics_of(server) if line.startswith("vllm:prefix_cache_hits_total")
    )
    assert hits > 0
    assert first[:1] == second[:1]


def test_sixteen_clients_at_once_get_their_own(client: openai.OpenAI) -> None:
    """Two answers each, streamed for every other client."""
    schema = {"type": "object", "properties": {"n": {"const": 0}}, "required": ["n"], "additionalProperties": False}

    def answer(number: int) -> str:
        own = {**schema, "properties": {"n": {"const": number}}}
        extra = named({"name": "json_schema", "args": {"schema": own}})
        if number % 2:
            return str(ask(client, "Number:", extra, max_tokens=40, n=2).choices[1].text)
        chunks = ask(client, "Number:", extra, max_tokens=40, n=2, stream=True)
        return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == 1)

    with ThreadPoolExecutor(16) as pool:
        assert [json.loads(text)["n"] for text in pool.map(answer, range(16))] == list(range(16))


def test_a_failure_ends_one_answer_and_is_reported(client: openai.OpenAI, server: str) -> None:
    extra = named({"name": "acme/raises"}, logits_processors_report="mine")
    assert ask(client, "Once", extra, max_tokens=40).choices[0].finish_reason == "stop"
    request = urllib.request.Request(
        f"{server}/collective_rpc",
        json.dumps({"method": "take_processor_failures"}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        told = response.read().decode()
    assert "acme/raises" in told
    assert "mine" in told
    assert 'dlw_processor_errors_total{processor="acme/raises",reason="raised"} 1.0' in metrics_of(server)
