"""GEMMs on quantised weights: batch-invariant, and with the bits of float32 on what is unpacked; or
of integers, where rows are rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import amx_emulation
import pytest
import torch
from chosen_paths import kept_choices, plain_c
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import DOT_IN_EVEX, compile_kernels, needs_dot_in_evex
from torch.nn import functional

from worker.engines.embedded import native
from worker.engines.embedded.model.quantisation import (  # type: ignore[attr-defined]
    BLOCK,
    GROUP,
    QuantisedGemm,
    QuantisedWeight,
    StackedWeight,
    concatenated,
    quantise,
)
from worker.engines.embedded.native import libraries
from worker.engines.embedded.native.gemm import quantised_kernel
from worker.engines.embedded.native.whole_scales import (
    BYTES,
    E2M1,
    NIBBLES,
    SPAN,
    span_of,
    step_of,
    whole_scales,
)
from worker.errors import StartupError

pytestmark = pytest.mark.native

PATHS = [path for path in native.PATHS if native.unavailable(torch.float32, path) is None]
if not amx_emulation.IS_REAL and amx_emulation.reason_against(torch.float32) is None:
    PATHS.insert(0, "amx")
DTYPES = [torch.float32, torch.bfloat16]

AVX2_WITH_VNNI = "avx2 with VNNI"

OUTLIER = 12
"""Times the mean magnitude of its row: an element above is not rounded; of ``rounded_rows.h``."""

of_integers = pytest.mark.parametrize(
    "path", [*PATHS, pytest.param(AVX2_WITH_VNNI, marks=[needs_dot_in_evex, pytest.mark.native_build])], indirect=True
)
"""Of tests that run with each instruction for integers that this processor has."""


@pytest.fixture(params=PATHS, scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with kept_choices(), pytest.MonkeyPatch.context() as patch:
        if request.param == AVX2_WITH_VNNI:
            file = tmp_path_factory.mktemp("kernels") / "kernels.so"
            compile_kernels("avx2", file, "-O2", "-shared", "-fPIC", "-DFLOAT32=1", DOT_IN_EVEX)
            library, others = libraries.KernelLibrary(file), libraries.open_library
            patch.setattr(
                libraries, "open_library", lambda *which: library if which[1] == AVX2_WITH_VNNI else others(*which)
            )
        with amx_emulation.amx() if request.param == "amx" else nullcontext():
            native.choose_path(torch.float32, request.param)
            yield request.param


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def random_weight(
    bits: int, group: int, shape: tuple[int, int], has_offsets: bool, generator: torch.Generator
) -> QuantisedWeight:
    """A weight of random codes, its scales and offsets in float16."""
    columns, inner = shape
    scales = (randn(generator, columns, inner // group) / 16).half()
    offsets = randn(generator, columns, inner // group).half() if has_offsets else None
    if bits == 8:
        codes = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    else:
        codes = torch.randint(0, 256, (columns, inner // 2), dtype=torch.uint8, generator=generator)
    return QuantisedWeight(codes, scales, offsets)


def weight_of(kind: str, columns: int, groups: int, generator: torch.Generator) -> QuantisedWeight:
    """A weight ``[columns, 32 * groups]`` of random codes, as a format holds it."""
    shape = columns, 32 * groups
    if kind in ("int8", "int4"):
        return quantise(randn(generator, *shape), kind)
    bits, group = 8 if kind in ("Q8_0", "Q6_K") else 4, 16 if kind == "Q6_K" else 32
    weight = random_weight(bits, group, shape, kind in ("Q4_1", "Q4_K"), generator)
    if kind == "MXFP4":
        exponents = torch.randint(-9, -3, weight.scales.shape, generator=generator)
        return replace(weight, scales=torch.ones(weight.scales.shape).ldexp(exponents).half(), is_e2m1=True)
    if not kind.endswith("K"):
        return weight
    # scales are a float16 times an integer of 6 or 8 bits
    scales = weight.scales.float() * torch.randint(0, 64, weight.scales.shape, generator=generator)
    return replace(weight, scales=scales, offsets=weight.offsets.float() if weight.offsets is not None else None)


KINDS = ("int8", "int4", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4")

GEMMS = {
    "rows": st.one_of(st.integers(0, 14), st.integers(190, 200)),
    "columns": st.sampled_from([1, 15, 33, 70]),
    "groups": st.sampled_from([1, 3, 9]),
    "then": st.sampled_from([*native.EPILOGUES]),
    "has_bias": st.booleans(),
    "threads": st.integers(1, 3),
    "seed": st.integers(0, 2**32 - 1),
}
"""Of few rows, and of more than the caches are filled with at a time."""


def operands(
    generator: torch.Generator, weight: QuantisedWeight, rows: int, then: str, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Random rows, bias and operand of the epilogue `then`."""
    columns, inner = weight.shape
    x = randn(generator, rows, inner)
    bias = randn(generator, columns) if has_bias else None
    return x, bias, randn(generator, rows, columns) if then in native.WITH_OTHER else None


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(25), deadline=None)
@given(**GEMMS)
def test_bits_are_those_of_float32_on_the_unpacked_weight(
    path: str, kind: str, rows: int, columns: int, groups: int, then: str, has_bias: bool, threads: int, seed: int
) -> None:
    if path == "generic":  # which is slow where FMA is emulated
        rows, groups = rows % 20, min(groups, 3)
    generator = torch.Generator().manual_seed(seed)
    weight = weight_of(kind, columns, groups, generator)
    x, bias, other = operands(generator, weight, rows, then, has_bias)
    with num_threads(threads):
        found = QuantisedGemm(weight, bias)(x, then, other)
    with plain_c(torch.float32):
        expected = native.linear(x, native.Gemm(native.PackedWeight.of(weight.dequantised()), bias), then, other)
    assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("rounds_to", ["none", "int8"])
