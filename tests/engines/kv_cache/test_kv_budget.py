"""How much memory the KV cache is given, and when it is taken."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_doubles import collect
from memory_mappings import CAN_POPULATE, resident_bytes

from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine, Engine
from worker.engines.embedded.host.memory import zeros
from worker.engines.embedded.kv_cache import budget
from worker.errors import StartupError
from worker.models.huge_pages import HUGE_PAGE_BYTES
from worker.sampling import SamplingParams

GIB = 2**30
TOKEN_BYTES = 2**16
CONTEXT = 8192
CONTEXT_BYTES = CONTEXT * TOKEN_BYTES  # half a GiB


@dataclass
class Sizes:
    """The part of a model that the budget looks at."""

    device: torch.device
    kv_bytes_per_token: int = TOKEN_BYTES


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    free: int | None,
    device: str = "cpu",
    draft_token_bytes: int | None = None,
    **settings: Any,
) -> int:
    """Bytes of the KV cache, without those of the draft model's."""
    monkeypatch.setattr(budget, "free_memory", lambda device: free)
    config = EmbeddedConfig(model_path="unused", **settings)
    model: Any = Sizes(torch.device(device))
    draft: Any = None if draft_token_bytes is None else Sizes(torch.device(device), draft_token_bytes)
    return budget.choose_kv_blocks(config, model, CONTEXT, draft) * config.kv_block_size * TOKEN_BYTES


@pytest.mark.parametrize(
    ("free", "device", "settings", "expected"),
    [
        (100 * GIB, "cpu", {"max_num_seqs": 2}, 2 * CONTEXT_BYTES),  # enough for all
        (8 * GIB, "cpu", {}, 2 * GIB),  # a quarter
        (100 * GIB, "cpu", {}, 4 * GIB),
        (8 * GIB, "cpu", {"local_workers": 2}, GIB),  # each its part
        (GIB, "cpu", {}, CONTEXT_BYTES),  # one context, though that is half
        (None, "cpu", {"max_num_seqs": 3}, 3 * CONTEXT_BYTES),  # nobody knows
        (20 * GIB, "cuda", {}, 18 * GIB),
        (20 * GIB, "cuda", {"local_workers": 2}, 9 * GIB),
        (100 * GIB, "cuda", {}, 64 * CONTEXT_BYTES),
        (100 * GIB, "cpu", {"kv_cache_memory": 9 * GIB + 5}, 9 * GIB),
        (100 * GIB, "cpu", {"kv_blocks": 513}, CONTEXT_BYTES),  # whole pages
    ],
)
def test_budgets(
    monkeypatch: pytest.MonkeyPatch, free: int | None, device: str, settings: dict[str, int], expected: int
) -> None:
    assert chosen(monkeypatch, free, device, **settings) == expected


