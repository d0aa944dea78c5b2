"""The Python client package: alone, asynchronous, and beside the openai package."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
from checks import refusal, run
from dynamo_logits_client import (
    AsyncClient,
    Client,
    Refused,
    Unreachable,
    healed,
    last_receipts,
    logits_processors,
    receipt_of,
    replay_request,
)
from dynamo_logits_client import processors as p

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
PARIS = "The capital of France is Paris."


def refused(call: Callable[..., Any], **fields: Any) -> Refused:
    """The error that ``call`` must raise."""
    try:
        call(**fields)
    except Refused as error:
        return error
    raise AssertionError(f"{fields} was taken")


def check_chat_and_its_receipt(url: str, model: str) -> None:
    chosen = logits_processors(p.choice(choices=["yes", "no"]), p.min_tokens(n=1), receipt="debug")
    answer = Client(url).chat(model=model, messages=FRANCE, **GREEDY, **chosen)
    receipt = answer.receipt
    assert answer.text in ("yes", "no")
    assert receipt is not None
    assert receipt.model.name == model
    assert receipt.processor("choice").steps_active > 0
    assert {each.processor for each in receipt.tokens} >= {"choice"}
    assert receipt.controls is not None
    assert [each["name"] for each in receipt.controls["processors"]] == ["choice", "min_tokens"]


def check_stream(url: str, model: str) -> None:
    fields = logits_processors(receipt=True, nvext={"annotations": ["token_ids"]})
    with Client(url).stream_chat(
        model=model, messages=FRANCE, stream_options={"include_usage": True}, **GREEDY, **fields
    ) as stream:
        assert "".join(chunk.text for chunk in stream) == PARIS
    read = stream.read
    assert read.texts == {0: PARIS}
    assert read.prompt_token_ids is not None
    assert read.receipts[0].prompt_length == len(read.prompt_token_ids)
    assert read.usage is not None
    assert read.usage["prompt_tokens"] == len(read.prompt_token_ids)


def check_choices(url: str, model: str) -> None:
    fields = {"n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 12, **logits_processors(receipt=True)}
    answer = Client(url).chat(model=model, messages=FRANCE, **fields)
    assert len(set(answer.texts)) == 3
    assert len({each.answer_digest for each in answer.receipts if each}) == 3
    with Client(url).stream_chat(model=model, messages=FRANCE, **fields) as stream:
        chunks = list(stream)
    assert [stream.read.texts[index] for index in range(3)] == answer.texts
    assert [last_receipts(each.data for each in chunks)[index] for index in range(3)] == list(answer.receipts)


def check_completion_with_token_healing(url: str, model: str) -> None:
    prompt, entry = healed("The capital of France is Par")
    fields = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 4, **logits_processors(entry)}
    answer = Client(url).complete(**fields)
    assert answer.text.startswith(" Paris")
    with Client(url).stream_completion(**fields) as stream:
        assert "".join(chunk.text for chunk in stream) == answer.text


def check_catalogue_and_models(url: str, model: str) -> None:
    client = Client(url)
    assert client.models() == [model]
    assert {each["name"] for each in client.catalogue()} == set(p.__all__)


def check_errors(url: str, model: str) -> None:
    client = Client(url)
    for fields, param in (
        ({"n": 129}, "n"),
        (logits_processors(p.top_k(k=-2)), "logits_processors.processors[0].args.k"),
        ({"no_such_field": 1}, "no_such_field"),
    ):
        for call in (client.chat, lambda **given: list(client.stream_chat(**given))):
            error = refused(call, model=model, messages=FRANCE, **fields)
            assert error.status == 400, error
            assert error.param is not None, error
            assert param in error.param or param in error.message, (error.param, error.message)
    assert "404" in refusal(Refused, client.chat, model="no-such-model", messages=FRANCE)
    assert refusal(Unreachable, Client("http://127.0.0.1:9/v1").models)


def check_a_stream_that_is_left(url: str, model: str) -> None:
    client = Client(url)
    for _ in range(4):
        with client.stream_chat(model=model, messages=FRANCE, max_tokens=400, ignore_eos=True) as stream:
            for _chunk in stream:
                break
    assert client.chat(model=model, messages=FRANCE, **GREEDY).text == PARIS


def check_replay_files(url: str, model: str) -> None:
    fields = {"messages": FRANCE, "temperature": 0.9, "max_tokens": 8}
    answer = Client(url).chat(model=model, **fields, **logits_processors(p.top_k(k=40), receipt=True))
    with tempfile.TemporaryDirectory() as directory:
        arguments = replay_request(answer, fields).save(directory)
        assert all(Path(each).exists() for each in arguments[1::2])


async def check_asynchronous(url: str, model: str) -> None:
    async with AsyncClient(url) as client:
        answers = await asyncio.gather(*(client.chat(model=model, messages=FRANCE, **GREEDY) for _ in range(8)))
        assert {each.text for each in answers} == {PARIS}
        async with client.stream_chat(
            model=model, messages=FRANCE, **GREEDY, **logits_processors(receipt=True)
        ) as stream:
            assert "".join([chunk.text async for chunk in stream]) == PARIS
        assert stream.read.receipts[0].generated_tokens > 4
        assert await client.models() == [model]
        assert len(await client.catalogue()) == len(p.__all__)
        completed = await client.complete(model=model, prompt="The capital of France is", temperature=0, max_tokens=4)
        assert completed.text
        with suppress(Refused):
            async with client.stream_chat(model=model, messages=FRANCE, n=129):
                raise AssertionError("129 choices were taken")


def check_beside_openai(url: str, model: str) -> None:
    chosen = logits_processors(p.json_schema(schema={"type": "integer"}), receipt=True)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        answer = client.chat.completions.create(model=model, messages=FRANCE, extra_body=chosen, **GREEDY)
        stream = client.chat.completions.create(model=model, messages=FRANCE, extra_body=chosen, stream=True, **GREEDY)
        chunks = list(stream)
    receipt = receipt_of(answer)
    assert receipt is not None
    assert int(answer.choices[0].message.content or "") is not None
    assert last_receipts(chunks)[0].answer_digest == receipt.answer_digest
    assert replay_request(answer, {"messages": FRANCE}).receipt["seed"] == receipt.seed


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
