"""Controls that the installed vLLM does not apply as the worker means them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_vllm import FakeLlm, FakeParams, collect, package, running

from worker.engines import EngineRequest
from worker.engines.vllm import VllmConfig, VllmEngine
from worker.engines.vllm.params import EARLY, SAMPLER
from worker.errors import StartupError
from worker.sampling import SamplingParams

PROBED = ("temperature", "top_k", "top_p", "min_p", "min_tokens", "repetition_penalty")


def without(*names: str) -> type[FakeLlm]:
    """A double that takes these controls and ignores them."""

    class Ignores(FakeLlm):
        def _controlled(self, params: FakeParams, *rest: Any) -> torch.Tensor:
            return super()._controlled(neutral(params), *rest)

        def _chosen(self, params: FakeParams, logits: torch.Tensor) -> int:
            return super()._chosen(neutral(params), logits)

    def neutral(params: FakeParams) -> FakeParams:
        ignored: dict[str, Any] = {name: getattr(FakeParams(), name) for name in names}
        return replace(params, **ignored | ({"temperature": 0.0} if "temperature" in names else {}))

    return Ignores


def of(kind: type[FakeLlm]) -> Any:
    return replace(package(), async_llm=kind)


async def test_all_of_them_are_vllms_where_they_are_applied() -> None:
    async with running() as (engine, _):
        assert engine._served is not None
        assert engine._served.native == EARLY | SAMPLER


async def test_what_a_gpu_keeps_only_nearly_runs_in_the_chain() -> None:
    async with running(None, replace(package(), is_cpu=False)) as (engine, llm):
        assert engine._served is not None
        assert engine._served.native == (EARLY | SAMPLER) - {"top_p"}
        params = SamplingParams(max_tokens=3, temperature=0.8, top_k=20, top_p=0.9)
        await collect(engine, EngineRequest("r", [9, 30], params))
        (sent,) = llm.params
        assert sent.extra_args is not None
        assert (sent.temperature, sent.top_k, sent.top_p) == (1.0, 0, 1.0)


@pytest.mark.parametrize("name", PROBED)
async def test_one_that_is_ignored_runs_in_the_chain(name: str) -> None:
    value: Any = {"repetition_penalty": 1.5, "min_tokens": 2, "top_k": 4, "temperature": 2.0}.get(name, 0.5)
    fields: dict[str, Any] = {"temperature": 1.0, name: value}
    params = SamplingParams(max_tokens=3, **fields)
    async with running(None, of(without(name))) as (engine, llm):
        assert engine._served is not None
        lost = {"temperature", "top_k", "top_p", "min_p"} if name == "temperature" else {name}
        assert engine._served.native == (EARLY | SAMPLER) - lost
        await collect(engine, EngineRequest("r", [9, 30], params))
        (sent,) = llm.params
        assert sent.extra_args is not None
        assert getattr(sent, name) == (1.0 if name == "temperature" else getattr(FakeParams(), name))


class Contrary(FakeLlm):
    """Greedy tokens are the least likely ones."""

    def _chosen(self, params: FakeParams, logits: torch.Tensor) -> int:
        return super()._chosen(params, logits) if params.extra_args else int(logits.argmin())


class Endless(FakeLlm):
    """Answers go on after stop tokens."""

    def _reason(self, params: FakeParams, output: list[int]) -> str | None:
        return "length" if len(output) == params.max_tokens else None


def silent(what: str) -> type[FakeLlm]:
    class Silent(FakeLlm):
        def _output(self, params: FakeParams, *rest: Any) -> Any:
            fields: dict[str, Any] = {what: None}
            return super()._output(replace(params, **fields), *rest)

    return Silent


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (lambda: Contrary, r"greedy tokens \[.*\] are not the most likely ones"),
        (lambda: Endless, "an answer goes on after a stop token"),
        (lambda: silent("logprobs"), "are not the most likely ones of the log probabilities"),
        (lambda: silent("prompt_logprobs"), "the log probabilities of a prompt's tokens are not reported"),
    ],
)
async def test_what_no_chain_can_do_keeps_it_from_starting(kind: Callable[[], type[FakeLlm]], message: str) -> None:
    engine = VllmEngine(VllmConfig(model_path="fake"), lambda: of(kind()))
    with pytest.raises(StartupError, match=message):
        await engine.start()
    await engine.stop()


async def test_a_request_that_fails_keeps_it_from_starting() -> None:
    class Fails(FakeLlm):
        async def generate(self, prompt: Any, params: FakeParams, request_id: str, **hints: Any) -> AsyncIterator[Any]:
            if "control" in request_id:
                raise RuntimeError("no kernel\nimage")
            async for output in super().generate(prompt, params, request_id, **hints):
                yield output

    engine = VllmEngine(VllmConfig(model_path="fake"), lambda: of(Fails))
    with pytest.raises(StartupError, match=r"vLLM 0\.0 failed on its first requests: no kernel image"):
        await engine.start()
    await engine.stop()
