"""No built-in that maps a row hides what makes the row unfit: its request must end."""

from __future__ import annotations

import math

import pytest
import torch
from builtin_examples import EXAMPLES

from adapters.catalog import Catalog, Requested, Selection
from adapters.chain import ProcessorChain, apply_chain, row_problem
from adapters.testing.kit_model import kit_context

CATALOG, CONTEXT = Catalog.load(), kit_context()
WIDTH = CONTEXT.vocabulary.size


def chain_of(name: str, args: dict[str, object]) -> ProcessorChain:
    chain = CATALOG.build_chain(Selection((Requested(name, args),)), CONTEXT)
    chain.start([5, 6, 7])
    return chain


SHAPING = [
    name
    for name, examples in EXAMPLES.items()
    if (one := chain_of(name, examples[0])).has_shaping and not one.companion
]


@pytest.mark.parametrize("name", SHAPING)
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_an_odd_logit_of_a_token_that_is_left_stays(name: str, odd: float) -> None:
    for args in EXAMPLES[name]:
        chain = chain_of(name, args)
        for token_id in range(chain.context.vocabulary.num_tokens):
            if not chain.plan().permits(token_id):
                continue
            row = torch.linspace(-3.0, 3.0, WIDTH)
            row[token_id] = odd
            apply_chain(chain, row)
            assert row_problem(row) in ("nan", "infinite"), token_id
