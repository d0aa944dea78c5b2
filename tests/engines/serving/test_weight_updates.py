"""Weights that change while an engine serves: whole or not at all, and named by every token."""

from __future__ import annotations

import asyncio
import gc
import json
import mmap
import os
import random
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import decoder_shapes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_adapters import ALL_TARGETS, linear_layers, write_adapter
from quantised_checkpoints import K_TYPES, WIDE, stored_in
from random_checkpoints import TYPES, write
from system_faults import full_memory
from third_party_checkpoints import write as write_third_party
from weight_runs import Answer, Tensors, as_bytes, ask, config, copy_with, running, tensors_of, weights_of

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.stochastic import Mirostat
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.embedded import EmbeddedEngine
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.kv_cache import KvStore
from worker.engines.embedded.model import HfModel, updates
from worker.engines.embedded.model.loading import load_model, network_of
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.model.stored_weights import Weight
from worker.engines.embedded.plan import Request
from worker.engines.embedded.sampling.chain_replay import CHANGED
from worker.engines.embedded.serving import load, weights, weights_digest
from worker.engines.embedded.serving.weights import _fall_asleep
from worker.engines.embedded.speculation import DraftModelProposer
from worker.engines.lora_adapters import AdapterRefused
from worker.engines.weights import PauseMode, Updated, WeightsRefused, WrongState
from worker.sampling import SamplingParams
from worker.tiny_model import write_tiny_model

