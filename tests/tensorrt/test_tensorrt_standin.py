"""The stand-in's own behaviour, called as the real LLM API is: what the worker is protected
from.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from faulty_processors import Raw
from stand_in import collect, embedded, running, stand_in

from adapters.trtllm import Step
from adapters.trtllm.side_channel import SideChannel
from worker.engines import NO_HINTS, EngineRequest, RequestHints
from worker.engines.trtllm.probes import CallProbe
from worker.sampling import SamplingParams

PROMPT = [9, 30, 41, 77]


class Api:
    """An ``LLM`` of the stand-in, and what its processors report."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        package = importlib.import_module("tensorrt_llm")
        self.params = package.SamplingParams
        self.error = importlib.import_module("tensorrt_llm.executor.utils").RequestError
        self.llm = package.LLM(str(model), max_batch_size=8, **arguments)
        self.steps: list[Step] = []
        self.channel = SideChannel(lambda failure: None, lambda name, step: self.steps.append(step))
        self.channel.open()

    def close(self) -> None:
        self.llm.shutdown()
        self.channel.close()

    async def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        """An answer, with nothing else asked for."""
        output = await self.llm.generate_async(prompt, self.params(max_tokens=num_tokens, ignore_eos=True))
        return list(output.outputs[0].token_ids)

    async def positions(self, prompt: list[int], num_tokens: int) -> list[int]:
        """At which positions a processor is called."""
        self.steps.clear()
        probe = CallProbe(self.channel.reporter("r"), 40)
        params = self.params(max_tokens=num_tokens, logits_processor=probe, ignore_eos=True)
        output = await self.llm.generate_async(prompt, params)
        assert output.outputs[0].token_ids == [40] * num_tokens
        self.channel.poll()
        return [step.position for step in self.steps]


async def test_processors_see_an_old_history_and_errors_fail_everyone(model: Path) -> None:
    with stand_in():
        api = Api(model)
        try:
            assert await api.positions(PROMPT, 4) == [4, 4, 5, 6]
            stranger = api.llm.generate_async(PROMPT, api.params(max_tokens=1500, ignore_eos=True), streaming=True)
            await anext(stranger)
            guilty = api.llm.generate_async(PROMPT, api.params(max_tokens=9, logits_processor=Raw(5), ignore_eos=True))
            with pytest.raises(api.error, match="error in forward function"):
                await guilty
            with pytest.raises(api.error, match="error in forward function"):
                await stranger
            with pytest.raises(api.error, match="exceeds max_num_tokens"):
                api.llm.generate_async([7] * 9000, api.params())
            with pytest.raises(TypeError):
                api.llm.generate_async(PROMPT, {"max_tokens": 1})
            with pytest.raises(ValueError, match="priority"):
                api.llm.generate_async(PROMPT, priority=2.0)
            with pytest.raises((AttributeError, TypeError), match="pickle"):
                api.llm.generate_async(PROMPT, api.params(logits_processor=lambda *a: None))
            spent = api.params(max_tokens=2)
            await api.llm.generate_async(PROMPT, spent)
            assert spent.end_id is not None  # the object that was given is changed
        finally:
            api.close()


async def test_processors_are_called_once_per_chunk(model: Path) -> None:
    with stand_in():
        api = Api(model, disable_overlap_scheduler=True, enable_chunked_prefill=True, max_num_tokens=16)
        try:
            assert await api.positions(PROMPT, 3) == [4, 5, 6]
            assert await api.positions([7] * 40, 3) == [40, 40, 40, 41, 42]
        finally:
            api.close()


def test_the_import_prints(capfd: pytest.CaptureFixture[str]) -> None:
    with stand_in():
        importlib.import_module("tensorrt_llm")
    assert capfd.readouterr().out == "[TensorRT-LLM] TensorRT LLM version: 1.3.0rc29\n"


@pytest.mark.parametrize("reason", ["length", "not_finished"])
async def test_a_context_only_request_ends_by_its_length(model: Path, reason: str) -> None:
    with stand_in(context_only_ends=reason):
        api = Api(model, cache_transceiver_config={"backend": "DEFAULT"})
        try:
            kind = importlib.import_module("tensorrt_llm").DisaggregatedParams
            asked = api.params(max_tokens=9, ignore_eos=True)
            result = await api.llm.generate_async(PROMPT, asked, disaggregated_params=kind(request_type="context_only"))
            assert (asked.max_tokens, result.outputs[0].finish_reason) == (1, reason)
            assert result.outputs[0].disaggregated_params.first_gen_tokens == result.outputs[0].token_ids
            ends = api.params(max_tokens=9, stop_token_ids=list(range(1024)))
            result = await api.llm.generate_async(PROMPT, ends, disaggregated_params=kind(request_type="context_only"))
            assert result.outputs[0].finish_reason == "stop"
            assert result.outputs[0].disaggregated_params.first_gen_tokens is None  # its own input
        finally:
            api.close()


