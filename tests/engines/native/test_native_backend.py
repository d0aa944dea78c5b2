"""The Python side of the native kernels; they themselves are tested in `test_native_kernels`."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples, grid
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoints import EVERY_TYPE

from worker.engines import EngineRequest
from worker.engines.embedded import native
from worker.engines.embedded.admission import admit
from worker.engines.embedded.attention import (
    AttentionBackend,
    AttentionLayer,
    NativeAttention,
    RopeTables,
    TorchAttention,
)
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.kv_cache.store import KvStore, SequenceSlice
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.native import libraries
from worker.engines.embedded.native.layers import DecoderLayers
from worker.engines.embedded.step import make_stepper
from worker.sampling import SamplingParams

LENGTHS = (1, 5, 70, 300)
"""Tokens of the prompts; the last one takes two pages."""
NEW_TOKENS = 6

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.native]


PATHS = [path for path in native.PATHS if native.unavailable(torch.float32, path) is None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of each kernel."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        kernel = getattr(native, name)

        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return kernel(*arguments)

        return call

    for name in ("linear", "rms_norm", "rotate_and_store", "attend"):
        monkeypatch.setattr(native, name, counted(name))
    compute = DecoderLayers.compute

    def counted_layers(*arguments: Any) -> None:
        counts["decoder_layers"] += 1
        compute(*arguments)

    monkeypatch.setattr(DecoderLayers, "compute", counted_layers)
    return counts


def load(path: Path, kernels: str) -> HfModel:
    return load_model(EmbeddedConfig(model_path=path, device="cpu", dtype="float32", kernels=kernels))


def answers(model: HfModel, budget: int) -> list[list[int]]:
    """Greedy answers to random prompts, with at most `budget` tokens in a step."""
    source = random.Random(5)
    config = EmbeddedConfig(model_path="", max_num_seqs=4, max_num_batched_tokens=budget, max_mixed_chunk=64)
    driver = make_stepper(config, model, 160)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for which, length in enumerate(LENGTHS):
        prompt = [source.randrange(3, 300) for _ in range(length)]
        driver.add(admit(EngineRequest(str(which), prompt, params), which, model, 512))
        tokens[str(which)] = []
    while not driver.scheduler.is_idle:
        for output in driver.step():
            assert output.error is None
            assert output.token_id is not None
            tokens[output.request_id].append(output.token_id)
    return list(tokens.values())


@pytest.mark.parametrize("arch", grid(EVERY_TYPE, fast=3))
def test_native_tokens_are_those_of_the_torch_backend(
    arch: str, every_checkpoint: dict[str, Path], calls: Counter[str]
) -> None:
    expected = answers(load(every_checkpoint[arch], "torch"), 512)
    assert not calls
    for path in PATHS:
        model = load(every_checkpoint[arch], f"native-{path}")
        assert answers(model, 90) == expected
        assert (model.kernels, model.made_by) == (f"native-{path}", "exact, native kernels")
        assert not model.wants_dense_kv
        assert set(calls) == {"linear", "rms_norm", "decoder_layers"}
        calls.clear()
    assert answers(load(every_checkpoint[arch], "native"), 512) == expected


class Inputs:
    """A step of some rows, with random queries, keys and values, and some rows of padding."""

    size = 4

    def __init__(self, rows: list[tuple[int, int]], padding: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads, kv_heads, head_dim = 4, 2, 8
        pages = torch.randperm(9 * len(rows), generator=generator).view(-1, 9).tolist()
        self.sequences = [
            SequenceSlice(own, start, start + count) for own, (start, count) in zip(pages, rows, strict=True)
        ]
        slots = [
            divmod(position, self.size)
            for sequence in self.sequences
            for position in range(sequence.start, sequence.stop)
        ]
        owners = [sequence for sequence in self.sequences for _ in range(sequence.start, sequence.stop)]
        self.slot_mapping = torch.tensor(
            [
                [sequence.page_table[page] for sequence, (page, _) in zip(owners, slots, strict=True)],
                [slot for _, slot in slots],
            ]
        )
        self.tokens = len(slots)
        computed = self.tokens + padding
        self.qkv = torch.randn(computed, heads + 2 * kv_heads, head_dim, generator=generator)
        angles = torch.randn(computed, head_dim // 2, generator=generator).repeat(1, 2)
        self.rope = RopeTables(angles.cos(), angles.sin())
        self.norms = torch.randn(head_dim, generator=generator), torch.randn(head_dim, generator=generator), 1e-6
        shape = 9 * len(rows), kv_heads, self.size, head_dim
        self.cached = [torch.randn(shape, generator=generator) for _ in range(2)]

    def store(self) -> KvStore:
        return KvStore(*([each.clone()] for each in self.cached))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused QKV", "queries, keys and values"])
@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    window=st.sampled_from([0, 1, 5]),
    softcap=st.sampled_from([None, 0.7]),
    has_norms=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_both_backends_write_the_same_cache_and_attend_alike(
    is_fused: bool,
    rows: list[tuple[int, int]],
    padding: int,
    window: int,
    softcap: float | None,
    has_norms: bool,
    seed: int,
) -> None:
    inputs = Inputs(rows, padding, seed)
    layer = AttentionLayer(0, 4, 2, 0.3, window, inputs.norms if has_norms else None)

    def attend(backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        store = inputs.store()
        step = backend.plan(store, inputs.sequences, inputs.slot_mapping)
        if is_fused:
            attended = step.attend_qkv(layer, inputs.qkv, inputs.rope)
        else:
            query, key, value = inputs.qkv.split((4, 2, 2), 1)
            attended = step.attend(0, query, key, value, 0.3, window, softcap)
        return attended, store.keys[0], store.values[0]

    found, expected = attend(NativeAttention()), attend(TorchAttention())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-5)
    assert len(found[0]) == inputs.tokens + padding
    assert not found[0][inputs.tokens :].any()


STRUCTURES = [
    "gemm",
    "linear",
    "rms_norm",
    "rotation",
    "attention",
    "layer",
    "step",
    "unpacking",
    "weighing",
    "threads",
]

SIZES = """
#include <stdio.h>
#include "arguments.h"
int main(void) { printf("%s"%s); return 0; }
"""


@pytest.mark.native
def test_structures_of_arguments_have_the_sizes_of_those_in_c(tmp_path: Path) -> None:
    sizes = "".join(f", (int)sizeof({name}_t)" for name in STRUCTURES)
    (tmp_path / "sizes.c").write_text(SIZES % ("%d " * len(STRUCTURES), sizes), encoding="utf-8")
    command = ["cc", "-Wno-psabi", f"-I{libraries.FOLDER}", tmp_path / "sizes.c", "-lm", "-o", tmp_path / "sizes"]
    subprocess.run(command, check=True, timeout=60)  # type: ignore[arg-type]
    printed = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True, timeout=60).stdout
    kernels = native.library(torch.float32)
    found = [ctypes.sizeof(getattr(kernels, f"{name}_t")) for name in STRUCTURES]
    assert found == [int(size) for size in printed.split()]


@pytest.mark.native
def test_an_argument_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match="columns"):
        native.library(torch.float32).linear_t(columns=1)


@pytest.mark.native
def test_a_library_with_arguments_of_unknown_type_is_refused() -> None:
    with pytest.raises(KeyError, match="short"):
        libraries._structure("odd", "int64_t rows;short columns;")


def test_bfloat16_panels_hold_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, other = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((3, 10), (35, 10), (35,), (3, 35))
    )
    found = native.linear(x, native.Gemm(native.PackedWeight.of(weight), bias), "mul", other)
    expected = (x.double() @ weight.double().T + bias) * other
    assert torch.equal(found, expected.bfloat16())
