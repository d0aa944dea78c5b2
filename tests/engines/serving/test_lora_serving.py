"""LoRA adapters in the engine: caches, preemptions, drafts and choices keep them apart, and files
that are no adapter are refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_adapters import ALL_TARGETS, write_adapter
from random_checkpoints import write
from safetensors.torch import load_file, save_file

from worker.engines.embedded.adapters import LoadedAdapters
from worker.engines.embedded.kv_cache import budget
from worker.engines.embedded.offline import Engine
from worker.engines.lora_adapters import CONFIG, WEIGHTS, AdapterRefused
from worker.engines.lora_config import LoraConfig, read_config
from worker.engines.request import EngineRequest
from worker.errors import InvalidRequest, StartupError
from worker.sampling import SamplingParams

NAMES = (None, "mine", "other")
PROMPT = list(range(30, 80))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write(folder / "model", "llama", {})
    write(folder / "draft", "llama", {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32})
    write_adapter(folder / "mine", folder / "model", seed=1)
    write_adapter(folder / "other", folder / "model", seed=2, targets=ALL_TARGETS, rank=3)
    return folder


def engine(folder: Path, **changes: Any) -> Engine:
    modules = tuple((name, str(folder / name)) for name in NAMES if name is not None)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "numerics": "exact",
        "context_length": 128,
        "lora_modules": modules,
    } | changes
    return Engine(folder / "model", **settings)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 3, **changes})


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str | None, list[int]]:
    """The answer of each adapter in an engine that has computed nothing else, without drafts."""
    found = {}
    for name in NAMES:
        [result] = engine(folder, speculative_config={"method": "none"}).generate([PROMPT], params(), adapter=name)
        found[name] = list(result.outputs[0].token_ids)
    assert len({tuple(tokens) for tokens in found.values()}) == len(NAMES)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 9},
        {"kv_blocks": 16, "max_num_seqs": 9},  # too few for all of them at a time
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}, "max_num_seqs": 9},
        {"speculative_config": {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3}},
    ],
    ids=["chunked", "preempted", "drafted", "drafted by a model"],
)
def test_answers_are_those_of_an_engine_of_its_own(
    folder: Path, alone: dict[str | None, list[int]], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "PAGE_TOKENS", 32)
    speculative = settings.get("speculative_config")
    if speculative and "model" in speculative:
        settings = {"speculative_config": speculative | {"model": str(folder / speculative["model"])}}
    shared = engine(folder, **settings)
    asked = {shared.add(PROMPT, params(), adapter=name): name for name in NAMES * 3}
    answers: dict[str, list[int]] = {}
    while shared.unfinished:
        answers |= {result.request_id: list(result.outputs[0].token_ids) for result in shared.step()}
    assert answers == {request_id: alone[name] for request_id, name in asked.items()}
    if "kv_blocks" in settings:
        assert shared.session.stepper.scheduler.queues.num_preemptions > 0


def test_a_prefix_hit_is_of_the_same_adapter(folder: Path, alone: dict[str | None, list[int]]) -> None:
    shared = engine(folder)
    for cached in (0, 48):
        for name in NAMES:
            [result] = shared.generate([PROMPT], params(), adapter=name)
            assert (list(result.outputs[0].token_ids), result.outputs[0].num_cached_tokens) == (alone[name], cached)


def test_choices_of_an_adapter_are_its_own(folder: Path, alone: dict[str | None, list[int]]) -> None:
    [result] = engine(folder).generate([PROMPT], params(n=3, best_of=3), adapter="mine")
    answers = [list(each.token_ids) for each in result.outputs]
    assert answers[0] == alone["mine"]
    assert len({tuple(tokens) for tokens in answers}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_companion_is_computed_with_its_adapter(
    folder: Path, alone: dict[str | None, list[int]], name: str | None
) -> None:
    """Guidance away from the prompt itself changes nothing, if both rows are of one adapter."""
    same = {"name": "cfg", "args": {"scale": 3.0, "negative_token_ids": PROMPT}}
    [result] = engine(folder).generate([PROMPT], params(), processors=[[same]], adapter=name)
    assert list(result.outputs[0].token_ids) == alone[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_model_computes_its_rows_without_the_adapter(
    folder: Path, alone: dict[str | None, list[int]], name: str | None
) -> None:
    """Contrast of a model with itself changes nothing, if both rows are of one adapter."""
    contrastive = {"name": "contrastive", "args": {"alpha": 1e-9, "beta": 1.0}}
    amateur = engine(folder, speculative_config={"model": str(folder / "model")})
    [result] = amateur.generate([PROMPT], params(), processors=[[contrastive]], adapter=name)
    assert (list(result.outputs[0].token_ids) == alone[name]) == (name is None)


def test_an_adapter_that_is_none_is_refused_by_its_name(folder: Path) -> None:
    shared = engine(folder)
    with pytest.raises(InvalidRequest, match=r"^adapter: there is no LoRA adapter 'hers'; there is mine, other$"):
        shared.generate([PROMPT], params(), adapter="hers")
    for adapter in (5, ["mine"]):
        with pytest.raises(ValueError, match=r"^adapter must be a text, got"):
            shared.add(PROMPT, params(), adapter=adapter)  # type: ignore[arg-type]
    assert shared.session.is_idle


def test_a_request_keeps_its_adapter_when_it_is_replaced(
    folder: Path, alone: dict[str | None, list[int]], tmp_path: Path
) -> None:
    shared = engine(folder)
    adapters = shared.session.stepper.adapters
    assert adapters is not None
    before = shared.add(PROMPT, params(), adapter="mine")
    shared.step()
    digest = adapters.digests["mine"]
    adapters.load("mine", folder / "other")
    after = shared.add(PROMPT, params(), adapter="mine")
    found: dict[str, list[int]] = {}
    while shared.unfinished:
        found |= {result.request_id: list(result.outputs[0].token_ids) for result in shared.step()}
    assert (found[before], found[after]) == (alone["mine"], alone["other"])
    meant = EngineRequest("r", PROMPT, SamplingParams(), lora_name="mine", lora_digest=digest)
    for _ in range(2):  # it waited for its grammar meanwhile
        found_again = adapters.of(meant)
        assert found_again is not None
        assert found_again.digest == digest
        adapters.load("mine", folder / "other")  # what is there already replaces nothing
    adapters.load("mine", write_adapter(tmp_path / "newest", folder / "model", seed=3))
    with pytest.raises(InvalidRequest, match="the LoRA adapter mine was replaced"):
        adapters.of(meant)
    adapters.unload("mine")
    with pytest.raises(InvalidRequest, match="there is no LoRA adapter 'mine'; there is other"):
        shared.add(PROMPT, params(), adapter="mine")


def test_kernels_without_adapters_refuse_them_at_start(folder: Path) -> None:
    with pytest.raises(StartupError, match="--lora-modules: LoRA adapters are served where native kernels compute"):
        engine(folder, kernels="torch", numerics="fast")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora must be null or false: DoRA is not served"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save must be null or false"),
    ({"bias": "all"}, "bias must be none"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights must be one of"),
    ({"a_setting_of_2031": {"x": 1}}, "a_setting_of_2031 must be null or false: it is not served"),
    ({"rank_pattern": {"q_proj": 4}}, "r must be the rank of"),
    ({"rank_pattern": {"(a+)+b": 4}}, "must be names, alternatives and"),
    ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern.q_proj must be a finite number"),
    ({"lora_alpha": None}, "lora_alpha must be a finite number"),
    ({"target_modules": ["k_proj"]}, "target_modules must have model.layers.0.self_attn.q_proj"),
]


def loading(folder: Path) -> LoadedAdapters:
    adapters = engine(folder).session.stepper.adapters
    assert adapters is not None
    return adapters


def test_settings_that_are_not_served_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    adapters = loading(folder)
    for number, (changes, problem) in enumerate(BAD):
        path = write_adapter(tmp_path / str(number), folder / "model")
        config = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps(config | changes))
        with pytest.raises(AdapterRefused) as refused:
            adapters.load("bad", path)
        assert problem in str(refused.value)
    assert adapters.digests.keys() == {"mine", "other"}


def test_matrices_that_are_none_of_lora_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    adapters, layer = loading(folder), "base_model.model.model.layers.0.self_attn.q_proj"
    path = write_adapter(tmp_path / "a", folder / "model", targets=("q_proj",))
    good = load_file(path / WEIGHTS)
    a, b = good[f"{layer}.lora_A.weight"], good[f"{layer}.lora_B.weight"]
    for changes, problem in (
        ({f"{layer}.lora_magnitude_vector": b[:, 0]}, "is no matrix of a LoRA adapter"),
        ({f"{layer}.lora_A.weight": a.to(torch.int8)}, "must be of F32, F16, BF16 or F64, got I8"),
        ({f"{layer}.lora_A.weight": a[:-1]}, "A and B of model.layers.0.self_attn.q_proj must have one rank"),
        ({f"{layer}.lora_B.weight": b * float("nan")}, "lora_B holds what is no finite number"),
        ({f"{layer}.lora_B.weight": (b * 0 + 3e38)}, "lora_B times its scale holds what is no finite number"),
    ):
        save_file({name: tensor.contiguous() for name, tensor in (good | changes).items()}, str(path / WEIGHTS))
        with pytest.raises(AdapterRefused) as refused:
            adapters.load("bad", path)
        assert problem in str(refused.value)
    content = (folder / "mine" / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(content[:-5])
    with pytest.raises(AdapterRefused, match="is cut off"):
        adapters.load("bad", path)


WORDS = st.sampled_from(["q_proj", "k_proj", "model.layers.1.mlp.up_proj", r".*\.o_proj", "self_attn", "a|b", "(("])
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-2, 20), st.floats(), st.text(max_size=4), st.lists(WORDS))


@given(
    st.fixed_dictionaries(
        {"peft_type": st.just("LORA"), "r": st.integers(1, 9), "lora_alpha": st.integers(1, 9)},
        optional={
            "target_modules": st.one_of(WORDS, st.lists(WORDS, min_size=1), VALUES),
            "rank_pattern": st.one_of(st.dictionaries(WORDS, st.integers(1, 9)), VALUES),
            "alpha_pattern": st.one_of(st.dictionaries(WORDS, VALUES), VALUES),
            "use_rslora": VALUES,
            "use_dora": VALUES,
            "bias": st.one_of(st.just("none"), VALUES),
            "some_setting": VALUES,
        },
    )
)
@settings(max_examples=examples(300), deadline=None)
def test_settings_are_understood_or_refused(config: dict[str, Any]) -> None:
    try:
        found = read_config(config)
    except ValueError:
        return
    assert isinstance(found, LoraConfig)
    assert all(config.get(name) in (None, False, [], {}) for name in ("use_dora", "some_setting"))
    layer = "model.layers.1.self_attn.q_proj"
    alpha, rank = found.alpha(layer), found.rank(layer)
    assert found.scale(layer) == alpha / (rank**0.5 if config.get("use_rslora") else rank)


def test_a_pattern_of_no_layer_changes_none() -> None:
    """An empty one was taken for all that no other pattern matches."""
    patterns = {"rank_pattern": {"": 4, "k_proj": 2}, "alpha_pattern": {"": 64, "layers.1.self_attn.q_proj": 3}}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj"], **patterns}
    found, at = read_config(config), "model.layers.1.self_attn"
    assert [found.rank(f"{at}.{name}") for name in ("q_proj", "k_proj", "o_proj")] == [8, 2, 8]
    assert [found.alpha(f"{at}.{name}") for name in ("q_proj", "k_proj", "o_proj")] == [3, 16, 16]
