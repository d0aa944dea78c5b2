"""``/engine/pause`` with ``abort``: a trainer gets the tokens so far, and goes on behind them."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import Stack, Worker, http, running_stack, wait_for
from front_door_process import Door
from ports import free_port

KEY = "a trainer's key"
PROMPT = [9, 30, 41, 77, 130, 41, 12]
COUNT = 700
"""Tokens of an answer, some of which are sampled between two pauses."""

Answer = dict[str, Any]


@dataclass
class Part:
    """What a trainer keeps of one answer: ids, the log probability of each, and why it ended."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Served:
    """A worker with ``--engine-port`` behind a front door."""

    door: Door
    worker: Worker
    engine_url: str

    def tell(self, route: str, **body: Any) -> Answer:
        """The answer of a route of the worker."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.engine_url}/engine/{route}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: Answer = json.loads(answer.read())
            return found

    def ask(self, path: str, fields: Answer, *, streams: bool) -> list[Answer]:
        """The events of an answer, or the one answer."""
        status, text = http(self.door.url + path, {"model": "tiny", "stream": streams, **fields}, 60)
        assert status == 200, text
        if not streams:
            return [json.loads(text)]
        assert text.rstrip().endswith("data: [DONE]")
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    with running_stack(tmp_path_factory.mktemp("served"), tiny_model) as stack:
        yield started(stack, tiny_model)


def started(stack: Stack, model: Path) -> Served:
    keys, port = stack.directory / "keys.txt", free_port()
    keys.write_text(KEY)
    stack.start_frontend()
    exact = ("--device", "cpu", "--dtype", "float32", "--numerics", "exact")
    worker = stack.start_worker(*exact, "--engine-port", str(port), "--engine-key-file", str(keys))
    return Served(Door(stack, "--model-path", str(model)), worker, f"http://127.0.0.1:{port}")


Ask = Callable[[Served, list[int], int, int, bool], Part]


def openai_form(path: str) -> Ask:
    def ask(served: Served, prompt: list[int], count: int, seed: int, streams: bool) -> Part:
        fields = {"prompt": prompt, "max_tokens": count, "seed": seed, "temperature": 1.0, "ignore_eos": True}
        part = Part()
        for event in served.ask(path, {**fields, "logprobs_mode": "train"}, streams=streams):
            for choice in event["choices"]:
                part.token_ids += choice.get("token_ids", [])
                part.logprobs += choice.get("train_logprobs", {}).get("raw", [])
                part.finish_reason = choice.get("finish_reason") or part.finish_reason
        return part

    return ask


def sglang(served: Served, prompt: list[int], count: int, seed: int, streams: bool) -> Part:
    params = {"max_new_tokens": count, "sampling_seed": seed, "temperature": 1.0, "ignore_eos": True}
    fields = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    answer = served.ask("/generate", fields, streams=streams)[-1]
    meta = answer["meta_info"]
    assert (meta["completion_tokens"], meta["prompt_tokens"]) == (len(answer["output_ids"]), len(prompt))
    if meta["finish_reason"]["type"] == "abort":
        assert "its engine's weights change" in meta["finish_reason"]["message"]
    ids = [token_id for _, token_id, _ in meta["output_token_logprobs"]]
    assert ids == answer["output_ids"]
    return Part(ids, [logprob for logprob, _, _ in meta["output_token_logprobs"]], meta["finish_reason"]["type"])


def vllm(served: Served, prompt: list[int], count: int, seed: int, streams: bool) -> Part:
    params = {"max_tokens": count, "seed": seed, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    part = Part()
    fields = {"token_ids": prompt, "sampling_params": params}
    for event in served.ask("/inference/v1/generate", fields, streams=streams):
        for choice in event["choices"]:
            part.token_ids += choice["token_ids"]
            part.logprobs += [one["logprob"] for one in choice["logprobs"]["content"]]
            part.finish_reason = choice["finish_reason"] or part.finish_reason
    return part


FORMS: dict[str, Ask] = {
    "completions": openai_form("/v1/completions"),
    "chat": openai_form("/v1/chat/completions"),
    "sglang": sglang,
    "vllm": vllm,
}


def cut_off(served: Served, ask: Callable[[], Any], pause_s: float = 0.0) -> Any:
    """The answer to `ask`, which a pause meets under way, this time behind its beginning."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        wait_for(lambda: asked.done() or served.worker.metric("dlw_running_requests") > 0, "an answer under way")
        time.sleep(pause_s)
        assert served.tell("pause", mode="abort")["state"] == "paused"
        served.tell("resume")
        return asked.result()