PROMPT = list(range(20, 60))
ARCH = "qwen3"  # tied embeddings, norms of heads


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one shape, the first of which engines start with."""
    root = tmp_path_factory.mktemp("weights")
    return [write_tiny_model(root / str(seed), arch=ARCH, seed=seed) for seed in range(3)]


async def until(answer: Answer, count: int) -> None:
    """Wait for the tokens of an answer that is under way."""
    for _ in range(2000):
        if len(answer.tokens) >= count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{len(answer.tokens)} of {count} tokens")


def broken(kind: str, tensors: Tensors) -> memoryview:
    """An update that must be refused."""
    name, whole = "model.norm.weight", dict(tensors)
    if kind == "nan":
        whole[name] = whole[name].clone()
        whole[name][3] = float("nan")
    elif kind == "shape":
        whole[name] = torch.ones(7)
    elif kind == "name":
        whole["model.norm.wait"] = whole[name].clone()
    elif kind == "dtype":
        whole[name] = torch.ones(len(whole[name]), dtype=torch.int64)
    content = as_bytes(whole)
    return content[: len(content) - 5] if kind == "cut off" else content


Operation = tuple[str, object]
MODES = st.sampled_from(["keep", "finish", "abort"])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 60)),
        st.tuples(st.just("whole"), st.tuples(st.integers(0, 2), MODES)),
        st.tuples(st.just("partial"), st.tuples(st.integers(0, 2), st.integers(0, 99), st.sampled_from(["keep"]))),
        st.tuples(st.just("broken"), st.sampled_from(["nan", "shape", "name", "dtype", "cut off"])),
        st.tuples(st.just("wait"), st.integers(0, 12)),
        st.tuples(st.just("twice"), st.tuples(st.integers(0, 2), st.integers(0, 2), MODES, MODES)),
        st.tuples(st.just("pause"), MODES),
        st.tuples(st.just("abort all"), st.none()),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("resume"), st.none()),
        st.tuples(st.just("flush"), st.none()),
        st.tuples(st.just("sleep"), st.none()),
    ),
    min_size=3,
    max_size=10,
)


class Played:
    """An engine, the tensors of each of its versions by name, and the answers under way."""

    def __init__(self, engine: EmbeddedEngine, sources: list[Path]) -> None:
        self.engine, self.weights = engine, weights_of(engine)
        self.given = [tensors_of(path) for path in sources]
        self.now: Tensors = self.given[0]
        self.versions: dict[str, Tensors] = {"0": self.now}
        self.answers: list[tuple[int, asyncio.Task[Answer]]] = []
        self.is_paused = False
        self.num_asked = 0
        self.may_end: set[int] = set()  # seeds of answers that were in flight when all were aborted

    async def play(self, name: str, value: object) -> None:
        await getattr(self, f"_{name.replace(' ', '_')}")(value)

    async def _ask(self, count: int) -> None:
        seed, self.num_asked = self.num_asked, self.num_asked + 1
        asked = ask(self.engine, f"r{seed}", PROMPT, count, seed)
        self.answers.append((seed, asyncio.create_task(asked)))
        await asyncio.sleep(0)

    async def _whole(self, value: tuple[int, PauseMode]) -> None:
        await self._update(self.given[value[0]], value[1])

    async def _partial(self, value: tuple[int, int, PauseMode]) -> None:
        source, seed, mode = value
        tensors = self.given[source]
        names = random.Random(seed).sample(sorted(tensors), 1 + seed % 9)
        await self._update({name: tensors[name] for name in names}, mode)

    async def _update(self, tensors: Tensors, mode: PauseMode) -> None:
        if mode == "abort":
            self.may_end |= {seed for seed, _ in self.answers}
        updated = await self.weights.update_weights(as_bytes(tensors), None, mode)
        self.now = {**self.now, **tensors}
        self.versions[updated.version.name] = self.now

    async def _twice(self, value: tuple[int, int, PauseMode, PauseMode]) -> None:
        """Two trainers at once: one of them is told, and the weights are the other's."""
        if "abort" in value:
            self.may_end |= {seed for seed, _ in self.answers}
        *sources, one, two = value
        tensors = [self.given[source] for source in sources]
        both = (
            self.weights.update_weights(as_bytes(each), None, mode)
            for each, mode in zip(tensors, (one, two), strict=True)
        )
        first, second = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(second, WrongState)
        assert isinstance(first, Updated)
        self.now = {**self.now, **tensors[0]}
        self.versions[first.version.name] = self.now

    async def _abort_all(self, _: None) -> None:
        await self.weights.abort_all()
        self.may_end |= {seed for seed, _ in self.answers}

    async def _leave(self, number: int) -> None:
        """A client goes."""
        if self.answers:
            _, task = self.answers.pop(number % len(self.answers))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _broken(self, kind: str) -> None:
        before = self.weights.weight_version
        with pytest.raises(WeightsRefused):
            await self.weights.update_weights(broken(kind, self.given[1]), None, "keep")
        assert self.weights.weight_version == before

    async def _wait(self, number: int) -> None:
        await asyncio.sleep(0.002 * number)

    async def _pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self.may_end |= {seed for seed, _ in self.answers}
        await self.weights.pause(mode)
        self.is_paused = True

    async def _resume(self, _: None) -> None:
        await self.weights.resume()
        self.is_paused = False

    async def _flush(self, _: None) -> None:
        await self.weights.flush_cache()

    async def _sleep(self, _: None) -> None:
        await self.weights.sleep(1)
        with pytest.raises(WrongState):
            await self.weights.resume()
        await self.weights.wake()
        assert self.weights.weights_state == ("paused" if self.is_paused else "serving")

    async def check(self, base: Path) -> None:
        """Every token is that of a fresh engine with exactly the weights of its version."""
        await self.weights.resume()
        answers = [(seed, await task) for seed, task in self.answers]
        by_version: dict[str, list[tuple[int, Answer, int, int]]] = {}
        for seed, answer in answers:
            assert answer.finish_reason in (("length", "abort") if seed in self.may_end else ("length",))
            assert not answer.tokens or answer.runs()[0][1] == 0
            for name, first, end in answer.runs():
                by_version.setdefault(name, []).append((seed, answer, first, end))
        for name, found in by_version.items():
            with tempfile.TemporaryDirectory() as directory:
                path = copy_with(base, Path(directory) / "fresh", self.versions[name])
                async with running(path, weight_updates=False) as fresh:
                    for seed, answer, first, end in found:
                        before = answer.tokens[:first]
                        expected = await ask(fresh, "f", PROMPT, end - first, seed, so_far=before)
                        assert expected.tokens == answer.tokens[first:end]


@settings(max_examples=8, deadline=None)
@given(operations=OPERATIONS)
def test_tokens_are_those_of_the_named_version(sources: list[Path], operations: list[Operation]) -> None:
    async def play() -> None:
        async with running(sources[0]) as engine:
            played = Played(engine, sources)
            for name, value in operations:
                await played.play(name, value)
            await played.check(sources[0])
            stepper = engine._stepper
            assert stepper is not None
            stepper.scheduler.check_integrity()
            stepper.scheduler.cache.check_blocks()

    asyncio.run(play())


class Heard:
    """Blocks that a router takes for cached."""

    def __init__(self) -> None:
        self.known: set[int] = set()

    def stored(self, parent_hash: int | None, block_hashes: Sequence[int], *_: object) -> None:
        self.known.update(block_hashes)

    def removed(self, block_hashes: Sequence[int]) -> None:
        self.known.difference_update(block_hashes)


