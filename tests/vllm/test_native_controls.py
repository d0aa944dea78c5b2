"""The controls that vLLM applies itself, as the worker finds them, and the order of priorities."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from engine import default_model

from worker.engines import EngineRequest, RequestHints
from worker.engines.vllm import VllmConfig, VllmEngine
from worker.engines.vllm.control_probes import find_native
from worker.engines.vllm.params import EARLY, SAMPLER
from worker.sampling import SamplingParams

pytestmark = pytest.mark.real_model

logger = logging.getLogger(__name__)

OPTIONS = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 1}


async def test_controls_and_priorities() -> None:
    engine = VllmEngine(VllmConfig(model_path=str(default_model()), options=OPTIONS))
    ended: list[str] = []

    async def ask(name: str, priority: float, count: int) -> None:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        request = EngineRequest(name, [40, 41, 42], params, hints=RequestHints(priority=priority))
        async for delta in engine.generate(request):
            if delta.finish_reason is not None:
                ended.append(name)

    try:
        info = await engine.start()
        assert engine._served is not None
        assert engine._package is not None
        assert engine._served.native == EARLY | SAMPLER
        began = time.perf_counter()
        assert await find_native(engine._llm, engine._package, info) == EARLY | SAMPLER
        logger.info("the probes of controls took %.2f s", time.perf_counter() - began)
        first = asyncio.create_task(ask("first", 0, 40))
        while engine.load().num_running == 0:
            await asyncio.sleep(0.01)
        late = {"low": -1.0, "usual": 0.0, "high": 2.0}
        await asyncio.gather(first, *(ask(name, priority, 2) for name, priority in late.items()))
        assert [name for name in ended if name != "first"] == ["high", "usual", "low"]
    finally:
        await engine.stop()
