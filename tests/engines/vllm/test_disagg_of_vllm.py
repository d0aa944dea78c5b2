"""Prefill and decode workers on a double of ``AsyncLLM``: hand-offs, refusals, lost KV, leases."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_vllm import collect, running
from test_engine_of_vllm import one, request

from adapters.chain import ProcessorRecord, Receipt
from adapters.processors.forcing import ForcedPrefix
from adapters.processors.penalties import RepetitionPenalty
from worker.engines import EngineRequest, KeepKv, LocalPrefill, ReadKv
from worker.engines.request import KvPart
from worker.engines.vllm import VllmConfig, kv_connector
from worker.engines.vllm.extension import WorkerExtension
from worker.engines.vllm.loads import LoadReports
from worker.errors import InvalidRequest, StartupError

LEASE_S = 30.0


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that is there, and variables that are put back."""
    monkeypatch.setattr(kv_connector, "check_connector", lambda role: None)
    for name in ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "UCX_NET_DEVICES"):
        monkeypatch.setenv(name, "")


def config(role: str, **fields: Any) -> VllmConfig:
    return VllmConfig(model_path="fake", role=role, kv_lease_s=LEASE_S, **fields)


def with_kv(made: EngineRequest, kv: KvPart) -> EngineRequest:
    return EngineRequest(
        made.id, made.prompt_token_ids, made.params, made.chain, made.generated_token_ids, made.seed, kv=kv
    )


async def handed_over(made: EngineRequest, **more: Any) -> dict[str, Any]:
    """The handle of the request's prompt, as it goes through a message."""
    async with running(config("prefill"), **more) as (engine, _):
        found = await collect(engine, with_kv(made, KeepKv()))
    assert (found.token_ids, found.finish_reason, found.num_cached_tokens) == ([], "length", 3)
    return dict(json.loads(json.dumps(found.kv)))


def untimed(receipt: Receipt) -> list[ProcessorRecord]:
    return [replace(each, seconds=0.0) for each in receipt.records]


async def test_processors_do_what_they_do_aggregated() -> None:
    """Whether the KV comes or not, and for a migrated answer too."""
    async with (
        running() as (aggregated, _),
        running(config("prefill")) as (prefill, _),
        running(config("decode")) as (decode, llm),
    ):
        samplings: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "seed": 4})
        for fields, has_chain, generated, is_lost in product(samplings, (True, False), ([], [7, 8]), (False, True)):

            def asked(
                fields: dict[str, Any] = fields, has_chain: bool = has_chain, generated: list[int] = generated
            ) -> EngineRequest:
                chosen = [one(RepetitionPenalty, penalty=1.7)] if has_chain else []
                return request(*chosen, generated=generated, receipt=True, max_tokens=8, **fields)

            expected = await collect(aggregated, asked())
            kept = await collect(prefill, with_kv(asked(), KeepKv()))
            assert kept.kv is not None
            llm.unreachable = is_lost
            before = dict(decode.transfers())
            found = await collect(decode, with_kv(asked(), ReadKv(kept.kv)))
            assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
            outcome = "lost" if is_lost else "received"
            assert decode.transfers() == {**before, outcome: before.get(outcome, 0) + 1}
            assert found.receipt is not None
            assert expected.receipt is not None
            mode = "migrated" if generated else "local prefill" if is_lost else "disaggregated"
            assert found.receipt.mode == mode
            assert untimed(found.receipt) == untimed(expected.receipt)


