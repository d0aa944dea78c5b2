"""Safetensors that no trainer would send: each is read, or refused in one line."""

from __future__ import annotations

import json
from typing import Any

import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from worker.engines.embedded.model.stored_weights import read_weights
from worker.models.problems import ModelFileError

NORM = "model.norm.weight"
UPDATE = save({NORM: torch.linspace(0.5, 1.5, 64)})

HEADERS: st.SearchStrategy[Any] = st.dictionaries(
    st.sampled_from([NORM, "a", "__metadata__", "a.codes", "a.scales", "\u0000", "model.embed_tokens.weight"]),
    st.one_of(
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "U8", "I64", "F9", 3, None]),
                "shape": st.one_of(st.lists(st.sampled_from([0, 1, 2, 8, 64, 2**40, -1, 1.5, True]), max_size=4)),
                "data_offsets": st.lists(st.sampled_from([0, 4, 8, 64, 256, 2**50, -4, "a"]), max_size=3),
            }
        ),
        st.none(),
        st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
        st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=2), max_leaves=3),
    ),
    max_size=4,
)


def built(header: Any, size: int, length: int | None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(size)


@settings(max_examples=examples(300), deadline=None)
@given(header=HEADERS, size=st.sampled_from([0, 4, 64, 256, 300]), length=st.sampled_from([None, 0, 1, 2**63, 2**27]))
def test_hostile_headers_are_read_or_refused(header: Any, size: int, length: int | None) -> None:
    read(built(header, size, length))


@settings(max_examples=examples(300), deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, len(UPDATE) - 1), st.integers(0, 255)), max_size=6), end=st.integers(0, 9)
)
def test_damaged_bytes_are_read_or_refused(places: list[tuple[int, int]], end: int) -> None:
    content = bytearray(UPDATE)
    for place, byte in places:
        content[place] = byte
    read(bytes(content[: len(content) - end]))


def read(content: bytes) -> None:
    try:
        weights = read_weights(memoryview(bytearray(content)))
    except ModelFileError as error:
        refusal = str(error)
    else:
        assert all(weight.nbytes <= len(content) for weight in weights.values())
        return
    assert refusal.startswith("body: ")
    assert len(refusal) < 1000


def test_every_prefix_is_refused() -> None:
    """Of a sender that dies, and whose length says that it did not."""
    for end in range(len(UPDATE)):
        try:
            read_weights(memoryview(bytearray(UPDATE[:end])))
        except ModelFileError:
            continue
        raise AssertionError(f"{end} of {len(UPDATE)} bytes are taken for the whole")
