"""The native kernels against float64, and their batch invariance."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import chain, pairwise
from pathlib import Path

import amx_emulation
import pytest
import torch
from chosen_paths import kept_choices, plain_c
from effort import examples, grid
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoints import EVERY_TYPE
from torch.nn import functional

from worker.engines.embedded import native
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.kv_cache import CodeRows, SequenceSlice
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.kernels import choose_kernels
from worker.engines.embedded.native import libraries, paths
from worker.engines.embedded.native.layers import DecoderLayer, DecoderLayers, Mlp, StepTensors
from worker.engines.embedded.plan import Chunk, Plan, Request
from worker.errors import StartupError
from worker.sampling import SamplingParams

pytestmark = pytest.mark.native

CPU_FLAGS = libraries.cpu_flags.__wrapped__
"""Not cached, nor what an emulation stands in for it with."""

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}
"""Of a result, relative: half a unit in the last place of bfloat16, and what a few operations
lose in float32.
"""
CODES = {torch.bfloat16: (torch.int8,), torch.float32: (torch.int8, torch.int16)}
"""Of keys and values that are not elements, by the data type of these."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
COMPUTED = [
    (path, dtype) for dtype in libraries.DATA_TYPES for path in native.PATHS if native.unavailable(dtype, path) is None
]
"""Paths that this processor has, and their data types; plain C is always among them."""
EMULATED = [
    ("amx", dtype)
    for dtype in libraries.DATA_TYPES
    if not amx_emulation.IS_REAL and amx_emulation.reason_against(dtype) is None
]
SLOW = {"generic", *(path for path, _ in EMULATED)}
"""Paths that tests spare: plain C may emulate FMA."""


@pytest.fixture(
    scope="module",
    params=[*COMPUTED, *(pytest.param(each, marks=pytest.mark.timeout(600)) for each in EMULATED)],
    ids=lambda each: f"{each[0]}-{each[1]}",
)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """A path, which computes in the data type of `dtype`."""
    name, dtype = request.param
    with kept_choices(clear=True), amx_emulation.amx() if request.param in EMULATED else nullcontext():
        native.choose_path(dtype, name)
        yield name


@pytest.fixture(scope="module")
def dtype(path: str) -> torch.dtype:
    [found] = paths._chosen
    return found


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> native.Gemm:
    return native.Gemm(native.PackedWeight.of(weight), bias)


def randn(dtype: torch.dtype, generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", libraries.DATA_TYPES, ids=str)
def test_every_path_of_this_processor_is_built(dtype: torch.dtype) -> None:
    has = {path for path, flags in libraries.DATA_TYPES[dtype].needs.items() if set(flags) <= libraries.cpu_flags()}
    assert {path for path, each in COMPUTED if each == dtype} == has
    assert "generic" in has


def skip_own_order(path: str, dtype: torch.dtype) -> None:
    if path in libraries.DATA_TYPES[dtype].own_order:
        pytest.skip("it sums in an order of its own: the bits are others")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32) if x.is_floating_point() else x


