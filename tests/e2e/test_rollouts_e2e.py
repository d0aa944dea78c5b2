"""Token ids, and log probabilities for a trainer, through the front door and Dynamo's frontend."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_stack import DYNAMO, http, running_stack
from effort import examples
from front_door_process import Door
from tokenizers.decoders import DecodeStream

from adapters.vocabulary import Vocabulary
from worker.engines.embedded.offline import Engine
from worker.engines.embedded.offline.results import Completion
from worker.sampling import SamplingParams

IDS = [9, 30, 41, 77, 130, 41, 12]
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
TRAIN = ("raw", "tempered", "processed", "log_mass")
AT_ONCE = 8
IS_GRPC = os.environ.get("DLW_UPSTREAM") == "grpc"
"""Whether the front door asks workers behind OpenEngine, without Dynamo."""
IS_OLD = DYNAMO < (1, 6) and not IS_GRPC

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
    for name in () if IS_GRPC else ("temperature", "top_p"):  # the numbers of Dynamo's frontend are of 32 bits
        named |= {name: float(np.float32(named[name]))} if name in named else {}
    bias = fields.get("logit_bias")
    processors = [{"name": "logit_bias", "args": {"bias": bias}}] if bias else None
    params = SamplingParams(logprobs_mode="train", **named)
    (result,) = engine.generate([prompt], params, progress=False, processors=processors)
    return result.outputs[0]


def check(door: Door, engine: Engine, number: int) -> tuple[str, list[int], Answer]:
    """One answer, streamed and not; returns what the engine is compared with."""
    numbers = random.Random(number)
    fields = controls(numbers, 1000)
    prompt = [numbers.randrange(5, 1000) for _ in range(numbers.randint(0, 30))]
    prompt.append(30)  # the end of a character, so that the answer's text begins with its own
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


@cache
def token_bytes(engine: Engine) -> tuple[bytes, ...]:
    """Bytes of the engine's tokens."""
    return Vocabulary(engine.info.vocab_size, engine.tokenizer).token_bytes


def compare(engine: Engine, path: str, prompt: list[int], answer: Answer) -> None:
    """The answer is what the engine samples by itself, up to the end of the first stop string."""
    fields = answer["fields"]
    expected = offline(engine, prompt, fields)
    ids, reason = list(expected.token_ids), expected.finish_reason
    text = detokenized(engine, ids)
    if isinstance(expected.stop_reason, int):
        ids.append(expected.stop_reason)
        shown = detokenized(engine, ids) if fields.get("include_stop_str_in_output") else text
        text = text if answer["text"] == text and IS_OLD else shown  # 1.4.2 shows no stop token
    stops = fields.get("stop", [])
    for count in range(1, len(ids) + 1) if stops else ():
        part = b"".join(token_bytes(engine)[token_id] for token_id in ids[:count])
        places = [place for stop in stops if (place := part.find(stop.encode())) >= 0]
        if places:  # perhaps within a token whose last character is not whole
            ids, text, reason = ids[:count], part[: min(places)].decode(errors="replace"), "stop"
            break
    assert (answer["token_ids"], answer["finish_reason"]) == (ids, reason), fields
    if IS_OLD and stops and reason == "stop":  # 1.4.2 shows parts of a stop string that is not a token
        assert answer["text"].startswith(text.rstrip("\ufffd")), fields
        assert detokenized(engine, ids).startswith(answer["text"]), fields
    else:  # 1.6.1 shows the beginning of a character at the end
        assert answer["text"].rstrip("\ufffd") == text.rstrip("\ufffd"), fields
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
@pytest.mark.timeout(7200)
def test_they_agree_in_ten_thousand_answers(door: Door, engine: Engine) -> None:
    fuzz(door, engine, 10_000)


# -- the forms of vLLM's, Dynamo's and SGLang's clients


def entries(completion: Completion) -> list[Any]:
    return [position[0] for position in completion.logprobs or [] if isinstance(position, list)]


def test_a_chat_by_ids_is_the_chat_by_messages(door: Door) -> None:
    asked = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "return_token_ids": True}
    by_messages = ask(door, "chat/completions", messages=MESSAGES, **asked)
    by_ids = ask(door, "chat/completions", prompt=by_messages["prompt_token_ids"], **asked)
    assert by_ids["choices"] == by_messages["choices"]
    assert by_ids["prompt_token_ids"] == by_messages["prompt_token_ids"]
    assert by_ids["usage"]["completion_tokens"] == len(by_ids["choices"][0]["token_ids"])


