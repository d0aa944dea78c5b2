"""Combinations of the features of chats and completions, through the front door and a worker.

Whatever a request combines, its stream is its whole answer, each of its choices is the answer to
the request for it alone, what only reports changes nothing, and the answer is the same where it is
computed in small pieces, preempted and speculated. What each control asks for is looked for in the
tokens. A refusal names a field of the request, and is the same on each of these ways.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from combined_requests import CHAT, COMPLETIONS, ENDS, Fields, Row, body, features, rows
from effort import examples
from engine_doors import door
from openengine_workers import make_worker, running
from running_workers import taking_requests

from worker.build import embedded_config
from worker.engines import EngineInfo
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.engines.embedded.plan import Model, Output
from worker.engines.embedded.serving.engine import load_for_serving
from worker.engines.embedded.step import Stepper
from worker.frontdoor.openengine.prompts import Prompts
from worker.runtimes.openengine.runtime import OpenEngineWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = 100
AT_ONCE = 6
REPORTS = (
    *(
        "scores",
        "prompt scores",
        "ids",
        "mode",
        "names",
        "receipt",
        "drafts",
        "prediction",
        "salt",
        "usage",
        "deadline",
    ),
)
"""Features that change no token."""

CONTRADICTING = ("processors", "allowed", "bad words", "guide", "format", "tools", "least")
"""Features that may leave no token together."""

REASONS = (
    "cannot be given beside ",
    "is set, and the processor .* is named too",
    "needs (n: 1|one prompt)",
    "needs an end token|a request with an end token|has no end token",
    "the answer at most|the most tokens of the answer",
    "would end the answer there",
)
"""Parts of the refusals of what cannot be combined."""

CHANGING = {"logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty"}
"""Fields that change logits."""

MASKING = {
    *("guided_regex", "guided_choice", "guided_grammar", "guided_json", "structured_outputs", "response_format"),
    *("tools", "allowed_token_ids", "bad_words_token_ids", "min_tokens"),
}
"""Fields that mask tokens."""

DECODABLE = 0.9
"""Least share of ids that have a text; others are never sampled."""


class RestlessEngine(EmbeddedEngine):
    """Preempts every decoding request after every third step; every other time all KV is lost."""

    def __init__(self, config: EmbeddedConfig) -> None:
        super().__init__(config, load=self._loaded)

    def _loaded(self, config: EmbeddedConfig, model: Model | None) -> tuple[Stepper, EngineInfo]:
        stepper, info = load_for_serving(config, model)
        step, queues, number = stepper.step, stepper.scheduler.queues, 0

        def step_and_preempt(prompts_first: bool = False) -> list[Output]:
            nonlocal number
            outputs, number = step(prompts_first), number + 1
            for request in queues.decoding if number % 3 == 0 else ():
                queues.preempt(request)
            if number % 6 == 0:
                stepper.scheduler.cache.clear()
            return outputs

        stepper.step = step_and_preempt  # type: ignore[method-assign]
        return stepper, info


@dataclass(frozen=True)
class Doors:
    """Clients of front doors.

    Attributes:
        plain: Before a worker as it is.
        restless: Before one that computes in small pieces, drafts, and preempts.
        thinking: Before the first, whose thinking is told from its answers.
        prompts: Tokenizer of all.
    """

    plain: httpx.AsyncClient
    restless: httpx.AsyncClient
    thinking: httpx.AsyncClient
    prompts: Prompts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(tiny_model: Path) -> AsyncIterator[Doors]:
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(running(tiny_model))
        drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
        argv = ("--max-num-batched-tokens", "16", "--speculative-config", json.dumps(drafts))
        odd = make_worker(tiny_model, *argv, engine=lambda arguments: RestlessEngine(embedded_config(arguments)))
        restless = await stack.enter_async_context(taking_requests(odd))
        parser = ("--", "--dyn-reasoning-parser", "qwen3")
        ways: tuple[tuple[OpenEngineWorker, tuple[str, ...]], ...] = ((plain, ()), (restless, ()), (plain, parser))
        first, second, third = [
            await stack.enter_async_context(door(tiny_model, f"grpc://127.0.0.1:{each.port}", arguments=arguments))
            for each, arguments in ways
        ]
        yield Doors(first, second, third, Prompts.load(tiny_model, None))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_combined_features_of_requests(doors: Doors, path: str) -> None:
    limit = asyncio.Semaphore(AT_ONCE)
    problems: list[str] = []

    async def check(row: Row) -> None:
        async with limit:
            try:
                await check_row(doors, path, row)
            except AssertionError as error:
                problems.append(f"{json.dumps(body(path, row))}\n{error}")

    await asyncio.gather(*(check(row) for row in rows(path, examples(ROWS))))
    assert not problems, f"{len(problems)} requests\n\n" + "\n\n".join(problems[:5])


async def check_row(doors: Doors, path: str, row: Row) -> None:
    """Check the answers to the request of a row, without the fields for which it is refused."""
    while True:
        request = body(path, row)
        options = request.pop("stream_options", None)
        whole = await ask(doors.plain, path, request)
        other = await ask(doors.restless, path, request)
        stream = await folded(doors.plain, path, request, options)
        assert same_answers(whole, other), f"restless: {other}\nplain: {whole}"
        if "error" in stream and str(stream["error"]["param"]).startswith("stream_options"):
            row = {**row, "usage": 0}
            continue
        assert same_answers(whole, stream), f"streamed: {stream}\nwhole: {whole}"
        if "error" not in whole:
            break
        row = without(path, row, request, whole["error"])
    if path == CHAT:
        thoughts = [await ask(doors.thinking, path, request), await folded(doors.thinking, path, request, options)]
        assert same_answers(*thoughts), f"thinking: {thoughts[0]}\nstreamed: {thoughts[1]}"
    await check_choices(doors, path, request, whole)
    await check_reports(doors, path, row, whole)
    check_usage(whole)
    if not isinstance(request.get("prompt"), list) or isinstance(request["prompt"][0], int):
        await check_controls(doors, path, row, request, whole)


# Asking


async def ask(client: httpx.AsyncClient, path: str, request: Fields) -> Any:
    """The whole answer, or the error."""
    answer = await client.post(path, json={"model": "tiny", **request})
    made = answer.json()
    assert answer.status_code == (400 if "error" in made else 200), answer.text
    return made


async def folded(client: httpx.AsyncClient, path: str, request: Fields, options: Any) -> Any:
    """The whole answer that the events of a stream make, or the error."""
    made: dict[str, Any] = {"choices": {}}
    usages: list[Any] = []
    stream = {"stream": True} | ({} if options is None else {"stream_options": options})
    async with client.stream("POST", path, json={"model": "tiny", **request, **stream}) as answer:
        if answer.status_code != 200:
            return json.loads(await answer.aread())
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    events = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    for event in events:
        if "error" in event:
            return event
        usages += [event.pop("usage")] if event.get("usage") else []
        add(made, event)
    assert lines[-1] == "data: [DONE]"
    check_usages(usages, events, options or {})
    made["choices"] = [made["choices"][index] for index in sorted(made["choices"])]
    nvext = made.pop("nvext", {})
    if len(nvext) > 1 or (nvext and len(made["choices"]) > 1):
        made["nvext"] = {"choices": [nvext.get(index) for index in range(len(made["choices"]))]}
    elif nvext:
        (made["nvext"],) = nvext.values()
    if options is not None and options.get("include_usage"):
        made["usage"] = usages[-1]
    return made


def add(made: dict[str, Any], event: Any) -> None:
    """Add an event to an answer."""
    for name in ("prompt_token_ids", "prompt_logprobs"):
        if name in event:
            made[name] = event[name]
    index = event["choices"][0]["index"] if event["choices"] else 0
    if event.get("nvext"):
        so_far = made.setdefault("nvext", {}).setdefault(index, {})
        more = dict(event["nvext"])
        if "completion_token_ids" in more:
            more["completion_token_ids"] = so_far.get("completion_token_ids", []) + more["completion_token_ids"]
        if "engine_data" in more:
            more["engine_data"] = so_far.get("engine_data", {}) | more["engine_data"]
        so_far.update(more)
    for delta in event["choices"]:
        choice = made["choices"].setdefault(
            delta["index"], {"index": delta["index"], "text": "", "finish_reason": None}
        )
        said = delta.get("delta") or {}
        choice["text"] += delta.get("text") or said.get("content") or ""
        choice["finish_reason"] = delta.get("finish_reason") or choice["finish_reason"]
        choice["thoughts"] = choice.get("thoughts", "") + (said.get("reasoning_content") or "")
        for call in said.get("tool_calls") or ():
            calls = choice.setdefault("calls", {})
            known = calls.setdefault(call["index"], ["", ""])
            known[0] += call["function"].get("name") or ""
            known[1] += call["function"].get("arguments") or ""
        if "prompt_logprobs" in delta:
            choice["prompt_logprobs"] = delta["prompt_logprobs"]
        for name in ("token_ids", "prompt_token_ids"):
            if name in delta:
                choice[name] = choice.get(name, []) + delta[name]
        for name in ("logprobs", "train_logprobs"):
            for key, values in (delta.get(name) or {}).items():
                if values is not None:
                    lists = choice.setdefault(name, {})
                    lists[key] = lists.get(key, []) + values


def check_usages(usages: Sequence[Any], events: Sequence[Any], options: Fields) -> None:
    """Usage comes where it is asked for."""
    if not options.get("include_usage"):
        assert not usages, f"nobody asked for usage: {usages}"
    elif not options.get("continuous_usage_stats"):
        assert len(usages) == 1
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)


_FAILED = re.compile(r"logits processor .* at position \d+$")


def plain(answer: Any) -> Any:
    """What two answers to the same request have in common."""
    if "error" in answer:
        error = answer["error"]  # of several choices or prompts the first that fails is told
        return _FAILED.sub("logits processor", error["message"]), error["param"]
    choices = []
    for choice in answer["choices"]:
        message = choice.get("message")
        text = choice["text"] if message is None else message["content"] or ""
        calls = choice.get("calls")
        if calls is None:
            functions = [each["function"] for each in (message or {}).get("tool_calls") or ()]
            calls = dict(enumerate([each["name"], each["arguments"]] for each in functions))
        thoughts = (message or choice).get("reasoning_content" if message else "thoughts") or ""
        lists = {name: _given(choice.get(name)) for name in ("logprobs", "train_logprobs")}
        kept = {
            name: choice.get(name) for name in ("finish_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")
        }
        choices.append({"text": text, "thoughts": thoughts, "calls": calls, **kept, **lists})
    kept = {name: answer.get(name) for name in ("prompt_token_ids", "prompt_logprobs")}
    return choices, kept, _extension(answer.get("nvext"))


def _given(lists: Any) -> Any:
    return {key: values for key, values in (lists or {}).items() if values}


def _extension(nvext: Any) -> Any:
    """``nvext`` without what depends on how an answer was computed."""
    if not isinstance(nvext, dict):
        return nvext
    if "choices" in nvext:
        return [_extension(each) for each in nvext["choices"]]
    data = dict(nvext.get("engine_data") or {})
    receipt = data.pop("logits_processors", None)
    kept = ("seed", "processors", "sampling", "prompt_digest", "answer_digest", "generated_tokens")
    told = None if receipt is None else {name: receipt.get(name) for name in kept}
    return {**{name: each for name, each in nvext.items() if name != "engine_data"}, "data": data, "receipt": told}


def same_answers(one: Any, other: Any) -> bool:
    if plain(one) != plain(other):
        return False
    counts = [{k: v for k, v in (each.get("usage") or {}).items() if k.endswith("_tokens")} for each in (one, other)]
    return not (counts[0] and counts[1]) or counts[0] == counts[1]


# Refusals


def without(path: str, row: Row, request: Fields, error: Any) -> Row:
    """The row without the feature that a refusal names, which is one of the request's."""
    message, param = error["message"], error["param"]
    if param is None:
        assert message.startswith("logits processor"), f"names no field: {message}"
        names = [name for name in CONTRADICTING if row.get(name)]
        assert names, f"fails without a reason: {message}"
        return {**row, names[0]: 0}
    assert any(re.search(reason, message) for reason in REASONS), f"no reason that is known: {message}"
    root = re.split(r"[.\[]", param)[0]
    assert root in request, f"names a field that there is not: {param}"
    assert message.startswith(param), f"{param} does not begin {message}"
    known = features(path)
    blamed = [name for name, value in row.items() if value and root in known[name][value] and name != "prompt"]
    if root == "logits_processors":
        blamed.sort(key=lambda name: name != "processors")
    assert blamed, f"{param} is no feature that could be left out: {message}"
    return {**row, blamed[0]: 0}


