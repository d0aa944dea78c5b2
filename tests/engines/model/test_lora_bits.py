"""LoRA adapters: logits are those of merged weights, and a row's bits are its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import amx_emulation
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_adapters import ALL_TARGETS, merged, write_adapter
from random_checkpoints import write
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from worker.engines.embedded import native
from worker.engines.embedded.adapters import LoadedAdapter
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, hf_model, load_model
from worker.engines.embedded.model.adapter_weights import load_adapter
from worker.engines.embedded.plan import Chunk, Plan, Request
from worker.engines.weights import NotSupported
from worker.models.problems import ModelFileError
from worker.sampling import SamplingParams

PAGE = 32
TOKENS = torch.randint(300, (70,), generator=torch.Generator().manual_seed(5)).tolist()
UNEVEN = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}
"""Sizes with which panels of the fused QKV projection hold columns of several layers."""

NAMES = ("wide", "stable", "plain")

PATTERNS: dict[str, Any] = {
    "rank_pattern": {"layers.1.self_attn.q_proj": 3, "down_proj": 20, ".*up_proj": 1},
    "alpha_pattern": {"k_proj": 7.5, r"model\.layers\.2\.mlp\.gate_proj": -3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write(folder / "model", "qwen2", UNEVEN)
    write_adapter(folder / "wide", folder / "model", targets=ALL_TARGETS, rank=5, size=0.1, **PATTERNS)
    write_adapter(folder / "stable", folder / "model", targets=("k_proj", "gate_proj"), rank=24, use_rslora=True)
    write_adapter(folder / "plain", folder / "model", seed=1, dtype=torch.bfloat16)
    return folder


class Case:
    """A model, its adapters, and logits of prompts that were alone."""

    def __init__(self, folder: Path, names: Sequence[str] = NAMES, kept: str = "auto", **config: Any) -> None:
        model = load_model(EmbeddedConfig(model_path=folder / "model", numerics="exact", **config))
        assert isinstance(model, HfModel)
        model.allocate_kv(24, PAGE)
        read = model.adapter_loader(kept)
        self.model = model
        self._adapters = {name: read(name, folder / name) for name in names}
        self._known: dict[tuple[str | None, int], torch.Tensor] = {}

    def request(self, name: str | None, length: int, pages: list[int]) -> Request:
        adapter = None if name is None else self._adapters[name]
        tokens = TOKENS[:length]
        return Request("", 0, SamplingParams(), tokens, length, 999, frozenset(), 0, pages=pages, adapter=adapter)

    def nbytes(self, name: str) -> int:
        return int(self._adapters[name].packed.nbytes)

    def digest(self, name: str) -> str:
        return self._adapters[name].digest

    def alone(self, name: str | None, length: int) -> torch.Tensor:
        if (name, length) not in self._known:
            request = self.request(name, length, [0, 1, 2])
            logits = self.model.forward(Plan((), (Chunk(request, 0, length),), (request,)))
            self._known[name, length] = logits[0].clone()
        return self._known[name, length]


@pytest.mark.parametrize("name", ["wide", "stable", "plain"])
def test_logits_are_those_of_merged_weights(folder: Path, tmp_path: Path, name: str) -> None:
    case = Case(folder, dtype="float32")
    network = AutoModelForCausalLM.from_pretrained(merged(tmp_path / "m", folder / "model", folder / name))
    with torch.no_grad():
        expected = network(torch.tensor([TOKENS])).logits[0, -1]
    difference = [
        (case.alone(each, len(TOKENS)) - expected).abs().max() / expected.abs().max() for each in (name, None)
    ]
    assert difference[0] < 1e-5
    assert difference[1] > 0.1


def test_bfloat16_adapters_are_kept_as_such(folder: Path, tmp_path: Path) -> None:
    """A rank more, of no bfloat16 in A and zeros in B, keeps A in float32, and changes no bit."""
    before = load_file(folder / "plain/adapter_model.safetensors")
    size = sum(matrix.numel() for matrix in before.values())
    config = json.loads((folder / "plain/adapter_config.json").read_text())
    config |= {"r": config["r"] + 1, "lora_alpha": config["lora_alpha"] / config["r"] * (config["r"] + 1)}
    matrices = {name: matrix.float() for name, matrix in before.items()}
    (tmp_path / "wider").mkdir()
    (tmp_path / "wider/adapter_config.json").write_text(json.dumps(config))
    wider = {
        name: functional.pad(matrix, (0, 0, 0, 1), value=0.1) if "lora_A" in name else functional.pad(matrix, (0, 1))
        for name, matrix in matrices.items()
    }
    save_file(wider, tmp_path / "wider/adapter_model.safetensors")
    (tmp_path / "model").symlink_to(folder / "model")
    (tmp_path / "plain").symlink_to(folder / "plain")
    case = Case(tmp_path, names=("plain", "wider"), dtype="float32")
    assert torch.equal(case.alone("wider", 40), case.alone("plain", 40))
    assert case.nbytes("plain") < 3 * size < case.nbytes("wider")


def test_float16_adapters_are_kept_as_such(folder: Path, tmp_path: Path) -> None:
    """Matrices of float16 take half the bytes of float32 in a float32 model, and change no bit."""
    (tmp_path / "model").symlink_to(folder / "model")
    own: dict[str, Any] = {"targets": ALL_TARGETS, "size": 0.1}
    write_adapter(tmp_path / "half", folder / "model", dtype=torch.float16, **own)
    write_adapter(tmp_path / "wider", folder / "model", dtype=torch.float16, **own)
    matrices = load_file(tmp_path / "wider/adapter_model.safetensors")
    for name, matrix in matrices.items():  # a rank more, as above
        matrices[name] = functional.pad(matrix.float(), (0, 0, 0, 1) if "lora_A" in name else (0, 1), value=0.0)
        if "lora_A" in name:
            matrices[name][-1] = 0.1
    config = json.loads((tmp_path / "wider/adapter_config.json").read_text())
    config |= {"r": config["r"] + 1, "lora_alpha": config["lora_alpha"] / config["r"] * (config["r"] + 1)}
    (tmp_path / "wider/adapter_config.json").write_text(json.dumps(config))
    save_file(matrices, tmp_path / "wider/adapter_model.safetensors")
    for path in ("avx512", "avx2", "generic"):
        if native.unavailable(torch.float32, path) is None:
            case = Case(tmp_path, names=("half", "wider"), dtype="float32", kernels=f"native-{path}")
            assert torch.equal(case.alone("half", 40), case.alone("wider", 40))
            assert case.nbytes("half") < 0.8 * case.nbytes("wider")
    native.choose_path(torch.float32)


def test_an_adapter_is_read_in_a_thread_that_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP keeps threads for each one that has computed, and steps are slower beside them."""
    read_in: list[threading.Thread] = []

    def noted(*arguments: Any) -> LoadedAdapter:
        read_in.append(threading.current_thread())
        return load_adapter(*arguments)

    monkeypatch.setattr(hf_model, "load_adapter", noted)
    case = Case(folder, dtype="float32")
    assert len(read_in) == len(NAMES)
    assert not any(thread.is_alive() for thread in read_in)
    assert case.nbytes("wide")