def test_each_choice_has_its_ids(door: Door, engine: Engine) -> None:
    asked = {"prompt": IDS, "max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 3, "return_token_ids": True}
    choices = ask(door, "completions", **asked)["choices"]
    assert all(choice["prompt_token_ids"] == IDS for choice in choices)
    (result,) = engine.generate([IDS], SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3), progress=False)
    found = [choice["token_ids"] for choice in choices]
    assert [ids[:12] for ids in found] == [output.token_ids for output in result.outputs]
    chat = ask(door, "chat/completions", **asked)["choices"]
    assert [choice["token_ids"] for choice in chat] == found


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_extra_fields_of_dynamos_contract(door: Door, path: str) -> None:
    wanted = ["completion_token_ids", "prompt_token_ids", "prompt_logprobs"]
    asked = {"prompt": IDS, "max_tokens": 5, "prompt_logprobs": 1, "nvext": {"extra_fields": wanted}}
    answer = ask(door, path, **asked)
    found = answer["nvext"]
    assert found["prompt_token_ids"] == IDS
    assert len(found["completion_token_ids"]) == answer["usage"]["completion_tokens"] == 5
    assert [None, *map(str, IDS[1:])] == [
        one if one is None else next(key for key in one if key == str(token_id))
        for one, token_id in zip(found["prompt_logprobs"], IDS, strict=True)
    ]
    together: list[int] = []
    for event in events(door, f"/v1/{path}", **asked):
        together += (event.get("nvext") or {}).get("completion_token_ids", [])
    assert together == found["completion_token_ids"]


def test_scores_of_a_cached_prompt_are_the_same(door: Door) -> None:
    prompt = [9 + place * place % 900 for place in range(200)]
    asked = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 2, "cache_salt": "scores"}
    first, second = (ask(door, "completions", **asked)["choices"][0]["prompt_logprobs"] for _ in range(2))
    plain = ask(door, "completions", prompt=prompt, max_tokens=1, cache_salt="scores")
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert first == second
    status, text = http(f"{door.url}/generate", {"input_ids": prompt, **SCORED, "extra_key": "scores"})
    assert status == 200, text
    found = json.loads(text)["meta_info"]["input_token_logprobs"]
    expected = [one[str(token_id)]["logprob"] for one, token_id in zip(first[1:], prompt[1:], strict=True)]
    assert [entry[0] for entry in found] == [None, *expected]


SCORED = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}


def generate(door: Door, **fields: Any) -> Any:
    status, text = http(f"{door.url}/generate", fields)
    assert status == 200, text
    return json.loads(text)


