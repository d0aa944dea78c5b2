"""The stand-in for TensorRT-LLM in this process, in one version and with the troubles that a
test wants.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from worker.arguments import parse_arguments
from worker.engines import EngineRequest, TokenDelta
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.engines.trtllm import TrtllmEngine, config_from
from worker.sampling import SamplingParams

STAND_IN = Path(__file__).resolve().parents[1] / "trtllm_standin"


@contextlib.contextmanager
def stand_in(**switches: Any) -> Iterator[None]:
    """Makes ``tensorrt_llm`` importable, and forgets it afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTLLM_STANDIN", json.dumps(switches))
        patch.setenv("TRTLLM_STANDIN_FORKS", "yes")
        patch.syspath_prepend(str(STAND_IN))
        with forgotten():
            yield


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """``tensorrt_llm`` is imported anew, and forgotten afterwards."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def engine(model: Path, *argv: str, library_batch: bool = False) -> TrtllmEngine:
    """``library_batch``: as many requests as the library takes; else 16, unless ``argv`` says."""
    seats = [] if library_batch or "--max-num-seqs" in argv else ["--max-num-seqs", "16"]
    arguments = ["--model-path", str(model), "--engine", "trtllm", *seats, *argv]
    return TrtllmEngine(config_from(parse_arguments(arguments, {})))


@contextlib.asynccontextmanager
async def running(model: Path, *argv: str, library_batch: bool = False, **switches: Any) -> AsyncIterator[TrtllmEngine]:
    with stand_in(**switches):
        started = engine(model, *argv, library_batch=library_batch)
        try:
            await started.start()
            yield started
        finally:
            await started.stop()


@contextlib.asynccontextmanager
async def embedded(model: Path) -> AsyncIterator[EmbeddedEngine]:
    started = EmbeddedEngine(EmbeddedConfig(model_path=model, device="cpu", dtype="float32", max_num_seqs=8))
    try:
        await started.start()
        yield started
    finally:
        await started.stop()


async def collect(
    served: TrtllmEngine | EmbeddedEngine,
    prompt: Sequence[int],
    params: SamplingParams,
    name: str = "request",
    **arguments: Any,
) -> TokenDelta:
    """The whole answer as one delta."""
    whole = TokenDelta()
    async for delta in served.generate(EngineRequest(name, prompt, params, **arguments)):
        whole.token_ids += delta.token_ids
        if delta.logprobs is not None:
            whole.logprobs = [*(whole.logprobs or ()), *delta.logprobs]
        for field in (
            "finish_reason",
            "stop_reason",
            "error",
            "engine_data",
            "receipt",
            "failure",
            "kv",
            "end_logprobs",
        ):
            setattr(whole, field, getattr(delta, field))
    return whole
