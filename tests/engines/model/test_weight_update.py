"""Updated weights are, bit by bit, those that a fresh start packs of the same tensors."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import Source
from quantised_checkpoints import K_TYPES, WIDE, stored_in
from random_checkpoints import write
from safetensors.torch import load_file, save_file
from third_party_checkpoints import write as write_third_party

from worker.engines.embedded import EmbeddedConfig
from worker.engines.embedded.model import HfModel, load_model, stored_weights
from worker.engines.embedded.model.llama import LlamaNetwork
from worker.engines.embedded.model.llama_weights import LlamaWeights
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.model.requantisation import requantised
from worker.engines.embedded.model.stored_weights import Weight, read_weights
from worker.engines.embedded.model.updates import PackedUpdates
from worker.engines.embedded.model.weight_update import tensors_in
from worker.engines.weights import WeightsRefused
from worker.models import convert_gguf
from worker.models.problems import ModelFileError
from worker.models.weight_files import SINGLE
from worker.tiny_model import write_tiny_model

SETTINGS = {
    "dense": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8, no activations": {"dtype": "float32", "quantization": "int8", "activation_dtype": "none"},
}


def loaded(path: Path, **settings: str) -> HfModel:
    settings = {"kernels": "native", "packed_copy": "off"} | settings
    model = load_model(EmbeddedConfig(model_path=path, device="cpu", **settings))  # type: ignore[arg-type]
    model.allocate_kv(2, 256)
    return model


def is_same(ours: LlamaWeights, theirs: LlamaWeights) -> bool:
    pairs = zip(tensors_in(ours), tensors_in(theirs), strict=True)
    return all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)


def packed(network: Network) -> LlamaWeights:
    assert isinstance(network, LlamaNetwork)
    found = network.packed()
    assert found is not None
    return found


def assert_equal(model: HfModel, fresh: HfModel, weights: Mapping[str, Weight]) -> None:
    """The weights make what `fresh` was loaded with, all at once and in parts."""
    updates, expected = PackedUpdates(model), fresh.packed_weights()
    assert expected is not None
    assert is_same(packed(updates.network(updates.check(weights))), expected)
    names, parts = list(weights), packed(model.network)
    random.Random(0).shuffle(names)
    for start in range(0, len(names), 7):
        some = {name: weights[name] for name in names[start : start + 7]}
        parts = packed(model.updated(parts, updates.check(some)))
        assert is_same(parts, expected) == (start + 7 >= len(names))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_parts_make_the_whole(tmp_path: Path, arch: str, settings: str) -> None:
    old = write_tiny_model(tmp_path / "old", arch=arch, seed=1)
    new = write_tiny_model(tmp_path / "new", arch=arch, seed=2)
    model, fresh = (loaded(path, **SETTINGS[settings]) for path in (old, new))
    assert_equal(model, fresh, read_weights(new))


def test_a_quantised_checkpoint_quantises_as_it_was(tmp_path: Path) -> None:
    from worker.quantize import main as quantize

    for form in ("int8", "int4"):
        paths = []
        for seed in (1, 2):
            dense = write_tiny_model(tmp_path / f"{form}-dense-{seed}", seed=seed)
            paths.append(tmp_path / f"{form}-{seed}")
            assert quantize([str(dense), "--output", str(paths[-1]), "--to", form]) == 0
        model, fresh = (loaded(path) for path in paths)
        assert_equal(model, fresh, read_weights(paths[1]))
        assert_equal(model, fresh, read_weights(dense))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_a_gguf_file_quantises_as_llama_cpp_does(tmp_path: Path, arch: str, kind: Kind) -> None:
    """Float weights give what a start from a GGUF file of the same weights gives."""
    rounding = "int8" if kind == Kind.Q8_0 else "none"  # 8 bits have another layout beside rounded rows
    models: list[HfModel] = []
    for seed in (1, 2):
        dense = write_tiny_model(tmp_path / f"dense-{seed}", arch=arch, seed=seed)
        source = Source(dense, kind)
        name = "blk.0.attn_v.weight"  # the parts of a fused projection may be of several types
        source.tensors[name] = (source.tensors[name][0], Kind.Q8_0)
        file = source.write(tmp_path / f"{seed}.gguf")
        checkpoint = convert_gguf(file, tmp_path / "cache", lambda _: None, keeps_blocks=True)
        models.append(loaded(checkpoint, activation_dtype=rounding))
    assert_equal(models[0], models[1], read_weights(dense))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two dense checkpoints whose rows are whole super-blocks."""
    root = tmp_path_factory.mktemp("wide")
    write(root / "0", "llama", WIDE)
    tensors = load_file(root / "0" / SINGLE)
    shutil.copytree(root / "0", root / "1")
    save_file({name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}, root / "1" / SINGLE)
    return [root / "0", root / "1"]