# What answers have to do with each other


async def check_choices(doors: Doors, path: str, request: Fields, whole: Any) -> None:
    """The last choice is the answer to the request for it alone."""
    number = request.get("n", 1)
    if number == 1:
        return
    selection = {**request.get("logits_processors", {}), "choice": number - 1}
    alone = await ask(doors.plain, path, {**request, "n": 1, "logits_processors": selection})
    assert "error" not in alone, f"refused alone: {alone}"
    place = slice(number - 1, None, number)
    own = {**whole, "choices": whole["choices"][place]}
    assert plain(own)[0] == plain(alone)[0], f"choice {number - 1}: {own}\nalone: {alone}"


async def check_reports(doors: Doors, path: str, row: Row, whole: Any) -> None:
    """The same tokens without all that only reports."""
    request = body(path, {name: value for name, value in row.items() if name not in REPORTS})
    request.pop("stream_options", None)
    bare = await ask(doors.plain, path, request)
    assert "error" not in bare, f"refused without reports: {bare}"
    found = [[(each["text"], each["calls"], each["finish_reason"]) for each in plain(one)[0]] for one in (whole, bare)]
    assert found[0] == found[1], f"with reports: {whole}\nwithout: {bare}"
    assert same_answers({"usage": whole["usage"], "choices": []}, {"usage": bare["usage"], "choices": []})


