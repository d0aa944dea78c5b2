"""Weights of vLLM that change while it serves, through the worker's engine."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import close_shared, tiny
from safetensors.torch import load_file, save, save_file
from tiny_vision import PLACEHOLDER, data_url, picture, write_tiny_vision
from transformers import PreTrainedTokenizerFast

from worker.engines import EngineRequest
from worker.engines.images import ImageInput, ImageSources
from worker.engines.vllm import VllmConfig, VllmEngine
from worker.engines.vllm.weights import VllmWeights
from worker.engines.weights import NotSupported, WeightsRefused, WrongState
from worker.sampling import SamplingParams

PROMPT = list(range(20, 90))
OPTIONS = {"max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True, "dtype": "float32", "block_size": 32}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """vLLM leaves sockets to the garbage collector, which tells of them here."""
    yield
    gc.collect()


@asynccontextmanager
async def running(model: Path, images: ImageSources | None = None, **options: Any) -> AsyncIterator[VllmEngine]:
    digest: Future[str] = Future()
    digest.set_result("of the checkpoint")
    config = VllmConfig(model_path=str(model), options=OPTIONS | options, weight_updates=True, images=images)
    engine = VllmEngine(config, digest=lambda: digest)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


class Answer:
    """Tokens, and versions with the first token of each."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.versions: list[tuple[int, str]] = []
        self.finish_reason: str | None = None


async def ask(
    engine: VllmEngine, name: str, count: int, so_far: list[int] | None = None, found: Answer | None = None
) -> Answer:
    found = found or Answer()
    params = SamplingParams(max_tokens=count + len(so_far or []), ignore_eos=True)
    async for delta in engine.generate(EngineRequest(name, PROMPT, params, generated_token_ids=so_far or [])):
        found.tokens += delta.token_ids
        found.versions += [(first, version.name) for first, version in delta.weights]
        found.finish_reason = delta.finish_reason
    return found


def weights_of(engine: VllmEngine) -> VllmWeights:
    assert engine.weights is not None
    return engine.weights


@pytest.mark.campaign
async def test_answers_after_an_update_are_those_of_the_new_weights(tmp_path: Path) -> None:
    close_shared()
    old = tiny(tmp_path, "llama")
    file = old / "model.safetensors"
    new = {name: tensor + 0.2 * torch.randn_like(tensor) for name, tensor in load_file(file).items()}
    content = memoryview(save(new))
    async with running(old) as engine:
        weights = weights_of(engine)
        before = await ask(engine, "before", 16)
        assert before.versions == [(0, "0")]
        for tensors, problem in (
            ({**new, "model.norm.wait": torch.ones(1)}, "has none of this name"),
            ({"model.norm.weight": new["model.norm.weight"]}, "is missing; an update of vLLM must have every tensor"),
            ({**new, "model.norm.weight": torch.ones(3)}, r"model.norm.weight: must be of shape \[128\]"),
            ({**new, "model.norm.weight": torch.full((128,), float("nan"))}, "infinite or not a number"),
        ):
            with pytest.raises(WeightsRefused, match=problem):
                await weights.update_weights(memoryview(save(tensors)), None, "keep")
        with pytest.raises(WeightsRefused, match="body: "):
            await weights.update_weights(content[:-5], None, "keep")
        assert (await ask(engine, "same", 16)).tokens == before.tokens
        kept, finishing = Answer(), Answer()
        under_way = asyncio.create_task(ask(engine, "kept", 300, found=kept))
        while len(kept.tokens) < 5:
            await asyncio.sleep(0.001)
        updated = await weights.update_weights(content, "new", "keep")
        after = await ask(engine, "after", 16)
        await under_way
        (_, (first, name)) = kept.versions
        assert (name, len(kept.tokens), 5 <= first < 300) == ("new", 300, True)
        under_way = asyncio.create_task(ask(engine, "finishing", 60, found=finishing))
        while len(finishing.tokens) < 5:
            await asyncio.sleep(0.001)
        again = await weights.update_weights(content, None, "finish")
        await under_way
        assert finishing.versions == [(0, "new")]
        assert again.version.digest == updated.version.digest != "of the checkpoint"
        await weights.pause("keep")
        waiting = asyncio.create_task(ask(engine, "waiting", 4))
        await asyncio.sleep(0.3)
        assert (weights.weights_state, waiting.done()) == ("paused", False)
        await weights.flush_cache()  # it has not begun, and holds nothing
        await weights.resume()
        assert (await waiting).tokens == after.tokens[:4]
        aborted = asyncio.create_task(ask(engine, "aborted", 300))
        await asyncio.sleep(0.1)
        with pytest.raises(WrongState, match="keeps its prefix cache"):
            await weights.flush_cache()
        await weights.pause("abort")
        assert (await aborted).finish_reason == "abort"
        await weights.resume()
        with pytest.raises(NotSupported, match="CPU build ignores its own sleep"):
            await weights.sleep(1)
    save_file(new, file, {"format": "pt"})
    async with running(old) as fresh:
        expected = await ask(fresh, "expected", 16)
        assert after.tokens == expected.tokens != before.tokens
        behind = await ask(fresh, "behind", 16, kept.tokens[:first])
        assert behind.tokens == kept.tokens[first : first + 16]