async def test_the_token_of_the_prompt_counts_nowhere() -> None:
    async with running(config("prefill")) as (engine, llm):
        found = await collect(engine, with_kv(request(one(ForcedPrefix, token_ids=[5, 6])), KeepKv()))
        (params,) = llm.params
    assert (found.token_ids, found.receipt, found.logprobs) == ([], None, None)
    assert (params.max_tokens, params.temperature, params.stop_token_ids) == (1, 0.0, [])
    assert params.extra_args == {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


async def test_a_hand_off_says_when_its_lease_ends() -> None:
    before = time.perf_counter()
    handle = await handed_over(request())
    assert before + LEASE_S <= handle["params"]["remote_blocks_expiry_time"] <= time.perf_counter() + LEASE_S


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"engine": "embedded"}, "engine", "must be vllm, got 'embedded'"),
        ({"facts": 3}, "facts", "must be a mapping"),
        ({"params": None}, "params", "must be a mapping"),
        ({"facts.vllm": "9.9"}, "facts.vllm", "the prefill worker has '9.9', and this decode worker '0.0'"),
        ({"facts.model": "another"}, "facts.model", "the prefill worker has 'another'"),
        ({"facts.model_path": "/other"}, "facts.model_path", "the prefill worker has '/other'"),
        ({"facts.dtype": "bfloat16"}, "facts.dtype", "this decode worker 'float32'"),
        ({"facts.kv_cache_dtype": "fp8"}, "facts.kv_cache_dtype", "this decode worker 'auto'"),
        ({"facts.block_size": 32}, "facts.block_size", "has 32, and this decode worker 16"),
        ({"adapter": "digest"}, "adapter", "the prefill worker has 'digest', and this decode worker None"),
        ({"params.remote_num_tokens": 9}, "params.remote_num_tokens", "must be 3, the length of the prompt, got 9"),
        ({"params.remote_block_ids": None}, "params.remote_block_ids", "is missing"),
        ({"params.remote_blocks_expiry_time": None}, "params.remote_blocks_expiry_time", "is missing"),
    ],
)
async def test_workers_that_do_not_belong_together(change: dict[str, Any], field: str, problem: str) -> None:
    handle = await handed_over(request())
    for path, value in change.items():
        *outer, name = path.split(".")
        (handle[outer[0]] if outer else handle)[name] = value
    async with running(config("decode")) as (engine, llm):
        with pytest.raises(InvalidRequest) as refused:
            await collect(engine, with_kv(request(), ReadKv(handle)))
        assert llm.params == []
        assert engine.num_unfinished() == 0
    assert str(refused.value).startswith(f"prefill_result.disaggregated_params.kv.{field}: ")
    assert problem in str(refused.value)


async def test_requests_that_a_role_does_not_take() -> None:
    handle = await handed_over(request())
    for role, kv in (("decode", KeepKv()), ("prefill", ReadKv(handle))):
        async with running(config(role)) as (engine, _):
            with pytest.raises(InvalidRequest, match=f"this is a {role} worker"):
                await collect(engine, with_kv(request(), kv))
    async with running(config("prefill")) as (engine, llm):
        with pytest.raises(InvalidRequest, match=r"output_options\.prompt_logprobs: vLLM reports none"):
            await collect(engine, with_kv(request(prompt_logprobs=1), KeepKv()))
        assert llm.kept == []


async def test_kv_that_vllm_does_not_keep_is_an_error() -> None:
    async with running(config("prefill")) as (engine, llm):
        llm.kept = _Nothing()
        with pytest.raises(Exception, match="vLLM keeps no KV of the prompt"):
            await collect(engine, with_kv(request(), KeepKv()))


class _Nothing(list[str]):
    def append(self, name: str) -> None:
        """Forget it."""


async def test_local_prefills_and_probes_say_so() -> None:
    async with running(config("decode")) as (engine, _):
        found = await collect(engine, with_kv(request(receipt=True), LocalPrefill("missing")))
        assert found.receipt is not None
        assert found.receipt.mode == "local prefill"
        assert len((await collect(engine, request())).token_ids) == 6
        assert engine.transfers() == {}


