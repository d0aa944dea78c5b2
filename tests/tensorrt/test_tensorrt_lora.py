"""LoRA adapters on TensorRT-LLM: what is asked of it, and the answers of an adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from lora_adapters import merged, write_adapter
from safetensors.torch import load_file, save_file
from stand_in import collect, embedded, engine, running, stand_in

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.forcing import ForcedPrefix
from adapters.vocabulary import Vocabulary
from worker.engines.lora_adapters import CONFIG, WEIGHTS
from worker.engines.trtllm import TrtllmEngine
from worker.engines.trtllm.cache_reports import EventRelay
from worker.errors import ConfigurationError, StartupError
from worker.sampling import SamplingParams

PROMPT = [9, 30, 41, 77]


@pytest.fixture(scope="module")
def mine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("lora") / "mine", model, seed=3)


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("lora") / "other", model, seed=4, rank=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted(model: Path, mine: Path, other: Path) -> AsyncIterator[TrtllmEngine]:
    async with running(model, "--lora-modules", f"mine={mine},other={other}") as started:
        yield started


@pytest.mark.asyncio(loop_scope="module")
async def test_answers_are_those_of_merged_weights(
    adapted: TrtllmEngine, model: Path, mine: Path, tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    async with embedded(merged(tmp_path / "merged", model, mine)) as reference:
        expected = await collect(reference, PROMPT, params)
    answers = {name: await collect(adapted, PROMPT, params, lora_name=name) for name in (None, "mine", "other")}
    assert answers["mine"].token_ids == expected.token_ids
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_processors_run_on_an_adapter(adapted: TrtllmEngine) -> None:
    context = Context(Vocabulary(1024), frozenset(), 0)
    chain = ProcessorChain([ForcedPrefix(ForcedPrefix.Args(token_ids=[40, 41]), context)], context)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    forced = await collect(adapted, PROMPT, params, chain=chain, lora_name="mine")
    assert forced.token_ids[:2] == [40, 41]
    assert forced.receipt is not None
    plain = await collect(adapted, [*PROMPT, 40, 41], params, lora_name="mine")
    assert forced.token_ids[2:] == plain.token_ids[:4]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_engine_names_its_adapters(adapted: TrtllmEngine) -> None:
    assert adapted._info is not None
    assert sorted(adapted._info.adapters) == ["mine", "other"]
    assert adapted._llm.args.lora_config.lora_target_modules == ["attn_k", "attn_q", "attn_v"]
    assert (adapted._llm.args.lora_config.max_lora_rank, adapted._llm.args.lora_config.max_loras) == (8, 2)


@pytest.mark.parametrize(
    ("layer", "new"),
    [("q_proj", "gate"), ("self_attn.q_proj", "mlp.experts.0.gate_proj")],
)
def test_a_layer_that_it_would_skip_is_refused(model: Path, tmp_path: Path, layer: str, new: str) -> None:
    adapter, base = write_adapter(tmp_path / "a", model), shutil.copytree(model, tmp_path / "base")
    for directory, name in ((adapter, WEIGHTS), (base, "model.safetensors")):
        tensors = load_file(directory / name)
        save_file({key.replace(layer, new): tensor for key, tensor in tensors.items()}, str(directory / name))
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | {"target_modules": ["v_proj", new]}))
    with pytest.raises(ConfigurationError, match=rf"^--lora-modules: mine: TensorRT-LLM adapts .*changes .*{new}$"):
        engine(base, "--lora-modules", f"mine={adapter}")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--disaggregation-mode", "prefill"], "adapters are registered with aggregated workers alone"),
        (["--served-model-name", "mine"], "mine is the name of the model itself"),
        (["--override-engine-args", '{"lora_config": {}}'], r"lora_config: .*adapters are --lora-modules"),
        (["--override-engine-args", '{"enable_lora": true}'], r"enable_lora: .*adapters are --lora-modules"),
    ],
)
def test_what_adapters_do_not_go_with(model: Path, mine: Path, argv: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        engine(model, "--lora-modules", f"mine={mine}", *argv)


async def test_a_refused_adapter_keeps_it_from_starting(model: Path, mine: Path) -> None:
    with stand_in():
        started = engine(model, "--lora-modules", f"mine={mine}")
        (mine / WEIGHTS).rename(mine / "gone")  # after it was checked
        try:
            with pytest.raises(StartupError, match=r"^--lora-modules: mine: TensorRT-LLM .*cannot be loaded"):
                await started.start()
        finally:
            (mine / "gone").rename(mine / WEIGHTS)
            await started.stop()


class Sink:
    """Says what was stored."""

    def __init__(self) -> None:
        self.stored_of: list[str | None] = []

    def stored(self, parent: int | None, hashes: list[int], ids: list[int], salt: str | None, lora: str | None) -> None:
        self.stored_of.append(lora)

    def removed(self, hashes: list[int]) -> None:
        raise AssertionError


def test_blocks_of_an_adapter_are_reported_as_its_own(caplog: pytest.LogCaptureFixture) -> None:
    block = {"block_hash": 1, "tokens": [{"token_id": 5}]}
    for has_adapters, expected in ((True, [None, "mine"]), (False, [None, None, None, "mine"])):
        sink = Sink()
        relay = EventRelay(sink, 1, has_adapters)  # type: ignore[arg-type]
        said: list[dict[str, Any]] = [{}, {}, {"lora_name": None}, {"lora_name": "mine"}]
        for number, named in enumerate(said):
            relay.take({"event_id": number, "data": {"type": "stored", "blocks": [block], **named}})
        assert sink.stored_of == expected
    assert caplog.text.count("do not name LoRA adapters") == 1
