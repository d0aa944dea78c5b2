"""One token is left: the one that the draw of this seed and position falls on."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.chain import ProcessorChain
from adapters.contract import SAMPLE, Context, uniform
from adapters.processors.seeded_sampler import SeededSampler
from adapters.processors.truncation import Temperature
from adapters.trtllm import create_trtllm_adapters
from adapters.vocabulary import Vocabulary


def token(draw: SeededSampler, logits: torch.Tensor) -> int:
    row = logits.clone()
    draw.shape(row)
    (left,) = row.isfinite().nonzero()[:, 0].tolist()
    assert row[left] == logits[left]
    return int(left)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=40), st.integers(0, 2**64 - 1))
def test_the_draw_inverts_the_cumulative_weights(values: list[float], seed: int) -> None:
    logits = torch.tensor(values)
    draw = SeededSampler(seed)
    draw.start([1, 2])
    weights = (logits.double() - logits.max().double()).exp()
    chosen = token(draw, logits)
    number = float(weights.sum()) * uniform(seed, 0, 2, SAMPLE)
    assert float(weights[:chosen].sum()) <= number * (1 + 1e-12) + 1e-300
    assert number <= float(weights[: chosen + 1].sum()) * (1 + 1e-12)


def test_masked_tokens_are_never_drawn_and_all_others_are() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    seen: Counter[int] = Counter()
    for seed in range(200):
        draw = SeededSampler(seed)
        draw.start([7])
        seen[token(draw, logits)] += 1
    assert set(seen) == {1, 3}
    assert min(seen.values()) > 60


def test_without_a_seed_the_likeliest_of_equals_is_the_lowest_id() -> None:
    assert token(SeededSampler(None), torch.tensor([0.0, 3.0, 3.0, 1.0])) == 1


@pytest.mark.parametrize(("odd", "reason"), [(math.nan, "nan"), (math.inf, "infinite")])
@pytest.mark.parametrize("seed", [None, 7])
@given(at=st.integers(0, 9))
def test_a_row_without_numbers_ends_its_request(odd: float, reason: str, seed: int | None, at: int) -> None:
    """No token is sampled from it, token 0 least of all."""
    context = Context(Vocabulary(10))
    chain = ProcessorChain([Temperature(Temperature.Args(value=0.7), context), SeededSampler(seed)], context)
    chain.start([1, 2])
    (adapter,) = create_trtllm_adapters([chain], end_id=4)
    logits = torch.arange(10.0).view(1, 1, -1)
    logits[0, 0, at] = odd
    adapter(0, logits, [[1, 2]])
    assert adapter.failure is not None
    assert adapter.failure.reason == reason