@pytest.mark.parametrize(
    ("free", "settings", "expected"),
    [
        (100 * GIB, {"max_num_seqs": 2}, 2 * CONTEXT_BYTES),
        (8 * GIB, {}, 3 * CONTEXT_BYTES // 2),  # of a quarter: as much for the draft model, and one context
        (8 * GIB, {"max_num_seqs": 1}, CONTEXT_BYTES),  # no row beside the only one
        (8 * GIB, {"kv_cache_memory": 2 * GIB}, 3 * CONTEXT_BYTES // 2),
        (8 * GIB, {"kv_blocks": 1024}, 2 * CONTEXT_BYTES),
    ],
)
def test_the_draft_models_kv_is_counted(
    monkeypatch: pytest.MonkeyPatch, free: int, settings: dict[str, int], expected: int
) -> None:
    assert chosen(monkeypatch, free, draft_token_bytes=TOKEN_BYTES, **settings) == expected  # type: ignore[arg-type]


def test_memory_for_the_draft_models_kv_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"--kv-blocks 512: 1\.5 GiB of KV cache, 1\.0 GiB of memory are free"):
        chosen(monkeypatch, GIB, draft_token_bytes=TOKEN_BYTES, kv_blocks=512)
    with pytest.raises(StartupError, match=r"cannot hold one context of 8192 tokens, which takes 1\.5 GiB"):
        chosen(monkeypatch, 100 * GIB, draft_token_bytes=TOKEN_BYTES, kv_cache_memory=GIB)


@pytest.mark.parametrize("method", ["draft_model", "none"])
def test_the_draft_model_has_no_more_kv_than_was_counted(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture, method: str
) -> None:
    settings = {"method": method, "model": str(checkpoints["llama"])}
    with caplog.at_level(logging.INFO, logger=budget.__name__):
        engine = Engine(
            checkpoints["llama"],
            device="cpu",
            kv_cache_memory=3 * 2**20,
            context_length=256,
            speculative_config=settings,
        )
    stepper = engine.session.stepper
    assert stepper.draft_model is not None
    stores: list[Any] = [stepper.model, stepper.draft_model.model]
    used = sum(tensor.nbytes for model in stores for tensor in model.kv_store.tensors)
    assert 2 * 2**20 < used <= 3 * 2**20
    (line,) = [one.message for one in caplog.records if one.name == budget.__name__]
    assert line.startswith(f"KV cache: {used / 2**20:.1f} MiB with the draft model's, taken as it is used, for ")


@pytest.mark.parametrize(
    ("free", "settings", "said"),
    [
        (
            CONTEXT_BYTES,
            {},
            "--context-length 8192 needs 512.0 MiB of KV cache, 256.0 MiB of 512.0 MiB are free for it: lower it, "
            "or set --kv-cache-memory",
        ),
        (GIB, {"kv_cache_memory": 2 * GIB}, "--kv-cache-memory: 2.0 GiB of KV cache, 1.0 GiB of memory are free"),
        (GIB, {"kv_blocks": 4096}, "--kv-blocks 4096: 4.0 GiB of KV cache, 1.0 GiB of memory are free"),
        (
            GIB,
            {"kv_cache_memory": CONTEXT_BYTES - 1},
            "--kv-cache-memory 512.0 MiB cannot hold one context of 8192 tokens, which takes 512.0 MiB",
        ),
    ],
)
def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, free: int, settings: dict[str, int], said: str) -> None:
    with pytest.raises(StartupError) as refused:
        chosen(monkeypatch, free, **settings)  # type: ignore[arg-type]
    assert str(refused.value) == said


def test_start_up_says_what_was_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=budget.__name__):
        chosen(monkeypatch, 9 * GIB)
    (line,) = [one.message for one in caplog.records if one.name == budget.__name__]
    assert line == "KV cache: 2.2 GiB, taken as it is used, for 36864 tokens, 4.5 full contexts of 8192"


def test_memory_is_taken_as_it_is_written() -> None:
    tensors = zeros(2, (64, 1024, 1024), torch.float32, torch.device("cpu"))
    address = tensors[0].data_ptr()
    assert resident_bytes(address) == 0
    assert not tensors[1][5:60].any()  # a read finds zeros, and takes nothing
    assert resident_bytes(address) == 0
    tensors[0][7, 3] = 1.0
    assert 0 < resident_bytes(address) <= HUGE_PAGE_BYTES


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
async def test_an_engine_takes_memory_as_sequences_grow(checkpoints: dict[str, Path], role: str) -> None:
    size = 256 * 2**20
    settings = EmbeddedConfig(model_path=checkpoints["llama"], device="cpu", kv_cache_memory=size, role=role)
    engine = EmbeddedEngine(settings)
    await engine.start()
    try:
        tensors: list[torch.Tensor] = engine._stepper.model.kv_store.tensors  # type: ignore[union-attr]
        assert sum(tensor.nbytes for tensor in tensors) == size
        address = tensors[0].data_ptr()
        assert resident_bytes(address) < size // 16
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        if role == "aggregated":
            tokens, _ = await collect(engine, "one", [5] * 300, params)
            assert len(tokens) == 20
            assert 0 < resident_bytes(address) < size // 8
    finally:
        await engine.stop()


async def test_a_first_request_finds_its_memory(checkpoints: dict[str, Path]) -> None:
    """Where the system can be asked for it: since Linux 5.14."""
    engine = EmbeddedEngine(EmbeddedConfig(model_path=checkpoints["llama"], device="cpu", kv_cache_memory=256 * 2**20))
    await engine.start()
    try:
        address = engine._stepper.model.kv_store.tensors[0].data_ptr()  # type: ignore[union-attr]
        async with asyncio.timeout(30):
            while CAN_POPULATE and not resident_bytes(address):
                await asyncio.sleep(0.05)
    finally:
        await engine.stop()
