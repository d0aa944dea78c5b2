"""Which part of a request a worker does, and how many prompts a decode worker computes for want
of a hand-off.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from adapters.catalog import Requested, Selection
from worker.disaggregation.hand_offs import HandOffs, TransferMetrics
from worker.disaggregation.seal import CLOCK_SKEW_S, Seal
from worker.engines import KeepKv, ReadKv, TokenDelta
from worker.errors import ConfigurationError, InvalidRequest, Overloaded
from worker.lifecycle.drain import Flight
from worker.requests.request import GenerationRequest
from worker.sampling import SamplingParams

POOL = "a secret of this pool, and of no other"
PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=5)
KV = {"opaque": "what the engine of the prefill worker said"}
CHOSEN = Selection((Requested("min_tokens", {"n": 3}),))


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def hand_offs(role: str, secret: str = POOL, most: int = 2, clock: Clock | None = None) -> HandOffs:
    return HandOffs(role, Seal(secret, clock or Clock()), hold_s=30.0, max_local_prefills=most)


def request(given: Any = None, prompt: list[int] = PROMPT, **fields: Any) -> GenerationRequest:
    result = None if given is None else {"disaggregated_params": json.loads(json.dumps(given))}
    return GenerationRequest(prompt_token_ids=prompt, params=PARAMS, prefill_result=result, **fields)


def handed_over(secret: str = POOL, clock: Clock | None = None) -> dict[str, Any]:
    delta = TokenDelta(finish_reason="length", num_cached_tokens=2, kv=dict(KV))
    return hand_offs("prefill", secret, clock=clock).hand_over(PROMPT, CHOSEN, delta)


def test_decode_reads_where_prefill_says() -> None:
    part = hand_offs("decode").part_of(request(handed_over()), CHOSEN)
    assert part.kv == ReadKv(KV)
    assert part.num_cached_tokens == 2
    assert part.local_reason is None


def test_decode_connects_to_nobody_but_its_own_pool() -> None:
    decode = hand_offs("decode")
    with pytest.raises(InvalidRequest, match="is not of this pool"):
        decode.part_of(request(handed_over("a secret of some other pool, far away")), CHOSEN)
    unsigned = json.loads(handed_over()["body"])
    with pytest.raises(InvalidRequest, match=r"disaggregated_params: must be of format dynamo-logits-worker/sealed"):
        decode.part_of(request(unsigned), CHOSEN)


@pytest.mark.parametrize(
    ("prompt", "selection", "whose"), [([5, 6, 8], CHOSEN, "another prompt"), (PROMPT, Selection(), "other processors")]
)
def test_a_genuine_hand_off_is_worth_nothing_with_another_request(
    prompt: list[int], selection: Selection, whose: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"was made for {whose}"):
        hand_offs("decode").part_of(request(handed_over(), prompt), selection)


def test_what_came_too_late_is_computed_here() -> None:
    clock = Clock()
    given = handed_over(clock=clock)
    decode = hand_offs("decode", clock=clock)
    clock.now += 31 + CLOCK_SKEW_S
    part = decode.part_of(request(given), CHOSEN)
    assert (part.kv, part.num_cached_tokens, part.local_reason) == (None, 0, "late")
    with pytest.raises(InvalidRequest, match="was made for another prompt"):
        decode.part_of(request(given, [1]), CHOSEN)


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
def test_others_take_no_hand_off(role: str) -> None:
    with pytest.raises(InvalidRequest, match=f"prefill_result: this is no decode worker, it is {role}"):
        hand_offs(role).part_of(request({}), CHOSEN)


def test_a_probe_is_held_by_nobody_and_takes_no_place() -> None:
    assert hand_offs("prefill").part_of(request(is_probe=True), CHOSEN).kv is None
    assert hand_offs("prefill").part_of(request(), CHOSEN).kv == KeepKv()
    probed = hand_offs("decode", most=0).part_of(request(is_probe=True), CHOSEN)
    assert (probed.kv, probed.local_reason) == (None, None)


def test_only_so_many_prompts_are_computed_for_want_of_a_hand_off() -> None:
    decode = hand_offs("decode", most=2)
    part = decode.part_of(request(), CHOSEN)
    assert (part.kv, part.local_reason) == (None, "missing")
    flights = [Flight(str(number), len(PROMPT)) for number in range(3)]
    for flight in flights[:2]:
        decode.check_room(part)
        decode.enter(flight, part)
    with pytest.raises(Overloaded, match="2 prompts without a hand-off are being computed here already"):
        decode.check_room(part)
    decode.check_room(decode.part_of(request(handed_over()), CHOSEN))  # those who bring their KV pass
    decode.leave(flights[0])
    decode.check_room(part)
    decode.enter(flights[2], part)
    assert decode.num_local == 2
    decode.leave(flights[0])  # again: its place is another one's now
    assert decode.num_local == 2
    decode.evict("1")
    decode.leave(flights[2])
    assert decode.num_local == 0
    assert decode.counts == {"missing": 3}


def test_a_stream_that_is_closed_late_does_not_give_up_its_successors_place() -> None:
    decode = hand_offs("decode")
    part = decode.part_of(request(), CHOSEN)
    first, second = Flight("same id", 3), Flight("same id", 3)
    decode.enter(first, part)
    decode.evict("same id")
    decode.enter(second, part)
    decode.leave(first)
    assert decode.num_local == 1


def test_a_decode_worker_may_be_told_to_compute_no_prompts() -> None:
    decode = hand_offs("decode", most=0)
    with pytest.raises(InvalidRequest, match=r"disaggregated_params: is missing, and this decode worker computes no"):
        decode.part_of(request(), CHOSEN)


def test_no_role_without_a_seal() -> None:
    with pytest.raises(ConfigurationError, match="--disaggregation-mode decode needs DLW_POOL_SECRET"):
        HandOffs("decode", None, 30.0, 1)


def test_what_was_computed_here_is_counted_by_reason() -> None:
    class Counting:
        def transfers(self) -> dict[str, float]:
            return {"lost": 2, "expired": 3}

        def num_held(self) -> int:
            return 0

    decode, registry = hand_offs("decode"), CollectorRegistry()
    decode.enter(Flight("one", 3), decode.part_of(request(), CHOSEN))
    TransferMetrics(Counting(), decode, registry)  # type: ignore[arg-type]
    found = {
        reason: registry.get_sample_value("dlw_local_prefills_total", {"reason": reason})
        for reason in ("missing", "late", "expired", "lost")
    }
    assert found == {"missing": 1, "late": 0, "expired": 3, "lost": 2}