@pytest.mark.parametrize("rounding", ["int8", "none"])
def test_super_blocks_are_rounded_as_the_file_was(tmp_path: Path, wide: list[Path], rounding: str) -> None:
    """Fused projections of two types, in parts and at once; the update says the types."""
    stored = [stored_in(path, tmp_path / path.name, K_TYPES) for path in wide]
    model, fresh = (loaded(path, activation_dtype=rounding) for path in stored)
    assert_equal(model, fresh, read_weights(wide[1]))
    assert_equal(model, fresh, read_weights(stored[1]))
    given = PackedUpdates(model).check(read_weights(wide[1]))
    assert Counter(given.formats.values()) == {"Q4_K": 2 * 5, "Q6_K": 2 * 2 + 1}
    assert given.digests == PackedUpdates(model).check(read_weights(stored[1])).digests


def test_tensors_of_another_type_change_the_layout(tmp_path: Path, wide: list[Path]) -> None:
    """A file of the new weights in other types is served as it is; so is one of the old types."""
    stored = [stored_in(path, tmp_path / path.name, K_TYPES) for path in wide]
    other = stored_in(wide[1], tmp_path / "other", {"q_proj": "Q8_0", "_proj": "Q6_K", "embed_tokens": "Q8_0"})
    model, fresh = (loaded(path, activation_dtype="int8") for path in stored)
    was = packed(model.network)
    changed = packed(model.updated(was, PackedUpdates(model).check(read_weights(other))))
    expected = loaded(other, activation_dtype="int8").packed_weights()
    assert expected is not None
    assert is_same(changed, expected)
    expected = fresh.packed_weights()
    assert expected is not None
    assert is_same(packed(model.updated(changed, PackedUpdates(model).check(read_weights(stored[1])))), expected)


