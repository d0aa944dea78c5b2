"""Draws of many rows are those of each row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import uniform, uniform_rows

words = st.integers(0, 2**64 - 1)
counts = st.integers(0, 2**40)


@given(rows=st.lists(st.tuples(words, counts, counts), min_size=1, max_size=5), purpose=st.integers(0, 9))
def test_rows_are_drawn_as_one(rows: list[tuple[int, int, int]], purpose: int) -> None:
    seeds, choices, positions = (list(column) for column in zip(*rows, strict=True))
    together = uniform_rows(seeds, choices, positions, purpose).tolist()
    assert together == [uniform(*row, purpose) for row in rows]
    assert all(0 < number < 1 for number in together)


@given(seed=words, choice=st.integers(1, 127), other=st.integers(0, 127), position=counts)
def test_no_seed_nearby_has_the_numbers_of_a_choice(seed: int, choice: int, other: int, position: int) -> None:
    number = uniform(seed, choice, position)
    assert number != uniform(seed, 0, position)
    assert other == choice or number != uniform((seed + choice - other) % 2**64, other, position)
    assert number != uniform(seed, 0, position + choice)
