"""Prefill on one TensorRT-LLM, decode on another: the answer is the aggregated one's."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import collect, engine, stand_in

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.forcing import ForcedPrefix
from adapters.vocabulary import Vocabulary
from worker.engines import LEAST_LOGPROB, EngineRequest, KeepKv, ReadKv, TokenDelta
from worker.engines.trtllm import TrtllmEngine, disaggregated_params
from worker.engines.trtllm.deltas import Cursor
from worker.engines.trtllm.running_request import RunningRequest
from worker.engines.trtllm.settings import Role
from worker.errors import InvalidRequest, Overloaded, RequestFailed
from worker.sampling import SamplingParams


@dataclasses.dataclass(kw_only=True)
class Params:
    """As TensorRT-LLM's, with one field that cannot travel."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None


@dataclasses.dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None


IDS = st.integers(0, 2**31)


@given(
    tokens=st.lists(IDS, min_size=1, max_size=3),
    state=st.none() | st.binary(max_size=40),
    number=st.none() | st.integers(0, 2**63),
    logprob=st.none() | st.tuples(IDS, st.floats(-50, 0), st.integers(1, 9)),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
def test_what_is_handed_over_arrives(
    tokens: list[int], state: bytes | None, number: int | None, logprob: Any, seed: int | None
) -> None:
    positions = None if logprob is None else [{logprob[0]: Logprob(*logprob[1:])}]
    given_ = Params(
        request_type="context_only",
        first_gen_tokens=tokens,
        first_gen_log_probs=positions,
        opaque_state=state,
        disagg_request_id=number,
    )
    data = json.loads(json.dumps(disaggregated_params.encode(given_, seed=seed)))
    assert data["seed"] == seed
    assert disaggregated_params.decode(data, Params, Logprob) == dataclasses.replace(
        given_, request_type="generation_only"
    )


def test_what_cannot_travel_stops_the_hand_off() -> None:
    with pytest.raises(RequestFailed, match="first_gen_logits"):
        disaggregated_params.encode(Params(first_gen_logits=[1]))
    with pytest.raises(RequestFailed, match="log probabilities as list"):
        disaggregated_params.encode(Params(first_gen_log_probs=[[1]]))


@dataclasses.dataclass(kw_only=True)
class NewerParams(Params):
    """With what a version may add: ids, a state of its own, a private argument."""

    handoff_attempt_uuid: str | None = None
    endpoint: Any = None
    _locked: bool = dataclasses.field(default=False, init=False)
    _hint: Any = None

    def __post_init__(self) -> None:
        if self.handoff_attempt_uuid == "":
            raise ValueError("handoff_attempt_uuid must be\na UUID")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(uuid=st.none() | st.text(min_size=1), endpoint=JSON, hint=JSON | st.binary(), locked=st.booleans())
@settings(max_examples=examples(100))
def test_what_a_version_adds_travels_if_it_is_json(uuid: str | None, endpoint: Any, hint: Any, locked: bool) -> None:
    sent = NewerParams(first_gen_tokens=[1], handoff_attempt_uuid=uuid, endpoint=endpoint, _hint=hint)
    sent._locked = locked
    completed = disaggregated_params.complete(Output([1], sent), NewerParams(request_type="context_only"))
    data = json.loads(json.dumps(disaggregated_params.encode(completed), allow_nan=False))
    assert not [name for name in data["params"] if name.startswith("_")]
    found = disaggregated_params.decode(data, NewerParams, Logprob)
    assert (found.handoff_attempt_uuid, found.endpoint, found._locked, found._hint) == (uuid, endpoint, False, None)


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, [b"x"], {"a": Logprob(0.0)}, math.inf], ids=repr)
def test_new_params_that_json_cannot_hold_are_not_sent(value: Any) -> None:
    with pytest.raises(RequestFailed, match="cannot be sent"):
        disaggregated_params.encode(NewerParams(first_gen_tokens=[1], endpoint=value))


@pytest.mark.parametrize("name", ["_locked", "_hint", "unknown"])
def test_the_state_of_an_object_is_not_taken_from_a_hand_off(name: str) -> None:
    given_ = {**GOOD, "params": {**GOOD["params"], name: True}}
    with pytest.raises(InvalidRequest, match=f"the installed TensorRT-LLM has no '{name}'"):
        disaggregated_params.decode(given_, NewerParams, Logprob)


