"""The Triton kernels: against float64, and each row bit by bit as it is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from worker.engines.embedded import cuda
from worker.engines.embedded.cuda import gemm

DTYPES = [torch.bfloat16, torch.float32]
TOLERANCES = {torch.bfloat16: 4e-3, torch.float32: 1e-6}
EPILOGUES: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda x, other: x,
    "silu": lambda x, other: functional.silu(x),
    "gelu": lambda x, other: functional.gelu(x),
    "gelu_tanh": lambda x, other: functional.gelu(x, approximate="tanh"),
    "relu": lambda x, other: functional.relu(x),
    "add": lambda x, other: x + other,
    "mul": lambda x, other: x * other,
}
ROWS = (1, 2, 15, 16, 17, 63, 64, 65, 128, 256, 257, 600)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_every_epilogue_is_known() -> None:
    assert tuple(EPILOGUES) == cuda.EPILOGUES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", [(70, 33), (512, 384), (2048, 300)])
def test_gemm(epilogue: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    inner, columns = shape
    x, weight = randn(50, inner, dtype=dtype), randn(columns, inner, dtype=dtype)
    bias, other = randn(columns, dtype=dtype), randn(50, columns, dtype=dtype)
    expected = EPILOGUES[epilogue](x.double() @ weight.double().T + bias.double(), other.double())
    given = other if epilogue in ("add", "mul") else None
    assert error(cuda.multiply(x, weight, bias, epilogue, given), expected) < TOLERANCES[dtype]
    unrounded = cuda.multiply(x, weight, bias, epilogue, given, is_unrounded=True)
    assert unrounded.dtype == torch.float32
    assert error(unrounded, expected) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(200, 70), (576, 1536), (1536, 576), (2048, 2048), (2048, 9000)])
def test_a_row_of_a_gemm_does_not_depend_on_the_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inner, columns = shape
    x, weight = randn(max(ROWS), inner, dtype=dtype), randn(columns, inner, dtype=dtype)
    whole = cuda.multiply(x, weight, is_unrounded=True)
    for rows in ROWS:
        some = torch.randperm(len(x), device="cuda")[:rows]
        assert torch.equal(cuda.multiply(x[some], weight, is_unrounded=True), whole[some]), rows


def test_all_tiles_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that `multiply` chooses among: a row's bits do not tell in which it was computed."""
    x, weight = randn(300, 1000, dtype=torch.bfloat16), randn(500, 1000, dtype=torch.bfloat16)
    chosen = {
        tuple(gemm._tile(rows, columns, torch.bfloat16).items()) for rows in ROWS for columns in (64, 2048, 3072, 8192)
    }
    assert len(chosen) >= 4
    found = []
    for tile in chosen:
        monkeypatch.setattr(gemm, "_tile", lambda *_, tile=tile: dict(tile))
        found.append(cuda.multiply(x, weight, is_unrounded=True))
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 100, 576, 4096])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = randn(130, width, dtype=dtype), randn(width)
    expected = torch.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    whole = cuda.rms_norm(x, weight, 1e-5)
    assert error(whole, expected) < TOLERANCES[dtype]
    assert torch.equal(cuda.rms_norm(x[7:8], weight, 1e-5), whole[7:8])


HEADS = [(32, 8, 64, 64), (8, 8, 128, 16), (9, 3, 64, 256), (14, 2, 80, 100), (4, 2, 16, 32), (16, 1, 256, 32)]
"""Query heads, key heads, width and page size."""

VARIANTS = [(0, None, False), (50, None, False), (0, 5.0, False), (130, 0.5, True), (0, None, True)]
"""Window, soft cap and sinks."""

