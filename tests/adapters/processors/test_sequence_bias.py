"""Sequence bias against transformers' processor, over any history."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import SequenceBiasLogitsProcessor
from vocab_for_tests import after_rewinding, assert_rows_equal, context, replayed, step_by_step, vocabulary

from adapters.contract import ArgumentError, Context
from adapters.processors.sequence_bias import SequenceBias
from adapters.vocabulary import Vocabulary

V = 6
CONTEXT = Context(Vocabulary(V))
tokens = st.lists(st.integers(0, V - 1), max_size=14)
biases = st.dictionaries(
    st.lists(st.integers(0, V - 1), min_size=1, max_size=4).map(tuple),
    st.integers(-400, 400).map(lambda quarters: quarters / 4),  # sums in any order have the same bits
    min_size=1,
    max_size=8,
)
rows = st.lists(st.integers(-100, 100).map(float), min_size=V, max_size=V).map(torch.tensor)


def bias_of(values):
    sequences = [{"token_ids": list(ids), "bias": bias} for ids, bias in values.items()]
    return SequenceBias(SequenceBias.Args.model_validate({"sequences": sequences}), CONTEXT)


@settings(max_examples=examples(80), deadline=None)
@given(biases, tokens.filter(bool), tokens, rows)
def test_it_is_that_of_transformers(values, prompt, generated, row) -> None:
    oracle = SequenceBiasLogitsProcessor({ids: float(bias) for ids, bias in values.items()})  # type: ignore[arg-type]
    expected = [
        oracle(torch.tensor([prompt + generated[:k]]), row.clone().unsqueeze(0))[0] for k in range(len(generated) + 1)
    ]
    processors = [bias_of(values)]
    assert_rows_equal(step_by_step(processors, CONTEXT, prompt, generated, row), expected)
    assert_rows_equal(replayed(processors, CONTEXT, prompt, generated, row), expected)
    assert_rows_equal(after_rewinding(processors, CONTEXT, prompt, generated, row), expected)


def test_a_text_is_its_tokens() -> None:
    facts, ids = context(), vocabulary().encode("the answer is B")
    made = SequenceBias(SequenceBias.Args(sequences=[{"text": "the answer is B", "bias": 2.0}]), facts)  # type: ignore[list-item]
    made.start(ids[:-2])
    assert made.edit() is None
    made.accept(ids[-2], len(ids) - 2)
    assert made.edit().token_ids.tolist() == [ids[-1]]  # type: ignore[union-attr]
    assert made.edit().values.tolist() == [2.0]  # type: ignore[union-attr]


def test_what_is_refused() -> None:
    twice = [{"token_ids": [1], "bias": 1.0}, {"token_ids": [1], "bias": 2.0}]
    args = SequenceBias.Args.model_validate({"sequences": twice})
    with pytest.raises(ArgumentError, match="given twice"):
        SequenceBias(args, CONTEXT)
    with pytest.raises(ArgumentError, match="between 0 and 5"):
        bias_of({(1, V): 1.0})
    for wrong in ([], [{"token_ids": [1]}], [{"token_ids": [1], "bias": 101.0}], [{"bias": 1.0}]):
        with pytest.raises(ValidationError):
            SequenceBias.Args.model_validate({"sequences": wrong})