def test_what_a_version_checks_itself_is_a_refusal() -> None:
    given_ = {**GOOD, "params": {**GOOD["params"], "handoff_attempt_uuid": ""}}
    with pytest.raises(InvalidRequest, match=r"params: handoff_attempt_uuid must be a UUID"):
        disaggregated_params.decode(given_, NewerParams, Logprob)


def test_log_probabilities_of_a_hand_off_are_numbers() -> None:
    at = {5: Logprob(-0.5, 1), 7: Logprob(-math.inf, 2)}
    data = disaggregated_params.encode(Params(first_gen_tokens=[5], first_gen_log_probs=[at]))
    text = json.dumps(data, allow_nan=False)
    found = disaggregated_params.decode(json.loads(text), Params, Logprob)
    assert found.first_gen_log_probs == [{5: Logprob(-0.5, 1), 7: Logprob(LEAST_LOGPROB, 2)}]


GOOD = disaggregated_params.encode(Params(first_gen_tokens=[1], opaque_state=b"x"))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"engine": "embedded"},
        {"params": None},
        {"params": {"first_gen_tokens": []}},
        {"params": {**GOOD["params"], "first_gen_tokens": [True]}},
        {"params": {**GOOD["params"], "opaque_state": "no base64"}},
        {"params": {**GOOD["params"], "ctx_request_id": "1"}},
        {"params": {**GOOD["params"], "schedule_style": 0}},
        {"params": {**GOOD["params"], "first_gen_logits": [1]}},
        {"params": {**GOOD["params"], "first_gen_log_probs": [[{"token_id": 1}]]}},
    ],
    ids=str,
)
def test_a_malformed_hand_off_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="prefill_result"):
        disaggregated_params.decode({**GOOD, **change}, Params, Logprob)


def test_a_hand_off_of_another_kind_of_worker_is_refused() -> None:
    """TensorRT-LLM would take the KV of another checkpoint that has the same shape."""
    facts = disaggregated_params.HandOffFacts("1.2.0", "5f2a", "bfloat16", "auto")
    own = disaggregated_params.encode(Params(first_gen_tokens=[1]), facts=dataclasses.asdict(facts))
    facts.check(own)
    facts.check(GOOD)  # an earlier version tells nothing
    dataclasses.replace(facts, model="").check(own)
    for field in dataclasses.fields(facts):
        other = dataclasses.replace(facts, **{field.name: "another"})
        with pytest.raises(InvalidRequest, match=rf"facts\.{field.name}: the prefill worker has '.*', and this decode"):
            other.check(own)
    with pytest.raises(InvalidRequest, match="facts: must be a mapping"):
        facts.check({**own, "facts": 3})


async def test_a_decode_worker_takes_no_kv_of_another_model(model: Path) -> None:
    with stand_in():
        engines = [in_role(model, role) for role in ("prefill", "decode")]
        for number, each in enumerate(engines):
            known: Future[str] = Future()
            known.set_result(f"model {number}")
            each._digest = partial(lambda found: found, known)
        try:
            for each in engines:
                await each.start()
            first = await collect(engines[0], PROMPT, SamplingParams(max_tokens=3), kv=KeepKv())
            kv = ReadKv(json.loads(json.dumps(first.kv)))
            refused = r"facts\.model: the prefill worker has 'model 0', and this decode worker 'model 1'"
            with pytest.raises(InvalidRequest, match=refused):
                await collect(engines[1], PROMPT, SamplingParams(max_tokens=3), kv=kv)
            assert engines[1].num_unfinished() == 0
        finally:
            for each in engines:
                await each.stop()


def in_role(model: Path, role: Role, *argv: str) -> TrtllmEngine:
    config = engine(model, *argv).config
    transceiver = {"backend": "DEFAULT", "kv_transfer_timeout_ms": 30000}
    options = {**config.options, "cache_transceiver_config": transceiver}
    return TrtllmEngine(dataclasses.replace(config, role=role, options=options, kv_lease_s=0.001))


