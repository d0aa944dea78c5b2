"""Tied embeddings are held once: rows come out of the packed output layer, bit by bit those of
the checkpoint.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from effort import examples, grid
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoints import COMMON, EVERY_TYPE, GEMMA, MIXTURE
from served_checkpoint import load, logits, served_or_refused
from transformers import AutoConfig, AutoModelForCausalLM

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import gemm, load_model, transformers_checkpoint
from worker.engines.embedded.model.embedding import Embedding
from worker.engines.embedded.model.gemm import NativeGemm, OneDnnGemm, TorchGemm
from worker.engines.embedded.model.kernels import TORCH, native_kernels
from worker.engines.embedded.model.linear import Linear, linears
from worker.engines.embedded.model.llama import LlamaNetwork
from worker.engines.embedded.model.panels import Panels, lookup
from worker.engines.embedded.model.updates import PackedUpdates
from worker.models.weight_files import SINGLE
from worker.quantize.output import write_quantised
from worker.tiny_model import write_tiny_model

DTYPES = [torch.float32, torch.bfloat16]
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "layer_types": ["full_attention"] * 3},
    "qwen3_moe": MIXTURE,
}

pytestmark = pytest.mark.usefixtures("one_thread")


def randn(rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows * inner)).to(dtype)


def blocked(weight: torch.Tensor, columns: int, inner_block: int) -> torch.Tensor:
    """``weight`` as oneDNN lays it out, ``OI{inner_block}i{columns}o``, in words of 32 bits;
    element by element.
    """
    per_word = 4 // weight.itemsize
    rows, inner = weight.shape
    step = inner_block * per_word
    padded = torch.zeros(-(-rows // columns) * columns, -(-inner // step) * step, dtype=weight.dtype)
    padded[:rows, :inner] = weight
    outer = padded.view(-1, columns, padded.shape[1] // step, inner_block, per_word)
    return outer.permute(0, 2, 3, 1, 4).contiguous().view(torch.int32).flatten()


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, 200),
    inner=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    columns=st.sampled_from(gemm._ONEDNN_COLUMNS),
    inner_block=st.sampled_from([1, 8, 16, 64]),
    data=st.data(),
)
def test_rows_are_found_in_every_layout_of_onednn(
    rows: int, inner: int, dtype: torch.dtype, columns: int, inner_block: int, data: st.DataObject
) -> None:
    weight = randn(rows, inner, dtype)
    words = blocked(weight, columns, inner_block)
    layouts = list(gemm.onednn_layouts(words, weight.shape, dtype))
    assert any(panels.words.shape[2] == columns and panels.matches(weight) for panels in layouts)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), max_size=9)), dtype=torch.int64)
    found = lookup(weight, layouts)
    assert found is not None
    assert torch.equal(found(ids), weight[ids])


@settings(max_examples=examples(40), deadline=None)
@given(rows=st.integers(1, 150), words=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_rows_are_found_in_native_panels(rows: int, words: int, dtype: torch.dtype) -> None:
    weight = randn(rows, words * 4 // dtype.itemsize, dtype)
    [panels] = NativeGemm(weight, None).layouts()
    ids = torch.arange(rows).flip(0)
    assert torch.equal(panels.rows(ids), weight[ids])
    assert torch.equal(panels.rows(ids[None]), weight[ids][None])


@pytest.mark.parametrize("shape", [(320, 64), (1000, 100), (49, 7), (4099, 33)])
def test_embeddings_are_the_weights_rows_in_any_packed_layout(shape: tuple[int, int]) -> None:
    weight = randn(*shape, torch.float32)
    ids = torch.tensor([0, shape[0] - 1, 3, 3])
    for kernels in (TORCH, native_kernels("generic")):
        layer = Linear(weight)
        layer.pack(kernels)
        for is_tied in (False, True):
            assert torch.equal(Embedding(weight, layer, is_tied, weight.dtype)(ids), weight[ids])


def test_a_layout_that_does_not_match_is_not_taken() -> None:
    weight = randn(64, 8, torch.float32)
    words = blocked(weight, 32, 1).view(2, 8, 32)
    right = Panels(words, 8, torch.float32)
    one_off = words.clone()
    one_off[1, 7, 31] ^= 1
    wrong = (replace(right, words=one_off), replace(right, words=words.view(4, 8, 16)))
    assert not any(panels.matches(weight) for panels in wrong)
    assert lookup(weight, [*wrong, right]) == right.rows
    assert lookup(weight, wrong) is None


RECOGNISED = """
import torch
from worker.engines.embedded.model.gemm import OneDnnGemm
for shape in ((320, 64), (49152, 576), (1000, 100)):
    weight = torch.randn(shape)
    [found] = [panels for panels in OneDnnGemm(weight, None).layouts() if panels.matches(weight)]
    print(found.words.nbytes, weight.nbytes)
"""


@pytest.mark.slow
def test_onednns_layouts_are_known() -> None:
    """Of the instructions that all processors have which these kernels are made for."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", RECOGNISED], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        packed, given = map(int, line.split())
        assert given <= packed < 1.2 * given  # filled up


