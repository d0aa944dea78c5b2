"""GEMMs with AMX in bfloat16 on quantised weights: the bits of AMX on the weights as bfloat16, by
any rows, chunks and threads. Emulated where the processor has no AMX.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amx_emulation
import pytest
import torch
from chosen_paths import kept_choices
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runs import greedy_answers, last_logits, load_native
from test_quantised_kernels import KINDS, bits, num_threads, operands, randn, random_weight, weight_of
from torch.nn import functional

from worker.engines.embedded import native
from worker.engines.embedded.model.quantisation import QuantisedGemm, QuantisedWeight
from worker.engines.embedded.native import libraries
from worker.errors import StartupError

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def with_amx() -> Iterator[None]:
    if reason := amx_emulation.reason_against(torch.bfloat16):
        pytest.skip(reason)
    with kept_choices(), amx_emulation.amx():
        for dtype in (torch.float32, torch.bfloat16):
            native.choose_path(dtype, "amx")
        yield


def sums(weight: QuantisedWeight, x: torch.Tensor) -> torch.Tensor:
    """The oracle: `x` as bfloat16 times the unpacked weight as bfloat16, float32."""
    odd = (0, x.shape[1] % 2)  # AMX reads pairs
    packed = native.PackedWeight.of(functional.pad(weight.dequantised().bfloat16(), odd))
    return native.linear(functional.pad(x.bfloat16(), odd), native.Gemm(packed), is_unrounded=True)


SHAPES = {
    "rows": st.one_of(st.integers(0, 34), st.sampled_from([65, 200])),
    "columns": st.sampled_from([1, 15, 33, 70]),
    "seed": st.integers(0, 2**32 - 1),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(15), deadline=None)
@given(groups=st.sampled_from([1, 3, 9]), threads=st.integers(1, 3), is_bfloat16=st.booleans(), **SHAPES)
def test_bits_are_those_of_the_weight_in_bfloat16(
    with_amx: None, kind: str, rows: int, columns: int, groups: int, threads: int, is_bfloat16: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = weight_of(kind, columns, groups, generator)
    x = randn(generator, rows, 32 * groups).to(torch.bfloat16 if is_bfloat16 else torch.float32)
    with num_threads(threads):
        found = QuantisedGemm(weight, None, True, "bfloat16")(x)
    assert torch.equal(bits(found), bits(sums(weight, x)))


@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.one_of(
        st.tuples(st.just(4), st.sampled_from([8, 24, 40, 96]), st.integers(1, 5)),
        st.tuples(st.just(8), st.sampled_from([1, 7, 16, 33, 95]), st.integers(1, 5)),
    ),
    has_offsets=st.booleans(),
    **SHAPES,
)
def test_groups_are_of_any_size(
    with_amx: None, sizes: tuple[int, int, int], has_offsets: bool, rows: int, columns: int, seed: int
) -> None:
    """Also those that neither steps of 32 elements nor words of two fit."""
    width, group, groups = sizes
    generator = torch.Generator().manual_seed(seed)
    weight = random_weight(width, group, (columns, group * groups), has_offsets, generator)
    x = randn(generator, rows, group * groups)
    found = QuantisedGemm(weight, None, rounds_to="bfloat16")(x)
    assert torch.equal(bits(found), bits(sums(weight, x)))


@pytest.mark.parametrize("then", [*native.EPILOGUES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_result_is_rounded_once_behind_the_epilogue(with_amx: None, dtype: torch.dtype, then: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = weight_of("Q4_1", 70, 3, generator)
    x, bias, other = operands(generator, weight, 33, then, True)
    assert bias is not None
    x, bias, other = x.to(dtype), bias.to(dtype), None if other is None else other.to(dtype)
    found = QuantisedGemm(weight, bias, rounds_to="bfloat16")(x, then, other)
    # the same epilogue of the same sums, in float32: those of a weight that is 1 on the diagonal
    unit = native.Gemm(native.PackedWeight.of(torch.eye(70)), bias.float())
    expected = native.linear(sums(weight, x), unit, then, None if other is None else other.float())
    assert torch.equal(found, expected.to(dtype))


def test_a_row_does_not_depend_on_the_others(with_amx: None) -> None:
    """Nor on the chunks that rows of 9,000 elements, and 1,100 rows of 64, are computed in."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner in ((130, 9024), (1100, 64)):
        if not amx_emulation.IS_REAL:
            rows //= 2
        layer = QuantisedGemm(weight_of("Q4_0", 40, inner // 32, generator), None, rounds_to="bfloat16")
        x = randn(generator, rows, inner)
        expected = layer(x)
        for start, stop in ((0, 1), (1, 18), (18, 64), (rows - 3, rows)):
            assert torch.equal(layer(x[start:stop]), expected[start:stop])


def test_it_is_near_the_product(with_amx: None) -> None:
    """Two roundings to 8 bits each: errors of a few thousandths of the sum of magnitudes."""
    generator = torch.Generator().manual_seed(0)
    weight = weight_of("Q8_0", 70, 30, generator)
    x = randn(generator, 9, 960)
    true = x.double() @ weight.dequantised().double().T
    size = x.double().abs() @ weight.dequantised().double().abs().T
    error = (QuantisedGemm(weight, None, rounds_to="bfloat16")(x).double() - true).abs()
    assert 0 < (error / size).max() < 2**-9


SETTINGS: dict[str, Any] = {"quantization": "int4", "activation_dtype": "bfloat16"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_has_one_answer_in_any_chunks_and_batches(
    with_amx: None, dtype: str, every_checkpoint: dict[str, Path]
) -> None:
    model = load_native(every_checkpoint["qwen3"], dtype=dtype, **SETTINGS)
    assert model.made_by.endswith("int4 weights, bfloat16 activations with AMX")
    whole = last_logits(model)
    assert torch.equal(last_logits(model, (0, 33, 34, 89, 90))[-1:], whole)
    near = last_logits(load_native(every_checkpoint["qwen3"], dtype="float32", quantization="int4"))
    assert 0 < (whole.float() - near).norm() / near.norm() < 0.2
    prompts = [[(7 * which + 3 * at) % 290 + 3 for at in range(length)] for which, length in enumerate((1, 5, 70))]

    def answers(budget: int, together: int) -> list[list[int]]:
        fresh = load_native(every_checkpoint["qwen3"], dtype=dtype, **SETTINGS)
        return greedy_answers(fresh, prompts, 4, budget=budget, together=together)

    assert answers(40, 3) == answers(512, 1)


def test_it_needs_amx(every_checkpoint: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="bfloat16 needs AMX: native-generic does not use it; use auto"):
        load_native(every_checkpoint["llama"], kernels="native-generic", dtype="float32", **SETTINGS)
    with pytest.raises(StartupError, match="--activation-dtype bfloat16 needs quantised weights"):
        load_native(every_checkpoint["llama"], activation_dtype="bfloat16")
    flags = libraries.cpu_flags() - amx_emulation.FLAGS
    monkeypatch.setattr(libraries, "cpu_flags", lambda: flags)
    libraries.open_library.cache_clear()
    try:
        with pytest.raises(StartupError, match="--activation-dtype bfloat16 needs AMX: this processor has no "):
            load_native(every_checkpoint["llama"], dtype="float32", **SETTINGS)
    finally:
        libraries.open_library.cache_clear()


def test_padding_adds_nothing(with_amx: None) -> None:
    """A row of infinities meets elements behind the last group as zeros that are not multiplied."""
    generator = torch.Generator().manual_seed(1)
    weight = random_weight(8, 33, (40, 33), False, generator)
    x = functional.pad(torch.full((2, 1), torch.inf), (0, 32))
    found = QuantisedGemm(weight, None, rounds_to="bfloat16")(x)
    assert torch.equal(found.isfinite(), sums(weight, x).isfinite())
