"""A sampling control is added in one place: here to a copy of the record, and everything knows it.

It is the worked example of CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from engine_doubles import ScriptedModel, request, run_alone
from rewritten_requests import rewritten

from adapters.catalog import ANNOTATION, Catalog, ModelPolicy, Selection, SelectionError, parse_selection
from adapters.contract import Context
from adapters.processors.truncation import TopA
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.chain_builder import ChainBuilder
from worker.engines.embedded.admission import SAMPLED
from worker.engines.trtllm.params import Served, native_request
from worker.errors import InvalidRequest
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.fields import CHAT, COMPLETIONS, client_fields
from worker.frontdoor.playground import PAGE, documents
from worker.replay.position import sampler
from worker.requests.fields import request_fields
from worker.requests.request import RequestLimits, RequestTable, parse_request
from worker.runtimes.nats.batch.openai import message_of
from worker.sampling import SamplingParams
from worker.sampling.control import Number, RunsAs, control

MODEL = ScriptedModel()
PROMPT = [5, 6, 7]
LIMITS = RequestLimits(256, MODEL.vocab_size, (1,))


@dataclass(slots=True, kw_only=True)
class Extended(SamplingParams):
    top_a: float | None = control(
        RunsAs(TopA, "a"),
        bounds=Number(0, 1),
        neutral=0,
        samples="if active",
        paths="sampling_options.top_a",
        summary="Tokens less likely than this times the square of the highest probability are not sampled.",
    )


TABLE = RequestTable(Extended)


def asked(**options: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_options": options}


def test_it_is_parsed_into_the_record() -> None:
    params = parse_request(asked(top_a=0.25, top_k=-1), LIMITS, TABLE).params
    assert isinstance(params, Extended)
    assert (params.top_a, params.top_k) == (0.25, 0)
    rows = {row.path: row for row in request_fields(Extended)}
    assert (rows["sampling_options.top_a"].fate, rows["sampling_options.top_a"].target) == ("honoured", "top_a")


def test_without_the_declaration_it_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling_options\.top_a: unknown field"):
        parse_request(asked(top_a=0.25), LIMITS)


SUMMARY = "Tokens less likely than this times the square of the highest probability are not sampled."
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    COMPLETIONS: {"prompt": "Hello"},
}


def at_the_front_door(path: str, **fields: Any) -> Any:
    """The request for Dynamo's frontend, which drops or refuses fields that it does not know."""
    body = json.dumps({"model": "m", **PROMPTS[path], **fields}).encode()
    (sent,) = rewritten(path, body, {}, Catalog.default(), record=Extended)
    return json.loads(sent)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_front_door_sends_it_as_its_processor(path: str) -> None:
    sent = at_the_front_door(path, top_a=0.25, min_p=0.1, logits_processors=[{"name": "min_tokens", "args": {"n": 3}}])
    assert sent.keys() - PROMPTS[path].keys() == {"model", "min_p", "nvext"}
    (annotation,) = sent["nvext"]["annotations"]
    found = parse_selection(annotation.removeprefix(ANNOTATION)).processors
    assert [(one.name, dict(one.args)) for one in found] == [("min_tokens", {"n": 3}), ("top_a", {"a": 0.25})]
    for nothing in (0.0, None):
        assert at_the_front_door(path, top_a=nothing) == {"model": "m", **PROMPTS[path]}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("value", [-0.1, 1.1, "x"])
def test_the_front_door_refuses_it_by_name(path: str, value: Any) -> None:
    with pytest.raises(FieldRefused, match=r"^top_a: must be a") as refused:
        at_the_front_door(path, top_a=value)
    assert refused.value.param == "top_a"
    twice = [{"name": "top_a", "args": {"a": 0.5}}]
    with pytest.raises(FieldRefused, match=r"^top_a: is set, and the processor top_a is named too"):
        at_the_front_door(path, top_a=0.25, logits_processors=twice)


def test_a_batch_may_have_it() -> None:
    message = message_of(COMPLETIONS, {"model": "m", "prompt": PROMPT, "top_a": 0.25}, "0" * 64, Extended)
    params = parse_request(message, LIMITS, TABLE).params
    assert isinstance(params, Extended)
    assert params.top_a == 0.25
    with pytest.raises(InvalidRequest, match=r"^body\.top_a: is not a field"):
        message_of(COMPLETIONS, {"model": "m", "prompt": PROMPT, "top_a": 0.25}, "0" * 64)