PROMPT = [9, 30, 41, 77, 12]
pytestmark = pytest.mark.timeout(300)  # several processes start, each loads torch
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 8},
    {"temperature": 0.9, "seed": 8, "logprobs": 2, "repetition_penalty": 1.4},
    {"repetition_penalty": 1.8, "min_tokens": 3, "stop_token_ids": list(range(0, 1000, 4))},
    {"max_tokens": 1},
    {"stop_token_ids": list(range(1000))},
    {"logprobs": 1},
]


# What the sources of different versions do where their documents say nothing.
VERSIONS: list[dict[str, Any]] = [
    {},
    {"context_only_ends": "not_finished", "checks_transferred": True},
    {"passes_on": False},
    {"lifecycle": True},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aggregated(model: Path) -> AsyncIterator[list[TokenDelta]]:
    """What one worker answers."""
    with stand_in():
        whole = in_role(model, "aggregated")
        try:
            await whole.start()
            yield [await collect(whole, PROMPT, SamplingParams(**{"max_tokens": 10, **asked})) for asked in ASKED]
            for kv in (KeepKv(), ReadKv(GOOD)):
                with pytest.raises(InvalidRequest, match="serves aggregated"):
                    await collect(whole, PROMPT, SamplingParams(), kv=kv)
        finally:
            await whole.stop()


@pytest.mark.parametrize("switches", VERSIONS, ids=str)
async def test_prefill_and_decode_make_the_aggregated_answer(
    model: Path, aggregated: list[TokenDelta], switches: dict[str, Any]
) -> None:
    with stand_in(**switches):
        engines = [in_role(model, role) for role in ("prefill", "decode")]
        prefill, decode = engines
        try:
            for each in engines:
                await each.start()
            for asked, expected in zip(ASKED, aggregated, strict=True):
                params = {"max_tokens": 10, **asked}
                first = await collect(prefill, PROMPT, SamplingParams(**params), kv=KeepKv())
                if first.finish_reason == "stop":
                    assert (expected.token_ids, first.token_ids, expected.finish_reason) == ([], [], "stop")
                    assert first.kv is None
                    continue
                assert first.token_ids == expected.token_ids[:1]
                assert first.finish_reason == "length"
                assert first.kv is not None
                data = json.loads(json.dumps(first.kv))
                rest = await collect(decode, PROMPT, SamplingParams(**params), kv=ReadKv(data))
                assert (rest.token_ids, rest.finish_reason, rest.stop_reason) == (
                    expected.token_ids,
                    expected.finish_reason,
                    expected.stop_reason,
                )
                assert ranks(rest) == ranks(expected)
            if switches.get("passes_on", True):
                stolen = await collect(decode, [1, 2], SamplingParams(), kv=ReadKv(data))
                assert stolen.error == "the KV of another prompt was handed over"
            for each, kv in ((prefill, ReadKv(data)), (decode, KeepKv())):
                with pytest.raises(InvalidRequest, match=f"serves {each.config.role}"):
                    await collect(each, PROMPT, SamplingParams(), kv=kv)
                own: Any = KeepKv() if each is prefill else ReadKv(data)
                with pytest.raises(InvalidRequest, match="n: must be 1 in disaggregated"):
                    await collect(each, PROMPT, SamplingParams(n=2, temperature=1.0), kv=own)
                probe = await collect(each, PROMPT, SamplingParams(max_tokens=2))  # by nobody but this worker
                assert (len(probe.token_ids), probe.finish_reason, probe.kv) == (2, "length", None)
            for asked, expected in zip(ASKED, aggregated, strict=True):  # nobody handed over: decode does both
                alone = await collect(decode, PROMPT, SamplingParams(**{"max_tokens": 10, **asked}))
                assert (alone.token_ids, alone.finish_reason) == (expected.token_ids, expected.finish_reason)
        finally:
            for each in engines:
                await each.stop()


async def test_decode_does_not_refuse_what_prefill_has_computed(model: Path) -> None:
    """The KV would stay with the prefill worker until the transfer's time-out."""
    with stand_in():
        prefill = in_role(model, "prefill")
        decode = in_role(model, "decode", "--max-num-seqs", "1", "--max-queue", "0")
        try:
            for each in (prefill, decode):
                await each.start()
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            handed = [await collect(prefill, PROMPT, params, f"p{number}", kv=KeepKv()) for number in range(3)]
            answers = await asyncio.gather(
                *(collect(decode, PROMPT, params, f"d{i}", kv=ReadKv(one.kv or {})) for i, one in enumerate(handed))
            )
            assert [(len(each.token_ids), each.finish_reason) for each in answers] == [(200, "length")] * 3
            whole = decode.generate(EngineRequest("whole", PROMPT, params))  # a prompt that it computes itself
            await anext(whole)
            with pytest.raises(Overloaded):
                await collect(decode, PROMPT, params)
            await whole.aclose()
        finally:
            for each in (prefill, decode):
                await each.stop()


async def test_a_lagged_decode_worker_continues_behind_the_first_token(model: Path) -> None:
    lagged = ("--history", "lagged", "--max-num-batched-tokens", "64")
    with stand_in():
        engines = [in_role(model, role, *lagged) for role in ("prefill", "decode")]
        try:
            for each in engines:
                await each.start()
            forced_params = SamplingParams(max_tokens=6)
            first = await collect(engines[0], PROMPT, forced_params, chain=forced([40, 41, 42]), kv=KeepKv())
            assert first.kv is not None
            rest = await collect(engines[1], PROMPT, forced_params, chain=forced([40, 41, 42]), kv=ReadKv(first.kv))
            assert (first.token_ids, rest.token_ids[:3], rest.error) == ([40], [40, 41, 42], None)
            assert rest.finish_reason == "length"
        finally:
            for each in engines:
                await each.stop()


def forced(token_ids: list[int]) -> ProcessorChain:
    context = Context(Vocabulary(1024), frozenset({1, 4}))
    made = ProcessorChain(ForcedPrefix.build(ForcedPrefix.Args(token_ids=token_ids), context), context)
    made.start(PROMPT)
    return made


def ranks(answer: TokenDelta) -> list[list[tuple[int, int]]]:
    return [[(entry.token_id, entry.rank) for entry in each] for each in answer.logprobs or ()]


@dataclasses.dataclass
class Output:
    """As TensorRT-LLM's ``CompletionOutput``, as far as a hand-off needs it."""

    token_ids: list[int]
    disaggregated_params: Any = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | None = None


GIVEN = Params(request_type="context_only", disagg_request_id=7)
OWN = Params(request_type="context_only", first_gen_tokens=[6], opaque_state=b"x", disagg_request_id=8)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (Output([5], OWN), OWN),
        (Output([5], dataclasses.replace(OWN, disagg_request_id=None)), dataclasses.replace(OWN, disagg_request_id=7)),
        (Output([5]), dataclasses.replace(GIVEN, first_gen_tokens=[5])),
        (Output([5], GIVEN), dataclasses.replace(GIVEN, first_gen_tokens=[5])),
        (
            Output([5], None, [{5: Logprob(-0.5, 1)}]),
            dataclasses.replace(GIVEN, first_gen_tokens=[5], first_gen_log_probs=[{5: Logprob(-0.5, 1)}]),
        ),
    ],
    ids=["of the output", "but the id", "of the input", "of the input, at the output", "with log probabilities"],
)
def test_what_the_output_lacks_is_taken_from_the_input(output: Output, expected: Params) -> None:
    assert disaggregated_params.complete(output, GIVEN) == expected


def test_a_hand_off_needs_a_token() -> None:
    with pytest.raises(RequestFailed, match="no token"):
        disaggregated_params.complete(Output([]), GIVEN)


async def test_an_abort_waits_until_the_kv_is_here() -> None:
    aborted: list[bool] = []

    class Result:
        finished = False

        def abort(self) -> None:
            aborted.append(True)

    request = RunningRequest("r", [Cursor(0, frozenset())], must_not_abort=True, result=Result())
    request.abort()
    assert aborted == []
    request.advance([Output([5])])
    assert aborted == [True]
    request.advance([Output([5], finish_reason="cancelled")])
    assert [delta.finish_reason async for delta in request] == [None, "cancelled"]