async def test_an_abort_frees_the_request_in_vllm() -> None:
    """On either side; what waits for its KV is counted."""
    handle = await handed_over(request())
    for role, kv in (("prefill", KeepKv()), ("decode", ReadKv(handle))):
        async with running(config(role)) as (engine, llm):
            llm.gate.clear()
            answer = asyncio.ensure_future(collect(engine, with_kv(request(), kv)))
            while not llm.params:
                await asyncio.sleep(0)
            engine.abort("r")
            assert (await answer).finish_reason == "cancelled"
            while not llm.aborted:
                await asyncio.sleep(0)
            assert engine.transfers().get("cancelled", 0) == (role == "decode")
            assert engine.num_leased() == 0
            assert llm.kept == []


def stats(usage: float, running: int = 0, expired: int = 0) -> Any:
    moved = {"bytes_transferred": [8, 4], "transfer_duration": [0.5], "num_kv_expired_reqs": [expired]}
    return SimpleNamespace(num_running_reqs=running, num_waiting_reqs=0, kv_cache_usage=usage, kv_connector_stats=moved)


async def test_leases_end_with_vllms_blocks() -> None:
    async with running(config("prefill")) as (engine, llm):
        (loads,) = llm.loggers
        assert isinstance(loads, LoadReports)
        assert engine.num_leased() == 0
        await collect(engine, with_kv(request(), KeepKv()))
        loads.record(stats(0.1), None)
        assert engine.num_leased() == 1
        loads.record(stats(0.1, running=1), None)
        assert engine.num_leased() == 1
        loads.record(stats(0.0, expired=1), None)
        assert engine.num_leased() == 0
        assert engine.transfers() == {"leased": 1, "bytes": 36, "seconds": 1.5, "timed_out": 1}


async def test_a_connector_that_checks_no_lease_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ModuleNotFoundError" in str(WorkerExtension().arm_lease_check()) or "vllm" in sys.modules
    puller = SimpleNamespace(_bidirectional_kv_xfer_enabled=False, _is_turn2_read_expired=lambda meta: False)
    module = ModuleType("vllm.distributed.kv_transfer")
    module.get_kv_transfer_group = lambda: SimpleNamespace(connector_worker=puller)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer", module)
    assert WorkerExtension().arm_lease_check() is None
    assert puller._bidirectional_kv_xfer_enabled is True
    del puller._is_turn2_read_expired
    assert "_is_turn2_read_expired" in str(WorkerExtension().arm_lease_check())
    monkeypatch.setattr("fake_vllm.FakeLlm.collective_rpc", _cannot_check)
    with pytest.raises(
        StartupError, match=r"decode: vLLM 0\.0: its NixlConnector does not look whether a lease is over"
    ):
        async with running(config("decode")):
            pass


async def _cannot_check(self: Any, method: str, args: Any = ()) -> list[Any]:
    return ["no such switch"]


def test_where_an_engine_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    kv_connector.set_environment("lo", environ)
    assert (environ["UCX_NET_DEVICES"], environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]) == ("lo", "127.0.0.1")
    assert 0 < int(environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]) < 65536
    given = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    kv_connector.set_environment("mlx5_0:1", made := dict(given))
    assert made == {**given, "UCX_NET_DEVICES": "mlx5_0:1"}
    with pytest.raises(
        StartupError, match=r"set VLLM_NIXL_SIDE_CHANNEL_HOST to the address .*: mlx5_0:1 is no network"
    ):
        kv_connector.set_environment("mlx5_0:1", {})


def test_a_transfer_that_cannot_be_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(StartupError, match=r"--disaggregation-mode prefill: NIXL cannot be imported here: "):
        kv_connector.check_connector("prefill")
    monkeypatch.setitem(sys.modules, "nixl._api", ModuleType("nixl._api"))
    utils = ModuleType("utils")
    utils._NIXL_SUPPORTED_DEVICE = {"cuda": ("cuda",)}  # type: ignore[attr-defined]
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(device_type="cpu")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils", utils)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    with pytest.raises(StartupError, match="vLLM's NixlConnector is for cuda, and this is cpu"):
        kv_connector.check_connector("decode")
    utils._NIXL_SUPPORTED_DEVICE["cpu"] = ("cpu",)
    kv_connector.check_connector("decode")
