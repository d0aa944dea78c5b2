"""Temperature and truncation against transformers' warpers and against the formulas in float64."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from adapters.chain import ProcessorChain, apply_chain, apply_edits, apply_late, plan_rows
from adapters.contract import Ban, Context
from adapters.processors.truncation import (
    DynamicTemperature,
    EpsilonCutoff,
    EtaCutoff,
    MinP,
    Temperature,
    TopA,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
)
from adapters.vocabulary import Vocabulary

V = 40
CONTEXT = Context(Vocabulary(V))
ALL = [Temperature, TopK, TopP, MinP, TypicalP, TopNSigma, EpsilonCutoff, EtaCutoff]
few = settings(max_examples=examples(50), deadline=None)
seeds = st.integers(0, 2**32 - 1)
fractions = st.floats(0.01, 0.99)


def make(kind, value):
    (field,) = kind.Args.model_fields
    return kind(kind.Args(**{field: value}), CONTEXT)


def row_of(seed, *, quantised=False, masked=0, width=V, spread=3.0):
    """A random row; ``quantised`` makes many ties, ``masked`` logits are -inf."""
    random = np.random.default_rng(seed)
    values = random.normal(0, spread, width)
    if quantised:
        values = np.round(values * 2) / 2
    values[random.permutation(width)[:masked]] = -np.inf
    return torch.tensor(values, dtype=torch.float32)


def applied(row, *processors):
    """The row after the chain of ``processors``, through the batched path, and how it failed at
    the late stages.
    """
    chain = ProcessorChain(processors, CONTEXT)
    chain.start([1, 2])
    logits = row.clone().unsqueeze(0)
    planned, failures = plan_rows([(0, chain)])
    assert not failures
    assert not apply_edits(logits, planned)
    return logits[0], apply_late(logits, planned).get(0)


def shaped(row, *processors):
    """The row after the chain of ``processors``, which does not fail."""
    result, failure = applied(row, *processors)
    assert failure is None
    return result


def warped(warper, row):
    return warper(torch.zeros(1, 1, dtype=torch.long), row.clone().unsqueeze(0))[0]


def kept(row):
    return set(torch.nonzero(row > -torch.inf).flatten().tolist())


rows = st.builds(row_of, seeds, masked=st.integers(0, V - 1))
tied_rows = st.builds(row_of, seeds, quantised=st.booleans(), masked=st.integers(0, V - 1))


# Each against transformers: the same logits in, the same logits out


@few
@given(tied_rows, st.floats(1e-4, 100))
def test_temperature_is_that_of_transformers(row, value) -> None:
    assert torch.equal(shaped(row, make(Temperature, value)), warped(TemperatureLogitsWarper(value), row))


@few
@given(tied_rows, st.integers(2, V + 5))
def test_top_k_is_that_of_transformers_ties_included(row, k) -> None:
    assert torch.equal(shaped(row, make(TopK, k)), warped(TopKLogitsWarper(k), row))


@few
@given(rows, fractions)
def test_top_p_is_that_of_transformers(row, p) -> None:
    assert torch.equal(shaped(row, make(TopP, p)), warped(TopPLogitsWarper(p), row))


@few
@given(rows, st.floats(0, 0.99))
def test_min_p_is_that_of_transformers(row, p) -> None:
    assert torch.equal(shaped(row, make(MinP, p)), warped(MinPLogitsWarper(p), row))


@few
@given(rows, fractions)
def test_typical_p_is_that_of_transformers(row, p) -> None:
    assert torch.equal(shaped(row, make(TypicalP, p)), warped(TypicalLogitsWarper(p), row))


@few
@given(tied_rows, st.floats(1e-4, 0.9))
def test_epsilon_cutoff_is_that_of_transformers(row, epsilon) -> None:
    assert torch.equal(shaped(row, make(EpsilonCutoff, epsilon)), warped(EpsilonLogitsWarper(epsilon), row))


@few
@given(st.builds(row_of, seeds), st.floats(1e-4, 0.9))
def test_eta_cutoff_is_that_of_transformers(row, epsilon) -> None:
    assert torch.equal(shaped(row, make(EtaCutoff, epsilon)), warped(EtaLogitsWarper(epsilon), row))


@few
@given(rows, st.floats(1e-4, 0.9))
def test_eta_cutoff_with_masked_tokens_is_the_formula(row, epsilon) -> None:
    p = torch.softmax(row.double(), -1).numpy()
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    eta = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy))
    expected = {i for i in range(V) if p[i] >= eta and row[i] > -math.inf} | {int(row.argmax())}
    assert kept(shaped(row, make(EtaCutoff, epsilon))) == expected


# Against the formula, where transformers has no warper or another rule for ties


def top_p_reference(row, p):
    """By the definition, in float64: descending logits, then ascending ids; cut at the first
    mass of at least p.
    """
    weights = np.exp(row.double().numpy() - float(row.max()))
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
    mass, chosen = 0.0, set()
    for i in order:
        if row[i] == -math.inf:
            break
        chosen.add(i)
        mass += weights[i] / weights.sum()
        if mass >= p - 1e-12:
            break
    return chosen


@few
@given(st.builds(row_of, seeds, quantised=st.just(True), masked=st.integers(0, V - 1)), st.floats(0, 1))
def test_top_p_takes_the_lowest_ids_of_tied_tokens(row, p) -> None:
    assert kept(shaped(row, make(TopP, p))) == (top_p_reference(row, p) if p < 1 else kept(row))


def test_top_p_at_the_exact_boundary_keeps_the_shortest_prefix() -> None:
    row = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    assert kept(shaped(row, make(TopP, 0.8))) == {1, 3}
    assert kept(shaped(row, make(TopP, 0.8001))) == {1, 2, 3}


def test_top_p_of_equal_tokens_keeps_as_many_as_the_mass_needs() -> None:
    assert kept(shaped(torch.zeros(8), make(TopP, 0.5))) == {0, 1, 2, 3}
    assert kept(shaped(torch.zeros(8), make(TopP, 0.51))) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("spread", [0.01, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("quantised", [False, True])
def test_top_p_is_the_same_however_far_its_selection_is_widened(spread, p, quantised) -> None:
    row = row_of(5, width=12000, spread=spread, quantised=quantised)
    row[::7] = row[0]  # a tie wider than the first selection
    result = kept(shaped(row, make(TopP, p)))
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[: len(result)]
    masses = torch.softmax(row.double(), -1)[order].cumsum(0)
    assert result == set(order)
    assert masses[-1] >= p - 1e-6
    assert len(order) == 1 or masses[-2] < p + 1e-6


@few
@given(tied_rows, st.floats(0, 20))
def test_top_n_sigma_is_the_formula_over_the_finite_logits(row, n) -> None:
    z = row.double().numpy()
    cut = z.max() - n * z[np.isfinite(z)].std()
    near = {i for i in range(V) if abs(z[i] - cut) < 1e-4}
    result = kept(shaped(row, make(TopNSigma, n)))
    assert result - near == {i for i in range(V) if z[i] >= cut} - near
    assert int(row.argmax()) in result


def test_no_deviation_of_a_penalised_row_keeps_the_highest() -> None:
    """Squares of such penalties are beyond float32."""
    row = torch.tensor([1.0, 3.0, -3.4e38, 3.0, -3.4e38])
    assert kept(shaped(row, make(TopNSigma, 0.0))) == {1, 3}
    assert kept(shaped(row, make(TopNSigma, 1.0))) >= {0, 1, 3}


@few
@given(tied_rows, st.floats(0, 20), st.sampled_from([-100, -70, 70, 100]))
def test_top_n_sigma_is_the_same_at_any_scale(row, n, exponent) -> None:
    """Squares of what is small, or large, are beyond float32."""
    assert kept(shaped(row * 2.0**exponent, make(TopNSigma, n))) == kept(shaped(row, make(TopNSigma, n)))


@few
@given(tied_rows, st.sampled_from([(Temperature, 0.0), (Temperature, 9e-6), (TopK, 1), (TopP, 0.0)]))
def test_greedy_values_keep_the_lowest_of_the_most_likely_ids(row, greedy) -> None:
    result = shaped(row, make(*greedy))
    assert kept(result) == {int(row.argmax())}
    assert result.max() == row.max()


@pytest.mark.parametrize(
    ("kind", "value"), [(Temperature, 0.0), (Temperature, 9e-6), (TopK, 1), (TopP, 0.0), (MinP, 1.0)]
)
def test_greedy_values_keep_one_of_tied_tokens(kind, value) -> None:
    assert kept(shaped(torch.tensor([1.0, 3.0, 3.0, -5.0]), make(kind, value))) == {1}


def test_the_lowest_temperature_that_is_not_greedy_keeps_ties() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, -5.0])
    assert kept(shaped(row, make(Temperature, 1e-5))) == {0, 1, 2, 3}
    assert kept(shaped(row, make(Temperature, math.nextafter(1e-5, 0)))) == {1}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *[(Temperature, 1.0), (TopK, 0), (TopK, -1), (TopK, V), (TopP, 1.0), (MinP, 0.0), (TypicalP, 1.0)],
        *[(EpsilonCutoff, 0.0), (EtaCutoff, 0.0), (TopA, 0.0)],
    ],
)
def test_off_values_change_nothing(kind, value) -> None:
    row = row_of(3, masked=5)
    assert torch.equal(shaped(row, make(kind, value)), row)


@few
@given(tied_rows, st.floats(0, 1))
def test_top_a_is_the_formula(row, a) -> None:
    p = torch.softmax(row.double(), -1).numpy()
    cut = a * p.max() ** 2
    near = {i for i in range(V) if abs(p[i] - cut) < 1e-7}
    result = kept(shaped(row, make(TopA, a)))
    assert result - near == {i for i in kept(row) if p[i] >= cut} - near
    assert int(row.argmax()) in result


@few
@given(tied_rows, st.floats(0.01, 3), st.floats(0, 3), st.floats(0, 4))
def test_dynamic_temperature_is_that_of_llama_cpp(row, low, delta, exponent) -> None:
    """As `llama_sampler_temp_ext_apply` computes it, in float64."""
    processor = DynamicTemperature(DynamicTemperature.Args(low=low, high=low + delta, exponent=exponent), CONTEXT)
    result = shaped(row, processor)
    z = row.double().numpy()
    left = z[np.isfinite(z)]
    if len(left) == 1:
        assert torch.equal(result, row)
        return
    p = np.exp(left - left.max())
    p /= p.sum()
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    temperature = low + delta * min(1.0, entropy / math.log(len(left))) ** exponent
    expected = torch.softmax(torch.tensor(z) / temperature, -1)
    torch.testing.assert_close(torch.softmax(result.double(), -1), expected, rtol=1e-3, atol=1e-6)
    assert kept(result) == kept(row)


def test_dynamic_temperature_at_its_ends() -> None:
    def temperature(row):
        processor = DynamicTemperature(DynamicTemperature.Args(low=0.0, high=2.0), CONTEXT)
        return shaped(torch.tensor(row), processor)

    assert temperature([1.0, 1.0, 1.0]).tolist() == [0.5, 0.5, 0.5]
    assert kept(temperature([400.0, 1.0, -1.0])) >= {0}
    assert float(torch.softmax(temperature([400.0, 1.0, -1.0]), -1)[0]) == 1.0
    assert temperature([-math.inf, 3.0]).tolist() == [-math.inf, 3.0]
    with pytest.raises(ValidationError, match="low must be at most high"):
        DynamicTemperature.Args(low=2.0, high=1.0)


def test_typical_p_may_drop_the_most_likely_token() -> None:
    row = torch.tensor([0.3, *[0.1] * 7]).log()
    assert kept(shaped(row, make(TypicalP, 0.5))) == {1, 2, 3, 4, 5, 6, 7}


# Properties of all of them

VALUES = {
    Temperature: st.floats(0, 100),
    TopK: st.integers(-1, V + 5),
    TopP: st.floats(0, 1),
    MinP: st.floats(0, 1),
    TypicalP: st.floats(0.001, 1),
    TopNSigma: st.floats(0, 100),
    EpsilonCutoff: st.floats(0, 0.999),
    EtaCutoff: st.floats(0, 0.999),
}
processors = st.sampled_from(ALL).flatmap(lambda kind: VALUES[kind].map(lambda value: make(kind, value)))


@few
@given(tied_rows, processors)
def test_truncation_keeps_the_most_likely_token_and_kept_logits(row, processor) -> None:
    result = shaped(row, processor)
    left = sorted(kept(result))
    assert left
    assert set(left) <= kept(row)
    if not isinstance(processor, TypicalP):
        assert int(result.argmax()) == int(row.argmax())
    if not isinstance(processor, Temperature):
        assert torch.equal(result[left], row[left])


@few
@given(st.data(), st.sampled_from(ALL), st.integers(2, 6))
def test_a_row_does_not_depend_on_its_batch_mates(data, kind, count) -> None:
    batch = torch.stack([data.draw(tied_rows) for _ in range(count)])
    members = [make(kind, data.draw(VALUES[kind])) for _ in range(count)]
    alone = []
    for member, row in zip(members, batch, strict=True):
        single = row.clone()
        member.shape(single)
        alone.append(single)
    kind.shape_rows(members, batch)
    assert torch.equal(batch, torch.stack(alone))


@pytest.mark.parametrize("kind", ALL)
def test_rows_of_a_real_width_do_not_depend_on_their_batch_mates(kind) -> None:
    value = {TopK: 3000, TopNSigma: 3.0, EpsilonCutoff: 1e-5, EtaCutoff: 1e-4}.get(kind, 0.9)
    batch = torch.stack([row_of(seed, width=50003) for seed in range(3)])
    members = [make(kind, value) for _ in range(3)]
    alone = batch.clone()
    for member, row in zip(members, alone, strict=True):
        kind.shape_rows([member], row.clone().unsqueeze(0))
        member.shape(row)
    kind.shape_rows(members, batch)
    assert torch.equal(batch, alone)


@pytest.mark.parametrize("kind", [*ALL, TopA])
def test_rows_that_cannot_be_sampled_leave_batch_mates_alone(kind) -> None:
    value = {TopK: 300, TopNSigma: 3.0, EpsilonCutoff: 1e-5, EtaCutoff: 1e-4}.get(kind, 0.9)
    batch = torch.stack([row_of(seed, width=40003) for seed in range(5)])
    member = make(kind, value)
    good = batch[[0, 4]].clone()
    kind.shape_rows([member] * 2, good)
    batch[1], batch[2, 7], batch[3] = torch.nan, torch.inf, -torch.inf
    kind.shape_rows([member] * 5, batch)
    assert torch.equal(batch[[0, 4]], good)
    assert not bool(batch[1:4].amax(-1).isfinite().any())


@few
@given(processors, st.integers(0, V - 1))
def test_rows_with_nothing_or_one_token_left(processor, only) -> None:
    empty = torch.full((V,), -torch.inf)
    result, failure = applied(empty, processor)
    assert torch.equal(result, empty)
    assert failure is not None
    assert failure.reason == "unsatisfiable"
    single = empty.clone()
    single[only] = -2.5
    assert kept(shaped(single, processor)) == {only}


@few
@given(processors, rows, st.integers(0, V - 1))
def test_nan_is_never_hidden(processor, row, where) -> None:
    row[where] = torch.nan
    assert bool(shaped(row, processor).isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_row_that_cannot_be_sampled_keeps_its_nucleus(dtype, odd) -> None:
    rows = torch.stack([row_of(seed) for seed in range(20)]).to(dtype)
    rows[:, 7] = odd
    before = rows.clone()
    TopP.shape_rows([make(TopP, 0.5)] * len(rows), rows)
    assert torch.equal(rows.view(torch.uint8), before.view(torch.uint8))


@few
@given(processors, rows)
def test_twice_is_pure_and_pickles(processor, row) -> None:
    first = shaped(row, processor)
    assert torch.equal(shaped(row, processor), first)
    assert torch.equal(shaped(row, pickle.loads(pickle.dumps(processor))), first)


def test_stages_follow_the_order_law_whatever_the_requests_order() -> None:
    row = row_of(11)
    result = shaped(row, make(TopP, 0.7), make(Temperature, 2.5))
    assert torch.equal(result, warped(TopPLogitsWarper(0.7), warped(TemperatureLogitsWarper(2.5), row)))
    assert not torch.equal(result, warped(TemperatureLogitsWarper(2.5), warped(TopPLogitsWarper(0.7), row)))


def test_within_a_stage_the_order_is_that_of_the_request() -> None:
    row = row_of(12)
    both = shaped(row, make(TopK, 4), make(TopP, 0.9))
    assert torch.equal(both, warped(TopPLogitsWarper(0.9), warped(TopKLogitsWarper(4), row)))


def test_a_mask_before_truncation_counts() -> None:
    from adapters.contract import ProcessorArgs, Reads, Stage, SteeringProcessor

    class BanBest(SteeringProcessor):
        name, stage, reads, Args = "ban_best", Stage.MASK, Reads.NOTHING, ProcessorArgs

        def edit(self):
            return Ban.of([1])

    row = torch.tensor([2.0, 9.0, 1.0, 0.0])
    assert kept(shaped(row, BanBest(None, CONTEXT), make(TopK, 2))) == {0, 2}


def test_half_precision_rows_of_the_dense_path() -> None:
    chain = ProcessorChain([make(TopK, 3)], CONTEXT)
    chain.start([1])
    row = row_of(4).bfloat16()
    expected = kept(shaped(row.float(), make(TopK, 3)))
    assert apply_chain(chain, row)
    assert row.dtype == torch.bfloat16
    assert kept(row) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [(Temperature, -0.1), (Temperature, 100.5), (TopK, -2), (TopK, 2**31), (TopK, 2.0), (TopP, -0.1), (TopP, 1.1)]
    + [(MinP, -0.1), (MinP, 1.1), (TypicalP, 0.0), (TypicalP, 1.1), (TopNSigma, -1.0), (TopNSigma, 101.0)]
    + [(EpsilonCutoff, -0.1), (EpsilonCutoff, 1.0), (EtaCutoff, -0.1), (EtaCutoff, 1.0)]
    + [(kind, bad) for kind in ALL for bad in (math.nan, math.inf, "1", None, True)],
)
def test_arguments_out_of_bounds(kind, value) -> None:
    with pytest.raises(ValidationError):
        make(kind, value)


@pytest.mark.parametrize("kind", ALL)
def test_unknown_and_missing_arguments(kind) -> None:
    with pytest.raises(ValidationError):
        kind.Args()
    with pytest.raises(ValidationError):
        kind.Args(value=1.0, k=2, p=0.5, n=1.0, epsilon=0.1)
