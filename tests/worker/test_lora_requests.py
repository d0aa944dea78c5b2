"""Requests to LoRA adapters: who is refused, what receipts say, and where an answer may go on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dynamo.llm import exceptions
from lora_adapters import write_adapter
from test_boundary_records import Memory, worker
from test_boundary_records import request as boundary_request
from test_llm_engine import ARGUMENTS, INFO, FakeEngine, chains, collect, request, two_tokens

from adapters.catalog import Selection
from worker.arguments import parse_arguments
from worker.engines import EngineInfo, EngineRequest, TokenDelta
from worker.errors import ConfigurationError, InvalidRequest
from worker.replay.recorded import RecordedModel
from worker.replay.run import loaded, replay
from worker.replay.verdict import check_adapter, check_model_digest
from worker.runtimes import dynamo_adapters
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.sampling import SamplingParams
from worker.tiny_model import write_tiny_model

ADAPTERS = {"mine": "d" * 32, "other": "e" * 32}


async def reporting(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
    yield TokenDelta([5], finish_reason="length", engine_data={"logits_processors": {"version": 1}})


class Adapted(FakeEngine):
    """An engine with adapters."""

    def __init__(self) -> None:
        super().__init__(reporting)
        self.chosen: list[str | None] = []

    async def start(self) -> EngineInfo:
        return dataclasses.replace(INFO, adapters=ADAPTERS)

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        self.chosen.append(request.lora_name)
        return super().generate(request)


async def started(engine: Any) -> WorkerEngine:
    worker = WorkerEngine(engine, ARGUMENTS, shut_down=lambda: None, make_chains=chains)
    await worker.start(0)
    return worker


def to(name: str | None, **fields: Any) -> Any:
    return request(model=name or "tiny", routing={} if name is None else {"lora_name": name}, **fields)


async def test_a_request_reaches_the_adapter_that_it_names() -> None:
    engine = Adapted()
    worker = await started(engine)
    for name in (None, "mine", "other"):
        await collect(worker, to(name))
    assert engine.chosen == [None, "mine", "other"]
    with pytest.raises(exceptions.InvalidArgument, match=r"no LoRA adapter 'nobody'; it has mine, other"):
        await collect(worker, to("nobody"))
    assert (await worker.engine_control("info", {}))["adapters"] == ADAPTERS


async def test_an_engine_without_adapters_refuses_them_by_name() -> None:
    worker = await started(FakeEngine(two_tokens))
    with pytest.raises(exceptions.InvalidArgument, match=r"routing\.lora_name: .*'mine'; it has none"):
        await collect(worker, to("mine"))


async def test_a_receipt_names_the_adapter() -> None:
    worker = await started(Adapted())
    wants = {"annotations": ['logits_processors:{"version": 1, "receipt": true, "processors": []}']}
    models = []
    for name in (None, "mine"):
        chunks = await collect(worker, to(name, **wants))
        models.append(chunks[-1]["engine_data"]["logits_processors"]["model"])
    assert "adapter" not in models[0]
    assert models[1]["adapter"] == {"name": "mine", "digest": ADAPTERS["mine"]}
    assert (models[1]["name"], models[1]["digest"]) == (models[0]["name"], models[0]["digest"])


def receipt_of_mine() -> Any:
    model = RecordedModel.model_validate({"name": "m", "digest": None, "adapter": {"name": "mine", "digest": "d"}})
    return SimpleNamespace(model=model, weights=())


def test_replay_says_what_an_adapter_needs() -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_adapter(receipt_of_mine(), ["other"])
    problem = "so give its directory too: --lora-modules mine=DIRECTORY"
    assert str(refused.value) == "model.adapter: the answer is of the LoRA adapter mine, " + problem
    check_adapter(receipt_of_mine(), ["mine"])


def test_replay_refuses_another_adapter_of_the_name() -> None:
    server: Any = SimpleNamespace(model_digest="m", adapters={"mine": "d"})
    check_model_digest(server, receipt_of_mine())
    server.adapters = {"mine": "e"}
    with pytest.raises(
        ConfigurationError, match=r"model\.adapter\.digest: the receipt is of an adapter with d, .* has e"
    ):
        check_model_digest(server, receipt_of_mine())


async def test_replay_computes_with_the_adapter(tmp_path: Path) -> None:
    tiny_model = write_tiny_model(tmp_path / "model")
    path = write_adapter(tmp_path / "mine", tiny_model, size=1.0)
    argv = ["--model-path", str(tiny_model), "--device", "cpu", "--dtype", "float32", "--lora-modules", f"mine={path}"]
    answers = []
    for name in (None, "mine"):
        async with loaded(parse_arguments(argv, {}), name) as model:
            request = await model.request("r", [9, 30, 41], SamplingParams(max_tokens=6, seed=1), Selection())
            assert (request.adapter and request.adapter.name) == name
            answers.append(replay(model.stepper, request, 6).token_ids)
            recorded = receipt_of_mine()
            recorded.model.adapter.digest = model.server.adapters["mine"]
            check_model_digest(model.server, recorded)
    assert answers[0] != answers[1]


async def test_an_answer_goes_on_in_its_own_adapter_alone() -> None:
    store = Memory()
    mine = dataclasses.replace(boundary_request(1, 2), lora_name="mine")
    record = await worker(store).begin("a", mine)
    record.write(7)
    await record.wait_written()
    moved = boundary_request(1, 2, 5, max_tokens=8)
    for name, generated in (("mine", [5]), ("other", []), (None, [])):
        found = (await worker(store).begin("a", dataclasses.replace(moved, lora_name=name))).request
        assert (found.lora_name, found.generated_token_ids) == (name, generated)


async def test_an_answer_does_not_go_on_in_another_adapter_of_its_name() -> None:
    store = Memory()
    record = await worker(store).begin("a", dataclasses.replace(boundary_request(1, 2), lora_name="m", lora_digest="d"))
    record.write(7)
    await record.wait_written()
    moved = dataclasses.replace(boundary_request(1, 2, 5, max_tokens=8), lora_name="m", lora_digest="e")
    with pytest.raises(InvalidRequest, match="adapter is 'd' on the worker that began the answer and 'e' on this one"):
        await worker(store).begin("a", moved)
    assert (
        await worker(store).begin("a", dataclasses.replace(moved, lora_digest="d"))
    ).request.generated_token_ids == [5]


async def test_adapters_are_registered_again_for_late_frontends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered: list[str] = []

    async def register(endpoint: Any, name: str, *_: Any) -> None:
        registered.append(name)
        if len(registered) == 1:
            raise RuntimeError("discovery is away")

    monkeypatch.setattr(dynamo_adapters, "_register", register)
    monkeypatch.setattr(dynamo_adapters, "PAUSES_S", (0.0, 0.0, 0.0))
    info = dataclasses.replace(INFO, adapters=ADAPTERS)
    models = dynamo_adapters.AdapterModels(None, info, ARGUMENTS, forget=lambda name: None)
    models.begin()
    await asyncio.gather(*models._again.values())
    assert registered == ["mine", "other"] * 3
    assert "the LoRA adapter mine is not registered: discovery is away" in caplog.text


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Mine", "it and 'mine' are both mine in Dynamo's discovery"),
        ("../mine", "it and 'mine' are both mine in Dynamo's discovery"),
        ("\u65e5\u672c", "the name needs an ASCII letter, a digit or - for Dynamo's discovery"),
    ],
)
async def test_a_name_that_discovery_takes_for_another_one(
    monkeypatch: pytest.MonkeyPatch, name: str, problem: str
) -> None:
    """One key has one entry: the second adapter is not found, and its end is that of the first."""
    registered: list[str] = []

    async def register(endpoint: Any, name: str, *_: Any) -> None:
        registered.append(name)

    monkeypatch.setattr(dynamo_adapters, "_register", register)
    info = dataclasses.replace(INFO, adapters={**ADAPTERS, name: "digest"})
    models = dynamo_adapters.AdapterModels(None, info, ARGUMENTS, forget=lambda name: None)
    with pytest.raises(ValueError, match="discovery") as refused:
        await models.publish(name)
    assert (str(refused.value), registered) == (problem, [])
    await models.publish("mine-2")
    models.close()
    assert registered == ["mine-2"]