def test_float32_adapters_of_a_bfloat16_model(folder: Path, tmp_path: Path) -> None:
    """They are rounded as the matrices of a bfloat16 file, and named otherwise than unrounded."""
    (tmp_path / "model").symlink_to(folder / "model")
    exact, narrow = (
        write_adapter(tmp_path / name, folder / "model", targets=ALL_TARGETS, dtype=dtype, size=0.1)
        for name, dtype in (("exact", torch.float32), ("narrow", torch.bfloat16))
    )
    names = (exact.name, narrow.name)
    rounded, whole, float32 = (
        Case(tmp_path, names, kept, dtype=dtype)
        for dtype, kept in (("bfloat16", "auto"), ("bfloat16", "float32"), ("float32", "auto"))
    )
    assert torch.equal(rounded.alone("exact", 40), rounded.alone("narrow", 40))
    assert not torch.equal(whole.alone("exact", 40), whole.alone("narrow", 40))
    assert torch.equal(whole.alone("narrow", 40), rounded.alone("narrow", 40))
    assert rounded.nbytes("exact") == rounded.nbytes("narrow") < 0.6 * whole.nbytes("exact")
    assert rounded.digest("narrow") == whole.digest("narrow") == float32.digest("narrow")
    assert rounded.digest("exact") != whole.digest("exact") == float32.digest("exact")
    again = Case(tmp_path, names, "bfloat16", dtype="float32")
    assert again.digest("exact") == rounded.digest("exact")


def test_what_bfloat16_cannot_hold_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(folder / "model")
    write_adapter(tmp_path / "large", folder / "model", size=0.0)
    matrices = load_file(tmp_path / "large/adapter_model.safetensors")
    next(matrix for name, matrix in matrices.items() if "lora_A" in name)[0, 0] = torch.finfo(torch.float32).max
    save_file(matrices, tmp_path / "large/adapter_model.safetensors")
    Case(tmp_path, ("large",), "float32", dtype="bfloat16")
    with pytest.raises(ModelFileError, match=r"lora_A holds what is too large for --lora-dtype bfloat16"):
        Case(tmp_path, ("large",), dtype="bfloat16")