def put_together(served: Served, ask: Ask, seed: int, *, streams: bool) -> tuple[Part, int]:
    """The whole of an answer that pauses have cut in parts, as SkyRL and slime put it together; and
    the number of parts that were cut off behind their first token.
    """
    numbers, whole, num_cut = random.Random(seed), Part(), 0
    for _ in range(3):
        ids = whole.token_ids
        rest = partial(ask, served, PROMPT + ids, COUNT - len(ids), seed, streams)
        part: Part = cut_off(served, rest, numbers.uniform(0.0, 0.05))
        whole = Part(ids + part.token_ids, whole.logprobs + part.logprobs, part.finish_reason)
        if part.finish_reason != "abort":
            return whole, num_cut
        num_cut += bool(part.token_ids)
    last = ask(served, PROMPT + whole.token_ids, COUNT - len(whole.token_ids), seed, streams)
    return Part(whole.token_ids + last.token_ids, whole.logprobs + last.logprobs, last.finish_reason), num_cut


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("form", FORMS)
def test_an_aborted_answer_goes_on_with_the_same_tokens(served: Served, form: str, streams: bool) -> None:
    """Bit by bit, as do log probabilities: prompt and tokens so far are sent as a prompt."""
    ask, num_cut = FORMS[form], 0
    for seed in range(1, 4):
        expected = ask(served, PROMPT, COUNT, seed, streams)
        assert (len(expected.token_ids), expected.finish_reason) == (COUNT, "length")
        whole, cut = put_together(served, ask, seed, streams=streams)
        assert whole == expected
        num_cut += cut
    assert num_cut > 0, "every answer was faster than the pause"


@pytest.mark.parametrize("form", FORMS)
def test_one_that_waits_ends_without_tokens(served: Served, form: str) -> None:
    """As those in flight do; the front door says so in the form of each endpoint."""
    served.tell("pause", mode="keep")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(FORMS[form], served, PROMPT, 5, 1, False)
        # until the engine has it, nothing is aborted
        wait_for(lambda: served.tell("pause", mode="abort") and asked.done(), "an answer without tokens", 30)
        part = asked.result()
        served.tell("resume")
    assert part == Part([], [], "abort")


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("path", "scored"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/completions", {}),
        ("/v1/completions", {"echo": True, "logprobs": 1}),
        ("/v1/completions", {"max_tokens": 0}),
    ],
)
def test_one_that_waits_has_no_scores(served: Served, path: str, scored: Answer, streams: bool) -> None:
    served.tell("pause", mode="keep")
    fields = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True, "prompt_logprobs": 0, **scored}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.ask, path, fields, streams=streams)
        wait_for(lambda: served.tell("pause", mode="abort") and asked.done(), "an answer without tokens", 30)
        served.tell("resume")
        choices = [choice for event in asked.result() for choice in event["choices"]]
    assert choices[-1]["finish_reason"] == "abort"
    assert not any(choice["token_ids"] for choice in choices if "token_ids" in choice)


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
def test_without_token_ids_it_is_an_error(served: Served, streams: bool) -> None:
    """Its client could not go on: text says neither which tokens there are nor that more follow."""
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": streams}
    ask = partial(http, f"{served.door.url}/v1/completions", fields, 60.0)
    status, text = cut_off(served, ask)
    while '"finish_reason":"length"' in text:  # it was whole before the pause
        status, text = cut_off(served, ask)
    assert status >= 500 or '"error"' in text, text[-500:]