async def test_a_flush_leaves_no_block_of_what_runs(sources: list[Path]) -> None:
    """The KV of what runs is computed again, with the same tokens."""
    async with running(sources[0]) as engine:
        weights, heard, answer = weights_of(engine), Heard(), Answer()
        engine.report_blocks(heard)
        under_way = asyncio.create_task(ask(engine, "runs", PROMPT, 60, answer=answer))
        await until(answer, 4)
        await weights.pause("keep")
        assert len(heard.known) >= len(PROMPT) // 16
        await weights.flush_cache()
        await weights.pause("keep")  # what the flush has changed was told by then
        assert not heard.known
        await weights.resume()
        await under_way
        assert answer.tokens == (await ask(engine, "after", PROMPT, 60)).tokens


OTHERS: dict[str, dict[str, object]] = {
    "gemma3_text": {"quantization": "int8"},
    "qwen3_moe": {"quantization": "int4"},
    "gpt2": {},
    "llama": {"kernels": "torch", "numerics": "auto"},
}
"""Settings by model type, of models that native kernels do not compute all of."""


@pytest.mark.parametrize("kind", OTHERS)
async def test_other_networks_are_loaded_again(tmp_path: Path, kind: str) -> None:
    """Their updates are whole, and answers then are those of a fresh engine of the new weights."""
    settings = TYPES.get(kind, {})
    network = write(tmp_path / "old", kind, settings)
    new = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in tensors_of(tmp_path / "old").items()}
    path = copy_with(tmp_path / "old", tmp_path / "new", new)
    del network
    async with running(path, **OTHERS[kind], weight_updates=False) as fresh:
        expected = await ask(fresh, "r", PROMPT, 8)
    async with running(tmp_path / "old", **OTHERS[kind]) as engine:
        weights = weights_of(engine)
        before = await ask(engine, "before", PROMPT, 8)
        name, shape = next((name, kind.shape) for name, kind in weights.weight_tensors().items())
        with pytest.raises(WeightsRefused, match=r"tensor \S+: is missing; an update of a"):
            await weights.update_weights(as_bytes({name: torch.ones(shape)}), None, "keep")
        assert (await ask(engine, "same", PROMPT, 8)).tokens == before.tokens
        under_way = asyncio.create_task(ask(engine, "keep", PROMPT, 40))
        while not engine.num_unfinished():
            await asyncio.sleep(0)
        await weights.pause("keep")  # however fast the answer would be
        updated = await weights.update_weights(path, "new", "keep")
        await weights.resume()
        assert (await ask(engine, "after", PROMPT, 8)).tokens == expected.tokens != before.tokens
        kept = await under_way
        assert [version.name for _, version in kept.weights][-1] == "new"
        await weights.sleep(2)
        await weights.wake()
        assert weights.weights_state == "needs_weights"
        again = await weights.update_weights(as_bytes(new), "again", "keep")
        assert again.version.digest == updated.version.digest
        assert (await ask(engine, "again", PROMPT, 8)).tokens == expected.tokens


async def scored(engine: EmbeddedEngine) -> list[tuple[int, float]]:
    """Tokens of an answer with their log probabilities."""
    params = SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True)
    found = [delta async for delta in engine.generate(EngineRequest("scored", PROMPT, params))]
    return [(one.token_id, one.logprob) for delta in found for (one, *_) in delta.logprobs or ()]


@pytest.mark.parametrize("kind", ["deepseek_v3", "ernie4_5_moe", "flint", "hunyuan_v1_moe", "apertus"])
async def test_what_is_held_in_float32_stays_so(tmp_path: Path, kind: str) -> None:
    """Parts of routers and sinks are, beside weights in bfloat16: rounded, they would choose other
    experts. Numbers without a dimension are tensors, too.
    """
    decoder_shapes.write(tmp_path / "old", kind, 0)
    new, generator = tensors_of(tmp_path / "old"), torch.Generator().manual_seed(3)
    for name, tensor in new.items():
        start = 100 if name.endswith("e_score_correction_bias") else tensor
        new[name] = start + 0.2 * torch.randn(tensor.shape, generator=generator)
    path = copy_with(tmp_path / "old", tmp_path / "new", new)
    settings = {"dtype": "bfloat16", "numerics": "auto"}
    async with running(path, **settings, weight_updates=False) as fresh:
        expected = await scored(fresh)
    async with running(tmp_path / "old", **settings) as engine:
        assert await scored(engine) != expected
        await weights_of(engine).update_weights(path, None, "keep")
        assert await scored(engine) == expected