@settings(max_examples=examples(30), deadline=None)
@given(
    rows=st.integers(1, 14),
    columns=st.sampled_from([1, 15, 33, 70]),
    inner=st.sampled_from([1, 17, 64, 1100]),
    heads=st.sampled_from([(1, 1), (2, 3), (3, 1)]),
    width=st.sampled_from([2, 30, 64, 96]),
    window=st.sampled_from([0, 50]),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_bits_are_those_of_plain_c(
    path: str,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    inner: int,
    heads: tuple[int, int],
    width: int,
    window: int,
    softcap: float | None,
    seed: int,
) -> None:
    """So a prefill and a decode worker may have different processors."""
    skip_own_order(path, dtype)
    generator = torch.Generator().manual_seed(seed)
    kv_heads, group = heads
    x, weight = randn(dtype, generator, rows, 2 * inner), randn(dtype, generator, columns, 2 * inner)
    bias, other = randn(dtype, generator, columns), randn(dtype, generator, rows, columns)
    length, size = 9 * rows, 48
    query = randn(dtype, generator, length, kv_heads * group, width)
    cached = [randn(dtype, generator, -(-length // size), kv_heads, size, width) for _ in range(2)]
    formats = [CodeRows(width, dtype, codes) for codes in CODES[dtype]]
    tiles = native.Tiles([SequenceSlice([*range(-(-length // size))], 0, length)], group)
    qkv = randn(dtype, generator, rows, group + 2 * kv_heads, width)
    cosine, sine = (randn(dtype, generator, rows, width) for _ in range(2))
    norms = (randn(dtype, generator, width), randn(dtype, generator, width), 1e-6)
    places = (torch.zeros(rows, dtype=torch.int64), torch.arange(rows))

    def computed() -> list[torch.Tensor]:
        stored = [torch.zeros(1, kv_heads, 16, width, dtype=dtype) for _ in range(2)]
        stored_as = [[rows.quantise(each) for each in stored] for rows in formats]
        cached_as = [[rows.quantise(each) for each in cached] for rows in formats]
        projections = native.Projections(qkv, group, cosine, sine, norms)
        return [
            *(native.linear(x, packed(weight, bias), then, other) for then in native.EPILOGUES),
            native.attend(query, *cached, tiles, width**-0.5, window, softcap),
            *(native.attend(query, *each, tiles, width**-0.5, window, softcap) for each in cached_as),
            native.rms_norm(query, norms[0], 1e-5),
            native.rotate_and_store(projections, *stored, places),
            *(native.rotate_and_store(projections, *each, places) for each in stored_as),
            *stored,
            *chain(*stored_as),
        ]

    with plain_c(dtype):
        expected = computed()
    for one, other in zip(computed(), expected, strict=True):
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("scale", [2.0**-135, 2.0**-60, 1.0, 2.0**60, 2.0**120])
def test_weights_of_any_size_have_the_bits_of_plain_c(path: str, dtype: torch.dtype, scale: float) -> None:
    """Exponentials that are 0, subnormal and infinite, and what rounds to a subnormal bfloat16."""
    skip_own_order(path, dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 300, generator=generator)
    weight = torch.eye(300) * scale

    def computed() -> torch.Tensor:
        gemm = packed(weight.to(dtype))
        return torch.stack([native.linear(x.to(dtype), gemm, then) for then in ("none", *native.ACTIVATIONS)])

    with plain_c(dtype):
        expected = computed()
    assert torch.equal(bits(computed()), bits(expected))


def test_each_path_sums_in_the_same_order(path: str, dtype: torch.dtype) -> None:
    """What a processor's instructions do is asked at start, since a KV transfer depends on it."""
    skip_own_order(path, dtype)
    assert native.sums_as_others(dtype, path) or (path, dtype) == ("avx512", torch.bfloat16)


@settings(max_examples=examples(100), deadline=None)
@given(
    rows=st.one_of(st.integers(0, 40), st.integers(180, 400)),
    columns=st.integers(1, 150),
    inner=st.one_of(st.integers(1, 80), st.integers(1000, 1100), st.just(2100)),
    has_bias=st.booleans(),
    then=st.sampled_from([*native.EPILOGUES]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_product_is_the_product(
    path: str,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    inner: int,
    has_bias: bool,
    then: str,
    threads: int,
    seed: int,
) -> None:
    if path == "generic":
        rows, inner = rows % 20, inner % 80 + 1
    generator = torch.Generator().manual_seed(seed)
    x, weight = randn(dtype, generator, rows, 2 * inner), randn(dtype, generator, columns, 2 * inner)
    bias = randn(dtype, generator, columns) if has_bias else None
    other = randn(dtype, generator, rows, columns) if then in native.WITH_OTHER else None
    with computing_with(threads):
        found = native.linear(x, packed(weight, bias), then, other)
    product = functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    expected = {
        "none": lambda: product,
        **{name: lambda name=name: ACTIVATIONS[name](product) for name in ACTIVATIONS},
        "add": lambda: product + other.double(),
        "mul": lambda: product * other.double(),
        "clamped": lambda: product.clamp(max=7.0) * torch.sigmoid(1.702 * product.clamp(max=7.0)),
        "mul_clamped": lambda: (product.clamp(-7.0, 7.0) + 1.0) * other.double(),
    }[then]()
    # float32 sums of up to 4,200 terms of about 1, then one rounding
    scale = other.double().abs().clamp(min=1.0) if other is not None else 1.0
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= ROUNDING[dtype] * expected.abs() + 1e-3 * scale).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.lists(st.integers(0, 299), min_size=1, max_size=250, unique=True),
    columns=st.sampled_from([1, 31, 64, 97]),
    inner=st.sampled_from([2, 48, 2050, 4100]),
    threads=st.integers(1, 3),
)
def test_a_row_of_a_product_does_not_depend_on_the_others(
    path: str, dtype: torch.dtype, rows: list[int], columns: int, inner: int, threads: int
) -> None:
    if path in SLOW:
        inner = min(inner, 48 if path == "generic" else 2050)
    generator = torch.Generator().manual_seed(columns)
    x, weight = randn(dtype, generator, 300, inner), randn(dtype, generator, columns, inner)
    gemm = packed(weight)
    expected = native.linear(x, gemm)
    with computing_with(threads):
        assert torch.equal(native.linear(x[rows], gemm), expected[rows])


@pytest.mark.parametrize("is_quantised", [False, True], ids=["elements", "codes"])
@settings(max_examples=examples(40), deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (2, 3), (1, 64), (1, 96), (3, 1)]),
    width=st.sampled_from([2, 30, 64, 96, 98, 256]),
    size=st.sampled_from([3, 48, 64, 256]),
    window=st.sampled_from([0, 1, 50, 100]),
    source=st.randoms(use_true_random=False),
)
def test_attention_does_not_depend_on_how_tokens_are_cut(
    path: str,
    dtype: torch.dtype,
    is_quantised: bool,
    heads: tuple[int, int],
    width: int,
    size: int,
    window: int,
    source: random.Random,
) -> None:
    """And over codes it is attention over the elements that the rows stand for: in int8 bit by bit,
    in int16 up to the rounding of queries and weights.
    """
    codes = source.choice(CODES[dtype]) if is_quantised else None
    if path in SLOW:
        heads = min(heads, (2, 3))
    if path == "generic":
        width, size = min(width, 30), min(size, 48)
    kv_heads, group = heads
    generator = torch.Generator().manual_seed(source.randrange(2**32))
    length = source.randrange(1, 100 if path in SLOW else 300)
    places = -(-length // size)
    keys, values = (randn(dtype, generator, places, kv_heads, size, width) for _ in range(2))
    query = randn(dtype, generator, length, kv_heads * group, width)
    rows = None if codes is None else CodeRows(width, dtype, codes)
    if rows is not None:
        keys, values = rows.quantise(keys), rows.quantise(values)

    def attend(sequences: list[SequenceSlice], order: torch.Tensor | None = None) -> torch.Tensor:
        stored = [each if order is None else each[order] for each in (keys, values)]
        tokens = torch.cat([torch.arange(sequence.start, sequence.stop) for sequence in sequences])
        tiles = native.Tiles(sequences, group)
        return native.attend(query[tokens], *stored, tiles, width**-0.5, window, None)

    home = list(range(places))
    expected = attend([SequenceSlice(home, 0, length)])
    if rows is not None:
        elements = rows.dequantise(keys), rows.dequantise(values)
        tiles = native.Tiles([SequenceSlice(home, 0, length)], group)
        truth = native.attend(query, *elements, tiles, width**-0.5, window, None)
        if codes == torch.int8:
            assert torch.equal(truth, expected)
        else:
            assert (truth - expected).norm() < 1e-3 * truth.norm()
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


@settings(max_examples=examples(60), deadline=None)
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
    for codes in CODES[dtype]:
        rows = CodeRows(width, dtype, codes)
        quantised = [rows.quantise(torch.zeros_like(each)) for each in (keys, values)]
        with computing_with(threads):
            again = native.rotate_and_store(native.Projections(qkv, heads, cosine, sine, norms), *quantised, places)
        assert torch.equal(again, query)
        assert all(torch.equal(one, rows.quantise(each)) for one, each in zip(quantised, (keys, values), strict=True))
    assert close(query, turned(qkv[:, :heads], 0))
    assert close(stored_keys[0], turned(qkv[:, heads : heads + kv_heads], 1))
    assert torch.equal(stored_values[0], qkv[:, heads + kv_heads :])
    assert not stored_keys[1].any()
    assert not stored_values[1].any()


@pytest.mark.parametrize("width", [1, 16, 40, 768])
def test_a_norm_is_the_norm(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = randn(dtype, generator, width)
    for shape in ((3,), (2, 50), (130,)):
        x = randn(dtype, generator, *shape, width)
        expected = functional.rms_norm(x.double(), (width,), weight.double(), 1e-5)
        found = native.rms_norm(x, weight, 1e-5)
        assert ((found.double() - expected).abs() <= ROUNDING[dtype] * expected.abs()).all()


def test_a_result_is_not_a_number_where_something_in_it_is_not(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = randn(dtype, generator, 3, 8), randn(dtype, generator, 5, 8)
    x[1, 3] = torch.nan
    for then in ("none", *native.ACTIVATIONS):
        found = native.linear(x, packed(weight), then)
        assert found.isnan().tolist() == [[False] * 5, [True] * 5, [False] * 5]
    keys, values, query = (randn(dtype, generator, *shape) for shape in ((1, 1, 4, 2), (1, 1, 4, 2), (4, 1, 2)))
    keys[0, 0, 2] = torch.nan
    found = native.attend(query, keys, values, native.Tiles([SequenceSlice([0], 0, 4)], 1), 1.0, 0, None)
    assert found.isnan()[:, 0, 0].tolist() == [False, False, True, True]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [0, 20])
def test_a_row_that_is_no_number_spoils_what_attends_to_it(
    path: str, dtype: torch.dtype, window: int, softcap: float | None
) -> None:
    """Not what is before it in its block, what a window hides it from, another head or sequence."""
    if dtype != torch.float32:
        pytest.skip("codes of 16 bits are of float32")
    generator = torch.Generator().manual_seed(0)
    length, kv_heads, group, width = 90, 2, 2, 34
    query = randn(dtype, generator, 2 * length, kv_heads * group, width)
    keys, values = (randn(dtype, generator, 2, kv_heads, length, width) for _ in range(2))
    rows = CodeRows(width, dtype, torch.int16)
    tiles = native.Tiles([SequenceSlice([page], 0, length) for page in range(2)], group)

    def attend() -> torch.Tensor:
        stored = rows.quantise(keys), rows.quantise(values)
        return native.attend(query, *stored, tiles, width**-0.5, window, softcap)

    expected = attend()
    keys[0, 0, 30, 3], values[0, 1, 41, 0], query[70, 1, 7] = torch.nan, torch.inf, -torch.inf
    found = attend()
    spoiled = torch.zeros(2 * length, kv_heads * group, dtype=torch.bool)
    spoiled[30 : window + 30 if window else length, :group] = True
    spoiled[41 : window + 41 if window else length, group:] = True
    spoiled[70, 1] = True
    assert torch.equal(found.isnan(), spoiled[..., None].expand_as(found))
    assert torch.equal(found[~spoiled], expected[~spoiled])


@pytest.mark.parametrize("part", ["keys", "values"])
def test_keys_and_values_not_finite_are_seen_without_reading(dtype: torch.dtype, part: str) -> None:
    """Of tokens whose last hidden states nobody reads: they are NaN then, and finite otherwise."""
    generator, width, count, large = torch.Generator().manual_seed(0), 8, 5, 2
    hidden = randn(dtype, generator, count, width)
    hidden[large] *= 1e20
    qkv = torch.cat(
        [
            randn(dtype, generator, width, width) * (1e30 if part == each else 1)
            for each in ("queries", "keys", "values")
        ]
    )
    output, *mlp = (packed(randn(dtype, generator, width, width)) for _ in range(4))
    layer = DecoderLayer(
        index=0,
        norms=(None, None),
        epsilon=1e-5,
        head_norms=None,
        scale=1.0,
        window=0,
        rope=None,
        qkv=[packed(qkv.to(dtype))],
        output=output,
        mlp=Mlp(*mlp),
    )
    places = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    angles, pages = hidden.new_zeros(1, count, width), [[hidden.new_zeros(1, 1, count, width)] for _ in range(2)]
    tiles = native.Tiles([SequenceSlice([0], 0, count)], 1)
    step = StepTensors(angles, angles, places, tiles, *pages, read=torch.empty(0, dtype=torch.int64))
    found = hidden.clone()
    DecoderLayers([layer], 1, 1, width).compute(found, step)
    assert found.isnan().any(1).tolist() == [row == large for row in range(count)]
    sound = [row for row in range(count) if row != large]
    assert torch.equal(found[sound], hidden[sound])


@pytest.mark.parametrize("sharpness", [0.0, 0.01, 1.0], ids=["uniform", "nearly uniform", "sharp"])
def test_codes_lose_no_more_in_a_long_context(path: str, dtype: torch.dtype, sharpness: float) -> None:
    """Each block's weights have a scale of their own, and blocks are added in float32."""
    generator = torch.Generator().manual_seed(0)
    group, width, size = 3, 64, 256
    rows = CodeRows(width, dtype, CODES[dtype][-1])
    query = sharpness * randn(dtype, generator, 1, group, width)
    for length in (64, 2_000 if path in SLOW else 20_000):
        pages = -(-length // size)
        stored = [rows.quantise(randn(dtype, generator, pages, 1, size, width)) for _ in range(2)]
        tiles = native.Tiles([SequenceSlice([*range(pages)], length - 1, length)], group)
        found = native.attend(query, *stored, tiles, width**-0.5, 0, None)[0].double()
        keys, values = (rows.dequantise(each).double().flatten(0, 2)[:length] for each in stored)
        truth = (query[0].double() @ keys.T * width**-0.5).softmax(-1) @ values
        assert (found - truth).norm() < (6e-4 if dtype == torch.float32 else 1e-2) * truth.norm()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_as_near_to_the_truth_as_torchs(path: str, dtype: torch.dtype, name: str) -> None:
    large = torch.tensor([0.0, -0.0, 3e12, -3e12, 1e38, -1e38, 3e38, -3e38])
    x = torch.cat((torch.linspace(-12, 12, 4001), large)).to(dtype)
    pick_first = packed(torch.tensor([[1.0, 0.0]], dtype=dtype))
    found = native.linear(x[:, None].expand(-1, 2) * torch.tensor([1, 0], dtype=dtype), pick_first, name)
    expected = ACTIVATIONS[name](x.double())
    tolerance = 2 * ROUNDING[dtype] * expected.abs() + 3e-7 * x.double().abs().clamp(max=1.0)
    assert ((found[:, 0].double() - expected).abs() <= tolerance).all()


@settings(max_examples=examples(40), deadline=None)
@given(count=st.integers(1, 40_000), cap=st.sampled_from([0.5, 2.0, 30.0]), threads=st.integers(1, 5))
def test_a_soft_cap_is_computed_element_by_element(count: int, cap: float, threads: int) -> None:
    x = 3 * cap * torch.randn(count, generator=torch.Generator().manual_seed(count))
    with computing_with(threads):
        found = native.soft_cap(x.clone(), cap)
    with plain_c(torch.float32):
        expected = torch.cat([native.soft_cap(piece.clone(), cap) for piece in x.split(4099)])
    assert torch.equal(found, expected)
    torch.testing.assert_close(found.double(), (x.double() / cap).tanh() * cap, atol=5e-7 * cap, rtol=1e-6)


def test_a_soft_cap_holds_whatever_is_beyond_it(path: str, dtype: torch.dtype) -> None:
    """And so it does in attention, whose scores may be infinite."""
    x = torch.tensor([torch.inf, 3e38, -3e38, -torch.inf])
    if dtype == torch.float32:
        assert native.soft_cap(x.clone(), 0.5).tolist() == [0.5, 0.5, -0.5, -0.5]
        assert native.soft_cap(torch.tensor([torch.nan]), 0.5).isnan().all()
    keys = torch.tensor([[3e38, 3e38], [-3e38, -3e38]], dtype=dtype)[None, None]
    values = torch.tensor([[1.0, 1.0], [2.0, 2.0]], dtype=dtype)[None, None]
    tiles = native.Tiles([SequenceSlice([0], 0, 2)], 1)
    found = native.attend(torch.full((2, 1, 2), 4.0).to(dtype), keys, values, tiles, 1.0, 0, 0.5)
    weight = 1 / (1 + math.exp(-1.0))
    expected = torch.tensor([1.0, weight + 2 * (1 - weight)])[:, None, None].expand(-1, -1, 2)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=0)


def test_rows_of_another_width_are_refused() -> None:
    """The kernels would read beside the rows, or beside the weight."""
    for width in (7, 9, 16):
        rows = torch.zeros(3, width)
        with pytest.raises(ValueError, match=f"a weight of 8 columns cannot be multiplied by rows of {width}"):
            native.linear(rows, packed(torch.zeros(5, 8)))
        with pytest.raises(ValueError, match=f"a norm of 8 elements cannot be that of rows of {width}"):
            native.rms_norm(rows, torch.zeros(8), 1e-5)


def test_what_no_soft_cap_computes_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous float32"):
        native.soft_cap(torch.zeros(4, 4).T[:2], 1.0)
    with pytest.raises(ValueError, match="contiguous float32"):
        native.soft_cap(torch.zeros(4, dtype=torch.bfloat16), 1.0)


@settings(max_examples=examples(60), deadline=None)
@given(
    position=st.integers(0, 200),
    count=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    width=st.sampled_from([4, 32, 64, 96]),
    source=st.randoms(use_true_random=False),
)
def test_places_that_hold_nothing_yet_are_not_read(
    path: str,
    dtype: torch.dtype,
    position: int,
    count: int,
    heads: tuple[int, int],
    width: int,
    source: random.Random,
) -> None:
    codes = source.choice([None, *CODES[dtype]])
    generator = torch.Generator().manual_seed(0)
    queries, shared = heads
    stop = position + count
    shape = (2, shared, 128, width)
    query, keys, values = (randn(dtype, generator, *each) for each in ((count, queries, width), shape, shape))
    if codes is not None:
        rows = CodeRows(width, dtype, codes)
        keys, values = rows.quantise(keys), rows.quantise(values)
    tiles = native.Tiles([SequenceSlice([1, 0], position, stop)], queries // shared)
    expected = native.attend(query, keys, values, tiles, 1.0, 0, None)
    for page, first in ((1, 0), (0, 128)):
        for rows_of in (keys, values):
            rows_of[page, :, max(stop - first, 0) :] = -1 if codes is not None else torch.nan  # scales of -1 are NaN
    assert torch.equal(native.attend(query, keys, values, tiles, 1.0, 0, None), expected)


def test_pages_of_another_data_type_are_refused(dtype: torch.dtype) -> None:
    """Which a kernel would read as others, and beyond their end."""
    query, tiles = torch.zeros(1, 1, 8, dtype=dtype), native.Tiles([SequenceSlice([0], 0, 1)], 1)
    others = {torch.bfloat16, torch.float32, torch.int16, torch.int32} - {dtype, *CODES[dtype]}
    for other in others:
        pages = torch.zeros(1, 1, 16, 64, dtype=other)
        with pytest.raises(ValueError, match=f"keys and values for queries of {dtype} are of {other}"):
            native.attend(query, pages, pages, tiles, 1.0, 0, None)


@pytest.mark.parametrize("which", [0, -1], ids=["narrowest codes", "widest codes"])
def test_rows_of_codes_of_any_numbers_are_those_of_torch(dtype: torch.dtype, which: int) -> None:
    """Zeros, ties, numbers too small for a scale, infinities and NaN: of the fused kernel, and read
    again.
    """
    codes, width = CODES[dtype][which], 36
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(11, 3, width, generator=generator)
    tokens[0] = 0.0
    tokens[1] = torch.arange(width) - 0.5
    tokens[1, :, 0] = 127.0 if codes == torch.int8 else 2047.0  # the scale is 1, and every code a tie
    tokens[2] *= 2.0**-126
    tokens[3] *= 2.0**-118
    tokens[4] *= 2.0**120
    tokens[5, 1:, 7] = torch.inf
    tokens[6, 1:, 35] = -torch.inf
    tokens[7, 1:, 0] = torch.nan
    tokens[8] = 2.0**-149
    qkv = tokens.to(dtype)
    cosine, sine = torch.ones(11, width, dtype=dtype), torch.zeros(11, width, dtype=dtype)
    format_ = CodeRows(width, dtype, codes)
    stored = [torch.zeros(1, 1, 16, format_.width, dtype=codes) for _ in range(2)]
    places = torch.zeros(11, dtype=torch.int64), torch.arange(11)
    native.rotate_and_store(native.Projections(qkv, 1, cosine, sine, None), *stored, places)
    for one in (5, 6, 7):
        assert format_.dequantise(stored[1][0, 0, one]).isnan().all()
    for which, found in enumerate(stored):
        assert torch.equal(found[0, 0, 8:11], format_.quantise(qkv[8:11, 1 + which]))
    assert torch.equal(stored[1][0, 0, :11], format_.quantise(qkv[:, 2]))
    query = torch.ones(1, 1, width, dtype=dtype)
    for one in range(11):  # a single token attends to itself: the result is its values
        copied = [torch.zeros_like(each) for each in stored]
        for each, rows in zip(copied, stored, strict=True):
            each[0, 0, 0] = rows[0, 0, one]
        copied[0].zero_()
        found = native.attend(query, *copied, native.Tiles([SequenceSlice([0], 0, 1)], 1), 1.0, 0, None)[0, 0]
        expected, rtol = format_.dequantise(copied[1][0, 0, 0]), 0 if codes == torch.int8 else 2.0**-21
        torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("arch", grid(EVERY_TYPE, fast=lambda arch: arch in ("llama", "gemma3_text")))
def test_a_model_is_as_near_to_the_truth_as_with_torchs_kernels(
    path: str, dtype: torch.dtype, arch: str, every_checkpoint: dict[str, Path]
) -> None:
    prompts = torch.randint(300, (8, 90), generator=torch.Generator().manual_seed(5)).tolist()

    def logits(dtype: str, kernels: str) -> torch.Tensor:
        config = EmbeddedConfig(model_path=every_checkpoint[arch], device="cpu", dtype=dtype, kernels=kernels)
        model = load_model(config)
        model.allocate_kv(4, 32)
        rows = []
        for tokens in prompts:
            request = Request("", 0, SamplingParams(), tokens, len(tokens), 999, frozenset(), 0, pages=[2, 0, 3])
            for start, stop in ((0, 40), (40, 89), (89, 90)):
                rows.append(model.forward(Plan((), (Chunk(request, start, stop),), (request,))))
        return torch.cat(rows).double()

    truth = logits("float32", "torch")
    if dtype == torch.bfloat16:
        ours, theirs = (
            (logits("bfloat16", kernels) - truth).pow(2).mean().sqrt() for kernels in (f"native-{path}", "torch")
        )
        assert ours < 1.2 * theirs
    else:
        torch.testing.assert_close(logits("float32", f"native-{path}"), truth, atol=2e-4, rtol=2e-4)


def test_asked_for_in_vain(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(kernels: str) -> HfModel:
        return load_model(EmbeddedConfig(model_path=checkpoints["llama"], device="cpu", kernels=kernels))

    with pytest.raises(StartupError, match="--kernels native: they compute on a CPU, not on meta"):
        choose_kernels("native", torch.device("meta"), torch.float32)
    with pytest.raises(StartupError, match=r"--kernels native: they compute bfloat16 and float32, not torch.float16"):
        choose_kernels("native", torch.device("cpu"), torch.float16)
    monkeypatch.setattr(native, "unavailable", lambda dtype, path=None: "there is no compiler")
    with pytest.raises(StartupError, match="--kernels native: there is no compiler"):
        load("native")
    assert not caplog.records
    model = load("auto")
    model.allocate_kv(4, 32)
    assert "native" not in model.made_by
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert said.getMessage().endswith("and not the native ones: there is no compiler")


AVX2 = ("avx2", "fma", "f16c")
AMX = tuple(amx_emulation.FLAGS)
ask_for_tiles = libraries._ask_for_tiles  # before a fixture emulates it


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been loaded or chosen yet."""
    monkeypatch.setattr(paths, "_chosen", {})
    monkeypatch.setattr(libraries, "open_library", libraries.open_library.__wrapped__)


class OneLibrary:
    """Says what a library says of itself; nothing is computed with it."""

    integer_linear_amx = None
    are_integers_exact = True

    def __init__(self, stem: str) -> None:
        self.kernels_have_fma = lambda: "generic" not in stem
        self.kernels_sum_in_order = lambda: stem != "kernels_avx512_bfloat16"
        self.integers_in_tiles_are_exact = lambda: self.are_integers_exact


@pytest.mark.parametrize(
    ("flags", "auto", "fastest", "in_float32"),
    [
        ((*libraries.AVX512, "avx512_bf16", *AVX2), "native-avx512", "native-avx512", "native-avx512"),
        ((*libraries.AVX512, "avx512_bf16", *AMX, *AVX2), "native-amx", "native-amx", "native-amx"),
        ((*libraries.AVX512, *AVX2), "native-avx2", "native-avx2", "native-avx512"),
        (AVX2, "native-avx2", "native-avx2", "native-avx2"),
        (("fp", "asimd"), "native-neon", "native-neon", "native-neon"),
        (("avx2",), "torch", "native-generic", "torch"),
    ],
    ids=["avx512_bf16", "amx", "avx512", "avx2", "neon", "without FMA"],
)
def test_which_path_a_processor_takes(
    flags: tuple[str, ...],
    auto: str,
    fastest: str,
    in_float32: str,
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The choice by CPU flags, whatever this processor has."""
    monkeypatch.setattr(libraries, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(libraries, "_load", OneLibrary)
    monkeypatch.setattr(libraries, "_ask_for_tiles", lambda: None)

    def chosen(kernels: str, dtype: torch.dtype = torch.bfloat16) -> str:
        return choose_kernels(kernels, torch.device("cpu"), dtype).name

    assert chosen("auto") == auto
    assert chosen("native") == fastest
    assert chosen("auto", torch.float32) == in_float32
    assert chosen("torch") == "torch"
    assert chosen("native-generic") == "native-generic"
    if "avx512f" not in flags:
        with pytest.raises(StartupError, match="--kernels native-avx512: this processor has no avx512f"):
            chosen("native-avx512")


def test_cpu_flags_are_those_that_linux_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of x86, and in those of Arm."""
    for line in ("flags\t\t: fma avx2", "Features\t: fma avx2"):
        text = f"processor\t: 0\n{line}\nbugs\t\t: none\n\nprocessor\t: 1\n"
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text, **__: text)
        assert CPU_FLAGS() == {"fma", "avx2"}


@pytest.mark.parametrize(("more", "in_bfloat16"), [((), "native-avx512"), (AMX, "native-amx")], ids=["avx512", "amx"])
def test_kernels_whose_bits_differ_have_another_name(
    more: tuple[str, ...], in_bfloat16: str, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker refuses KV that was computed with kernels of another name."""
    monkeypatch.setattr(libraries, "cpu_flags", lambda: frozenset((*libraries.AVX512, "avx512_bf16", *more)))
    monkeypatch.setattr(libraries, "_load", OneLibrary)
    monkeypatch.setattr(libraries, "_ask_for_tiles", lambda: None)
    for dtype, name in ((torch.bfloat16, in_bfloat16), (torch.float32, "native")):
        found = choose_kernels("native", torch.device("cpu"), dtype)
        assert {found.gemms[0].kernels, found.attentions[0].kernels} == {name}


@pytest.mark.usefixtures("fresh")
class TestWithoutTheUseOfAmx:
    """AVX-512 computes instead, and the reason is there for who asked for AMX."""

    @pytest.fixture(autouse=True)
    def processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "cpu_flags", lambda: frozenset((*libraries.AVX512, "avx512_bf16", *AMX)))
        monkeypatch.setattr(libraries, "_load", OneLibrary)
        monkeypatch.setattr(libraries, "_ask_for_tiles", ask_for_tiles)

    def check(self, reason: str, log: pytest.LogCaptureFixture) -> None:
        assert choose_kernels("auto", torch.device("cpu"), torch.bfloat16).name == "native-avx512"
        assert f"kernels native-amx are not used in torch.bfloat16: {reason}" in log.text
        with pytest.raises(StartupError, match=f"--kernels native-amx: {reason}"):
            choose_kernels("native-amx", torch.device("cpu"), torch.bfloat16)

    def test_the_libraries_have_no_amx(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "_ask_for_tiles", lambda: None)
        monkeypatch.delattr(OneLibrary, "integer_linear_amx")
        reason = "they were built without AMX: the C compiler does not know it"
        assert native.unavailable(torch.float32, "amx") == reason

    def test_it_computes_other_integers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "_ask_for_tiles", lambda: None)
        monkeypatch.setattr(OneLibrary, "are_integers_exact", False)
        reason = "this processor's amx computes other integers than its maker documents"
        assert native.unavailable(torch.float32, "amx") == reason

    @pytest.mark.skipif(amx_emulation.IS_REAL, reason="this system does")
    def test_the_system_keeps_no_tiles(self, caplog: pytest.LogCaptureFixture) -> None:
        """As Linux before 5.16, and as that of a processor without."""
        self.check("the system does not let this process use AMX: ", caplog)

    def test_it_sums_in_another_order(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr(libraries, "_ask_for_tiles", lambda: None)
        monkeypatch.setattr(libraries, "_load", lambda stem: OneLibrary("kernels_avx512_bfloat16"))
        self.check("this processor's amx sums in another order than its maker documents", caplog)


@pytest.mark.usefixtures("fresh")
class TestWhyThereAreNone:
    def test_the_processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "cpu_flags", lambda: frozenset({"avx2"}))
        missing = "avx512f, avx512bw, avx512dq, avx512vl"
        assert native.unavailable(torch.float32, "avx512") == f"this processor has no {missing}"
        assert native.unavailable(torch.float32, "avx2") == "this processor has no fma, f16c"

    def test_no_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "FOLDER", tmp_path)
        assert "were not built" in str(native.unavailable(torch.float32))

    def test_of_another_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "_VERSION", 99)
        assert "is of another version of this package" in str(native.unavailable(torch.float32))

    def test_no_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "FOLDER", tmp_path)
        (tmp_path / f"kernels_generic_float32{EXTENSION_SUFFIXES[0]}").write_text("not a library")
        assert "kernels" in str(native.unavailable(torch.float32))


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)