def make(model_type: str, is_tied: bool) -> Any:
    maker: Any = AutoModelForCausalLM
    options = {**COMMON, **TYPES[model_type], "tie_word_embeddings": is_tied, "vocab_size": 4096}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return maker.from_config(AutoConfig.for_model(model_type, **options), dtype=torch.float32).eval()


def large_bytes(network: Any, least: int) -> int:
    """Bytes of all memory of at least `least` that tensors hold which `network` keeps alive,
    each counted once.
    """
    passed_over = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    pending = [network]
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, passed_over):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        else:
            pending += gc.get_referents(one)
    return sum(size for size in sizes.values() if size >= least)


@pytest.mark.parametrize("model_type", grid(TYPES, fast=3))
def test_tied_embeddings_are_held_once(model_type: str) -> None:
    """In panels as native kernels take them."""
    for is_tied in (True, False):
        network = make(model_type, is_tied)
        weight = network.model.embed_tokens.weight.detach().clone()
        scale = getattr(network.model.embed_tokens, "embed_scale", torch.tensor(1.0))
        packed = transformers_checkpoint.packed(network, native_kernels("generic"))
        del network
        gc.collect()
        assert large_bytes(packed, weight.nbytes) == weight.nbytes * (1 if is_tied else 2)
        ids = torch.tensor([0, 4095, 77])
        embed = packed._embed if isinstance(packed, LlamaNetwork) else packed.embedded
        assert torch.equal(embed(ids), weight[ids] * scale)  # type: ignore[operator]


@pytest.mark.parametrize("model_type", TYPES)
def test_logits_are_those_of_a_weight_held_twice(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = []
    for keeps_layouts in (True, False):
        if not keeps_layouts:
            monkeypatch.setattr(OneDnnGemm, "layouts", TorchGemm.layouts)
        networks.append(transformers_checkpoint.packed(make(model_type, True), TORCH))
    ids = torch.arange(0, 4096, 61)
    hidden = [
        network._embed(ids) if isinstance(network, LlamaNetwork) else network._model.embed_tokens(ids[None])[0]  # type: ignore[operator, union-attr]
        for network in networks
    ]
    assert torch.equal(hidden[0], hidden[1])
    with torch.inference_mode():
        logits = [network.logits(hidden[0].clone()) for network in networks]
    assert torch.equal(logits[0], logits[1])


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    """A checkpoint that is to be tied by its configuration, with an output layer of its own."""
    path = write_tiny_model(tmp_path / "untied", arch="qwen3")
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"]
    weights = safetensors.torch.load_file(path / SINGLE)
    head = weights["model.embed_tokens.weight"].flip(0).contiguous()
    safetensors.torch.save_file(weights | {"lm_head.weight": head}, path / SINGLE, metadata={"format": "pt"})
    return path


def test_what_differs_is_not_tied(untied: Path, tmp_path: Path) -> None:
    """As transformers does; quantised, too."""
    assert served_or_refused(untied) is None  # computed as transformers does
    write_quantised(untied, "int8", tmp_path / "quantised")
    exact, *rounded = (
        logits(load(path, activation_dtype="none", quantization=quantization))
        for path, quantization in ((untied, "none"), (tmp_path / "quantised", "auto"), (tmp_path / "quantised", "none"))
    )
    for found in rounded:
        assert (found - exact).norm() < 0.2 * exact.norm()
    updates = PackedUpdates(load(untied, kernels="native"))
    assert {"lm_head.weight", "model.embed_tokens.weight"} < set(updates.shapes)


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_there_twice_is_held_once(keeps: bool, untied: Path, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(untied / SINGLE)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(weights, untied / SINGLE, metadata={"format": "pt"})
    write_quantised(untied, "int8", tmp_path / "quantised")
    model = load(tmp_path / "quantised", kernels="native", quantization="auto" if keeps else "none")
    assert isinstance(model.network, LlamaNetwork)
    assert model.network.is_tied
    assert "lm_head.weight" not in PackedUpdates(model).shapes


def test_a_head_that_is_no_number_is_refused(untied: Path) -> None:
    weights = safetensors.torch.load_file(untied / SINGLE)
    weights["lm_head.weight"][3, 5] = torch.nan
    safetensors.torch.save_file(weights, untied / SINGLE, metadata={"format": "pt"})
    said = served_or_refused(untied)
    assert said is not None
    assert "tensor lm_head.weight holds a number that is infinite or not a number" in said


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", grid(EVERY_TYPE, fast=4))
def test_nothing_of_a_checkpoint_stays_mapped(
    model_type: str,
    dtype: str,
    packs: bool,
    every_checkpoint: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever writes to its files would change the answers, or end the process."""
    if not packs:
        monkeypatch.setattr(OneDnnGemm, "supports", classmethod(lambda cls, weight: False))
    path = Path(shutil.copytree(every_checkpoint[model_type], tmp_path / "model"))
    for file in path.glob("*.safetensors"):
        tensors = {
            name: each.to(getattr(torch, dtype)) for name, each in safetensors.torch.load(file.read_bytes()).items()
        }
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    config = EmbeddedConfig(
        model_path=path, device="cpu", dtype=dtype, kernels="torch", numerics="fast", packed_copy="off"
    )
    model = load_model(config)
    gc.collect()
    assert all(layer.gemm.is_packed == packs for layer in linears(model._network))
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