FORMATS = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"},
    {"dtype": "float32", "quantization": "int8", "activation_dtype": "none"},
)


@pytest.fixture(scope="module", params=FORMATS, ids=lambda config: "-".join(config.values()))
def case(folder: Path, request: pytest.FixtureRequest) -> Case:
    return Case(folder, **request.param)


@given(
    rows=st.lists(
        st.tuples(st.sampled_from((None, *NAMES)), st.integers(1, len(TOKENS)), st.booleans()), min_size=1, max_size=7
    ),
    cuts=st.sets(st.integers(1, len(TOKENS) - 1), max_size=2),
    threads=st.integers(1, 3),
)
@settings(max_examples=examples(20), deadline=None)
def test_bits_of_a_row_are_its_own(
    case: Case, rows: list[tuple[str | None, int, bool]], cuts: set[int], threads: int
) -> None:
    expected = [case.alone(name, length) for name, length, _ in rows]
    requests = [case.request(name, length, [3 * i, 3 * i + 1, 3 * i + 2]) for i, (name, length, _) in enumerate(rows)]
    ends = [length - decodes for _, length, decodes in rows]  # a decode row computes its last token alone
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found: dict[int, torch.Tensor] = {}
    try:
        for start, stop in pairwise([0, *sorted(cuts), len(TOKENS)]):
            parts = zip(requests, ends, strict=True)
            chunks = tuple(Chunk(request, start, min(stop, end)) for request, end in parts if start < end)
            sampled = tuple(chunk.request for chunk in chunks if chunk.is_last)
            if chunks:
                logits = case.model.forward(Plan((), chunks, sampled))
                found |= {id(request): row for request, row in zip(sampled, logits, strict=True)}
        decode = tuple(request for request, (_, _, decodes) in zip(requests, rows, strict=True) if decodes)
        if decode:
            logits = case.model.forward(Plan(decode, (), decode))
            found |= {id(request): row for request, row in zip(decode, logits, strict=True)}
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[id(request)], row) for request, row in zip(requests, expected, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_instructions_compute_the_same_bits(folder: Path, dtype: str) -> None:
    found = {}
    for path in ("avx512", "avx2", "generic"):
        if native.unavailable(getattr(torch, dtype), path) is None:
            case = Case(folder, dtype=dtype, kernels=f"native-{path}")
            found[path] = torch.stack([case.alone(name, 40) for name in ("wide", "stable")])
    native.choose_path(getattr(torch, dtype))
    assert len(found) > 1
    assert all(torch.equal(each, found["generic"]) for each in found.values())


def test_amx_computes_adapters(folder: Path) -> None:
    """It sums in an order of its own, and a row's bits are its own."""
    if reason := amx_emulation.reason_against(torch.bfloat16):
        pytest.skip(reason)
    rows: list[tuple[str | None, int]] = [("wide", 40), (None, 17), ("plain", 33), ("wide", 1)]
    with amx_emulation.amx():
        case = Case(folder, dtype="bfloat16", kernels="native-amx")
        alone = [case.alone(*row) for row in rows]
        requests = [case.request(*row, [3 * i, 3 * i + 1, 3 * i + 2]) for i, row in enumerate(rows)]
        chunks = tuple(Chunk(request, 0, length) for request, (_, length) in zip(requests, rows, strict=True))
        together = case.model.forward(Plan((), chunks, tuple(requests)))
    native.choose_path(torch.bfloat16)
    assert case.model.made_by == "exact, native-amx kernels"
    assert torch.equal(together, torch.stack(alone))
    avx512 = Case(folder, dtype="bfloat16", kernels="native-avx512")
    for row, found in zip(rows, alone, strict=True):
        expected = avx512.alone(*row)
        assert (found - expected).norm() / expected.norm() < 0.05
    native.choose_path(torch.bfloat16)


def test_kernels_of_torch_refuse_adapters(folder: Path) -> None:
    model = load_model(EmbeddedConfig(model_path=folder / "model", kernels="torch", numerics="fast"))
    assert isinstance(model, HfModel)
    model.allocate_kv(4, PAGE)
    with pytest.raises(NotSupported, match="LoRA adapters are served where native kernels compute"):
        model.adapter_loader()