@pytest.mark.parametrize("is_unrounded", [False, True])
@settings(max_examples=examples(25), deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 14),
    columns=st.sampled_from([1, 15, 33, 70]),
    then=st.sampled_from([*native.EPILOGUES]),
    seed=st.integers(0, 2**32 - 1),
)
def test_bfloat16_rows_are_widened_and_results_rounded_once(
    path: str, is_unrounded: bool, rounds_to: str, kind: str, rows: int, columns: int, then: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = weight_of(kind, columns, 3, generator)
    x, bias = randn(generator, rows, 96).bfloat16(), randn(generator, columns).bfloat16()
    other = randn(generator, rows, columns).bfloat16()
    found = QuantisedGemm(weight, bias, is_unrounded, rounds_to)(x, then, other)
    expected = QuantisedGemm(weight, bias.float(), False, rounds_to)(x.float(), then, other.float())
    assert torch.equal(found, expected if is_unrounded else expected.bfloat16())


@pytest.mark.parametrize("rounds_to", ["none", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=examples(10), deadline=None)
@given(
    rows=st.lists(st.integers(0, 219), min_size=1, max_size=210, unique=True),
    columns=st.sampled_from([1, 31, 97]),
    threads=st.integers(1, 3),
)
def test_a_row_does_not_depend_on_the_others(
    path: str, dtype: torch.dtype, kind: str, rounds_to: str, rows: list[int], columns: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(columns)
    groups = 2 if path == "generic" else 10
    layer = QuantisedGemm(weight_of(kind, columns, groups, generator), None, rounds_to=rounds_to)
    x = with_outliers(randn(generator, 220, 32 * groups), generator).to(dtype)
    expected = layer(x)
    with num_threads(threads):
        assert torch.equal(layer(x[rows]), expected[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_the_product(path: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = weight_of(kind, 70, 30, generator)
    x = randn(generator, 9, 960)
    expected = functional.linear(x.double(), weight.dequantised().double())
    terms = functional.linear(x.double().abs(), weight.dequantised().double().abs())
    assert ((QuantisedGemm(weight, None)(x).double() - expected).abs() <= 960 * 2.0**-24 * terms).all()


@settings(max_examples=examples(50), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.one_of(st.integers(1, 70), st.sampled_from([32, 64, 320]))),
    size=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_a_weight_is_rounded_to_the_nearest_code(to: str, shape: tuple[int, int], size: float, seed: int) -> None:
    weight = randn(torch.Generator().manual_seed(seed), *shape) * size
    weight[0] = 0
    weight[-1, 0] = 3 * size
    found = quantise(weight, to)
    is_grouped = to == "int4" and shape[1] % GROUP == 0
    assert (found.bits, found.shape) == (4 if is_grouped else 8, shape)
    error = (found.dequantised() - weight).abs()
    if is_grouped:
        groups = weight.unflatten(1, (-1, GROUP))
        spread = groups.amax(2) - groups.amin(2)
        # half a step, and what rounding scale and offset to float16 adds
        bound = (spread / 30 + 2.0**-9 * groups.abs().amax(2) + 2.0**-24).repeat_interleave(GROUP, 1)
    else:
        bound = weight.abs().amax(1, keepdim=True) / 254 * 1.0001
    assert (error <= bound).all()


def test_what_cannot_be_quantised() -> None:
    weight = torch.ones(3, 32)
    weight[1, 1] = torch.inf
    with pytest.raises(ValueError, match="infinite or not a number"):
        quantise(weight, "int4")
    assert quantise(torch.full((2, 32), 1e6) * torch.linspace(-1, 1, 32), "int4").bits == 8  # too large for float16


def test_weights_next_to_nothing_keep_their_sign() -> None:
    """Their scale, subnormal, is much smaller than a 127th of the largest."""
    weight = torch.tensor([[190.0, -190.0]]) * 2.0**-149
    assert torch.equal(quantise(weight, "int8").codes, torch.tensor([[127, -127]], dtype=torch.int8))


def test_weights_of_two_layouts_are_stacked() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [weight_of(kind, columns, 2, generator) for kind, columns in (("Q4_K", 33), ("Q6_K", 20))]
    stacked = concatenated(parts)
    assert isinstance(stacked, StackedWeight)
    assert stacked.shape == (53, 64)
    x, bias, other = randn(generator, 5, 64), randn(generator, 53), randn(generator, 5, 53)
    found = QuantisedGemm(stacked, bias)(x, "add", other)
    stacked = torch.cat([part.dequantised() for part in parts])  # type: ignore[assignment]
    expected = native.linear(x, native.Gemm(native.PackedWeight.of(stacked), bias), "add", other)  # type: ignore[arg-type]
    assert torch.equal(found, expected)
    same = concatenated([parts[0], parts[0]])
    assert isinstance(same, QuantisedWeight)
    assert torch.equal(same.dequantised(), torch.cat([parts[0].dequantised()] * 2))


@pytest.mark.parametrize("rounds_to", ["none", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_looked_up(kind: str, rounds_to: str) -> None:
    weight = weight_of(kind, 70, 3, torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 69], [33, 33]])
    layer = QuantisedGemm(weight, None, rounds_to=rounds_to)
    assert torch.equal(layer.rows(ids), weight.dequantised()[ids])
    assert torch.equal(layer.rows(ids.T, torch.bfloat16), weight.dequantised()[ids.T].bfloat16())
    assert torch.equal(layer.rows(ids[:0]), weight.dequantised()[ids[:0]])
    for wrong in (-1, 70, 2**40):
        with pytest.raises(IndexError, match="a weight of 70 rows has not all of the rows"):
            layer.rows(torch.tensor([3, wrong]))


def test_panels_that_the_kernels_would_read_beside_are_refused() -> None:
    four = weight_of("Q4_0", 70, 3, torch.Generator().manual_seed(0)).packed()
    eight = weight_of("Q8_0", 70, 3, torch.Generator().manual_seed(0)).packed(rounds_to="int8")
    assert eight.steps is not None
    assert eight.units is not None
    for panels, wrong in (
        (four, {"columns": 97}),
        (four, {"inner": four.inner + 8}),
        (four, {"bits": 8}),
        (four, {"rounds_to": "int8"}),
        (four, {"steps": eight.steps}),
        (eight, {"steps": None}),
        (eight, {"units": eight.units[:, :0]}),
        (eight, {"steps": eight.steps.int()}),
        (four, {"rounds_to": "int8", "scales": four.scales.repeat_interleave(8, 1)}),
        (four, {"scales": four.scales.repeat_interleave(16, 1)}),
        (four, {"scales": four.scales.double()}),
        (four, {"offsets": four.scales[:1]}),
        (four, {"is_e2m1": True}),
        (eight, {"rounds_to": "none"}),
        (eight, {"codes": eight.codes[:, 1:]}),
        (eight, {"scales": eight.scales[:, :0]}),
    ):
        with pytest.raises(ValueError, match="are no weight of shape"):
            replace(panels, **wrong)


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rows ``[n, K]`` as `integer.c` rounds them, in float64; and the number of terms of a sum:
    spans, and outliers of the row that has most.
    """
    inner = x.shape[1]
    is_outlier = x.abs() > OUTLIER * x.abs().mean(1, keepdim=True)
    span = span_of(inner)
    spans = functional.pad(x.where(~is_outlier, 0.0), (0, -inner % span)).unflatten(1, (-1, span))
    scales = spans.abs().amax(2, keepdim=True) / 127
    scales = scales.where(scales >= torch.finfo(torch.float32).tiny, 0.0)
    codes = (spans / scales.where(scales != 0, torch.inf)).round()
    inputs = (codes.double() * scales).flatten(1)[:, :inner].where(~is_outlier, x.double())
    return inputs, spans.shape[1] + max([0, *is_outlier.sum(1).tolist()])


def whole(weight: QuantisedWeight) -> torch.Tensor:
    """The weight that rounded rows meet, in float64, from its definition in `whole_scales`."""
    inner = weight.shape[1]
    kind = E2M1 if weight.is_e2m1 else NIBBLES if weight.bits == 4 else BYTES
    packed, units = whole_scales(weight.scales, weight.offsets, inner, kind)
    step = step_of(inner // weight.scales.shape[1], inner)
    steps, offsets = packed, torch.zeros_like(packed)
    if weight.offsets is not None:
        steps, offsets = packed << 16 >> 16, packed >> 16
    ones = torch.ones(weight.scales.shape, dtype=torch.float16)
    codes = replace(weight, scales=ones, offsets=None).dequantised().long()  # less 8 if they have 4 bits

    def each(numbers: torch.Tensor, count: int) -> torch.Tensor:
        return numbers.repeat_interleave(count, 1)[:, :inner]

    elements = codes * each(steps.long(), step) + each(offsets.long(), step)
    assert elements.abs().max() < 2**15
    return elements.double() * units.double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [32, 96, 576, 1536])
def test_scales_are_whole_numbers_of_a_fine_unit(kind: str, inner: int) -> None:
    """Steps, and offsets with what 8 steps of theirs add to them, are rounded to half a unit; a
    unit is the largest weight that codes of its row could have, by 32,512.
    """
    weight = weight_of(kind, 40, inner // 32, torch.Generator().manual_seed(inner))
    codes = 12 if kind == "MXFP4" else 128 if weight.bits == 8 else 8
    largest = codes * weight.scales.double().abs()
    if weight.offsets is not None:
        most, least = (c * weight.scales.double() + weight.offsets for c in (15, 0))
        largest = torch.maximum(most.abs(), least.abs())
    bound = largest.amax(1, keepdim=True) / 32_512 * (codes + 1) / 2 * 1.001
    error = (whole(weight) - weight.dequantised()).abs()
    assert (error <= (0.0 if kind == "MXFP4" else bound)).all()


@settings(max_examples=examples(200), deadline=None)
@given(group=st.sampled_from([8, 16, 32, 64, 96, 128, 256, 512]), groups=st.integers(1, 40))
def test_steps_and_spans_divide_each_other(group: int, groups: int) -> None:
    """As the kernels read them: blocks of a step, steps of a span, tiles of 64 elements."""
    inner = group * groups
    span, step = span_of(inner), step_of(group, inner)
    assert span <= SPAN
    assert span % 64 == 0
    assert span % step == 0
    assert groups == 1 or group % step == 0
    assert step % min(step, BLOCK) == 0
    assert -(-inner // span) == -(-inner // SPAN)  # not more of them than have to be


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("size", [0.0, 1e-43, 1e-38, 1e30])
def test_steps_of_weights_of_any_size(kind: str, size: float) -> None:
    weight = weight_of(kind, 3, 3, torch.Generator().manual_seed(0))
    scales = torch.full((3, 3), size)
    weight = replace(weight, scales=scales, offsets=None if weight.offsets is None else -3 * scales)
    expected = weight.dequantised().double()
    assert ((whole(weight) - expected).abs() <= 2e-3 * expected.abs().max() + 1e-37).all()


def with_outliers(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`x`, of which one element in 20 is much larger in every other row."""
    is_large = torch.rand(x.shape, generator=generator) < 0.05
    is_large[1::2] = False
    return x.where(~is_large, 1000 * x)


@of_integers
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(25), deadline=None)
@given(**GEMMS)
def test_a_product_with_rounded_rows(
    path: str, kind: str, rows: int, columns: int, groups: int, then: str, has_bias: bool, threads: int, seed: int
) -> None:
    """The bits are those of plain C, and the sums of the definition, in float64, are within its
    roundings.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = weight_of(kind, columns, groups, generator)
    x, bias, other = operands(generator, weight, rows, then, has_bias)
    x = with_outliers(x, generator)
    layer = QuantisedGemm(weight, bias, rounds_to="int8")
    with num_threads(threads):
        found, sums = layer(x, then, other), QuantisedGemm(weight, None, rounds_to="int8")(x)
    with plain_c(torch.float32):
        expected = layer(x, then, other)
    assert torch.equal(bits(found), bits(expected))
    inputs, num_terms = rounded(x)
    products = functional.linear(inputs, whole(weight))
    parts = weight.dequantised().double().abs()
    if weight.offsets is not None:  # a scaled code and an offset, which may cancel each other
        parts = parts + 2 * weight.offsets.double().abs().repeat_interleave(x.shape[1] // weight.offsets.shape[1], 1)
    terms = functional.linear(inputs.abs(), parts)
    assert ((sums.double() - products).abs() <= 4 * num_terms * 2.0**-24 * terms).all()


@of_integers
@settings(max_examples=examples(60), deadline=None)
@given(
    layouts=st.lists(
        st.tuples(st.sampled_from([4, 8]), st.sampled_from([8, 32, 64, 128, 384])), min_size=2, max_size=4
    ),
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    has_offsets=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_weights_of_one_call_may_have_groups_of_other_sizes(
    path: str, layouts: list[tuple[int, int]], rows: int, columns: int, has_offsets: bool, seed: int
) -> None:
    """Layers that share rounded rows have the bits that each has alone."""
    generator = torch.Generator().manual_seed(seed)
    x = with_outliers(randn(generator, rows, 384), generator)
    gemms: list[Any] = []
    kernels = native.library(torch.float32)
    for bits_of_code, group in layouts:
        weight = random_weight(bits_of_code, group, (columns, 384), has_offsets, generator)
        gemms += QuantisedGemm(weight, None, rounds_to="int8").parts
    found = [torch.empty(rows, columns) for _ in gemms]
    layers = (kernels.linear_t * len(gemms))(
        *(
            kernels.linear_t(input=x.data_ptr(), rows=rows, gemm=gemm.address, output=output.data_ptr())
            for gemm, output in zip(gemms, found, strict=True)
        )
    )
    assert quantised_kernel("int8")(layers, len(layers), kernels.threads()) == 0
    for gemm, output in zip(gemms, found, strict=True):
        assert torch.equal(bits(output), bits(native.linear(x, gemm)))


@of_integers
@pytest.mark.parametrize(
    "layout",
    [
        *((bits, group, groups * group) for bits in (4, 8) for group in (8, 16, 32, 64, 128) for groups in (1, 3)),
        *((4, row, row) for row in (24, 40, 104)),
        *((8, row, row) for row in (1, 7, 33, 100)),
    ],
    ids=str,
)
@settings(max_examples=examples(10), deadline=None)
@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 70),
    has_offsets=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_rounded_rows_and_groups_of_any_size(
    path: str, layout: tuple[int, int, int], rows: int, columns: int, has_offsets: bool, seed: int
) -> None:
    """Bits of a code, weights of a group, and of a row."""
    generator = torch.Generator().manual_seed(seed)
    bits_of_code, group, inner = layout
    weight = random_weight(bits_of_code, group, (columns, inner), has_offsets, generator)
    layer, x = QuantisedGemm(weight, None, rounds_to="int8"), with_outliers(randn(generator, rows, inner), generator)
    found = layer(x)
    with plain_c(torch.float32):
        assert torch.equal(bits(found), bits(layer(x)))


@of_integers
@pytest.mark.parametrize("inner", [1, 3, 20, 30, 33, 67, 100])
def test_rounded_rows_of_any_width(path: str, inner: int) -> None:
    """int8 has them: one scale a row, and words of four codes that the last ones do not fill."""
    generator = torch.Generator().manual_seed(inner)
    weight, x = quantise(randn(generator, 40, inner), "int8"), with_outliers(randn(generator, 5, inner), generator)
    layer = QuantisedGemm(weight, None, rounds_to="int8")
    inputs, _ = rounded(x)
    unpacked = weight.dequantised().double()
    bound = 2.0**-20 * functional.linear(inputs.abs(), unpacked.abs())
    products = functional.linear(inputs, whole(weight))
    assert ((layer(x).double() - products).abs() <= bound).all()
    assert torch.equal(layer.rows(torch.tensor([39])), weight.dequantised()[[39]])


@of_integers
@settings(max_examples=examples(25), deadline=None)
@given(**GEMMS)
def test_numbers_of_e2m1_are_the_codes_of_8_bits_that_they_are(
    path: str, rows: int, columns: int, groups: int, then: str, has_bias: bool, threads: int, seed: int
) -> None:
    """All bits. With rounded rows a unit depends on the codes that there can be: then both are near
    the product with rounded rows.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = weight_of("MXFP4", columns, groups, generator)
    numbers = weight.dequantised().unflatten(1, (-1, 32)) / weight.scales.float()[..., None]
    wide = QuantisedWeight(numbers.flatten(1).to(torch.int8), weight.scales)
    assert torch.equal(wide.dequantised(), weight.dequantised())
    x, bias, other = operands(generator, weight, rows, then, has_bias)
    x = with_outliers(x, generator)
    with num_threads(threads):
        found, expected = (QuantisedGemm(each, bias)(x, then, other) for each in (weight, wide))
        assert torch.equal(bits(found), bits(expected))
        found, expected = (QuantisedGemm(each, None, rounds_to="int8")(x) for each in (weight, wide))
    largest = 12 * weight.scales.float().abs().amax(1)
    assert ((found - expected).abs() <= 4e-3 * x.abs().sum(1, keepdim=True) * largest).all()


@of_integers
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "MXFP4"])
def test_products_of_the_largest_codes_do_not_overflow(path: str, kind: str) -> None:
    """Products of pairs are added in 16 bits where the processor has no other instruction."""
    weight = weight_of(kind, 33, 3, torch.Generator().manual_seed(0))
    for code in (-128, 127) if weight.bits == 8 else (255, 0, 0x77):
        largest = replace(weight, codes=torch.full_like(weight.codes, code))
        for x in (torch.ones(2, 96), -torch.ones(2, 96)):
            found = QuantisedGemm(largest, None, rounds_to="int8")(x).double()
            expected = functional.linear(x.double(), whole(largest))
            terms = functional.linear(x.double().abs(), whole(largest).abs())
            assert ((found - expected).abs() <= 2.0**-19 * terms).all()


@of_integers
def test_blocks_of_tiny_numbers_are_0_and_nan_or_inf_gives_nan(path: str) -> None:
    weight = weight_of("Q4_1", 40, 2, torch.Generator().manual_seed(0))
    x = torch.full((4, 64), 1e-38)
    x[1, 40], x[2, 3], x[3, :32] = torch.inf, torch.nan, 1.0
    found = QuantisedGemm(weight, None, rounds_to="int8")(x)
    assert torch.equal(found[0], torch.zeros(40))
    assert found[1:3].isnan().all()
    assert found[3].isfinite().all()
    assert found[3].any()


def test_groups_that_do_not_fit_rounded_rows_blocks_are_refused() -> None:
    weight = QuantisedWeight(torch.zeros(3, 96, dtype=torch.int8), torch.ones(3, 2))
    with pytest.raises(StartupError, match="groups of 48 weights do not fit blocks of 32"):
        weight.packed(rounds_to="int8")
