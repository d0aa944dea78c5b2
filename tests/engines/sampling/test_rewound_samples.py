"""What is sampled after a rewind is distributed as the logits say, whatever has led to it."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from backtracking_world import PROMPT, World

from adapters.contract import SAMPLE, uniform
from adapters.contract.random_numbers import SAMPLE_AGAIN
from worker.engines.embedded.plan import Plan, Request
from worker.engines.embedded.sampling import Sampler
from worker.engines.embedded.sampling.rows import RowTable
from worker.engines.embedded.step import plan_edits
from worker.sampling import SamplingParams

History = tuple[int, ...]
LOGITS = torch.tensor([[1.0, 0.5, 0.0, 0.3]])
CHANCES = LOGITS[0].double().softmax(-1).tolist()


def answer(world: World, seed: int, length: int) -> History:
    """An answer of so many tokens, each from the same logits."""
    chain = world.chain()
    params = SamplingParams(temperature=1.0)
    request = Request("one", 0, params, [*PROMPT], len(PROMPT), 64, frozenset(), seed=seed, chain=chain)
    sampler = Sampler(LOGITS.shape[1], ())
    while len(request.tokens) < len(PROMPT) + length:
        plan = Plan((request,), (), (request,))
        (token,) = sampler.sample(LOGITS.clone(), plan_edits(plan), plan).token_ids
        chain.accept(token, chain.position)
        request.tokens.append(token)
        position = chain.rewind_if_asked()
        if position is not None:
            del request.tokens[position:]
    return tuple(request.tokens[len(PROMPT) :])


def expected(world: World, phrase_length: int, length: int) -> dict[History, float]:
    """The probability of each answer, where each token is a character."""
    found: dict[History, float] = defaultdict(float)

    def sample(history: History, bans: tuple[History, ...], chance: float) -> None:
        if len(history) == length:
            found[history] += chance
            return
        left = [token for token in range(len(CHANCES)) if token not in bans[len(history)]]
        whole = sum(CHANCES[token] for token in left)
        for token in left:
            longer, begin = (*history, token), len(history) + 1 - phrase_length
            if world.breaks(longer):
                ruled_out = (*bans[begin], longer[begin])
                sample(longer[:begin], (*bans[:begin], ruled_out), chance * CHANCES[token] / whole)
            else:
                sample(longer, (*bans, ()), chance * CHANCES[token] / whole)

    sample((), ((),), 1.0)
    return found


@pytest.mark.parametrize(("phrase", "shown"), [("b", 2), ("ab", 1)])
def test_a_rewound_token_is_as_likely_as_the_logits_say(phrase: str, shown: int) -> None:
    """The number that has led to the rewind would nearly always lead to the same other token."""
    world, length, count = World("abcd", [phrase]), len(phrase) + 1, 1500
    chances: dict[History, float] = defaultdict(float)
    for each, chance in expected(world, len(phrase), length).items():
        chances[each[:shown]] += chance
    assert sum(chances.values()) == pytest.approx(1)
    found = Counter(answer(world, seed, length)[:shown] for seed in range(count))
    assert set(found) <= set(chances)
    distance = sum((found[each] - count * chance) ** 2 / (count * chance) for each, chance in chances.items())
    freedom = len(chances) - 1
    assert distance < freedom + 3 * (2 * freedom) ** 0.5


def test_drafted_positions_have_the_numbers_that_they_have_alone() -> None:
    """A number is another one at the position that was rewound, and at none after it."""
    chain = World("abcd", ["b"]).chain()
    chain.accept(1, chain.position)
    position = chain.rewind_if_asked()
    assert position == len(PROMPT)
    params = SamplingParams(temperature=1.0)
    request = Request("one", 0, params, [*PROMPT], position, 64, frozenset(), seed=3, chain=chain)
    purposes = (SAMPLE_AGAIN, SAMPLE, SAMPLE)
    expected = [uniform(3, 0, position + depth, purpose) for depth, purpose in enumerate(purposes)]
    assert list(RowTable((request,), [0, 3], 4).uniforms().values()) == expected
