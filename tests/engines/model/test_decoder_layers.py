"""All decoder layers in one native call have the bits of one kernel after another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_runs import last_logits
from model_runs import load_native as load

from worker.engines.embedded import native
from worker.engines.embedded.model import HfModel, llama
from worker.engines.embedded.model.quantisation import QuantisedGemm, StackedWeight, quantise

DTYPES = [each for each in ("float32", "bfloat16") if native.unavailable(getattr(torch, each)) is None]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.native,
]


def computed(model: HfModel, cuts: tuple[int, ...] = (0, 40, 41, 88, 89, 90)) -> list[torch.Tensor]:
    """Logits of each chunk of a prompt of 90 tokens, and what is in the KV store behind them."""
    rows = last_logits(model, cuts)
    return [rows, *(pages[[2, 0, 3]] for pages in model.kv_store.tensors)]


def check(model: HfModel) -> None:
    """With all layers in one call, and without."""
    assert model._network._native is not None
    found = computed(model)
    model._network.__dict__["_native"] = None
    expected = computed(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert found[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_of_every_architecture(arch: str, quantization: str, dtype: str, every_checkpoint: dict[str, Path]) -> None:
    check(load(every_checkpoint[arch], dtype=dtype, quantization=quantization))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", native.PATHS)
def test_on_every_path(path: str, dtype: str, every_checkpoint: dict[str, Path]) -> None:
    if native.unavailable(getattr(torch, dtype), path) is None:
        check(load(every_checkpoint["llama"], dtype=dtype, kernels=f"native-{path}"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_rounded_activations(dtype: str, every_checkpoint: dict[str, Path]) -> None:
    check(load(every_checkpoint["qwen3"], dtype=dtype, quantization="int4", activation_dtype="int8"))


@pytest.mark.parametrize(("kv", "dtype"), [*(("int8", dtype) for dtype in DTYPES), ("int16", "float32")])
def test_over_a_quantised_kv_cache(kv: str, dtype: str, every_checkpoint: dict[str, Path]) -> None:
    check(load(every_checkpoint["qwen3"], dtype=dtype, kv_cache_dtype=kv))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_projection_whose_parts_have_different_formats(dtype: str, every_checkpoint: dict[str, Path]) -> None:
    model = load(every_checkpoint["qwen2"], dtype=dtype, quantization="int8")
    layer = model._network._layers[0]
    rows, inner = layer._qkv.out_features, layer._qkv.in_features
    weight = torch.randn(rows, inner, generator=torch.Generator().manual_seed(3)) / inner**0.5
    parts = tuple(quantise(part, to) for part, to in zip(weight.chunk(3), ("int4", "int8", "int4"), strict=True))
    bias = torch.linspace(-1, 1, rows).to(model.dtype)
    layer._qkv.gemm = QuantisedGemm(StackedWeight(parts), bias)
    assert len(layer.native().qkv) == 3
    check(model)


def test_torchs_kernels_compute_layer_by_layer(every_checkpoint: dict[str, Path]) -> None:
    model = load(every_checkpoint["llama"], dtype="float32", kernels="torch")
    assert model._network._native is None
    assert computed(model)[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_the_same_looked_up_and_computed(
    dtype: str, every_checkpoint: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(every_checkpoint["llama"], dtype=dtype)
    network, generator = model._network, torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 17, 500):
        positions = torch.randint(model.context_length, (count,), generator=generator)
        found, expected = network._rope_tables(positions), network._rope.tables(positions, model.dtype)
        assert torch.equal(found.cosine, expected.cosine)
        assert torch.equal(found.sine, expected.sine)
    monkeypatch.setattr(llama, "_MOST_TABLES", 1000)  # bytes, as if the model's context were longer
    other = load(every_checkpoint["llama"], dtype=dtype)
    assert network._tables is not None
    assert other._network._tables is None
    assert all(torch.equal(one, two) for one, two in zip(computed(model), computed(other), strict=True))
