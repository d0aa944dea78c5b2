"""Logit bias against transformers' single-token sequence bias, and the ids it takes."""

from __future__ import annotations

import json

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import SequenceBiasLogitsProcessor
from vocab_for_tests import assert_rows_equal, replayed, run_row, step_by_step

from adapters.chain import ProcessorChain, apply_edits, plan_rows
from adapters.contract import ArgumentError, Context
from adapters.processors.bias import LogitBias
from adapters.vocabulary import Vocabulary

V = 20
CONTEXT = Context(Vocabulary(V))
few = settings(max_examples=examples(50), deadline=None)
biases = st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32), min_size=1)
rows = st.lists(st.floats(-30, 30, width=32), min_size=V, max_size=V).map(torch.tensor)
histories = st.lists(st.integers(0, V - 1), max_size=6)


def bias_of(values):
    return LogitBias(LogitBias.Args(bias=values), CONTEXT)


@few
@given(biases, rows, histories)
def test_it_is_the_sequence_bias_of_transformers(values, row, generated) -> None:
    oracle = SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in values.items()})
    wanted = oracle(torch.tensor([[1]]), row.clone().unsqueeze(0))[0]
    expected = [wanted] * (len(generated) + 1)
    processors = [bias_of(values)]
    assert_rows_equal(step_by_step(processors, CONTEXT, [1], generated, row), expected)
    assert_rows_equal(replayed(processors, CONTEXT, [1], generated, row), expected)


def test_json_and_python_callers_give_the_same_bias() -> None:
    values = {"3": 1.5, "0": -100, "19": 100}
    from_json = LogitBias.Args.model_validate_json(json.dumps({"bias": values}))
    assert from_json == LogitBias.Args(bias={3: 1.5, 0: -100, 19: 100})
    edit = LogitBias(from_json, CONTEXT).edit()
    assert edit.token_ids.tolist() == [0, 3, 19]
    assert edit.values.tolist() == [-100, 1.5, 100]


def test_a_steady_edit_is_prepared_once() -> None:
    processor = bias_of({1: 1.0})
    processor.start([5])
    first = processor.edit()
    processor.accept(2, 1)
    assert processor.edit() is first


def test_biases_of_two_processors_add_up() -> None:
    chain = ProcessorChain([bias_of({1: 1.0, 2: 2.0}), bias_of({2: 0.5})], CONTEXT)
    chain.start([0])
    assert run_row(chain, torch.zeros(V))[:4].tolist() == [0, 1, 2.5, 0]


def test_minus_100_is_no_ban_and_a_mask_stays() -> None:
    chain = ProcessorChain([bias_of({1: -100, 2: 100})], CONTEXT)
    chain.start([0])
    row = torch.zeros(V)
    row[2] = -torch.inf
    assert run_row(chain, row)[:3].tolist() == [0, -100, -torch.inf]


@few
@given(st.lists(st.one_of(st.none(), biases), min_size=1, max_size=5), rows)
def test_rows_of_a_batch_do_not_mix(requests, row) -> None:
    def chain_of(values):
        chain = ProcessorChain([] if values is None else [bias_of(values)], CONTEXT)
        chain.start([0])
        return chain

    batch = row.repeat(len(requests), 1)
    planned, failures = plan_rows([(i, chain_of(values)) for i, values in enumerate(requests)])
    assert not failures
    assert not apply_edits(batch, planned)
    for after, values in zip(batch, requests, strict=True):
        assert torch.equal(after, run_row(chain_of(values), row))


@pytest.mark.parametrize("key", ["01", "-1", "+1", " 1", "1 ", "1.0", "1e3", "", "x", "1\n", "12345678901", True])
def test_ids_are_canonical(key) -> None:
    with pytest.raises(ValidationError):
        LogitBias.Args(bias={key: 1.0})


@pytest.mark.parametrize("value", [100.1, -100.1, float("nan"), float("inf"), "1", None, True])
def test_values_are_bounded(value) -> None:
    with pytest.raises(ValidationError):
        LogitBias.Args(bias={"1": value})


def test_one_entry_at_least_and_4096_at_most() -> None:
    for number in (0, 4097):
        with pytest.raises(ValidationError):
            LogitBias.Args(bias={str(i): 1.0 for i in range(number)})
    with pytest.raises(ValidationError):
        LogitBias.Args(bias=[1])
    assert len(LogitBias.Args(bias={str(i): 1.0 for i in range(4096)}).bias) == 4096


def test_an_id_given_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="twice"):
        LogitBias.Args(bias={1: 1.0, "1": 2.0})


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ArgumentError, match="between 0 and 19, got 20") as caught:
        bias_of({20: 1.0})
    assert caught.value.argument == "bias"