def check_usage(whole: Any) -> None:
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def check_controls(doors: Doors, path: str, row: Row, request: Fields, whole: Any) -> None:
    """Look for what each control asks for in the tokens of the first choice."""
    rest = {name: value for name, value in row.items() if name not in ("n", "mode", "ids", "echo")}
    told = {**body(path, rest), "return_token_ids": True, "logprobs_mode": "train"}
    told.pop("stream_options", None)
    answer = await ask(doors.plain, path, told)
    if request.get("max_tokens") == 0:
        return
    (choice,) = answer["choices"]
    ids, lists = choice["token_ids"], choice["train_logprobs"]
    assert plain(answer)[0][0]["finish_reason"] == plain(whole)[0][0]["finish_reason"]
    prompt = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
    check_tokens(request, ids, choice["finish_reason"])
    shown = len(ids) - is_hidden(request, ids, choice["finish_reason"])
    assert answer["usage"]["completion_tokens"] == shown, f"{answer['usage']}: {ids}"
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    check_text(doors, path, request, ids[:shown], plain(answer)[0][0], choice["finish_reason"])
    check_masses(request, lists)
    scored = await ask(doors.plain, COMPLETIONS, {"prompt": prompt + ids, "max_tokens": 1, "prompt_logprobs": 0})
    entries = scored["choices"][0]["prompt_logprobs"][len(prompt) :]
    raw = [entry[str(token_id)]["logprob"] for entry, token_id in zip(entries, ids, strict=True)]
    assert raw == lists["raw"], "the answer's log probabilities are not those of a prompt"


