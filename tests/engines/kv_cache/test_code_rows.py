"""Rows of a quantised KV cache, in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.embedded.kv_cache import CodeRows, KvStore
from worker.engines.embedded.plan import PageCopy

DTYPES = (torch.float32, torch.bfloat16)
HIGHEST = {torch.int8: 127, torch.int16: 2047}
CODES = tuple(HIGHEST)
EACH_OF_CODES = pytest.mark.parametrize("codes", CODES, ids=str)


@given(
    head_dim=st.integers(1, 300),
    exponent=st.integers(-100, 100),
    dtype=st.sampled_from(DTYPES),
    codes=st.sampled_from(CODES),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_element_is_off_by_half_a_scale_at_most(
    head_dim: int, exponent: int, dtype: torch.dtype, codes: torch.dtype, seed: int
) -> None:
    x = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(seed)).mul(2.0**exponent).to(dtype)
    code_rows = CodeRows(head_dim, dtype, codes)
    rows = code_rows.quantise(x)
    of_codes = head_dim * codes.itemsize
    assert rows.shape == (5, 3, code_rows.width)
    assert rows.dtype == codes
    assert code_rows.num_bytes == rows[0, 0].nbytes
    assert of_codes + 4 <= code_rows.num_bytes < of_codes + 12
    assert code_rows.num_bytes % 8 == 0
    found, scale = rows[..., :head_dim], rows.view(torch.int8)[..., -4:].view(torch.float32)
    assert (found.int().abs().amax(-1) == HIGHEST[codes]).all()
    error = ((found * scale.double()) - x.double()).abs()
    assert (error <= scale.double() * (0.5 + HIGHEST[codes] * 2.0**-23)).all()
    assert torch.equal(code_rows.dequantise(rows), (found * scale).to(dtype))
    assert not rows.view(torch.int8)[..., of_codes:-4].any()


@given(
    head_dim=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    codes=st.sampled_from(CODES),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_row_depends_on_itself_alone(head_dim: int, dtype: torch.dtype, codes: torch.dtype, seed: int) -> None:
    """And is read in place, of any slice of the store."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, head_dim, generator=generator).to(dtype)
    x[1] *= 1000
    x[2, 0] = torch.nan
    code_rows = CodeRows(head_dim, dtype, codes)
    rows = code_rows.quantise(x)
    for one in range(4):
        for head in range(6):
            assert torch.equal(code_rows.quantise(x[one, head]), rows[one, head])
    assert torch.equal(code_rows.quantise(x.transpose(0, 1)), rows.transpose(0, 1))
    whole = code_rows.dequantise(rows)
    torch.testing.assert_close(code_rows.dequantise(rows[1:4:2, 2:5]), whole[1:4:2, 2:5], rtol=0, atol=0)
    assert whole[2, 0].isnan().all()
    assert whole.isnan().sum() == head_dim


@EACH_OF_CODES
def test_ties_go_to_the_even_code(codes: torch.dtype) -> None:
    most = HIGHEST[codes]
    x = torch.tensor([most, 0.5, 1.5, 2.5, -0.5, -1.5, most - 0.5])
    found = CodeRows(7, torch.float32, codes).quantise(x)[:7].tolist()
    assert found == [most, 0, 2, 2, 0, -2, most - 1]


@pytest.mark.parametrize("size", [0.0, 2.0**-149, 2.0**-126])
@EACH_OF_CODES
def test_what_has_no_scale_is_0(codes: torch.dtype, size: float) -> None:
    code_rows = CodeRows(6, torch.float32, codes)
    rows = code_rows.quantise(torch.full((2, 6), size))
    assert not rows.any()
    assert not code_rows.dequantise(rows).any()


@pytest.mark.parametrize("spoiler", [torch.inf, -torch.inf, torch.nan])
@EACH_OF_CODES
def test_what_is_not_finite_spoils_its_row(codes: torch.dtype, spoiler: float) -> None:
    code_rows = CodeRows(6, torch.float32, codes)
    x = torch.ones(2, 6)
    x[1, 3] = spoiler
    found = code_rows.dequantise(code_rows.quantise(x))
    assert torch.equal(found[0], x[0])
    assert found[1].isnan().all()


@EACH_OF_CODES
def test_rows_are_copied_and_zeroed_whole(codes: torch.dtype) -> None:
    code_rows = CodeRows(6, torch.float32, codes)
    store = KvStore(*([torch.full((3, 2, 4, code_rows.width), -1, dtype=codes)] for _ in range(2)), code_rows)  # type: ignore[arg-type, call-arg]
    assert store.dtype_name == f"{str(codes).removeprefix('torch.')} of float32"
    assert code_rows.dequantise(store.keys[0]).isnan().all()  # what memory may hold before it is zeroed
    written = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))
    store.begin([0, 2])
    store.write(0, (torch.zeros(4, dtype=torch.int64), torch.arange(4)), written, -written)
    store.copy([PageCopy(source=0, target=1, num_tokens=3)])
    expected = code_rows.dequantise(code_rows.quantise(written)).transpose(0, 1)
    keys, values = code_rows.dequantise(store.keys[0]), code_rows.dequantise(store.values[0])
    assert torch.equal(keys[0], expected)
    assert torch.equal(values[0], -expected)
    assert torch.equal(keys[1, :, :3], expected[:, :3])
    assert not keys[1, :, 3:].any()
    assert not keys[2].any()
