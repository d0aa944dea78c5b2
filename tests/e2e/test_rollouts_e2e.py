"""Token ids, and log probabilities for a trainer, through the front door and Dynamo's frontend."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_stack import http, running_stack
from effort import examples
from front_door_process import Door
from tokenizers.decoders import DecodeStream

from worker.engines.embedded.offline import Engine
from worker.engines.embedded.offline.results import Completion
from worker.sampling import SamplingParams

IDS = [9, 30, 41, 77, 130, 41, 12]
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
TRAIN = ("raw", "tempered", "processed", "log_mass")
AT_ONCE = 8

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Door]:
    with running_stack(tmp_path_factory.mktemp("served"), tiny_model) as stack:
        stack.start_frontend()
        stack.start_worker("--device", "cpu", "--dtype", "float32")
        yield Door(stack, "--model-path", str(tiny_model))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine(tiny_model, device="cpu", dtype="float32", numerics="exact")


def ask(door: Door, path: str, **fields: Any) -> Answer:
    status, text = door.post(path, **fields)
    assert status == 200, text
    answer: Answer = json.loads(text)
    return answer


def events(door: Door, url: str, **fields: Any) -> list[Answer]:
    status, text = http(door.url + url, {"model": "tiny", "stream": True, **fields})
    assert status == 200, text
    assert text.rstrip().endswith("data: [DONE]")
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def streamed(door: Door, path: str, **fields: Any) -> Answer:
    """The choice of a stream: text, ids and log probabilities of its chunks together."""
    found: Answer = {"text": "", "token_ids": [], "train": {key: [] for key in TRAIN}, "prompt_token_ids": []}
    for event in events(door, f"/v1/{path}", **fields):
        for choice in event["choices"]:
            found["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found["token_ids"] += choice.get("token_ids", [])
            for key in TRAIN:
                found["train"][key] += choice.get("train_logprobs", {}).get(key, [])
            found["prompt_token_ids"] += choice.get("prompt_token_ids", event.get("prompt_token_ids", []))
            found["finish_reason"] = choice.get("finish_reason") or found.get("finish_reason")
    return found


def whole(door: Door, path: str, **fields: Any) -> Answer:
    """The choice of an answer that is not streamed, in the same form."""
    answer = ask(door, path, **fields)
    (choice,) = answer["choices"]
    return {
        "text": choice["text"] if "text" in choice else choice["message"]["content"] or "",
        "token_ids": choice["token_ids"],
        "train": choice["train_logprobs"],
        "prompt_token_ids": choice.get("prompt_token_ids", answer.get("prompt_token_ids")),
        "finish_reason": choice["finish_reason"],
    }


# -- a fuzz of answers: ids, text and log probabilities of each


def controls(numbers: random.Random, vocab_size: int) -> Answer:
    """Fields of a request that ends in any of the ways."""
    fields: Answer = {
        "max_tokens": numbers.randint(1, 40),
        "temperature": numbers.choice([0.0, 0.7, 1.0, 1.6]),
        "seed": numbers.randrange(2**53),
    }
    if numbers.random() < 0.4:
        fields["top_p"] = numbers.choice([0.5, 0.95])
    if numbers.random() < 0.3:
        fields["top_k"] = numbers.choice([5, 40])
    end = numbers.choice(["string", "ids", "ignore", "eos", "none"])
    if end == "string":
        fields["stop"] = numbers.sample(["e", "an", "th", " ", "st", "o ", "\n", "\u00e9"], numbers.randint(1, 4))
    elif end == "ids":
        fields["stop_token_ids"] = numbers.sample(range(100, vocab_size - 100), 4)
        fields["include_stop_str_in_output"] = numbers.random() < 0.5
    elif end == "ignore":
        fields["ignore_eos"] = True
    elif end == "eos":
        fields["logit_bias"] = {"4": numbers.choice([4, 7])}  # the end token comes soon
    return fields


_OTHERWISE = ("logit_bias", "include_stop_str_in_output", "stop")


def offline(engine: Engine, prompt: list[int], fields: Answer) -> Completion:
    """The answer that the engine itself gives, without an end at stop strings."""
    named = {name: value for name, value in fields.items() if name not in _OTHERWISE}
    for name in ("temperature", "top_p"):  # the frontend's numbers are of 32 bits
        named |= {name: float(np.float32(named[name]))} if name in named else {}
    bias = fields.get("logit_bias")
    processors = [{"name": "logit_bias", "args": {"bias": bias}}] if bias else None
    params = SamplingParams(logprobs_mode="train", end_id=4, **named)
    (result,) = engine.generate([prompt], params, progress=False, processors=processors)
    return result.outputs[0]


def check(door: Door, engine: Engine, number: int) -> tuple[str, list[int], Answer]:
    """One answer, streamed and not; returns what the engine is compared with."""
    numbers = random.Random(number)
    fields = controls(numbers, 1000)
    prompt = [numbers.randrange(5, 1000) for _ in range(numbers.randint(1, 30))]
    path = numbers.choice(["completions", "chat/completions"])
    asked = {**fields, "prompt": prompt, "return_token_ids": True, "logprobs_mode": "train"}
    answer = whole(door, path, **asked)
    assert streamed(door, path, **asked) == answer, asked
    assert answer["prompt_token_ids"] == prompt
    assert all(len(answer["train"][key]) == len(answer["token_ids"]) for key in TRAIN)
    return path, prompt, {**answer, "fields": fields}


def detokenized(engine: Engine, ids: list[int]) -> str:
    """The text of ids as a stream gives it: without the beginning of a character at its end."""
    stream = DecodeStream(skip_special_tokens=True)
    return "".join(stream.step(engine.tokenizer.backend_tokenizer, one) or "" for one in ids)


def compare(engine: Engine, path: str, prompt: list[int], answer: Answer) -> None:
    """The answer is what the engine samples by itself, up to the end of the first stop string."""
    fields = answer["fields"]
    expected = offline(engine, prompt, fields)
    ids, reason = list(expected.token_ids), expected.finish_reason
    text = detokenized(engine, ids)
    if isinstance(expected.stop_reason, int):
        ids.append(expected.stop_reason)
        text = detokenized(engine, ids) if fields.get("include_stop_str_in_output") else text
    stops = fields.get("stop", [])
    for count in range(1, len(ids) + 1) if stops else ():
        part = detokenized(engine, ids[:count])
        places = [part.find(stop) for stop in stops if stop in part]
        if places:
            ids, text, reason = ids[:count], part[: min(places)], "stop"
            break
    assert (answer["token_ids"], answer["finish_reason"]) == (ids, reason), fields
    assert answer["text"] == text, fields
    entries = [position[0] for position in expected.logprobs or [] if isinstance(position, list)]
    for place, entry in enumerate(entries[: len(ids)]):
        found = [answer["train"][key][place] for key in TRAIN]
        assert found == [entry.logprob, entry.tempered, entry.processed, entry.log_mass], fields


def fuzz(door: Door, engine: Engine, count: int) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for path, prompt, answer in pool.map(lambda number: check(door, engine, number), range(count)):
            compare(engine, path, prompt, answer)


def test_ids_and_text_and_log_probabilities_agree(door: Door, engine: Engine) -> None:
    fuzz(door, engine, examples(100))


@pytest.mark.campaign
def test_they_agree_in_ten_thousand_answers(door: Door, engine: Engine) -> None:
    fuzz(door, engine, 10_000)
