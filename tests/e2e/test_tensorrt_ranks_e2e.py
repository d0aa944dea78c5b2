"""Attention data parallelism and LoRA adapters of ``--engine trtllm`` behind Dynamo's frontend, on
the stand-in for TensorRT-LLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_stack import MODEL, STAND_IN, Stack, Worker, http, running_stack, wait_for
from kv_router_checks import check_prefixes_stay
from lora_adapters import write_adapter

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

BLOCK = 32
RANKS = ("--tensor-parallel-size", "2", "--enable-attention-dp", "--kv-block-size", str(BLOCK))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Stack, Worker]]:
    with running_stack(tmp_path_factory.mktemp("ranks"), tiny_model) as stack:
        stack.start_frontend("--router-mode", "kv")
        yield stack, stack.start_worker("--engine", "trtllm", "--enable-kv-routing", "true", *RANKS, **STAND_IN)  # type: ignore[arg-type]


def test_the_router_finds_a_prefix_on_its_rank(ranks: tuple[Stack, Worker]) -> None:
    """A rank has no prefix of another, so what is cached says where a request ran."""
    stack, worker = ranks
    check_prefixes_stay(stack, 3 * BLOCK)
    for rank in ("0", "1"):
        wait_for(lambda rank=rank: worker.metric("dynamo_component_total_blocks", dp_rank=rank) > 0, "a rank's load")


def test_an_adapter_is_a_model_of_its_own(stack: Stack, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "mine", stack.model_path, seed=3)
    stack.start_frontend()
    stack.start_worker("--engine", "trtllm", "--lora-modules", f"mine={adapter}", **STAND_IN)  # type: ignore[arg-type]

    def models() -> set[str]:
        return {each["id"] for each in json.loads(http(f"{stack.url}/v1/models")[1])["data"]}

    wait_for(lambda: models() == {MODEL, "mine"}, "the adapter in the frontend")

    def answer(model: str) -> str | None:
        body = {"prompt": [9, 30, 41, 77], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        status, text = stack.post("completions", model=model, **body)
        return json.loads(text)["choices"][0]["text"] if status == 200 else None

    assert wait_for(lambda: answer("mine"), "an answer") != answer(MODEL)
