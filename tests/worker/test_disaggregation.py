"""Which part of a request a worker does, and how many local prefills a decode worker takes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from adapters.catalog import Requested, Selection
from worker.disaggregation.seal import CLOCK_SKEW_S, Seal
from worker.disaggregation.serving import OUTCOMES, DisaggregatedServing, TransferMetrics
from worker.engines import KeepKv, LocalPrefill, ReadKv, TokenDelta
from worker.engines.embedded.transfer import params
from worker.errors import ConfigurationError, InvalidRequest, Overloaded
from worker.lifecycle.drain import InFlightRequest
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


def disaggregation(role: str, secret: str = POOL, most: int = 2, clock: Clock | None = None) -> DisaggregatedServing:
    return DisaggregatedServing(role, Seal(secret, clock or Clock()), lease_s=30.0, max_local_prefills=most)


def request(given: Any = None, prompt: list[int] = PROMPT, **fields: Any) -> GenerationRequest:
    result = None if given is None else {"disaggregated_params": json.loads(json.dumps(given))}
    return GenerationRequest(prompt_token_ids=prompt, params=PARAMS, prefill_result=result, **fields)


def transferred(secret: str = POOL, clock: Clock | None = None, adapter: str | None = None) -> dict[str, Any]:
    delta = TokenDelta(finish_reason="length", num_cached_tokens=2, kv=dict(KV))
    return disaggregation("prefill", secret, clock=clock).transfer_params(PROMPT, CHOSEN, delta, adapter)


def test_decode_reads_where_prefill_says() -> None:
    assert disaggregation("decode").kv_of(request(transferred()), CHOSEN) == ReadKv(KV, num_cached_tokens=2)


@pytest.mark.parametrize(("theirs", "ours"), [("d", "d"), ("d", None), (None, "d")])
def test_decode_reads_kv_of_the_requests_adapter_alone(theirs: str | None, ours: str | None) -> None:
    asked = request(transferred(adapter=theirs), lora_digest=ours)
    if theirs == ours:
        assert disaggregation("decode").kv_of(asked, CHOSEN) == ReadKv(KV, num_cached_tokens=2)
    else:
        with pytest.raises(InvalidRequest, match="adapter: was made for another LoRA adapter"):
            disaggregation("decode").kv_of(asked, CHOSEN)


def test_decode_connects_to_nobody_but_its_own_pool() -> None:
    decode = disaggregation("decode")
    with pytest.raises(InvalidRequest, match="is not of this pool"):
        decode.kv_of(request(transferred("a secret of some other pool, far away")), CHOSEN)
    unsigned = json.loads(transferred()["body"])
    with pytest.raises(InvalidRequest, match=r"disaggregated_params: must be of format dynamo-logits-worker/sealed"):
        decode.kv_of(request(unsigned), CHOSEN)


@pytest.mark.parametrize(
    ("prompt", "selection", "whose"), [([5, 6, 8], CHOSEN, "another prompt"), (PROMPT, Selection(), "other processors")]
)
def test_a_kv_transfer_of_another_request_is_refused(prompt: list[int], selection: Selection, whose: str) -> None:
    with pytest.raises(InvalidRequest, match=f"was made for {whose}"):
        disaggregation("decode").kv_of(request(transferred(), prompt), selection)


def test_what_came_too_late_is_computed_here() -> None:
    clock = Clock()
    given = transferred(clock=clock)
    decode = disaggregation("decode", clock=clock)
    clock.now += 31 + CLOCK_SKEW_S
    assert decode.kv_of(request(given), CHOSEN) == LocalPrefill("late")
    with pytest.raises(InvalidRequest, match="was made for another prompt"):
        decode.kv_of(request(given, [1]), CHOSEN)


@pytest.mark.parametrize("version", [2, params.VERSION + 1])
def test_a_prompt_of_another_version_is_computed_here(version: int, caplog: pytest.LogCaptureFixture) -> None:
    given = Seal(POOL, Clock()).close({"format": params.FORMAT, "version": version, "unknown": 1}, 30.0)
    assert disaggregation("decode").kv_of(request(given), CHOSEN) == LocalPrefill("version")
    assert f"version: must be {params.VERSION}, got {version}" in caplog.text
    with pytest.raises(InvalidRequest, match="is of another version, and this decode worker computes no prompts"):
        disaggregation("decode", most=0).kv_of(request(given), CHOSEN)
    decode = disaggregation("decode")
    for number in range(3):
        decode.admit(InFlightRequest(str(number), 3), decode.kv_of(request(given), CHOSEN))
        assert len(caplog.records) == 3  # of the two workers before, and one of this


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
def test_others_receive_no_kv(role: str) -> None:
    with pytest.raises(InvalidRequest, match=f"prefill_result: this is no decode worker, it is {role}"):
        disaggregation(role).kv_of(request({}), CHOSEN)


def test_a_probe_is_held_by_nobody_and_takes_no_place() -> None:
    assert disaggregation("prefill").kv_of(request(is_probe=True), CHOSEN) is None
    assert disaggregation("prefill").kv_of(request(), CHOSEN) == KeepKv()
    assert disaggregation("decode", most=0).kv_of(request(is_probe=True), CHOSEN) is None
    assert disaggregation("decode").kv_of(request(transferred(), is_probe=True), CHOSEN) == ReadKv(KV, 2)


def test_only_so_many_prompts_are_computed_without_a_kv_transfer() -> None:
    decode = disaggregation("decode", most=2)
    part = decode.kv_of(request(), CHOSEN)
    assert part == LocalPrefill("missing")
    all_admitted = [InFlightRequest(str(number), len(PROMPT)) for number in range(3)]
    for admitted in all_admitted[:2]:
        decode.check_local_prefills(part)
        decode.admit(admitted, part)
    with pytest.raises(Overloaded, match="2 prompts without a KV transfer are being computed here already"):
        decode.check_local_prefills(part)
    decode.check_local_prefills(decode.kv_of(request(transferred()), CHOSEN))  # those who bring their KV pass
    decode.release(all_admitted[0])
    decode.check_local_prefills(part)
    decode.admit(all_admitted[2], part)
    assert decode.num_local_prefills == 2
    decode.release(all_admitted[0])  # again: another one is counted in its stead
    assert decode.num_local_prefills == 2
    decode.release_id("1")
    decode.release(all_admitted[2])
    assert decode.num_local_prefills == 0
    assert decode.counts == {"missing": 3}


def test_a_stream_closed_late_keeps_its_successors_local_prefill() -> None:
    decode = disaggregation("decode")
    part = decode.kv_of(request(), CHOSEN)
    first, second = InFlightRequest("same id", 3), InFlightRequest("same id", 3)
    decode.admit(first, part)
    decode.release_id("same id")
    decode.admit(second, part)
    decode.release(first)
    assert decode.num_local_prefills == 1


def test_a_seal_is_as_old_as_the_lease() -> None:
    prefill = DisaggregatedServing("prefill", Seal(POOL, Clock()), lease_s=7.0, max_local_prefills=0)
    delta = TokenDelta(finish_reason="length", kv=dict(KV))
    assert prefill.transfer_params(PROMPT, CHOSEN, delta)["expires"] == Clock.now + 7


def test_a_decode_worker_may_be_told_to_compute_no_prompts() -> None:
    decode = disaggregation("decode", most=0)
    with pytest.raises(InvalidRequest, match=r"disaggregated_params: is missing, and this decode worker computes no"):
        decode.kv_of(request(), CHOSEN)


def test_no_role_without_a_seal() -> None:
    with pytest.raises(ConfigurationError, match="--disaggregation-mode decode needs DLW_POOL_SECRET"):
        DisaggregatedServing("decode", None, 30.0, 1)


def test_what_was_computed_here_is_counted_by_reason() -> None:
    class Counting:
        def transfers(self) -> dict[str, float]:
            return {"lost": 2, "expired": 3, "received": 4, "bytes": 500, "seconds": 0.25}

        def num_leased(self) -> int:
            return 6

    decode, registry = disaggregation("decode"), CollectorRegistry()
    decode.admit(InFlightRequest("one", 3), decode.kv_of(request(), CHOSEN))
    decode.admit(InFlightRequest("two", 3), LocalPrefill("version"))
    TransferMetrics(Counting(), decode, registry)  # type: ignore[arg-type]
    found = {
        reason: registry.get_sample_value("dlw_local_prefills_total", {"reason": reason})
        for reason in ("missing", "late", "version", "expired", "lost")
    }
    assert found == {"missing": 1, "late": 0, "version": 1, "expired": 3, "lost": 2}
    outcomes = {name: registry.get_sample_value("dlw_kv_transfers_total", {"outcome": name}) for name in OUTCOMES}
    assert outcomes == {**dict.fromkeys(OUTCOMES, 0), "lost": 2, "expired": 3, "received": 4}
    for name, value in (
        ("kv_received_bytes_total", 500),
        ("kv_received_seconds_total", 0.25),
        ("kv_leased_prompts", 6),
    ):
        assert registry.get_sample_value(f"dlw_{name}") == value
