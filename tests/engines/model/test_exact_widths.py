"""Exact numerics at the widths of real models, and with more threads than these have processors.

Where a thread's part of a row-wise operation ends depends on widths, rows and threads: small models
do not show what happens there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples, grid
from engine_doubles import EveryToken
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoints import GEMMA, MIXTURE, write

from worker.engines.embedded import native
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.activations import activated, softmax, sums
from worker.engines.embedded.plan import Chunk, Plan, Request
from worker.sampling import SamplingParams

THREADS = (2, 3, 5)
NUM_TOKENS = 150
BUDGETS = (7, 64)

GEMMA_3_1B = {
    **GEMMA,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"],
    "sliding_window": 100,
}
GEMMA_2_2B = {
    **GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 1,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
QWEN_3_MOE = {
    **MIXTURE,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
ODD_LLAMA = {"hidden_size": 100, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", GEMMA_3_1B),
    "gemma2": ("gemma2", GEMMA_2_2B),
    "qwen3_moe": ("qwen3_moe", QWEN_3_MOE),
    "llama gelu": ("llama", {**ODD_LLAMA, "intermediate_size": 1538, "hidden_act": "gelu"}),
    "llama relu": ("llama", {**ODD_LLAMA, "intermediate_size": 302, "hidden_act": "relu"}),
    "llama tanh": ("llama", {**ODD_LLAMA, "intermediate_size": 6910, "hidden_act": "gelu_pytorch_tanh"}),
}
SMALL = ("llama gelu", "llama relu", "llama tanh")
FAST = (("gemma3", "bfloat16"), ("llama gelu", "float32"), ("llama relu", "bfloat16"))
"""A model of each width, in both data types."""


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def logits(model: HfModel, page_size: int, budget: int) -> torch.Tensor:
    """Logits of every token of a prompt, computed in chunks of `budget` tokens."""
    tokens = torch.randint(3, model.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    pages = list(range(-(-NUM_TOKENS // page_size)))[::-1]
    request = Request("", 0, SamplingParams(), tokens, len(tokens), 999, frozenset(), 0, pages=pages)
    tap = request.tap = EveryToken()
    for start in range(0, NUM_TOKENS, budget):
        model.forward(Plan((), (Chunk(request, start, min(NUM_TOKENS, start + budget)),), (request,)))
    return torch.cat(tap.seen)


def allocate(model: HfModel, page_size: int, threads: int) -> None:
    torch.set_num_threads(threads)
    model.allocate_kv(-(-NUM_TOKENS // page_size), page_size)
    assert model.numerics == "exact"


@pytest.mark.native
@pytest.mark.parametrize(
    ("kind", "dtype"),
    grid(product(WIDE, ("float32", "bfloat16")), fast=lambda case: case in FAST),
)
def test_rows_are_bit_equal_with_any_threads_chunks_and_pages(kind: str, dtype: str, tmp_path: Path) -> None:
    model_type, changes = WIDE[kind]
    write(tmp_path, model_type, changes)
    model = load_model(EmbeddedConfig(model_path=tmp_path, device="cpu", dtype=dtype, kernels="native"))
    allocate(model, 64, 1)
    expected = logits(model, 64, NUM_TOKENS)
    for threads, page_size in zip(THREADS, (24, 100, 7), strict=True):
        allocate(model, page_size, threads)
        for budget in BUDGETS:
            found = logits(model, page_size, budget)
            assert torch.equal(found, expected), f"{threads} threads, chunks of {budget}, pages of {page_size}"


@pytest.mark.parametrize("kind", grid([*SMALL, "gemma3"], fast=lambda kind: kind == "llama relu"))
def test_rows_are_bit_equal_in_any_chunks_with_torchs_kernels(kind: str, tmp_path: Path) -> None:
    model_type, changes = WIDE[kind]
    write(tmp_path, model_type, changes)
    for threads in THREADS if kind in SMALL else (5,):
        config = EmbeddedConfig(model_path=tmp_path, device="cpu", kernels="torch", numerics="exact")
        model = load_model(config)
        allocate(model, 64, threads)
        expected = logits(model, 64, NUM_TOKENS)
        for budget in BUDGETS:
            assert torch.equal(logits(model, 64, budget), expected), f"{threads} threads, chunks of {budget}"


@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from([*native.ACTIVATIONS]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    width=st.integers(1, 7000),
    rows=st.integers(1, 40),
    threads=st.sampled_from((1, *THREADS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_activations_in_torch_have_the_same_bits_in_any_batch(
    name: str, dtype: torch.dtype, width: int, rows: int, threads: int, seed: int
) -> None:
    x = 4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    torch.set_num_threads(threads)
    together = activated(name, x)
    assert together.dtype == dtype
    assert torch.equal(torch.cat([activated(name, row.clone()) for row in x.split(1)]), together)


@pytest.mark.parametrize("name", native.ACTIVATIONS)
@pytest.mark.native
def test_activations_in_torch_are_those_of_the_native_kernels(name: str) -> None:
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([0.0, 3e12, -3e12, 1e38, -1e38])))
    gemm = native.Gemm(native.PackedWeight.of(torch.ones(1, 1)))
    expected = native.linear(x[:, None], gemm, name)[:, 0]
    torch.testing.assert_close(activated(name, x), expected, atol=3e-7, rtol=3e-6)
    assert activated(name, torch.tensor([torch.nan])).isnan().all()


@settings(max_examples=examples(30), deadline=None)
@given(rows=st.integers(1, 20), width=st.integers(1, 200), threads=st.sampled_from((1, *THREADS)))
def test_softmax_and_sums_have_the_same_bits_in_any_batch(rows: int, width: int, threads: int) -> None:
    x = 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
    torch.set_num_threads(threads)
    together = softmax(x)
    torch.testing.assert_close(together.double(), x.double().softmax(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sums(x)[:, 0], x.sum(-1), atol=1e-4, rtol=1e-5)
    assert torch.equal(torch.cat([softmax(row.clone()) for row in x.split(1)]), together)
    assert torch.equal(torch.cat([sums(row.clone()) for row in x.split(1)]), sums(x))