class Sink:
    """Hears of blocks."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[int | None, list[int], list[int], str | None]] = asyncio.Queue()

    def stored(
        self,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> None:
        self.heard.put_nowait((parent_hash, list(block_hashes), list(token_ids), cache_salt))

    def removed(self, block_hashes: Sequence[int]) -> None:
        raise AssertionError("nothing is removed here")


MANAGERS = {"V1": "{}", "V2": "{use_kv_cache_manager_v2: true, kv_cache_event_hash_algo: v2_sha256}"}


@pytest.mark.parametrize("manager", MANAGERS)
async def test_load_and_kv_events_reach_the_runtime(model: Path, tmp_path: Path, manager: str) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text(f"kv_cache_config: {MANAGERS[manager]}")
    options = ("--kv-block-size", "16", "--extra-engine-args", str(path))
    async with running(model, *options, windows=[128, 4096]) as served:
        loads: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        served.tell_load(lambda used, total, dp_rank=0: loads.put_nowait((used, total)))
        sink = Sink()
        assert served.has_events
        served.report_blocks(sink)
        prompts = [list(range(start, start + 40)) for start in (20, 120)]
        for prompt, salt in zip(prompts, (None, "tenant"), strict=True):
            async for _ in served.generate(EngineRequest("r", prompt, SamplingParams(max_tokens=2), cache_salt=salt)):
                pass
        found = [await asyncio.wait_for(sink.heard.get(), 30) for _ in prompts]
        assert sink.heard.empty()  # nothing of the smaller window
        for prompt, salt, (parent, hashes, tokens, told) in zip(prompts, (None, "tenant"), found, strict=True):
            assert (parent, len(set(hashes)), tokens, told) == (None, 2, prompt[:32], salt)  # the last is not full
            assert all(type(each) is int for each in hashes)
        used, total = await asyncio.wait_for(loads.get(), 30)
        assert served._info is not None
        assert 0 <= used <= total == served._info.total_kv_blocks


async def test_hints_reach_the_library(model: Path) -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    asked: list[dict[str, Any]] = []
    async with running(model) as served:
        generate = served._llm.generate_async

        def spy(*given: Any, **arguments: Any) -> Any:
            asked.append({name: arguments.get(name) for name in ("trace_headers", "priority")})
            return generate(*given, **arguments)

        served._llm.generate_async = spy
        for hints in (NO_HINTS, RequestHints(trace, 3), RequestHints({}, -3)):
            async for _ in served.generate(EngineRequest("r", PROMPT, SamplingParams(max_tokens=2), hints=hints)):
                pass
    assert asked == [
        {"trace_headers": None, "priority": None},
        {"trace_headers": trace, "priority": 0.875},
        {"trace_headers": None, "priority": 0.125},
    ]


async def test_defaults_of_the_model_are_not_taken_for_the_clients(model: Path, tmp_path: Path) -> None:
    """``generation_config: auto`` samples what was asked for without a temperature."""
    taught = tmp_path / "taught"
    shutil.copytree(model, taught)
    path = taught / "generation_config.json"
    defaults = {"temperature": 9.0, "top_k": 0, "repetition_penalty": 30.0}
    path.write_text(json.dumps({**json.loads(path.read_text()), **defaults}))
    with stand_in():
        api = Api(taught, generation_config="auto", enable_iter_perf_stats=True)
        try:
            drawn = [await api.tokens(PROMPT, 12) for _ in range(2)]
        finally:
            api.close()
    async with running(taught) as served, embedded(model) as reference:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        answer, expected = await collect(served, PROMPT, params), await collect(reference, PROMPT, params)
        assert served._llm.args.generation_config == "trtllm"
    assert answer.token_ids == expected.token_ids
    assert all(each != expected.token_ids for each in drawn)


async def test_log_probabilities_after_truncation_are_json(model: Path) -> None:
    """The library fills the most likely tokens up with those that truncation has left out."""
    params = SamplingParams(
        max_tokens=4, ignore_eos=True, temperature=1.0, top_k=2, logprobs=5, logprobs_mode="processed"
    )
    async with running(model) as served:
        answer = await collect(served, PROMPT, params)
    assert answer.logprobs is not None
    for sampled, *top in answer.logprobs:
        assert 1 <= len(top) <= 2
        assert sampled.token_id in {each.token_id for each in top}
        assert all(math.isfinite(each.logprob) for each in (sampled, *top))