async def test_an_update_without_the_head_ends_no_answer(tmp_path: Path) -> None:
    """It is refused before those in flight are aborted, unless the model's embeddings are tied."""
    for kind, is_tied in (("granite", False), ("granite", True), ("gemma2", False)):
        shape, path = int(is_tied), tmp_path / f"{kind}-{is_tied}"
        decoder_shapes.write(path, kind, shape)
        tensors = {name: tensor for name, tensor in tensors_of(path).items() if name != "lm_head.weight"}
        async with running(path) as engine:
            before = await ask(engine, "before", PROMPT, 30)
            under_way = asyncio.create_task(ask(engine, "under way", PROMPT, 30))
            while not engine.num_unfinished():
                await asyncio.sleep(0)
            if is_tied:
                await weights_of(engine).update_weights(as_bytes(tensors), None, "keep")
            else:
                with pytest.raises(WeightsRefused, match=r"tensor lm_head\.weight: is missing"):
                    await weights_of(engine).update_weights(as_bytes(tensors), None, "abort")
            assert (await under_way).tokens == before.tokens


WITHOUT_PLACE: dict[str, dict[str, torch.Tensor]] = {
    "gpt_neox": {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4),
    },
    "gpt2": {"transformer.h.1.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)},
    "deepseek_v3": {"model.layers.61.eh_proj.weight": torch.ones(3, 3)},
    "mixtral": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
}
"""Tensors of older versions, and of layers for drafts, by model type."""


@pytest.mark.parametrize("kind", WITHOUT_PLACE)
async def test_what_the_model_has_no_place_for_may_be_there(tmp_path: Path, kind: str) -> None:
    """An update is whole with it and without it, also that of the checkpoint's own files."""
    if kind == "llama":
        write(tmp_path / "plain", kind, {})
    else:
        decoder_shapes.write(tmp_path / "plain", kind, 0)
    old = tensors_of(tmp_path / "plain")
    new = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in old.items()}
    with_more = [{**each, **WITHOUT_PLACE[kind]} for each in (old, new)]
    paths = [copy_with(tmp_path / "plain", tmp_path / str(index), each) for index, each in enumerate(with_more)]
    async with running(paths[1], weight_updates=False) as fresh:
        expected = await ask(fresh, "r", PROMPT, 8)
    async with running(paths[0]) as engine:
        weights = weights_of(engine)
        assert weights.weight_tensors().keys() == old.keys()
        before = await ask(engine, "before", PROMPT, 8)
        versions = []
        for source in (paths[1], as_bytes(new), as_bytes(with_more[1])):
            await weights.update_weights(paths[0], None, "keep")
            assert (await ask(engine, "back", PROMPT, 8)).tokens == before.tokens
            versions.append((await weights.update_weights(source, None, "keep")).version)
            assert (await ask(engine, "after", PROMPT, 8)).tokens == expected.tokens != before.tokens
        assert len({version.digest for version in versions}) == 1


async def test_a_checkpoint_without_a_head_has_a_digest(tmp_path: Path) -> None:
    """A replay knows the weights by it. Older checkpoints have RoPE's frequencies, too."""
    write(tmp_path / "plain", "llama", {})
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors_of(tmp_path / "plain").items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    path = copy_with(tmp_path / "plain", tmp_path / "short", tensors)
    async with running(path) as engine:
        version = (await weights_of(engine).update_weights(path, None, "keep")).version
    assert weights_digest(config(path), load_model(config(path))) == version.digest


@pytest.mark.parametrize("damage", ["gone", "cut off", "other sizes"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
async def test_a_checkpoint_that_cannot_be_read_again(tmp_path: Path, kind: str, damage: str) -> None:
    """Its worker wakes without weights, which an update then brings."""
    write(tmp_path / "model", kind, TYPES.get(kind, {}))
    path, content = tmp_path / "model" / "model.safetensors", as_bytes(tensors_of(tmp_path / "model"))
    async with running(tmp_path / "model") as engine:
        before = await ask(engine, "before", PROMPT, 8)
        under_way = asyncio.create_task(ask(engine, "under way", PROMPT, 40))
        while not engine.num_unfinished():
            await asyncio.sleep(0)
        await weights_of(engine).sleep(2)
        if damage == "gone":
            path.unlink()
        elif damage == "cut off":
            path.write_bytes(path.read_bytes()[:-5])
        else:
            write(tmp_path / "other", kind, {**TYPES.get(kind, {}), "intermediate_size": 64})
            path.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
        await weights_of(engine).wake()
        assert weights_of(engine).weights_state == "needs_weights"
        await weights_of(engine).update_weights(content, None, "keep")
        assert weights_of(engine).weights_state == "serving"
        assert (await ask(engine, "after", PROMPT, 8)).tokens == before.tokens
        assert len((await under_way).tokens) == 40


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str)
async def test_weights_that_were_dropped_come_back_whole(tmp_path: Path, settings: dict[str, object]) -> None:
    """An update of a part is refused, whichever part it is."""
    odd = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 96}
    write(tmp_path / "model", "qwen2", odd)
    tensors = tensors_of(tmp_path / "model")
    async with running(tmp_path / "model", **settings) as engine:
        before = await ask(engine, "before", PROMPT, 8)
        weights = weights_of(engine)
        await weights.update_weights(as_bytes(tensors), None, "keep")
        await weights.sleep(2)
        await weights.wake()
        names = sorted(tensors)
        for seed in range(60):
            chosen = random.Random(seed)
            some = {name: tensors[name] for name in chosen.sample(names, chosen.randrange(1, len(names)))}
            with pytest.raises(WeightsRefused, match="after a sleep of level 2 an update must have every tensor"):
                await weights.update_weights(as_bytes(some), None, "keep")
        await weights.update_weights(as_bytes(tensors), None, "keep")
        assert (await ask(engine, "after", PROMPT, 8)).tokens == before.tokens


