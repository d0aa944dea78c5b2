"""Updated weights are, bit by bit, those that a fresh start packs of the same tensors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from random_checkpoints import TYPES, write
from safetensors.torch import load_file

from worker.engines.embedded import EmbeddedConfig
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.llama_weights import LlamaWeights
from worker.engines.embedded.model.stored_weights import read_weights
from worker.engines.embedded.model.weight_update import check_given, tensors_in
from worker.engines.weights import NotSupported, WeightsRefused
from worker.tiny_model import write_tiny_model

SETTINGS = {
    "dense": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 activations": {"dtype": "float32", "quantization": "int8", "activation_dtype": "int8"},
}


def loaded(path: Path, **settings: str) -> HfModel:
    settings = {"kernels": "native", "packed_copy": "off"} | settings
    model = load_model(EmbeddedConfig(model_path=path, device="cpu", **settings))  # type: ignore[arg-type]
    model.allocate_kv(2, 256)
    return model


def is_same(ours: LlamaWeights, theirs: LlamaWeights) -> bool:
    pairs = zip(tensors_in(ours), tensors_in(theirs), strict=True)
    return all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_parts_make_the_whole(tmp_path: Path, arch: str, settings: str) -> None:
    old = write_tiny_model(tmp_path / "old", arch=arch, seed=1)
    new = write_tiny_model(tmp_path / "new", arch=arch, seed=2)
    model, fresh = (loaded(path, **SETTINGS[settings]) for path in (old, new))
    expected, weights = fresh.packed_weights(), read_weights(new)
    whole = model.updated(model.packed_weights(), check_given(weights, model.geometry, model.dtype))
    assert is_same(whole.packed(), expected)  # type: ignore[arg-type]
    names = list(weights)
    random.Random(arch).shuffle(names)
    parts = model.packed_weights()
    for start in range(0, len(names), 5):
        some = {name: weights[name] for name in names[start : start + 5]}
        parts = model.updated(parts, check_given(some, model.geometry, model.dtype)).packed()  # type: ignore[assignment]
        assert is_same(parts, expected) == (start + 5 >= len(names))


def test_a_quantised_checkpoint_takes_its_own_format(tmp_path: Path) -> None:
    from worker.quantize import main as quantize

    paths = []
    for seed in (1, 2):
        dense = write_tiny_model(tmp_path / f"dense-{seed}", seed=seed)
        paths.append(tmp_path / f"quantised-{seed}")
        assert quantize([str(dense), "--output", str(paths[-1]), "--to", "int8"]) == 0
    model, fresh = (loaded(path) for path in paths)
    given = check_given(read_weights(paths[1]), model.geometry, model.dtype)
    network = model.updated(model.packed_weights(), given)
    assert is_same(network.packed(), fresh.packed_weights())  # type: ignore[arg-type]
    name = "model.layers.0.self_attn.k_proj.weight"
    unquantised = {name: load_file(tmp_path / "dense-2" / "model.safetensors")[name]}
    with pytest.raises(WeightsRefused, match=f"tensor {name}: the model's is quantised, as its checkpoint has it"):
        model.updated(model.packed_weights(), check_given(unquantised, model.geometry, model.dtype))


def test_other_networks_refuse_by_name(tmp_path: Path) -> None:
    write(tmp_path / "gemma2", "gemma2", TYPES["gemma2"])
    with pytest.raises(NotSupported, match="kernels compute gemma2"):
        loaded(tmp_path / "gemma2").packed_weights()
    llama = write_tiny_model(tmp_path / "llama")
    with pytest.raises(NotSupported, match="here torch kernels compute llama"):
        loaded(llama, kernels="torch").packed_weights()


def test_tied_embeddings_are_one_weight(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tied", arch="qwen3")
    model, weights = loaded(path), read_weights(path)
    head = weights["model.embed_tokens.weight"]
    given = check_given({**weights, "lm_head.weight": head}, model.geometry, model.dtype)
    assert is_same(model.updated(model.packed_weights(), given).packed(), model.packed_weights())  # type: ignore[arg-type]
    assert isinstance(head, torch.Tensor)
    for other in ({"lm_head.weight": head}, {**weights, "lm_head.weight": head + 1}):
        with pytest.raises(WeightsRefused, match="the model's embeddings are tied"):
            check_given(other, model.geometry, model.dtype)
