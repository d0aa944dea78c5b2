"""The sampling of a model's ``generation_config.json``, through the front door and both engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dynamo_logits_client import Answer, Client, Receipt, logits_processors, replay_request
from e2e_stack import MODEL, STAND_IN, Stack, running_stack
from front_door_process import Door
from processor_requests import PATIENT
from test_disagg_e2e import start_pair

from worker.__main__ import main

VALUES = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
MESSAGES = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = shutil.copytree(tiny_model, tmp_path_factory.mktemp("sampled") / "tiny")
    config = path / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **VALUES, "do_sample": True}))
    return path


@pytest.fixture(scope="module", params=["embedded", "trtllm", "disaggregated"])
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, Client]]:
    with running_stack(tmp_path_factory.mktemp("served"), model) as stack:
        stack.start_frontend()
        if request.param == "disaggregated":
            start_pair(stack)
        elif request.param == "trtllm":
            stack.start_worker("--engine", "trtllm", *PATIENT, **STAND_IN)  # type: ignore[arg-type]
        else:
            stack.start_worker("--device", "cpu", "--dtype", "float32")
        yield stack, Client(f"{Door(stack).url}/v1")


def ask(client: Client, **fields: Any) -> tuple[Answer, Receipt]:
    answer = client.chat(model=MODEL, messages=MESSAGES, max_tokens=12, **fields, **logits_processors(receipt=True))
    assert answer.receipt is not None
    return answer, answer.receipt


def sources(receipt: Receipt) -> dict[str, tuple[float, str]]:
    return {name: (round(each.value, 6), each.source) for name, each in receipt.sampling.items()}


def test_an_unset_control_is_the_models(served: tuple[Stack, Client]) -> None:
    _, client = served
    from_model = {name: (value, "model") for name, value in VALUES.items()}
    for unset in ({}, {"temperature": None, "top_p": None}):
        assert sources(ask(client, **unset)[1]) == from_model
    assert sources(ask(client, top_p=0.5)[1]) == {**from_model, "top_p": (0.5, "request")}
    assert sources(ask(client, temperature=0)[1]) == {"temperature": (0, "request")}
    assert ask(client, seed=7)[0].text == ask(client, seed=7, **VALUES)[0].text
    assert len({ask(client)[0].text for _ in range(5)}) > 1
    assert len({ask(client, temperature=0)[0].text for _ in range(3)}) == 1


def test_an_answer_is_replayed(served: tuple[Stack, Client], tmp_path: Path) -> None:
    stack, client = served
    answer, receipt = ask(client)
    if receipt.engine.name == "trtllm":  # another engine's kernels: the stand-in's logits are not a model's
        assert receipt.controls is not None
        assert VALUES.items() <= receipt.controls["sampling"].items()
        return
    arguments = replay_request(answer, {"messages": MESSAGES}).save(tmp_path)
    assert main([*arguments, "--model-path", str(stack.model_path), "--device", "cpu"]) == 0