LENGTH = 400


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention(
    heads: tuple[int, int, int, int], variant: tuple[int, float | None, bool], dtype: torch.dtype
) -> None:
    """Of whole prompts, pieces of them and single tokens, in pages that lie anywhere."""
    (num_heads, kv_heads, width, page), (window, cap, has_sinks) = heads, variant
    if cuda.split_bytes(width, dtype) > cuda.MOST_BYTES:
        return  # `TritonAttention.supports` says so: `test_what_is_too_wide`
    query = randn(LENGTH, num_heads, width, dtype=dtype)
    key, value = (randn(LENGTH, kv_heads, width, dtype=dtype) for _ in range(2))
    keys, values = (torch.zeros(60, kv_heads, page, width, dtype=dtype, device="cuda") for _ in range(2))
    table = torch.randperm(60, device="cuda")[: -(-LENGTH // page)].int()
    position = torch.arange(LENGTH, device="cuda")
    cuda.store_kv(key, value, keys, values, table[position // page], position % page)
    sinks = randn(num_heads) if has_sinks else None
    no_singles, no_tiles = (torch.empty(0, n, dtype=torch.int32, device="cuda") for n in (3, 4))
    tokens = cuda.tile_tokens(query, kv_heads)

    def tiled(start: int) -> torch.Tensor:
        tiles = [[at - start, 0, at, min(tokens, LENGTH - at)] for at in range(start, LENGTH, tokens)]
        rows = cuda.Sequences(table[None], no_singles, torch.tensor(tiles, dtype=torch.int32, device="cuda"), 0)
        return cuda.attend(query[start:], keys, values, rows, width**-0.5, window, cap, sinks)

    whole = tiled(0)
    reference = attention(query, key, value, width**-0.5, window, cap, sinks)
    assert error(whole, reference) < TOLERANCES[dtype]
    for start in (1, 127, 130, LENGTH - 1):
        assert torch.equal(tiled(start), whole[start:])
    some = [0, 1, 49, 50, 127, 128, 129, 255, 256, 300, LENGTH - 1]
    entries = torch.tensor([[row, 0, at + 1] for row, at in enumerate(some)], dtype=torch.int32, device="cuda")
    for num_splits in (-(-LENGTH // cuda.SPLIT), 8):
        rows = cuda.Sequences(table[None], entries, no_tiles, num_splits)
        assert torch.equal(
            cuda.attend(query[some], keys, values, rows, width**-0.5, window, cap, sinks), whole[some]
        ), num_splits


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    group, count = query.shape[1] // key.shape[1], len(query)
    scores = torch.einsum("thd,shd->hts", query.double(), key.double().repeat_interleave(group, 1)) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    place = torch.arange(count, device="cuda")
    hidden = place[None] > place[:, None]
    if window:
        hidden |= place[None] <= place[:, None] - window
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, count, 1)), -1)
    weights = scores.softmax(-1)[..., :count]
    return torch.einsum("hts,shd->thd", weights, value.double().repeat_interleave(group, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_and_norms_of_heads(has_norms: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, width, count = 6, 2, 80, 9
    qkv = randn(count, heads + 2 * kv_heads, width, dtype=dtype)
    angles = randn(count, width // 2).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = (randn(width), randn(width), 1e-6) if has_norms else None
    keys, values = (torch.zeros(4, kv_heads, 8, width, dtype=dtype, device="cuda") for _ in range(2))
    pages = torch.tensor([3, 3, 3, 3, 1, 1, 1, 1, -1], device="cuda")
    slots = torch.tensor([0, 1, 2, 7, 0, 1, 2, 3, 0], device="cuda")
    query = cuda.rotate_and_store(qkv, heads, cosine, sine, norms, keys, values, pages, slots)
    rotated, value = qkv[:, :-kv_heads].double(), qkv[:, -kv_heads:]
    if norms is not None:
        query_part = torch.rms_norm(rotated[:, :heads], (width,), norms[0].double(), norms[2])
        key_part = torch.rms_norm(rotated[:, heads:], (width,), norms[1].double(), norms[2])
        rotated = torch.cat((query_part, key_part), 1)
    low, high = rotated.chunk(2, -1)
    rotated = rotated * cosine.double()[:, None] + torch.cat((-high, low), -1) * sine.double()[:, None]
    assert error(query, rotated[:, :heads]) < TOLERANCES[dtype]
    assert error(keys[pages[:8], :, slots[:8]], rotated[:8, heads:]) < TOLERANCES[dtype]
    assert torch.equal(values[pages[:8], :, slots[:8]], value[:8])
    assert int((keys.abs().sum(-1) > 0).sum()) == 8 * kv_heads, "a token without a page is not written"
