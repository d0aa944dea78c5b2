"""Which tokens survive, against references in exact arithmetic; dtypes, empty batches,
invariance.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.pipe import (
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Sample,
    Shaping,
    Softmax,
    Temperature,
    TensorType,
    TopK,
    TopP,
)
from adapters.processors.truncation import TypicalP

UNITS = 1024
"""Probabilities are multiples of 1 / 1024 here, so that float32 holds them and sums of them
exactly.
"""


@st.composite
def rows_of_units(draw: st.DrawFn) -> list[int]:
    cuts = draw(st.lists(st.integers(0, UNITS), min_size=1, max_size=12))
    bounds = [0, *sorted(cuts), UNITS]
    return draw(st.permutations([high - low for low, high in pairwise(bounds)]))


def probs_of(units: list[int]) -> torch.Tensor:
    return torch.tensor([units], dtype=torch.float32) / UNITS


def support(processor: LogitsProcessor, probs: torch.Tensor) -> set[int]:
    kept = LogitsPipe([processor], input_type=TensorType.PROBS)(probs)[0]
    assert math.isclose(float(kept.sum()), 1.0, rel_tol=1e-6)
    return set(kept.nonzero().flatten().tolist())


def reference_top_k(units: list[int], k: int) -> set[int]:
    if k == 1:
        return {units.index(max(units))}
    kth = sorted(units, reverse=True)[min(k, len(units)) - 1]
    return {i for i, unit in enumerate(units) if unit >= kth and unit > 0}


def reference_top_p(units: list[int], p: Fraction) -> set[int]:
    kept, mass = set(), Fraction(0)
    for i in sorted(range(len(units)), key=lambda i: (-units[i], i)):
        if mass >= p:
            break
        kept.add(i)
        mass += Fraction(units[i], UNITS)
    return {i for i in kept if units[i] > 0}


@given(units=rows_of_units(), k=st.integers(1, 15))
@example(units=[256, 256, 256, 256], k=1)
@example(units=[128, 512, 128, 256], k=3)
def test_top_k(units: list[int], k: int) -> None:
    assert support(TopK(top_k=k), probs_of(units)) == reference_top_k(units, k)


@given(units=rows_of_units(), numerator=st.integers(1, UNITS))
@example(units=[512, 256, 128, 128], numerator=512)
@example(units=[512, 256, 128, 128], numerator=513)
@example(units=[512, 256, 128, 128], numerator=896)
@example(units=[256, 256, 256, 256], numerator=512)
def test_top_p(units: list[int], numerator: int) -> None:
    assert support(TopP(top_p=numerator / UNITS), probs_of(units)) == reference_top_p(units, Fraction(numerator, UNITS))


@given(units=rows_of_units(), numerator=st.integers(1, UNITS))
@example(units=[512, 256, 128, 128], numerator=512)
def test_min_p(units: list[int], numerator: int) -> None:
    expected = {i for i, unit in enumerate(units) if unit > 0 and unit * UNITS >= numerator * max(units)}
    assert support(MinP(min_p=numerator / UNITS), probs_of(units)) == expected


@given(units=rows_of_units(), k=st.integers(1, 15), numerator=st.integers(1, UNITS))
def test_joint(units: list[int], k: int, numerator: int) -> None:
    p = Fraction(numerator, UNITS)
    expected = reference_top_k(units, k) & reference_top_p(units, p)
    chain = [TopK(joint_topk_topp=True, top_k=k), TopP(top_p=float(p)), Sample()]
    rows = torch.zeros(4000, dtype=torch.int32)
    drawn = LogitsPipe(chain, input_type=TensorType.PROBS)(
        probs_of(units), indices=rows, generator=torch.Generator().manual_seed(1)
    )
    assert set(drawn.tolist()) <= expected
    total = sum(units[i] for i in expected)
    assert {i for i in expected if units[i] * 100 >= total} <= set(drawn.tolist())  # missed with p < 1e-17


def test_sequential_top_p_sees_the_renormalised_mass() -> None:
    """.4 .3 of .4 .3 .2 .1 become 4/7 3/7: .5 needs the first only, 4/7 + a little both."""
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 2)
    pipe = LogitsPipe([TopK(top_k=2), TopP()], input_type=TensorType.PROBS)
    kept = pipe(probs, top_p=torch.tensor([0.5, 0.58]))
    assert [set(row.nonzero().flatten().tolist()) for row in kept] == [{0}, {0, 1}]


@pytest.mark.parametrize("width", [200, 5000, 20000])
def test_wide_rows_against_a_sort_in_float64(width: int) -> None:
    """Prefixes that outgrow each width of the selection; no mass is nearer than 1e-6 to p."""
    generator = torch.Generator().manual_seed(width)
    probs = (torch.randn(6, width, generator=generator) * 1.5).softmax(-1)
    p = torch.tensor([0.05, 0.3, 0.5, 0.9, 0.99, 0.995])
    kept = LogitsPipe([TopP()])(probs, top_p=p)
    values, ids = probs.double().sort(-1, descending=True)
    before = values.cumsum(-1) - values
    expected = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, ids, before < p.double().unsqueeze(1))
    assert torch.equal(kept > 0, expected)
    reference = probs.double() * expected
    assert torch.allclose(kept.double(), reference / reference.sum(-1, keepdim=True), atol=1e-7)


def test_top_k_of_logits_masks_and_nothing_else() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0], [-torch.inf, 1.0, 0.0, -torch.inf]])
    kept = LogitsPipe([TopK()], input_type=TensorType.LOGITS)(logits, top_k=torch.tensor([2, 3]))
    assert kept.tolist() == [[3.0, -torch.inf, 2.0, 2.0], logits[1].tolist()]
    assert logits[0, 1] == 1.0, "the input is not changed"


def test_values_against_float64() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(3)) * 4
    probs = LogitsPipe([Temperature(), Softmax(), TopK(), MinP()])(logits, temperature=0.7, top_k=50, min_p=0.05)
    reference = (logits.double() / 0.7).softmax(-1)
    reference[reference < reference.topk(50).values[:, -1:]] = 0
    reference[reference < 0.05 * reference.amax(-1, keepdim=True)] = 0
    assert torch.allclose(probs.double(), reference / reference.sum(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4)).to(dtype)
    wide = logits if dtype == torch.float64 else logits.float()
    assert LogitsPipe([Temperature(temperature=0.5)])(logits).dtype == dtype
    probs = LogitsPipe([Temperature(temperature=0.5), Softmax()])(logits)
    assert probs.dtype == wide.dtype, "half-precision logits give float32 probabilities"
    assert torch.equal(probs, (wide / 0.5).softmax(-1))
    kept = LogitsPipe([TopK(top_k=3)], input_type=TensorType.PROBS)(probs.to(dtype))
    assert kept.dtype == dtype
    assert LogitsPipe([Softmax(), TopP(top_p=0.5), Sample()])(logits).dtype == torch.int32


@pytest.mark.parametrize("compile_", [True, False])
def test_empty_batch(compile_: bool) -> None:
    chain = [Temperature(), TopK(), Softmax(), TopP(), MinP(), Sample()]
    empty = torch.empty(0, 32)
    nothing = torch.empty(0)
    tokens = LogitsPipe(chain, compile=compile_)(empty, temperature=nothing, top_k=3, top_p=nothing, min_p=0.1)
    assert tokens.shape == (0,)
    assert tokens.dtype == torch.int32
    assert LogitsPipe(chain[:5], compile=compile_)(empty, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1).shape == (
        0,
        32,
    )
    joint = LogitsPipe([TopK(joint_topk_topp=True), TopP(), Sample()], compile_, TensorType.PROBS)
    assert joint(empty, top_k=3, top_p=0.5, indices=torch.empty(0, dtype=torch.int64)).dtype == torch.int64


@given(seed=st.integers(0, 1000), order=st.permutations(range(6)), num_rows=st.integers(1, 6))
def test_a_row_does_not_depend_on_the_batch(seed: int, order: list[int], num_rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 700, generator=generator) * 3
    per_row = {
        "temperature": torch.rand(6, generator=generator) + 0.3,
        "top_k": torch.randint(1, 60, (6,), generator=generator),
        "top_p": torch.rand(6, generator=generator) * 0.9 + 0.1,
        "min_p": torch.rand(6, generator=generator) * 0.2,
    }
    pipe = LogitsPipe([Temperature(), Softmax(), TopK(), TopP(), MinP()])
    whole = pipe(logits, **per_row)
    chosen = order[:num_rows]
    part = pipe(logits[chosen], **{name: values[chosen] for name, values in per_row.items()})
    assert torch.equal(part, whole[chosen])


def test_a_row_of_a_real_vocabulary_is_the_same_alone_or_batched() -> None:
    logits = torch.randn(7, 128256, generator=torch.Generator().manual_seed(5)) * 2
    pipe = LogitsPipe([Temperature(temperature=0.9), Softmax(), TopK(top_k=500), TopP(top_p=0.95)])
    whole = pipe(logits)
    for row in range(7):
        assert torch.equal(pipe(logits[row : row + 1]), whole[row : row + 1])


def test_probabilities_may_sum_to_any_value_and_below_0_are_0() -> None:
    assert LogitsPipe([TopK(top_k=1)], input_type=TensorType.PROBS)(torch.tensor([[4.5, -3.5]])).tolist() == [[1, 0]]
    assert LogitsPipe([TopP(top_p=0.9)])(torch.tensor([[0.08, 0.92], [-0.25, 1.25]])).tolist() == [[0, 1], [0, 1]]
    assert LogitsPipe([MinP(min_p=0.05)])(torch.tensor([[-0.25, 1.25]])).tolist() == [[0, 1]]
    assert LogitsPipe([TopP(top_p=0.5)])(torch.tensor([[2.0, 1.0, 1.0]])).tolist() == [[1, 0, 0]]


def test_float64_rows_are_ordered_by_their_own_values() -> None:
    """Not by their integer weights, which are equal here."""
    probs = torch.tensor([[0.4, 0.4 + 1e-15, 0.2 - 1e-15]], dtype=torch.float64)
    assert LogitsPipe([TopP(top_p=0.3)])(probs).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("width", [50, 3000])
def test_logits_of_a_model_that_is_trained(width: int) -> None:
    """They require a gradient, where nobody has said ``no_grad``."""
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(8))
    chains: list[list[LogitsProcessor]] = [
        [Temperature(temperature=0.8), TopK(top_k=20), Sample()],
        [Softmax(), TopK(top_k=20), TopP(top_p=0.8), MinP(min_p=0.1), Sample()],
        [Softmax(), TopK(top_k=20, joint_topk_topp=True), TopP(top_p=0.8), Sample()],
        [Shaping(TypicalP, p=0.5), Sample()],
    ]
    for chain in chains:
        pipe = LogitsPipe(chain, input_type=TensorType.LOGITS)
        drawn = [
            pipe(rows, generator=torch.Generator().manual_seed(9)) for rows in (logits, logits.clone().requires_grad_())
        ]
        assert torch.equal(*drawn)
    trained = logits.clone().requires_grad_()
    kept = LogitsPipe([Softmax(), TopP(top_p=0.5)])(trained)
    torch.autograd.backward(kept[:, kept[0].argmax()].sum())
    assert trained.grad is not None
