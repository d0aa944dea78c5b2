"""Draws of many rows are those of each row."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import uniform, uniform_rows, uniforms_at
from adapters.contract.random_numbers import _GAMMA, _MASK, key

words = st.integers(0, 2**64 - 1)
counts = st.integers(0, 2**40)


@given(rows=st.lists(st.tuples(words, counts, counts, st.integers(0, 9) | words), min_size=1, max_size=5))
def test_rows_are_drawn_as_one(rows: list[tuple[int, int, int, int]]) -> None:
    seeds, choices, positions, purposes = (list(column) for column in zip(*rows, strict=True))
    together = uniform_rows(seeds, choices, positions, purposes).tolist()
    assert together == [uniform(*row) for row in rows]
    assert all(0 < number < 1 for number in together)


@given(seed=words, choice=st.integers(1, 127), other=st.integers(0, 127), position=counts)
def test_no_seed_nearby_has_the_numbers_of_a_choice(seed: int, choice: int, other: int, position: int) -> None:
    number = uniform(seed, choice, position)
    assert number != uniform(seed, 0, position)
    assert other == choice or number != uniform((seed + choice - other) % 2**64, other, position)
    assert number != uniform(seed, 0, position + choice)


def unmixed(word: int) -> int:
    """The word that the finaliser of SplitMix64 turns into this one."""
    word ^= (word >> 31) ^ (word >> 62)
    word = (word * pow(0x94D049BB133111EB, -1, 2**64)) & _MASK
    word ^= (word >> 27) ^ (word >> 54)
    word = (word * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & _MASK
    return word ^ (word >> 30) ^ (word >> 60)


@given(position=counts, purpose=st.integers(0, 9), low=st.integers(0, 2**11 - 1))
def test_no_seed_has_the_number_1(position: int, purpose: int, low: int) -> None:
    """Of the highest hash; who looks for its seed finds it."""
    hashed = _MASK - low
    state = unmixed(hashed) - _GAMMA
    for word in (purpose, position):
        state = unmixed(state & _MASK) - _GAMMA - word
    seed = (unmixed(state & _MASK) - _GAMMA) & _MASK
    assert key(seed, 0, position, purpose) == hashed
    assert uniform(seed, 0, position, purpose) == 1 - 2.0**-53
    assert uniform_rows([seed], [0], [position], [purpose]).tolist() == [1 - 2.0**-53]
    (number,) = uniforms_at(unmixed(hashed), torch.tensor([0])).tolist()
    assert np.log(-np.log(number)) < 0