@pytest.mark.campaign
async def test_a_preempted_answer_finishes_before_a_pause(tmp_path: Path) -> None:
    """The KV cache has room for one whole answer alone; vLLM's own pause leaves the other one in
    its queue.
    """
    close_shared()
    async with running(tiny(tmp_path, "llama"), max_model_len=192, num_gpu_blocks_override=8) as engine:
        answers = [Answer(), Answer()]
        asked = [asyncio.create_task(ask(engine, str(number), 100, found=each)) for number, each in enumerate(answers)]
        while min(len(each.tokens) for each in answers) < 5:
            await asyncio.sleep(0.001)
        await weights_of(engine).pause("finish")
        assert [len(each.tokens) for each in answers] == [100, 100]
        assert engine.load().num_preemptions > 0
        await weights_of(engine).resume()
        await asyncio.gather(*asked)


@pytest.mark.campaign
async def test_one_that_comes_while_others_finish_begins_after(tmp_path: Path) -> None:
    """Beside one of those it could be preempted, and go on with the new weights."""
    close_shared()
    model = tiny(tmp_path, "llama")
    content = memoryview((model / "model.safetensors").read_bytes())
    async with running(model, max_model_len=192, num_gpu_blocks_override=8) as engine:
        answers = [Answer() for _ in range(5)]
        asking = [ask(engine, str(number), 100, found=each) for number, each in enumerate(answers)]
        asked = [asyncio.create_task(each) for each in asking[:2]]
        while min(len(each.tokens) for each in answers[:2]) < 5:
            await asyncio.sleep(0.001)
        updating = asyncio.create_task(weights_of(engine).update_weights(content, "new", "finish"))
        while not weights_of(engine)._finishing:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        asked += [asyncio.create_task(each) for each in asking[2:]]
        await updating
        await asyncio.gather(*asked)
        assert [each.versions for each in answers] == [[(0, "0")]] * 2 + [[(0, "new")]] * 3


@pytest.mark.campaign
async def test_a_picture_is_seen_with_the_new_weights(tmp_path: Path) -> None:
    """Its features are those of the old ones, or gone, in a cache of vLLM's own."""
    close_shared()
    model = write_tiny_vision(tmp_path / "model")
    prompt = PreTrainedTokenizerFast.from_pretrained(model).encode(f"{PLACEHOLDER}What is it?")
    image = ImageInput("image", data_url(picture((255, 0, 0))))

    async def see(engine: VllmEngine, name: str, count: int = 12, found: list[int] | None = None) -> list[int]:
        found, params = [] if found is None else found, SamplingParams(max_tokens=count, ignore_eos=True)
        async for delta in engine.generate(EngineRequest(name, prompt, params, images=(image,))):
            found += delta.token_ids
        return found

    file = model / "model.safetensors"
    new = {name: tensor + 0.2 * torch.randn_like(tensor) for name, tensor in load_file(file).items()}
    async with running(model, images=ImageSources()) as engine:
        before = await see(engine, "before")
        kept: list[int] = []
        under_way = asyncio.create_task(see(engine, "kept", 300, kept))
        while len(kept) < 5:
            await asyncio.sleep(0.001)
        await weights_of(engine).update_weights(memoryview(save(new)), None, "keep")
        after = await see(engine, "after")
        assert len(await under_way) == 300
    save_file(new, file, {"format": "pt"})
    async with running(model, images=ImageSources()) as fresh:
        assert after == await see(fresh, "expected") != before
