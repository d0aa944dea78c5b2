from __future__ import annotations

import math

import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain, apply_chain
from adapters.contract import Context
from adapters.processors.guidance import Contrastive
from adapters.vocabulary import Vocabulary

SIZE = 24
rows = st.lists(st.floats(-30, 30, width=32), min_size=SIZE, max_size=SIZE)


def contrasted(expert: list[float], amateur: list[float], **arguments: float) -> list[float]:
    """The row that a chain with the processor alone makes of two rows."""
    context = Context(Vocabulary(SIZE), end_token_ids=frozenset({1}))
    processor = Contrastive(Contrastive.Args(**arguments), context)
    processor.second_row = {2: torch.tensor(amateur)}.__getitem__
    chain = ProcessorChain([processor], context)
    chain.start([5, 6])
    row = torch.tensor(expert)
    apply_chain(chain, row)
    return [float(value) for value in row]


@given(
    expert=rows,
    amateur=rows,
    alpha=st.floats(0.001, 1),
    beta=st.floats(0.01, 100),
    temperature=st.floats(0.01, 100),
    masked=st.sets(st.integers(0, SIZE - 1), max_size=SIZE - 1),
)
@settings(max_examples=examples(300), deadline=None)
def test_the_row_is_that_of_the_papers(
    expert: list[float], amateur: list[float], alpha: float, beta: float, temperature: float, masked: set[int]
) -> None:
    """Of the papers' probabilities in float64: both logarithms of Li et al., weighed by O'Brien and
    Lewis, which differ from logits by one constant of the row.
    """
    expert = [-math.inf if token in masked else value for token, value in enumerate(expert)]
    row = contrasted(expert, amateur, alpha=alpha, beta=beta, amateur_temperature=temperature)
    e = torch.tensor(expert, dtype=torch.float64).softmax(-1)
    a = (torch.tensor(amateur, dtype=torch.float64) / temperature).log_softmax(-1)
    share, head = (e / e.max()).tolist(), max(range(SIZE), key=expert.__getitem__)
    wanted = ((1 + beta) * e.log() - beta * a).tolist()
    assert math.isfinite(row[head]), "the most likely token is plausible"
    for token, value in enumerate(row):
        if abs(share[token] - alpha) <= 1e-5 * alpha:
            continue  # float32 rounds at the edge
        assert (value == -math.inf) == (share[token] < alpha), token
        if value != -math.inf:
            size = (1 + beta) * 60 + beta * 60 / temperature
            assert abs((value - row[head]) - (wanted[token] - wanted[head])) <= 1e-6 * size, token


def test_an_amateur_that_is_the_expert_changes_no_distribution() -> None:
    """Nothing but the cut is left of it: (1 + beta) e - beta e is e."""
    expert = [float(token % 7) for token in range(SIZE)]
    row = contrasted(expert, expert, alpha=1e-3, beta=2.0)
    assert row == expert