async def test_what_another_program_quantised_is_dense_after_an_update(tmp_path: Path) -> None:
    """Its linear layers have other kernels than at the start, and the bits of a fresh engine with
    the KV cache that this one chose at the start.
    """
    decoder_shapes.write(tmp_path / "plain", "granite", 0)
    old = write_third_party(tmp_path / "plain", tmp_path / "old", "awq")
    new = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in tensors_of(old / "dense").items()}
    path = copy_with(old / "dense", tmp_path / "new", new)
    async with running(path, weight_updates=False, kv_cache_dtype="int16") as fresh:
        expected = await ask(fresh, "r", PROMPT, 8)
    async with running(old) as engine:
        before = await ask(engine, "before", PROMPT, 8)
        updated = await weights_of(engine).update_weights(as_bytes(new), "new", "keep")
        assert updated.formats.keys() == {"float32"}
        assert (await ask(engine, "after", PROMPT, 8)).tokens == expected.tokens != before.tokens


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
async def test_a_checkpoint_of_super_blocks_stays_one(tmp_path: Path, kind: str) -> None:
    """Float tensors are rounded to Q4_K and Q6_K again, and cached prefixes are of no use."""
    mixture = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    write(tmp_path / "dense", kind, {**WIDE, **(mixture if kind == "qwen3_moe" else {})})
    new = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in tensors_of(tmp_path / "dense").items()}
    types = {"mlp.gate.": "F32", **K_TYPES}
    old = stored_in(tmp_path / "dense", tmp_path / "old", types)
    path = stored_in(copy_with(tmp_path / "dense", tmp_path / "dense-new", new), tmp_path / "new", types)
    prompt = [*PROMPT, *PROMPT]
    async with running(path, weight_updates=False) as fresh:
        expected = await ask(fresh, "r", prompt, 8)
    async with running(old) as engine:
        before = await ask(engine, "before", prompt, 8)
        name = "model.embed_tokens.weight"
        broken = {**new, name: new[name] * 1e12}
        with pytest.raises(WeightsRefused, match=f"tensor {name}: holds what the float16 scales of Q6_K cannot"):
            await weights_of(engine).update_weights(as_bytes(broken), None, "keep")
        assert (await ask(engine, "same", prompt, 8)).tokens == before.tokens
        updated = await weights_of(engine).update_weights(as_bytes(new), "new", "keep")
        assert updated.formats.keys() == {"Q4_K", "Q6_K"}
        assert (await ask(engine, "after", prompt, 8)).tokens == expected.tokens != before.tokens
        again = await weights_of(engine).update_weights(path, "again", "keep")
        assert (again.version.digest, again.formats) == (updated.version.digest, {})