def test_the_playground_offers_it() -> None:
    script = documents(Extended)[f"{PAGE}/sampling.js"].body.decode()
    schema = json.loads(script.removeprefix("export const SAMPLING = ").removesuffix(";\n"))
    assert schema["properties"]["top_a"] == {"type": "number", "minimum": 0, "maximum": 1, "description": SUMMARY}


def test_the_replay_shows_it() -> None:
    assert sampler(Extended(top_a=0.5, temperature=0.7)) == "temperature 0.7, top_a 0.5"


def test_every_table_says_the_same_of_it() -> None:
    worker = {row.path: row.why for row in request_fields(Extended)}
    clients = {row.name: row.why for row in client_fields(Extended)}
    assert worker["sampling_options.top_a"] == clients["top_a"] == SUMMARY
    assert worker["sampling_options.min_p"] == clients["min_p"]


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, "x"])
def test_out_of_its_range_it_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling_options\.top_a: must be a"):
        parse_request(asked(top_a=value), LIMITS, TABLE)
    with pytest.raises(ValueError, match=r"^top_a must be a"):
        Extended(top_a=value)


def test_it_says_whether_the_request_is_greedy() -> None:
    assert not Extended(top_a=0.5).is_greedy
    assert Extended(top_a=0.5, temperature=0).is_greedy
    assert Extended(top_a=0.0).is_greedy


def test_the_operators_policy_holds_for_it() -> None:
    policy = ModelPolicy(forbidden=frozenset({"top_a"}))
    chains = ChainBuilder(Catalog.default(), Context(Vocabulary(MODEL.vocab_size)), policy)
    with pytest.raises(SelectionError, match="asks for the logits processor top_a, which is not allowed") as refused:
        chains.select(Selection(), Extended(top_a=0.5), served=True)
    assert refused.value.path == "sampling_options.top_a"
    assert chains.select(Selection(), Extended(top_a=0.0), served=True).processors == ()


def test_a_new_control_runs_in_the_chain_with_the_samplers_own() -> None:
    admitted = request(MODEL, "one", PROMPT, Extended(top_a=0.5, temperature=0.7, min_p=0.1, top_p=0.9))
    assert admitted.chain is not None
    assert [member.name for member in admitted.chain.members] == ["temperature", "min_p", "top_p", "top_a"]
    assert (admitted.params.temperature, admitted.params.min_p, admitted.params.top_p) == (1.0, None, None)
    assert not admitted.params.is_greedy
    plain = request(MODEL, "one", PROMPT, Extended(temperature=0.7, min_p=0.1, top_p=0.9))
    assert plain.chain is None
    assert "top_a" not in SAMPLED


def least_share(tokens: Sequence[int]) -> float:
    """The smallest p(token) / max(p)² of an answer."""
    shares = []
    for place, token in enumerate(tokens):
        probabilities = MODEL.row([*PROMPT, *tokens[:place]]).softmax(-1)
        shares.append(float(probabilities[token] / probabilities.max() ** 2))
    return min(shares)


def test_the_embedded_engine_samples_by_it() -> None:
    def answers(**changes: Any) -> list[float]:
        params = [Extended(max_tokens=12, ignore_eos=True, temperature=1.0, seed=seed, **changes) for seed in range(8)]
        return [least_share(run_alone(MODEL, PROMPT, one).token_ids) for one in params]

    assert min(answers()) < 0.5
    assert min(answers(top_a=0.5)) >= 0.5 * (1 - 1e-5)


def test_tensorrt_llm_gets_a_processor_if_it_lacks_the_control() -> None:
    params = Extended(top_a=0.5, top_k=5)
    made = native_request(
        EngineRequest("", PROMPT, params), 0, Served(frozenset(), frozenset({"min_p"}), MODEL.vocab_size, (1,))
    )
    assert made.chain is not None
    assert [member.name for member in made.chain.members] == ["top_k", "top_a"]
    assert (made.fields["temperature"], made.fields["top_k"]) == (1.0, None)
    native = native_request(
        EngineRequest("", PROMPT, params), 0, Served(frozenset(), frozenset({"top_a"}), MODEL.vocab_size, (1,))
    )
    assert native.chain is None
    assert (native.fields["top_a"], native.fields["top_k"]) == (0.5, 5)