def test_sglangs_clients(door: Door, engine: Engine) -> None:
    params = {"max_new_tokens": 10, "temperature": 0.5, "sampling_seed": 4}
    answer = generate(door, input_ids=IDS, sampling_params=params, return_logprob=True, rid="mine")
    wanted = SamplingParams(max_tokens=10, temperature=0.5, seed=4, logprobs_mode="train")
    (result,) = engine.generate([IDS], wanted, progress=False)
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert ids[: len(result.token_ids)] == result.token_ids
    found = [(logprob, token_id) for logprob, token_id, _ in meta["output_token_logprobs"]]
    assert found[: len(result.token_ids)] == [(one.tempered, one.token_id) for one in entries(result.outputs[0])]
    assert meta["id"] == "mine"
    assert meta["weight_version"] == "default"
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(IDS), len(ids))
    ended = {"type": "length", "length": 10} if result.outputs[0].finish_reason == "length" else None
    assert ended is None or meta["finish_reason"] == ended
    last = events(door, "/generate", input_ids=IDS, sampling_params=params, return_logprob=True)[-1]
    assert (last["text"], last["output_ids"]) == (answer["text"], ids)
    assert last["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]


def test_a_batch_of_sglangs(door: Door) -> None:
    params = [{"max_new_tokens": 4, "sampling_seed": 1, "n": 2}, {"max_new_tokens": 2, "sampling_seed": 2}]
    answers = generate(door, input_ids=[IDS, IDS[:3]], sampling_params=params, rid=["a", "b"])
    assert [len(one["output_ids"]) for one in answers] == [4, 4, 2]
    assert [one["meta_info"]["id"] for one in answers] == ["a", "a", "b"]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    last = {one["index"]: one for one in events(door, "/generate", input_ids=[IDS, IDS[:3]], sampling_params=params)}
    assert [last[index]["output_ids"] for index in range(3)] == [one["output_ids"] for one in answers]


@pytest.mark.parametrize(
    ("params", "matched"), [({"stop": ["st"]}, "st"), ({"stop_token_ids": [275]}, 275), ({"regex": "[0-9]{3}"}, 4)]
)
def test_what_ended_an_answer_of_sglangs(door: Door, params: Answer, matched: int | str) -> None:
    answer = generate(door, input_ids=IDS, sampling_params={"max_new_tokens": 30, "sampling_seed": 1, **params})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


def inference(door: Door, **fields: Any) -> Any:
    status, text = http(f"{door.url}/inference/v1/generate", fields)
    assert status == 200, text
    return json.loads(text)


def test_vllms_token_endpoint(door: Door, engine: Engine) -> None:
    params = {"max_tokens": 6, "seed": 1, "logprobs": 2, "prompt_logprobs": 0, "n": 2}
    answer = inference(door, token_ids=IDS, sampling_params=params, return_token_ids=True, request_id="r")
    wanted = SamplingParams(max_tokens=6, temperature=1.0, seed=1, logprobs=2, prompt_logprobs=0, n=2, ignore_eos=True)
    (result,) = engine.generate([IDS], wanted, progress=False)
    assert (answer["request_id"], answer["prompt_token_ids"]) == ("r", IDS)
    for choice, output in zip(answer["choices"], result.outputs, strict=True):
        assert choice["token_ids"] == output.token_ids[: len(choice["token_ids"])]
        for found, expected in zip(choice["logprobs"]["content"], output.logprobs or [], strict=False):
            assert isinstance(expected, list)
            assert (found["token_id"], found["logprob"], found["rank"]) == _plain(expected[0])
            others = [_plain(one) for one in expected[1:] if one.token_id != found["token_id"]]
            assert [tuple(one.values()) for one in found["top_logprobs"][1:]] == others
    scores = [next(iter(one.values()))["logprob"] for one in answer["prompt_logprobs"][1:]]
    assert scores == [one[0].logprob for one in result.prompt_logprobs or [] if isinstance(one, list)]
    del params["prompt_logprobs"]
    fields = {"token_ids": IDS, "sampling_params": params, "stream_options": {"include_usage": True}}
    found = events(door, "/inference/v1/generate", **fields)
    assert found[-1]["usage"]["completion_tokens"] == sum(len(one["token_ids"]) for one in answer["choices"])
    for index, whole_choice in enumerate(answer["choices"]):
        parts = [one for event in found for one in event["choices"] if one["index"] == index]
        assert [token_id for part in parts for token_id in part["token_ids"]] == whole_choice["token_ids"]
        content = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert content == whole_choice["logprobs"]["content"]


@pytest.mark.parametrize("params", [{"max_tokens": 0}, {"n": 2, "stop_token_ids": [17], "logit_bias": {"17": 100}}])
def test_usage_counts_the_ids_that_are_there(door: Door, params: dict[str, Any]) -> None:
    fields = {"token_ids": IDS, "sampling_params": {"seed": 3, **params}}
    status, text = http(f"{door.url}/inference/v1/generate", fields)
    assert status == 200, text
    answer = json.loads(text)
    streamed = events(door, "/inference/v1/generate", **fields, stream_options={"include_usage": True})
    for usage in (answer["usage"], streamed[-1]["usage"]):
        assert usage["completion_tokens"] == sum(len(one["token_ids"]) for one in answer["choices"])
        assert usage["total_tokens"] == len(IDS) + usage["completion_tokens"]


def _plain(entry: Any) -> tuple[int, float, int]:
    return entry.token_id, entry.logprob, entry.rank


# -- refusals


HOSTILE: list[Any] = [[True], [1.0], [], [[[1]]], [-1], [2**40], [None], {"a": 1}, 5]


@pytest.mark.parametrize("ids", HOSTILE, ids=repr)
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "prompt"),
        ("/v1/completions", "prompt"),
        ("/generate", "input_ids"),
        ("/inference/v1/generate", "token_ids"),
    ],
)
def test_what_are_no_ids_is_refused_by_name(door: Door, path: str, field: str, ids: Any) -> None:
    body = {"model": "tiny", field: ids, "return_token_ids": True, "sampling_params": {}}
    names = {"/generate": ("input_ids", "model", "sampling_params"), "/inference/v1/generate": tuple(body)}
    known = names.get(path, ("model", field, "return_token_ids"))
    status, text = http(door.url + path, {name: value for name, value in body.items() if name in known})
    error = json.loads(text)["error"]
    assert status == 400
    assert str(error["param"]).startswith(field)


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "prompt"), ("/generate", "input_ids"), ("/inference/v1/generate", "token_ids")],
)
@pytest.mark.parametrize("ids", [[10**6], [9] * 10**6], ids=["unknown", "a million"])
def test_ids_that_the_model_cannot_take(door: Door, path: str, field: str, ids: list[int]) -> None:
    body: Answer = {field: ids, "model": "tiny"}
    if path.endswith("v1/generate"):
        body["sampling_params"] = {}
    status, text = http(door.url + path, body)
    assert (status, json.loads(text)["error"]["param"]) == (400, field), text


def test_ids_and_messages_are_too_much(door: Door) -> None:
    status, text = door.post("chat/completions", prompt=IDS, messages=MESSAGES)
    assert (status, json.loads(text)["error"]["param"]) == (400, "prompt")
    status, text = door.post("chat/completions", prompt=IDS, nvext={"token_data": IDS})
    assert (status, json.loads(text)["error"]["param"]) == (400, "prompt")