def ends_of(request: Fields) -> set[int]:
    return set(request.get("stop_token_ids") or ()) | (set() if request.get("ignore_eos") else set(ENDS))


def is_hidden(request: Fields, ids: Sequence[int], reason: str) -> bool:
    """Whether the last token is an end token that is no part of the answer."""
    shown = set(request.get("stop_token_ids") or ()) - set(ENDS) if request.get("include_stop_str_in_output") else set()
    return reason in ("stop", "tool_calls") and bool(ids) and ids[-1] in ends_of(request) - shown


def check_tokens(request: Fields, ids: Sequence[int], reason: str) -> None:
    most = request["max_tokens"]
    least = min(request.get("min_tokens", 0), most)
    ends = ends_of(request)
    if reason == "length":
        assert len(ids) == most, f"ends for its length after {len(ids)} tokens"
        assert not ends & set(ids), f"goes on behind an end token: {ids}"
    else:
        assert len(ids) - (ids[-1] in ends) >= least, f"ends after {len(ids)} tokens: {ids}"
        assert len(ids) - is_hidden(request, ids, reason) <= most
        assert not ends & set(ids[:-1]), f"goes on behind an end token: {ids}"
    if "allowed_token_ids" in request:
        assert set(ids) <= set(request["allowed_token_ids"])
    for word in request.get("bad_words_token_ids") or ():
        places = range(len(ids) - len(word) + 1)
        assert not any(list(ids[place : place + len(word)]) == word for place in places), f"{word}: {ids}"