async def ask_adapted(engine: EmbeddedEngine) -> list[int]:
    """Tokens of the adapter ``mine``."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    request = EngineRequest("r", PROMPT, params, lora_name="mine")
    return [token async for delta in engine.generate(request) for token in delta.token_ids]


async def test_an_adapter_keeps_the_layout_that_it_is_packed_for(tmp_path: Path) -> None:
    """Types may change which projections are fused until one is loaded, and not after."""
    write(tmp_path / "dense", "llama", WIDE)
    write_adapter(tmp_path / "mine", tmp_path / "dense", seed=2, targets=ALL_TARGETS, rank=3)
    old, new = (
        stored_in(tmp_path / "dense", tmp_path / name, types)
        for name, types in (("old", K_TYPES), ("new", {"_proj": "Q8_0", "embed_tokens": "Q8_0"}))
    )
    async with running(new, lora_modules=(("mine", str(tmp_path / "mine")),)) as fresh:
        expected = await ask_adapted(fresh)
        with pytest.raises(WeightsRefused, match="LoRA adapters are packed for those that serve; give tensors of the"):
            await weights_of(fresh).update_weights(old, None, "keep")
        await weights_of(fresh).update_weights(as_bytes(tensors_of(tmp_path / "dense")), None, "keep")
        assert await ask_adapted(fresh) == expected
    async with running(old) as engine:
        with pytest.raises(AdapterRefused):  # one that is never packed
            await engine.load_adapter("mine", tmp_path / "nowhere")
        await weights_of(engine).update_weights(new, None, "keep")
        await engine.load_adapter("mine", tmp_path / "mine")
        assert await ask_adapted(engine) == expected


@pytest.mark.parametrize("kind", ["granite", "deepseek_v3"])
async def test_an_adapter_goes_on_with_other_weights(tmp_path: Path, kind: str) -> None:
    """Where the network is made anew, of native kernels alone or of transformers' modules."""
    network = decoder_shapes.write(tmp_path / "old", kind, 0)
    new = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in tensors_of(tmp_path / "old").items()}
    path = copy_with(tmp_path / "old", tmp_path / "new", new)
    layers = linear_layers(network.base_model, f"{network.base_model_prefix}.")
    write_adapter(tmp_path / "mine", tmp_path / "old", layers=layers, targets=list(layers))
    mine = (("mine", str(tmp_path / "mine")),)
    async with running(path, lora_modules=mine) as fresh:
        expected, plain = await ask_adapted(fresh), await ask(fresh, "plain", PROMPT, 8)
    async with running(tmp_path / "old", lora_modules=mine) as engine:
        assert await ask_adapted(engine) != expected
        await weights_of(engine).update_weights(path, None, "keep")
        assert await ask_adapted(engine) == expected
        assert (await ask(engine, "plain", PROMPT, 8)).tokens == plain.tokens


def resident_mb() -> int:
    """Memory of this process, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE // 10**6


async def test_sleep_gives_memory_back(tmp_path: Path) -> None:
    sizes = {"vocab_size": 16_000, "hidden_size": 512, "num_key_value_heads": 8, "num_attention_heads": 8}
    write(tmp_path / "wide", "llama", {**sizes, "num_hidden_layers": 2, "head_dim": 64})
    weights, kv = 2 * 16_000 * 512 * 4 // 10**6, 2 * 2 * 8 * 64 * 4 * 4096 // 10**6
    async with running(tmp_path / "wide", max_num_batched_tokens=512, kv_blocks=512) as engine:
        for number in range(16):  # fills the KV cache with prompts
            await ask(engine, f"r{number}", [number + 1] * 256, 1)
        awake, answer = resident_mb(), await ask(engine, "before", PROMPT, 4)
        await weights_of(engine).sleep(1)
        light = resident_mb()
        assert light < awake - 0.7 * kv
        await weights_of(engine).wake()
        assert (await ask(engine, "between", PROMPT, 4)).tokens == answer.tokens
        await weights_of(engine).sleep(2)
        assert resident_mb() < awake - 0.7 * kv - 0.8 * weights
        await weights_of(engine).wake()  # read from the checkpoint again
        assert weights_of(engine).weights_state == "serving"
        assert (await ask(engine, "after", PROMPT, 4)).tokens == answer.tokens


def test_sleep_gives_the_memory_of_a_draft_model_back(tmp_path: Path) -> None:
    sizes = {"vocab_size": 1000, "hidden_size": 512, "num_key_value_heads": 8, "num_attention_heads": 8}
    write(tmp_path / "wide", "llama", {**sizes, "num_hidden_layers": 2, "head_dim": 64})
    speculative = {"method": "draft_model", "model": str(tmp_path / "wide")}
    stepper, _ = load(config(tmp_path / "wide", kv_blocks=512, speculative_config=speculative))
    draft, tokens = stepper.draft_model, [7] * 200
    assert draft is not None
    assert isinstance(draft.model, HfModel)
    assert isinstance(stepper.model, HfModel)
    one = Request("one", 0, SamplingParams(), tokens, len(tokens), 400, frozenset(), 0)
    proposer = DraftModelProposer(draft, one)
    found = proposer.propose(tokens, 4).tokens
    assert any(bool(tensor.any()) for tensor in draft.model.kv_store.tensors)
    _fall_asleep(stepper, stepper.model, None)
    assert not any(bool(tensor.any()) for tensor in draft.model.kv_store.tensors)
    assert proposer.propose(tokens, 4).tokens == found


async def test_an_update_that_a_gpu_has_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache takes nine tenths of what is free there; the weights stay what they were."""
    decoder_shapes.write(tmp_path, "gpt2", 0)

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    async with running(tmp_path) as engine:
        before = await ask(engine, "before", PROMPT, 4)
        monkeypatch.setattr(updates, "network_of", refuse)
        with pytest.raises(WeightsRefused, match=r"no memory for them beside .* a smaller --kv-cache-memory leaves"):
            await weights_of(engine).update_weights(tmp_path, None, "keep")
        assert (await ask(engine, "after", PROMPT, 4)).tokens == before.tokens


