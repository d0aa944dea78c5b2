"""LoRA adapters in vLLM, behind Dynamo's frontend: each is a model of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_stack import MODEL, Stack, Worker, http, wait_for
from engine import default_model
from kv_router_checks import num_cached, prompt_of
from lora_adapters import merged, write_adapter
from transformers import AutoModelForCausalLM
from vllm_stack import vllm_workers

from adapters.client import processor, selection

pytestmark = pytest.mark.real_model

BLOCK = 32
NUM_TOKENS = 8
PROMPT = prompt_of(1, 40)


@dataclass
class Served:
    """A worker with two adapters, by name, behind a frontend."""

    stack: Stack
    worker: Worker
    adapters: dict[str, Path]

    def models(self) -> set[str]:
        return {each["id"] for each in json.loads(http(f"{self.stack.url}/v1/models")[1])["data"]}

    def ask(self, model: str, **body: Any) -> dict[str, Any]:
        asked = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        status, text = self.stack.post("completions", **asked | body)
        assert status == 200, text
        return dict(json.loads(text))

    def logprobs(self, model: str, **body: Any) -> list[float]:
        return list(self.ask(model, logprobs=1, **body)["choices"][0]["logprobs"]["token_logprobs"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("lora")
    adapters = {name: write_adapter(directory / name, default_model(), seed=n) for n, name in enumerate(("one", "two"))}
    modules = ",".join(f"{name}={path}" for name, path in adapters.items())
    options = ("--lora-modules", modules, "--kv-block-size", str(BLOCK))
    with vllm_workers(directory / "stack", 1, *options, frontend=["--router-mode", "kv"]) as (stack, (worker,)):
        found = Served(stack, worker, adapters)
        wait_for(lambda: found.models() == {MODEL, *adapters}, "the adapters in the frontend")
        for name in adapters:
            wait_for(
                lambda name=name: stack.post("completions", model=name, prompt="a", max_tokens=1)[0] == 200, "an answer"
            )
        yield found


def test_an_adapter_answers_as_its_merged_weights(served: Served, tmp_path: Path) -> None:
    base, one, two = (served.logprobs(name) for name in (MODEL, "one", "two"))
    assert len({tuple(found) for found in (base, one, two)}) == 3
    assert served.logprobs(MODEL) == pytest.approx(base, abs=1e-3)
    expected = greedy_logprobs(merged(tmp_path / "merged", default_model(), served.adapters["one"]))
    assert one == pytest.approx(expected, abs=2e-3)


def test_adapters_in_a_batch_change_no_other_answer(served: Served) -> None:
    """vLLM's CPU kernels give requests without an adapter what is in the last place for one."""
    names = (MODEL, "one", "two", MODEL)
    alone = [served.logprobs(name, max_tokens=32) for name in names]
    with ThreadPoolExecutor(len(names)) as threads:
        together = list(threads.map(lambda name: served.logprobs(name, max_tokens=32), names))
    for found, expected in zip(together, alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-3)


def greedy_logprobs(model: Path) -> list[float]:
    """Log probabilities of the most likely tokens behind the prompt, by transformers."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens, found = list(PROMPT), []
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            row = network(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(row.argmax()))
        found.append(float(row.max()))
    return found


def test_adapters_share_no_prefix(served: Served) -> None:
    prompt = prompt_of(2, 2 * BLOCK + 1)
    names = (MODEL, "one", "two")
    assert [num_cached(served.stack, prompt, model=name) for name in names] == [0, 0, 0]
    assert [num_cached(served.stack, prompt, model=name) for name in names] == [2 * BLOCK] * 3
    assert "block_hash mismatch" not in served.worker.log


def test_controls_and_receipts_of_an_adapter(served: Served) -> None:
    wanted = "logits_processors:" + selection(processor("choice", choices=["maybe"]), receipt=True)
    nvext = {"annotations": [wanted], "extra_fields": ["engine_data"]}
    answer = served.ask("two", nvext=nvext, ignore_eos=False)
    assert answer["choices"][0]["text"] == "maybe"
    model = answer["nvext"]["engine_data"]["logits_processors"]["model"]
    assert (model["name"], model["adapter"]["name"]) == (MODEL, "two")


def test_an_answer_of_an_adapter_is_made_again(served: Served, tmp_path: Path) -> None:
    """The last test: another vLLM needs room."""
    wanted = "logits_processors:" + selection(processor("repetition_penalty", penalty=1.2), receipt=True)
    nvext = {"annotations": [wanted], "extra_fields": ["engine_data"]}
    (tmp_path / "response.json").write_text(json.dumps(served.ask("two", nvext=nvext)))
    (tmp_path / "request.json").write_text(json.dumps({"prompt": PROMPT}))
    stack = served.stack
    command = [sys.executable, "-m", "worker", "replay", str(tmp_path / "response.json")]
    command += ["--prompt-file", str(tmp_path / "request.json"), "--model-path", str(stack.model_path)]
    command += ["--engine", "vllm", "--engine-args", '{"enforce_eager": true}']
    command += ["--context-length", "1024", "--kv-cache-memory", "1GiB"]

    def replayed(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *options], env=stack.environ, capture_output=True, text=True, check=False)

    assert "so give its directory too: --lora-modules two=DIRECTORY" in replayed().stderr
    said = replayed("--lora-modules", f"two={served.adapters['two']}")
    assert said.stdout.endswith(f"answer: {NUM_TOKENS} tokens, equal to those recorded\n"), said.stdout + said.stderr