def check_text(doors: Doors, path: str, request: Fields, ids: Sequence[int], answer: Any, reason: str) -> None:
    tokenizer = doors.prompts.tokenizer
    hides = request.get("skip_special_tokens", True)
    decoded = tokenizer.decode(ids, skip_special_tokens=hides)
    text, stops = answer["text"], request.get("stop") or []
    if not stops and not request.get("tools"):
        assert text == decoded, f"{text!r} is not {decoded!r}"
    least = min(request.get("min_tokens", 0), request["max_tokens"])
    if stops and not request.get("tools"):
        head = tokenizer.decode(ids[: max(0, least - 1)], skip_special_tokens=hides)
        found = [text.find(stop, len(head)) + len(stop) for stop in stops if text.find(stop, len(head)) >= 0]
        if not request.get("include_stop_str_in_output"):
            assert not found, f"{text!r} has a stop string"
            assert decoded.startswith(text)
        else:
            assert text == decoded[: len(text)]
            assert all(end == len(text) for end in found), f"{text!r} goes on behind a stop string"
    if reason == "stop" and not any(stop in decoded for stop in stops):
        whole = ids[:-1] if ids and ids[-1] in ends_of(request) else ids
        check_guides(request, tokenizer.decode(whole, skip_special_tokens=hides))


def check_guides(request: Fields, text: str) -> None:
    """The whole text is one of the guide's."""
    pattern = request.get("guided_regex") or (request.get("structured_outputs") or {}).get("regex")
    if pattern is not None:
        assert re.fullmatch(pattern, text), f"{text!r} does not match {pattern}"
    if "guided_choice" in request:
        assert text in request["guided_choice"]
    if "guided_grammar" in request:
        assert re.fullmatch("E*D", text)
    form = request.get("response_format") or {}
    if "guided_json" in request or (form.get("type") == "json_schema" and not request.get("tools")):
        found = json.loads(text)
        schema = request.get("guided_json", (form.get("json_schema") or {}).get("schema"))
        assert schema is True or found["a"] in (1, 23, "DE")


def check_masses(request: Fields, lists: dict[str, list[float]]) -> None:
    """What is left of the distribution where nothing but masks and truncation changes it."""
    selection = request.get("logits_processors", {})
    if selection.get("processors") or selection.get("order") or not CHANGING.isdisjoint(request):
        return
    for tempered, processed, mass in zip(lists["tempered"], lists["processed"], lists["log_mass"], strict=True):
        assert mass <= 0
        assert processed >= tempered - 1e-9
        if request.get("temperature"):
            assert math.isclose(processed, tempered - mass, abs_tol=1e-6), (processed, tempered, mass)
        if (MASKING | {"top_k", "min_p"}).isdisjoint(request):
            assert mass >= math.log(request.get("top_p", 1.0) * DECODABLE)
