"""Token ids and log probabilities for a trainer over NATS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nats_workers import connected, running
from ports import free_port
from servers import NatsServer

from worker.engines.embedded import Engine
from worker.engines.weights import ChangesWeights
from worker.requests.rollout import TRAIN_KEYS
from worker.runtimes.nats.client import RequestError, WorkerClient
from worker.sampling import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 30, 41, 77, 30, 41, 12]
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 3}
ASKED: dict[str, Any] = {
    "token_ids": PROMPT,
    "sampling_options": SAMPLED,
    "output_options": {"logprobs_mode": "train", "return_token_ids": True},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(nats_server: NatsServer, tiny_model: Path) -> AsyncIterator[WorkerClient]:
    url = nats_server.url
    async with running(tiny_model, url, "tiny/rollouts"), await connected(url, "tiny/rollouts") as client:
        yield client


async def rollout(client: WorkerClient, **fields: Any) -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
    """The lists of all chunks together, and the chunks."""
    chunks = [chunk async for chunk in client.stream(**{**ASKED, **fields})]
    found: dict[str, list[Any]] = {key: [] for key in ("prompt_token_ids", "token_ids", *TRAIN_KEYS)}
    for chunk in chunks:
        data = json.loads(chunk.get("engine_data", {}).get("rollout", "{}"))
        for key, values in found.items():
            values += data.get(key, [])
    return found, chunks


async def test_they_are_those_of_the_engine(client: WorkerClient, tiny_model: Path) -> None:
    found, chunks = await rollout(client, stop_conditions={"max_tokens": 20, "ignore_eos": True})
    engine = Engine(tiny_model, device="cpu", dtype="float32", numerics="exact")
    wanted = SamplingParams(max_tokens=20, ignore_eos=True, logprobs_mode="train", **SAMPLED)
    (result,) = engine.generate([PROMPT], wanted, progress=False)
    entries = [position[0] for position in result.logprobs or [] if isinstance(position, list)]
    assert found["prompt_token_ids"] == PROMPT
    assert found["token_ids"] == result.token_ids
    assert found["raw"] == [entry.logprob for entry in entries]
    assert found["processed"] == [entry.processed for entry in entries]
    assert found["log_mass"] == [entry.log_mass for entry in entries]
    assert not any("log_probs" in chunk for chunk in chunks)  # they were not asked for in that form


async def test_a_whole_answer_has_them_of_all_tokens(client: WorkerClient) -> None:
    """It had those of its last chunk alone."""
    conditions = {"max_tokens": 20, "ignore_eos": True}
    found, chunks = await rollout(client, stop_conditions=conditions)
    assert len(chunks) > 1
    output = {**ASKED["output_options"], "prompt_logprobs": 1}
    asked = {**ASKED, "output_options": output, "logits_processors": {"receipt": True}}
    (choice,) = (await client.generate(**asked, stop_conditions=conditions)).choices
    assert choice.engine_data is not None
    assert {key: value for key, value in json.loads(choice.engine_data["rollout"]).items() if key in found} == found
    assert len(choice.engine_data["prompt_logprobs"]) == len(PROMPT)
    assert choice.engine_data["logits_processors"]["generated_tokens"] == 20


async def test_they_end_with_the_token_that_completes_a_stop_string(client: WorkerClient) -> None:
    found, chunks = await rollout(client, stop_conditions={"max_tokens": 40, "ignore_eos": True, "stop": ["e"]})
    text = "".join(chunk.get("text", "") for chunk in chunks)
    assert chunks[-1]["stop_string"] == "e"
    assert len(found["token_ids"]) == len(found["raw"]) == chunks[-1]["completion_usage"]["completion_tokens"]
    whole, _ = await rollout(client, stop_conditions={"max_tokens": 40, "ignore_eos": True})
    assert found["token_ids"] == whole["token_ids"][: len(found["token_ids"])]
    assert "e" not in text


async def test_an_aborted_answer_goes_on(nats_server: NatsServer, tiny_model: Path, tmp_path: Path) -> None:
    """Its chunks end with ``abort``, behind tokens that the next prompt ends with."""
    (tmp_path / "keys").write_text("key\n")
    port = ("--engine-port", str(free_port()), "--engine-key-file", str(tmp_path / "keys"))
    url, conditions = nats_server.url, {"max_tokens": 400, "ignore_eos": True}
    async with running(tiny_model, url, "tiny/aborts", *port) as worker, await connected(url, "tiny/aborts") as client:
        assert isinstance(worker.server.engine, ChangesWeights)
        weights = worker.server.engine.weights
        assert weights is not None
        whole, _ = await rollout(client, stop_conditions=conditions)
        task = asyncio.create_task(rollout(client, stop_conditions=conditions))
        while not worker.server.engine.num_unfinished():
            await asyncio.sleep(0.001)
        await weights.pause("abort")
        await weights.resume()
        part, chunks = await task
        assert (chunks[-1]["finish_reason"], chunks[-1]["engine_data"]["abort"]) == ("abort", True)
        conditions["max_tokens"] = 400 - len(part["token_ids"])
        rest, _ = await rollout(client, token_ids=PROMPT + part["token_ids"], stop_conditions=conditions)
        assert part["token_ids"] + rest["token_ids"] == whole["token_ids"]


async def test_another_mode_is_refused_by_name(client: WorkerClient) -> None:
    with pytest.raises(RequestError, match=r"output_options\.logprobs_mode: must be one of raw, processed, train"):
        await client.generate(token_ids=PROMPT, output_options={"logprobs_mode": "all"})