async def test_an_update_without_memory_is_refused(sources: list[Path], tmp_path: Path) -> None:
    """The weights that serve go on."""
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [2**28], "data_offsets": [0, 2**30]}}).encode()
    update = tmp_path / "large.safetensors"
    update.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(update, 8 + len(header) + 2**30)  # takes no room on the disk
    async with running(sources[0]) as engine:
        before = await ask(engine, "before", PROMPT, 4)
        with full_memory(2**29), pytest.raises(WeightsRefused, match=r"no memory for the new weights beside .* bytes"):
            await weights_of(engine).update_weights(update, None, "keep")
        assert weights_of(engine).weights_state == "serving"
        assert (await ask(engine, "after", PROMPT, 4)).tokens == before.tokens
        assert (await weights_of(engine).update_weights(sources[1], None, "keep")).version.number == 1


class NoGraphs:
    """As much of CUDA graphs as a step asks for."""

    def compute(self, batch: object) -> None:
        return None


async def test_it_wakes_with_memory_for_kv_or_sleeps_on(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs know where KV was, and end with the sleep."""
    monkeypatch.setattr(HfModel, "_new_graphs", lambda model: NoGraphs())

    def refuse(store: KvStore) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    async with running(sources[0]) as engine:
        model = model_of(engine)
        answer, captured = await ask(engine, "before", PROMPT, 4), model._graphs
        assert captured is not None
        await weights_of(engine).sleep(1)
        assert model._graphs is None
        with monkeypatch.context() as patch:
            patch.setattr(KvStore, "take_back", refuse)
            with pytest.raises(WrongState, match=r"cannot wake: no memory for its KV cache \(CUDA out of memory"):
                await weights_of(engine).wake()
        assert weights_of(engine).weights_state == "asleep"
        await weights_of(engine).wake()
        assert model._graphs not in (None, captured)
        assert (await ask(engine, "after", PROMPT, 4)).tokens == answer.tokens


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: Error code 12"),
        MemoryError("no memory for 8 rows of 64 elements"),
    ],
)
async def test_it_wakes_with_memory_for_weights_or_sleeps_on(
    error: Exception, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep that goes on holds no memory, that of the KV cache among it."""

    def refuse(*_: object) -> None:
        raise error

    async with running(sources[0]) as engine:
        model, given = model_of(engine), list[KvStore]()
        answer = await ask(engine, "before", PROMPT, 4)
        await weights_of(engine).sleep(2)
        with monkeypatch.context() as patch:
            patch.setattr(weights, "reload_network", refuse)
            patch.setattr(KvStore, "give_back", lambda store: given.append(store))
            with pytest.raises(WrongState, match=r"cannot wake: no memory for its weights \("):
                await weights_of(engine).wake()
        assert weights_of(engine).weights_state == "asleep"
        assert given == [model.kv_store]
        await weights_of(engine).wake()
        assert (await ask(engine, "after", PROMPT, 4)).tokens == answer.tokens


@pytest.mark.parametrize("given_up_by", ["sleep", "update", "refused update"])
async def test_networks_of_modules_are_freed(given_up_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They refer to themselves, and a server has put what it has loaded aside."""
    decoder_shapes.write(tmp_path, "gpt2", 0)
    made: list[weakref.ref[Network]] = []

    def refuse(config: EmbeddedConfig, model: HfModel, tensors: Mapping[str, Weight]) -> Network:
        network = network_of(config, model, tensors)
        made.append(weakref.ref(network))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    async with running(tmp_path) as engine:
        await ask(engine, "before", PROMPT, 4)
        gc.collect()
        gc.freeze()
        try:
            if given_up_by == "refused update":
                monkeypatch.setattr(updates, "network_of", refuse)
                with pytest.raises(WeightsRefused) as found:
                    await weights_of(engine).update_weights(tmp_path, None, "keep")
                assert found.value.__context__ is None
            else:
                made.append(weakref.ref(model_of(engine).network))
                control = weights_of(engine)
                await (control.sleep(2) if given_up_by == "sleep" else control.update_weights(tmp_path, None, "keep"))
            assert [each() for each in made] == [None]
            assert gc.get_freeze_count()
        finally:
            gc.unfreeze()


def model_of(engine: EmbeddedEngine) -> HfModel:
    """The model of a running engine."""
    assert engine._stepper is not None
    assert isinstance(engine._stepper.model, HfModel)
    return engine._stepper.model


@pytest.mark.campaign
async def test_many_updates_under_load(sources: list[Path], tmp_path: Path) -> None:
    """200 updates: no answer mixes versions, no memory is left behind, none is far slower."""
    write(tmp_path / "middle", "llama", {"vocab_size": 8000, "hidden_size": 256, "num_hidden_layers": 4})
    size = (tmp_path / "middle" / "model.safetensors").stat().st_size // 10**6
    content, is_over = as_bytes(tensors_of(tmp_path / "middle")), False
    answers: list[Answer] = []
    async with running(tmp_path / "middle", max_num_batched_tokens=256) as engine:

        async def client(number: int) -> None:
            while not is_over:
                name = f"{number}-{len(answers)}-{random.random()}"
                answers.append(await ask(engine, name, PROMPT, 40, number))

        clients = [asyncio.create_task(client(number)) for number in range(4)]
        memory = []
        for number in range(200):
            updated = await weights_of(engine).update_weights(content, f"v{number}", "finish")
            assert updated.version.number == number + 1
            memory.append(resident_mb())
        is_over = True
        await asyncio.gather(*clients)
    assert len(answers) > 100
    assert all(len(answer.weights) == 1 and len(answer.tokens) == 40 for answer in answers)
    assert max(memory[100:]) <= max(memory[20:100]) + size


async def scores_of(engine: EmbeddedEngine, name: str) -> tuple[object, list[str]]:
    """The log probabilities of a long prompt, and the versions that its answer names."""
    params = SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    found = [delta async for delta in engine.generate(EngineRequest(name, PROMPT * 10, params))]
    (scores,) = [delta.prompt_logprobs for delta in found if delta.prompt_logprobs is not None]
    return scores, [version.name for delta in found for _, version in delta.weights]


async def held_in_its_prompt(engine: EmbeddedEngine, name: str) -> None:
    """Pause the engine while a request's prompt of several steps is computed."""
    requests = (stream.request for stream in engine._streams.unfinished)
    while not any(one.id == name and one.num_computed for one in requests):
        requests = (stream.request for stream in engine._streams.unfinished)
        await asyncio.sleep(0)
    await weights_of(engine).pause("keep")
    (request,) = (stream.request for stream in engine._streams.unfinished)
    assert 0 < request.num_computed < len(request.tokens)


def continued_with_mirostat(name: str) -> EngineRequest:
    """A request that another worker has begun, with a state that is made of logits."""
    context = Context(Vocabulary(1024), frozenset(), 7)
    chain = ProcessorChain([Mirostat(Mirostat.Args(), context)], context)
    chain.start(PROMPT)
    params = SamplingParams(max_tokens=300, temperature=1.0, seed=7, ignore_eos=True)
    return EngineRequest(name, PROMPT, params, chain=chain, generated_token_ids=PROMPT * 5)


async def test_scores_of_a_prompt_are_of_one_version(sources: list[Path]) -> None:
    async with running(sources[0], max_num_batched_tokens=4) as engine:
        under_way = asyncio.create_task(scores_of(engine, "under way"))
        await held_in_its_prompt(engine, "under way")
        await weights_of(engine).update_weights(as_bytes(tensors_of(sources[1])), None, "keep")
        await weights_of(engine).resume()
        assert await under_way == await scores_of(engine, "after")


async def test_a_state_is_not_made_of_logits_of_two_versions(sources: list[Path]) -> None:
    async with running(sources[0], max_num_batched_tokens=4) as engine:

        async def ended() -> list[str | None]:
            request = continued_with_mirostat("under way")
            return [delta.error async for delta in engine.generate(request) if delta.finish_reason is not None]

        under_way = asyncio.create_task(ended())
        await held_in_its_prompt(engine, "under way")
        await weights_of(engine).update_weights(as_bytes(tensors_of(sources[1])), None, "keep")
        await weights_of(engine).resume()
        assert await under_way == [f"logits processor mirostat: {CHANGED}"]
