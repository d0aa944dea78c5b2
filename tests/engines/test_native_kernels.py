"""The native kernels against float64, and their batch invariance."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoints import EVERY_TYPE
from torch.nn import functional

from worker.engines.embedded import native
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.kv_cache.store import SequenceSlice
from worker.engines.embedded.model.hf_model import HfModel, load_model
from worker.engines.embedded.model.kernels import NATIVE, TORCH, KernelBackend, choose_kernels
from worker.engines.embedded.plan import Chunk, Plan, Request
from worker.errors import StartupError
from worker.sampling import SamplingParams

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}
"""Of a result, relative: half a unit in the last place of bfloat16, and what a few operations
lose in float32.
"""
DTYPES = [dtype for dtype, kind in native._KINDS.items() if set(kind.needs) <= native._cpu_flags()]
"""Those that this processor has what is needed for."""

each_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            dtype, marks=pytest.mark.skipif(dtype not in DTYPES, reason=f"needs {' '.join(kind.needs)} to run at all")
        )
        for dtype, kind in native._KINDS.items()
    ],
    ids=str,
)
"""Running the kernels needs the processor's instructions. Batch invariance with torch's kernels is
tested in `test_embedded_numerics`, and the Python side of the native ones in `test_native_backend`,
on every processor; so is the choice of kernels here."""


def randn(dtype: torch.dtype, generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


@each_dtype
@pytest.mark.skipif(shutil.which("cc") is None, reason="nothing to build them with")
def test_they_are_built_where_there_is_a_compiler(dtype: torch.dtype) -> None:
    assert native.unavailable(dtype) is None


@each_dtype
@settings(max_examples=100, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 40), st.integers(180, 400)),
    columns=st.integers(1, 150),
    inner=st.one_of(st.integers(1, 80), st.integers(1000, 1100), st.just(2100)),
    has_bias=st.booleans(),
    then=st.sampled_from(["none", "silu", "add", "mul"]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_product_is_the_product(
    dtype: torch.dtype, rows: int, columns: int, inner: int, has_bias: bool, then: str, threads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = randn(dtype, generator, rows, 2 * inner), randn(dtype, generator, columns, 2 * inner)
    bias = randn(dtype, generator, columns) if has_bias else None
    other = randn(dtype, generator, rows, columns) if then in ("add", "mul") else None
    with computing_with(threads):
        found = native.linear(x, native.pack(weight), columns, bias, then, other)
    product = functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    expected = {
        "none": lambda: product,
        "silu": lambda: functional.silu(product),
        "add": lambda: product + other.double(),
        "mul": lambda: product * other.double(),
    }[then]()
    # float32 sums of up to 4,200 terms of about 1, then one rounding
    scale = other.double().abs().clamp(min=1.0) if other is not None else 1.0
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= ROUNDING[dtype] * expected.abs() + 1e-3 * scale).all()


@each_dtype
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 299), min_size=1, max_size=250, unique=True),
    columns=st.sampled_from([1, 31, 64, 97]),
    inner=st.sampled_from([2, 48, 2050, 4100]),
    threads=st.integers(1, 3),
)
def test_a_row_of_a_product_does_not_depend_on_the_others(
    dtype: torch.dtype, rows: list[int], columns: int, inner: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, weight = randn(dtype, generator, 300, inner), randn(dtype, generator, columns, inner)
    panels = native.pack(weight)
    expected = native.linear(x, panels, columns)
    with computing_with(threads):
        assert torch.equal(native.linear(x[rows], panels, columns), expected[rows])


@each_dtype
@settings(max_examples=40, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (2, 3), (1, 64), (3, 1)]),
    width=st.sampled_from([2, 30, 64, 96, 256]),
    size=st.sampled_from([3, 48, 64, 256]),
    window=st.sampled_from([0, 1, 50, 100]),
    source=st.randoms(use_true_random=False),
)
def test_what_a_token_attends_to_does_not_depend_on_how_tokens_are_cut(
    dtype: torch.dtype, heads: tuple[int, int], width: int, size: int, window: int, source: random.Random
) -> None:
    kv_heads, group = heads
    generator = torch.Generator().manual_seed(source.randrange(2**32))
    length = source.randrange(1, 300)
    places = -(-length // size)
    keys, values = (randn(dtype, generator, places, kv_heads, size, width) for _ in range(2))
    query = randn(dtype, generator, length, kv_heads * group, width)

    def attend(sequences: list[SequenceSlice], order: torch.Tensor | None = None) -> torch.Tensor:
        stored = [each if order is None else each[order] for each in (keys, values)]
        tokens = torch.cat([torch.arange(sequence.start, sequence.stop) for sequence in sequences])
        tiles = native.Tiles(sequences, group)
        return native.attend(query[tokens], *stored, tiles, width**-0.5, window, None)

    home = list(range(places))
    expected = attend([SequenceSlice(home, 0, length)])
    moved = torch.tensor(source.sample(home, places))
    elsewhere = moved.argsort().tolist()
    cuts = sorted({0, length, *(source.randrange(length) for _ in range(8))})
    pieces = list(pairwise(cuts))
    source.shuffle(pieces)
    with computing_with(source.choice([1, 2, 3])):
        for start, stop in pieces:
            assert torch.equal(attend([SequenceSlice(home, start, stop)]), expected[start:stop])
        together = attend([SequenceSlice(elsewhere, start, stop) for start, stop in pieces], moved)
    assert torch.equal(together, torch.cat([expected[start:stop] for start, stop in pieces]))


@each_dtype
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.sampled_from([1, 3, 70]),
    heads=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    width=st.sampled_from([2, 10, 64, 96]),
    has_norms=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_queries_and_keys_are_rotated_and_keys_and_values_stored(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, width: int, has_norms: bool, threads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size, pages = 16, 6
    qkv = randn(dtype, generator, tokens, heads + 2 * kv_heads, width)
    angles = torch.randn(tokens, width // 2, generator=generator).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = (randn(dtype, generator, width), randn(dtype, generator, width), 1e-6) if has_norms else None
    slots = torch.randperm(pages * size, generator=generator)[:tokens]
    places = (slots // size, slots % size)
    keys, values = (torch.zeros(pages, kv_heads, size, width).to(dtype) for _ in range(2))
    with computing_with(threads):
        query = native.rotate_and_store(native.Projections(qkv, heads, cosine, sine, norms), keys, values, places)

    def turned(x: torch.Tensor, which: int) -> torch.Tensor:
        if norms is not None:
            x = functional.rms_norm(x.double(), (width,), norms[which].double(), norms[2]).to(dtype)
        x = x.double()
        swapped = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
        return x * cosine[:, None].double() + swapped * sine[:, None].double()

    def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
        return bool(((found.double() - expected).abs() <= 4 * ROUNDING[dtype] * (1 + expected.abs())).all())

    stored = torch.zeros(pages, size, dtype=torch.bool)
    stored[places] = True
    by_slot = (each.transpose(1, 2) for each in (keys, values))
    stored_keys, stored_values = ((each[places], each[~stored]) for each in by_slot)
    assert close(query, turned(qkv[:, :heads], 0))
    assert close(stored_keys[0], turned(qkv[:, heads : heads + kv_heads], 1))
    assert torch.equal(stored_values[0], qkv[:, heads + kv_heads :])
    assert not stored_keys[1].any()
    assert not stored_values[1].any()


@each_dtype
@pytest.mark.parametrize("width", [1, 16, 40, 768])
def test_a_norm_is_the_norm(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = randn(dtype, generator, width)
    for shape in ((3,), (2, 50), (130,)):
        x = randn(dtype, generator, *shape, width)
        expected = functional.rms_norm(x.double(), (width,), weight.double(), 1e-5)
        found = native.rms_norm(x, weight, 1e-5)
        assert ((found.double() - expected).abs() <= ROUNDING[dtype] * expected.abs()).all()


@each_dtype
def test_a_result_is_not_a_number_where_something_in_it_is_not(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = randn(dtype, generator, 3, 8), randn(dtype, generator, 5, 8)
    x[1, 3] = torch.nan
    for then in ("none", "silu"):
        found = native.linear(x, native.pack(weight), 5, None, then)
        assert found.isnan().tolist() == [[False] * 5, [True] * 5, [False] * 5]
    keys, values, query = (randn(dtype, generator, *shape) for shape in ((1, 1, 4, 2), (1, 1, 4, 2), (4, 1, 2)))
    keys[0, 0, 2] = torch.nan
    found = native.attend(query, keys, values, native.Tiles([SequenceSlice([0], 0, 4)], 1), 1.0, 0, None)
    assert found.isnan()[:, 0, 0].tolist() == [False, False, True, True]


@each_dtype
def test_places_that_hold_nothing_yet_are_not_read(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values, query = (randn(dtype, generator, *shape) for shape in ((1, 1, 16, 4), (1, 1, 16, 4), (2, 1, 4)))
    keys[0, 0, 7:] = values[0, 0, 7:] = torch.nan
    found = native.attend(query, keys, values, native.Tiles([SequenceSlice([0], 5, 7)], 1), 1.0, 0, None)
    assert not found.isnan().any()


@each_dtype
@pytest.mark.parametrize("arch", EVERY_TYPE)
def test_a_model_is_as_near_to_the_truth_as_with_torchs_kernels(
    dtype: torch.dtype, arch: str, every_checkpoint: dict[str, Path]
) -> None:
    tokens = torch.randint(300, (90,), generator=torch.Generator().manual_seed(5)).tolist()

    def logits(dtype: str, kernels: str) -> torch.Tensor:
        config = EmbeddedConfig(model_path=every_checkpoint[arch], device="cpu", dtype=dtype, kernels=kernels)
        model = load_model(config)
        model.allocate_kv(4, 32)
        request = Request("", 0, SamplingParams(), tokens, len(tokens), 999, frozenset(), 0, pages=[2, 0, 3])
        rows = []
        for start, stop in ((0, 40), (40, 89), (89, 90)):
            rows.append(model.forward(Plan((), (Chunk(request, start, stop),), (request,))))
        return torch.cat(rows).double()

    truth = logits("float32", "torch")
    if dtype == torch.bfloat16:
        ours, theirs = ((logits("bfloat16", kernels) - truth).pow(2).mean().sqrt() for kernels in ("native", "torch"))
        assert ours < 1.2 * theirs
    else:
        torch.testing.assert_close(logits("float32", "native"), truth, atol=2e-4, rtol=2e-4)


def test_asked_for_in_vain(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kernels: str) -> HfModel:
        return load_model(EmbeddedConfig(model_path=checkpoints["llama"], device="cpu", kernels=kernels))

    with pytest.raises(StartupError, match="--kernels native: they compute on a CPU, not on meta"):
        choose_kernels("native", torch.device("meta"), torch.float32)
    with pytest.raises(StartupError, match=r"--kernels native: they compute bfloat16 and float32, not torch.float16"):
        choose_kernels("native", torch.device("cpu"), torch.float16)
    monkeypatch.setattr(native, "unavailable", lambda dtype: "there is no compiler")
    with pytest.raises(StartupError, match="--kernels native: there is no compiler"):
        load("native")
    model = load("auto")
    model.allocate_kv(4, 32)
    assert "native" not in model.made_by


@pytest.mark.parametrize(
    ("flags", "auto", "asked_for"),
    [
        ((*native._AVX512, "avx512_bf16"), True, None),
        ((*native._AVX512, "avx512_bf16", "amx_bf16"), False, None),
        (("avx2", "fma"), False, "--kernels native: this processor has no avx512f"),
    ],
    ids=["avx512", "amx", "avx2"],
)
def test_which_processors_they_are_taken_on(
    flags: tuple[str, ...], auto: bool, asked_for: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice by CPU flags, whatever this processor has; oneDNN with AMX is faster."""
    monkeypatch.setattr(native, "_cpu_flags", lambda: frozenset(flags))
    if asked_for is None:
        monkeypatch.setattr(native, "unavailable", lambda dtype: None)
    else:
        monkeypatch.setattr(native, "_library", native._library.__wrapped__)
        monkeypatch.setattr(native, "unavailable", native.unavailable.__wrapped__)

    def chosen(kernels: str) -> KernelBackend:
        return choose_kernels(kernels, torch.device("cpu"), torch.bfloat16)

    assert chosen("auto") is (NATIVE if auto else TORCH)
    assert chosen("torch") is TORCH
    if asked_for is not None:
        with pytest.raises(StartupError, match=asked_for):
            chosen("native")
    else:
        assert chosen("native") is NATIVE


class TestWhyThereAreNone:
    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "_cpu_flags", lambda: frozenset(native._AVX512))
        monkeypatch.setattr(native, "_library", native._library.__wrapped__)
        monkeypatch.setattr(native, "unavailable", native.unavailable.__wrapped__)

    def test_the_processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "_cpu_flags", lambda: frozenset({"avx2"}))
        assert native.unavailable(torch.float32) == "this processor has no avx512f, avx512bw, avx512dq, avx512vl"

    def test_no_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
        assert "were not built" in str(native.unavailable(torch.float32))

    def test_of_another_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "_VERSION", 99)
        assert "is of another version of this package" in str(native.unavailable(torch.float32))

    def test_no_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
        (tmp_path / f"kernels_float32{EXTENSION_SUFFIXES[0]}").write_text("not a library")
        assert "kernels" in str(native.unavailable(torch.float32))


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)
