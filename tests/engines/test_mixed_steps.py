"""What is learnt of mixed steps holds on any machine, and beside any other program."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from worker.engines.embedded.mixed_steps import FIRST_CHUNK, MixedSteps


@given(
    row_s=st.floats(1e-6, 1e-2),
    token_s=st.floats(1e-5, 1e-2),
    base_s=st.floats(1e-4, 1.0),
    rows=st.integers(1, 64),
    share=st.floats(0.3, 8.0),
    noise=st.floats(0, 0.1),
    seed=st.integers(0, 100),
)
def test_a_mixed_step_takes_its_share(
    row_s: float, token_s: float, base_s: float, rows: int, share: float, noise: float, seed: int
) -> None:
    """Whatever a row and a token take, though a prompt is always there, on a machine that others
    use, too.
    """
    costs, source = MixedSteps(), random.Random(seed)
    alone_s, zeros = base_s + rows * row_s, 0
    for _ in range(300):
        tokens = costs.tokens(rows, share)
        seconds = (alone_s + tokens * token_s) * (1 + noise * source.random())
        if tokens:
            costs.learn_mixed(rows, tokens, seconds)
        else:
            costs.learn_decode(rows, seconds)
            zeros += 1
    assert zeros == 8  # behind 2, 4, 8 ... mixed steps
    tokens, ideal = costs.tokens(rows, share), share * alone_s / token_s
    unsure = 1 + 4 * noise * (1 + 1 / share)
    # What doubles with each step has not come to everything in so few.
    assert max(1, int(min(ideal, 1 << 30) / unsure) - 1) <= tokens <= max(1, ideal * unsure)


@given(st.floats(1e-3, 1), st.integers(1, 64), st.floats(0.1, 10))
def test_a_step_without_prompts_is_measured_first(seconds: float, rows: int, share: float) -> None:
    costs = MixedSteps()
    costs.learn_mixed(rows, 10, seconds)
    assert costs.tokens(rows, share) == 0
    costs.learn_decode(3 * rows, seconds)
    assert costs.tokens(rows, share) == 0
    costs.learn_decode(rows, seconds)
    assert costs.tokens(rows, share) > 0
    assert costs.tokens(2 * rows, share) > 0


@given(st.integers(1, 64), st.floats(0.1, 10))
def test_prompts_go_on_though_no_step_is_learnt(rows: int, share: float) -> None:
    """As when every step has something that spoils its time."""
    costs = MixedSteps()
    asked = [costs.tokens(rows, share) for _ in range(20)]
    assert asked.index(FIRST_CHUNK) <= 4
    assert all(asked[asked.index(FIRST_CHUNK) :])


@given(st.floats(1e-3, 1), st.integers(1, 64), st.floats(0.1, 10))
def test_little_is_tried_before_anything_is_known(seconds: float, rows: int, share: float) -> None:
    costs = MixedSteps()
    costs.learn_decode(rows, seconds)
    assert costs.tokens(rows, share) == FIRST_CHUNK
    costs.learn_mixed(rows, 10, 0.9 * seconds)  # as if prompt tokens were free: the machine was slow before
    assert costs.tokens(rows, share) == 20
    costs.learn_mixed(rows, 20, seconds)
    assert costs.tokens(rows, share) <= 32


@given(st.floats(2, 1000), st.integers(1, 64))
def test_a_first_step_that_compiled_something_is_forgotten(slower: float, rows: int) -> None:
    """Though a prompt is always there."""
    costs, longest_s = MixedSteps(), 0.0
    costs.learn_decode(rows, slower * 0.010)
    for step in range(60):
        tokens = costs.tokens(rows, 1.0)
        seconds = 0.010 + 0.001 * tokens
        (costs.learn_mixed(rows, tokens, seconds) if tokens else costs.learn_decode(rows, seconds))
        longest_s = max(longest_s, seconds if step > 20 else 0.0)
    assert 0.018 <= longest_s <= 0.022


def test_a_step_that_was_held_up_is_forgotten() -> None:
    costs = MixedSteps()

    def found(steps: int, seconds: float) -> int:
        for _ in range(steps):
            costs.learn_mixed(1, 20, seconds)
        costs.learn_decode(1, 0.010)
        return costs.tokens(1, 1.0)

    costs.learn_decode(1, 0.010)
    assert found(20, 0.020) == 20
    assert found(1, 0.200) < 20
    assert found(40, 0.020) >= 19
