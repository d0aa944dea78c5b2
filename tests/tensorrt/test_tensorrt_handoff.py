"""Prefill on one TensorRT-LLM, decode on another: the answer is the aggregated one's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import collect, engine, stand_in

from worker.engines import ReadKv, TokenDelta
from worker.engines.trtllm import TrtllmEngine, handoff
from worker.engines.trtllm.deltas import Cursor
from worker.engines.trtllm.flight import Flight
from worker.engines.trtllm.settings import Role
from worker.errors import InvalidRequest, RequestFailed
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
    data = json.loads(json.dumps(handoff.encode(given_, seed=seed)))
    assert data["seed"] == seed
    assert handoff.decode(data, Params, Logprob) == dataclasses.replace(given_, request_type="generation_only")


def test_what_cannot_travel_stops_the_hand_off() -> None:
    with pytest.raises(RequestFailed, match="first_gen_logits"):
        handoff.encode(Params(first_gen_logits=[1]))
    with pytest.raises(RequestFailed, match="log probabilities as list"):
        handoff.encode(Params(first_gen_log_probs=[[1]]))


GOOD = handoff.encode(Params(first_gen_tokens=[1], opaque_state=b"x"))


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
        handoff.decode({**GOOD, **change}, Params, Logprob)


def in_role(model: Path, role: Role) -> TrtllmEngine:
    config = engine(model).config
    options = {**config.options, "cache_transceiver_config": {"backend": "DEFAULT"}}
    return TrtllmEngine(dataclasses.replace(config, role=role, options=options, kv_hold_s=0.001))


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


async def test_prefill_and_decode_make_the_aggregated_answer(model: Path) -> None:
    with stand_in():
        engines = [in_role(model, role) for role in ("prefill", "decode", "aggregated")]
        prefill, decode, whole = engines
        try:
            for each in engines:
                await each.start()
            for asked in ASKED:
                params = {"max_tokens": 10, **asked}
                expected = await collect(whole, PROMPT, SamplingParams(**params))
                first = await collect(prefill, PROMPT, SamplingParams(**params))
                if first.finish_reason == "stop":
                    assert (expected.token_ids, first.token_ids, expected.finish_reason) == ([], [], "stop")
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
                assert [[(e.token_id, e.rank) for e in each] for each in rest.logprobs or ()] == [
                    [(e.token_id, e.rank) for e in each] for each in expected.logprobs or ()
                ]
            for asked in ASKED:  # nobody handed anything over: the decode worker's executor does both
                params = {"max_tokens": 10, **asked}
                expected = await collect(whole, PROMPT, SamplingParams(**params))
                alone = await collect(decode, PROMPT, SamplingParams(**params))
                assert (alone.token_ids, alone.finish_reason) == (expected.token_ids, expected.finish_reason)
            with pytest.raises(InvalidRequest, match="serves aggregated"):
                await collect(whole, PROMPT, SamplingParams(), kv=ReadKv(GOOD))
            stolen = await collect(decode, [1, 2], SamplingParams(), kv=ReadKv(data))
            assert stolen.error == "the KV of another prompt was handed over"
        finally:
            for each in engines:
                await each.stop()


def test_an_abort_waits_until_the_kv_is_here() -> None:
    aborted: list[bool] = []

    class Result:
        def abort(self) -> None:
            aborted.append(True)

    @dataclasses.dataclass
    class Output:
        token_ids: list[int]
        logprobs: Any = None
        finish_reason: str | None = None
        stop_reason: int | None = None

    flight = Flight("r", [Cursor(0, frozenset())], must_not_abort=True, result=Result())
    flight.abort()
    assert aborted == []
    flight.advance([Output([5])])
    assert aborted == [True]
    flight.advance([Output([5], finish_reason="cancelled")])
    deltas: list[TokenDelta] = [flight._queue.get_nowait(), flight._queue.get_nowait()]  # type: ignore[list-item]
    assert [delta.finish_reason for delta in deltas] == [None, "cancelled"]
