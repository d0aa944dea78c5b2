"""The Python client package against a whole stack; its answers are replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dynamo_logits_client import (
    AsyncClient,
    Client,
    Refused,
    healed,
    last_receipts,
    logits_processors,
    receipt_of,
    replay_request,
)
from dynamo_logits_client import processors as p
from e2e_stack import MODEL, Stack, running_stack
from front_door_process import Door

from worker.__main__ import main

MESSAGES: list[Any] = [{"role": "user", "content": "Hello there"}]
SAMPLED: dict[str, Any] = {"model": MODEL, "temperature": 0.9, "max_tokens": 12}
CHOSEN = logits_processors(p.top_k(k=50), p.min_tokens(n=4), receipt="debug")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Stack, Door]]:
    with running_stack(tmp_path_factory.mktemp("served"), tiny_model) as stack:
        stack.start_frontend()
        stack.start_worker("--device", "cpu", "--dtype", "float32")
        yield stack, Door(stack)


def url(door: Door) -> str:
    return f"{door.url}/v1"


def replayed(answer: Any, prompt: Any, stack: Stack, directory: Path, choice: int = 0) -> int:
    """Exit status of the replay."""
    arguments = replay_request(answer, prompt, choice).save(directory)
    return main([*arguments, "--model-path", str(stack.model_path), "--device", "cpu"])


def test_an_answer_is_replayed(served: tuple[Stack, Door], tmp_path: Path) -> None:
    stack, door = served
    client = Client(url(door))
    answer = client.chat(messages=MESSAGES, **SAMPLED, **CHOSEN)
    assert answer.receipt is not None
    assert {each.did for each in answer.receipt.tokens} >= {"shaped"}
    assert replayed(answer, {"messages": MESSAGES}, stack, tmp_path / "chat") == 0
    text = client.complete(prompt="Once", **SAMPLED, **CHOSEN)
    assert replayed(text, "Once", stack, tmp_path / "text") == 0


def test_a_choice_of_a_stream_is_replayed(served: tuple[Stack, Door], tmp_path: Path) -> None:
    stack, door = served
    chosen = logits_processors(p.top_k(k=50), receipt=True, nvext={"annotations": ["token_ids"]})
    with Client(url(door)).stream_chat(messages=MESSAGES, n=2, seed=7, **SAMPLED, **chosen) as stream:
        chunks = list(stream)
    assert stream.read.prompt_token_ids is not None
    receipts = last_receipts(chunk.data for chunk in chunks)
    assert stream.read.receipts == receipts
    assert receipts[0].answer_digest != receipts[1].answer_digest
    last = next(each for each in reversed(chunks) if each.choice == 1 and each.receipt is not None)
    assert replayed(last.data, stream.read.prompt_token_ids, stack, tmp_path) == 0


def test_beside_the_openai_package(served: tuple[Stack, Door], tmp_path: Path) -> None:
    stack, door = served
    with door.client() as client:
        answer = client.chat.completions.create(messages=MESSAGES, extra_body=CHOSEN, **SAMPLED)
    receipt = receipt_of(answer)
    assert receipt is not None
    assert receipt.processor("min_tokens").steps_active > 0
    assert replayed(answer, {"messages": MESSAGES}, stack, tmp_path) == 0


async def test_asynchronous(served: tuple[Stack, Door]) -> None:
    _, door = served
    prompt, entry = healed("Hello there, wor")
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": 8, **logits_processors(entry, receipt=True)}
    async with AsyncClient(url(door)) as client:
        answers = await asyncio.gather(*(client.complete(**fields) for _ in range(4)))
        async with client.stream_completion(**fields) as stream:
            streamed = "".join([chunk.text async for chunk in stream])
    assert {each.text for each in answers} == {streamed}
    assert streamed.startswith(" wor")
    assert {each.receipt and each.receipt.answer_digest for each in answers} == {stream.read.receipts[0].answer_digest}


def test_refusals_name_the_field(served: tuple[Stack, Door]) -> None:
    _, door = served
    client = Client(url(door))
    for fields, param in (({"n": 129}, "n"), ({"no_such_field": 1}, "no_such_field")):
        for call in (client.chat, client.stream_chat):
            with pytest.raises(Refused) as refused:
                call(model=MODEL, messages=MESSAGES, **fields)
            assert (refused.value.status, refused.value.param) == (400, param)
    with pytest.raises(Refused, match=r"processors\[1\]\.args\.k"):
        client.chat(model=MODEL, messages=MESSAGES, **logits_processors(p.min_tokens(n=1), p.top_k(k=-2)))


def test_what_is_served(served: tuple[Stack, Door]) -> None:
    _, door = served
    assert Client(url(door)).models() == [MODEL]
    assert {each["name"] for each in Client(url(door)).catalogue()} == set(p.__all__)
