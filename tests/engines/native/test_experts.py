"""Mixtures of experts in the native kernels, against their definition in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from chosen_paths import kept_choices, plain_c
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from worker.engines.embedded import native
from worker.engines.embedded.kv_cache import SequenceSlice
from worker.engines.embedded.native import libraries, paths
from worker.engines.embedded.native.layers import DecoderLayer, DecoderLayers, Mixture, Mlp, StepTensors

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]

HIDDEN, INNER = 6, 10
"""Elements of a token, and of an expert's rows."""

ERRORS = {torch.bfloat16: 0.04, torch.float32: 1e-5}
"""Of a result, relative to the terms that it is the sum of."""

COMPUTED = [
    (path, dtype)
    for dtype, data_type in libraries.DATA_TYPES.items()
    for path in native.PATHS
    if path not in data_type.own_order and native.unavailable(dtype, path) is None
]
"""Paths with the bits of plain C, and their data types."""


@pytest.fixture(scope="module", params=COMPUTED, ids=lambda each: f"{each[0]}-{each[1]}")
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """A path, which computes in the data type of `dtype`."""
    name, dtype = request.param
    with kept_choices(clear=True):
        native.choose_path(dtype, name)
        yield name


@pytest.fixture(scope="module")
def dtype(path: str) -> torch.dtype:
    [found] = paths._chosen
    return found


class Weights:
    """Random weights of a mixture, whose experts have as many different numbers as `kinds`."""

    def __init__(self, dtype: torch.dtype, count: int, kinds: int, generator: torch.Generator) -> None:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.kinds, self.kind_of = randn(kinds, HIDDEN), torch.randint(kinds, (count,), generator=generator)
        self.experts = [(randn(INNER, HIDDEN), randn(INNER, HIDDEN), randn(HIDDEN, INNER)) for _ in range(count)]

    def computed(self, x: torch.Tensor, top_k: int, normalises: bool) -> torch.Tensor:
        """Hidden states behind a layer without norms, whose attention adds nothing."""
        mlps = [Mlp(*map(packed, each)) for each in self.experts]
        layer = DecoderLayer(
            index=0,
            norms=(None, None),
            epsilon=1e-5,
            head_norms=None,
            scale=1.0,
            window=0,
            rope=None,
            qkv=[packed(x.new_zeros(3 * HIDDEN, HIDDEN))],
            output=packed(x.new_zeros(HIDDEN, HIDDEN)),
            mlp=Mixture(packed(self.kinds[self.kind_of]), mlps, top_k, normalises),
        )
        count, hidden = len(x), x.clone()
        places = torch.zeros(count, dtype=torch.int64), torch.arange(count)
        angles, pages = x.new_zeros(1, count, HIDDEN), [x.new_zeros(1, 1, count, HIDDEN)]
        tiles = native.Tiles([SequenceSlice([0], 0, count)], 1)
        step = StepTensors(angles, angles, places, tiles, pages, [page.clone() for page in pages])
        DecoderLayers([layer], 1, 1, HIDDEN).compute(hidden, step)
        return hidden

    def terms(self, x: torch.Tensor, top_k: int, normalises: bool) -> torch.Tensor:
        """The definition, in float64: a token's states and the weighted outputs of its experts,
        ``[T, 1 + top_k, hidden]``. Of experts with equal numbers the first ones are its.
        """
        wide = x.double()
        numbers = functional.linear(wide, self.kinds.double())[:, self.kind_of]
        chosen = numbers.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        shares = numbers.gather(1, chosen).softmax(1) if normalises else numbers.softmax(1).gather(1, chosen)
        outputs = torch.stack([_mlp(wide, *(weight.double() for weight in each)) for each in self.experts], dim=1)
        found = outputs.gather(1, chosen[..., None].expand(-1, -1, HIDDEN)) * shares[..., None]
        return torch.cat([wide[:, None], found], dim=1)


def packed(weight: torch.Tensor) -> native.Gemm:
    return native.Gemm(native.PackedWeight.of(weight))


def _mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    inner = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
    return functional.linear(inner, down)


@settings(max_examples=examples(150), deadline=None)
@given(
    tokens=st.sampled_from([1, 2, 3, 17]),
    count=st.sampled_from([1, 5, 16, 17, 33, 40]),
    kinds=st.integers(1, 40),
    top_k=st.integers(1, 20),
    normalises=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_token_has_the_experts_of_its_greatest_numbers(
    path: str, dtype: torch.dtype, tokens: int, count: int, kinds: int, top_k: int, normalises: bool, seed: int
) -> None:
    """Of equal ones the first; with the bits of plain C, and of each token alone."""
    generator, top_k = torch.Generator().manual_seed(seed), min(top_k, count)
    weights = Weights(dtype, count, kinds, generator)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    found = weights.computed(x, top_k, normalises)
    terms = weights.terms(x, top_k, normalises)
    assert ((found.double() - terms.sum(1)).abs() <= ERRORS[dtype] * terms.abs().sum(1).amax(1, keepdim=True)).all()
    for token in range(tokens):
        assert torch.equal(weights.computed(x[token : token + 1], top_k, normalises), found[token : token + 1])
    with plain_c(dtype):
        expected = weights.computed(x, top_k, normalises)
    assert torch.equal(found, expected)