@pytest.mark.parametrize("format", ["gptq", "gptq_sym", "gptq_8", "int_quantized"])
def test_a_format_that_nothing_rounds_to_is_replaced_by_int8(
    tmp_path: Path, wide: list[Path], format: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights are those of ``--quantization int8``, but for a head that was not quantised."""
    path = write_third_party(wide[0], tmp_path / format, format)
    with caplog.at_level(logging.INFO, "worker"):
        model = loaded(path)
        updates = PackedUpdates(model)
    assert "updates of weights in" in caplog.text
    assert "rounded to int8: nothing here rounds to that format" in caplog.text
    given = updates.check(read_weights(wide[1]))
    assert Counter(given.formats.values()) == {"int8": 2 * 7}
    found, int8 = packed(updates.network(given)), loaded(wide[1], quantization="int8").packed_weights()
    assert int8 is not None
    assert is_same(replace(found, head=int8.head, embedding=int8.embedding), int8)
    parts, names = packed(model.network), sorted(given.weights)
    for start in range(0, len(names), 5):
        some = read_weights(wide[1])
        parts = packed(model.updated(parts, updates.check({name: some[name] for name in names[start : start + 5]})))
    assert is_same(parts, found)


def test_what_a_type_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="what the float16 scales of Q4_1 cannot"):
        requantised(torch.full((4, 32), 1e9), "Q4_1")
    for kind in ("Q4_K", "Q6_K"):
        with pytest.raises(ValueError, match=f"what the float16 scales of {kind} cannot"):
            requantised(torch.linspace(-1, 1, 256)[None] * 1e9, kind)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_that_are_none_are_refused_in_any_type(tmp_path: Path, wide: list[Path], dtype: torch.dtype) -> None:
    """Also where the rounding itself finds them; and what is rounded has the same digest."""
    model = loaded(stored_in(wide[0], tmp_path / "old", K_TYPES), dtype="bfloat16")
    updates, name = PackedUpdates(model), "model.layers.0.mlp.down_proj.weight"
    weight = read_weights(wide[1])[name]
    assert isinstance(weight, torch.Tensor)
    weight = weight.half().to(torch.bfloat16).to(dtype)
    found, wanted = updates.check({name: weight}), updates.check({name: weight.float()})
    assert (found.digests, found.formats) == (wanted.digests, wanted.formats)
    said = dict.fromkeys((float("nan"), -float("inf")), "holds a number that is infinite or not a number")
    if dtype != torch.float16:
        said[1e38] = "holds what the float16 scales of Q6_K cannot"
    if dtype == torch.float64:
        said[1e39] = r"holds 1e\+39, which bfloat16 cannot"
    if dtype == torch.float32:
        said[3.4e38] = r"holds 3.4e\+38, which bfloat16 cannot"
    for number, message in said.items():
        broken = weight.clone()
        broken[3, 5] = number
        with pytest.raises(WeightsRefused, match=f"tensor {name}: {message}"):
            updates.check({name: broken})


def test_names_may_be_those_of_a_model_without_a_head(tmp_path: Path) -> None:
    old, new = (write_tiny_model(tmp_path / str(seed), arch="qwen3", seed=seed) for seed in (1, 2))
    updates, weights = PackedUpdates(loaded(old)), read_weights(new)
    short = {name.removeprefix("model."): weight for name, weight in weights.items()}
    assert is_same(packed(updates.network(updates.check(short))), packed(loaded(new).network))
    assert updates.check(short).digests == updates.check(weights).digests
    for name in ("norm.wait", "layers.2.input_layernorm.weight"):
        with pytest.raises(WeightsRefused, match=f"tensor '{name}': the model has none of this name"):
            updates.check({**short, name: short["norm.weight"]})
    with pytest.raises(WeightsRefused, match=r"tensor 'norm\.weight': the model has none of this name"):
        updates.check({**weights, "norm.weight": weights["model.norm.weight"]})


def test_tied_embeddings_are_one_weight(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tied", arch="qwen3")
    model, weights = loaded(path), read_weights(path)
    updates, head = PackedUpdates(model), weights["model.embed_tokens.weight"]
    given = updates.check({**weights, "lm_head.weight": head})
    assert is_same(packed(updates.network(given)), packed(model.network))
    assert isinstance(head, torch.Tensor)
    for other in ({"lm_head.weight": head}, {**weights, "lm_head.weight": head + 1}):
        with pytest.raises(WeightsRefused, match="the model's embeddings are tied"):
            updates.check(other)


def written(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"next")


def replaced(path: Path) -> None:
    (path.parent / "next").write_bytes(path.read_bytes())
    (path.parent / "next").replace(path)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


@pytest.mark.parametrize("changed", ["one.safetensors", "two.safetensors"])
@pytest.mark.parametrize("change", [written, replaced, cut_off])
def test_files_are_read_in_one_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], changed: str
) -> None:
    """A trainer writes its next checkpoint meanwhile: weights of two of them were never there."""
    for name in ("one", "two"):
        path = tmp_path / f"{name}.safetensors"
        save_file({name: torch.ones(4)}, path)
        os.utime(path, (1, 1))
    real, read = stored_weights._content, list[Path]()

    def content(path: Path) -> memoryview:
        found = real(path)
        if not read:
            change(tmp_path / changed)
        read.append(path)
        return found

    monkeypatch.setattr(stored_weights, "_content", content)
    with pytest.raises(ModelFileError, match=f"^{changed}: cannot be read: It has changed while it was read$"):
        read_weights(tmp_path)
    monkeypatch.undo()
    if change is not cut_off:
        assert set(read_weights(tmp_path)) == {"one", "two"}
