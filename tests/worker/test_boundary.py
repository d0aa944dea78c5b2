"""What a continuation is, and what it becomes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import SAMPLE, uniform
from adapters.contract.random_numbers import SAMPLE_AGAIN
from worker.migration.boundary import VERSION, Boundary, _digest, continuation, owner_of
from worker.requests.continuation import ControlDigests
from worker.requests.request import GenerationRequest, RequestLimits, parse_request

LIMITS = RequestLimits(context_length=64, vocab_size=8, eos_token_ids=(2,))

tokens = st.lists(st.integers(0, 7), min_size=1, max_size=12)
answers = st.lists(st.integers(0, 7), max_size=12)


def parsed(
    token_ids: list[int], max_tokens: int | None, min_tokens: int | None = None, **more: object
) -> GenerationRequest:
    stops = {"max_tokens": max_tokens, "min_tokens": min_tokens}
    return parse_request({"token_ids": token_ids, "stop_conditions": stops, **more}, LIMITS)


@given(prompt=tokens, answer=answers, max_tokens=st.none() | st.integers(12, 40), reduces=st.booleans())
def test_prompt_and_answer_are_told_apart_wherever_it_was_cut(
    prompt: list[int], answer: list[int], max_tokens: int | None, reduces: bool
) -> None:
    first = parsed(prompt, max_tokens, 12)
    boundary = Boundary.decode(Boundary.of(first, 7, "a-0").encode())
    left = None if max_tokens is None else max(1, max_tokens - len(answer))
    min_tokens = max(0, 12 - len(answer)) if reduces else 12  # 1.6.1 reduces it, 1.4.2 does not
    received = parsed(prompt + answer, left, min_tokens)
    if max_tokens == len(answer):
        return  # nothing is left to generate, so nothing migrates
    assert boundary.is_continued_by(received) == bool(answer)
    assert boundary.is_repeated_by(received) == (not answer)
    if answer:
        request = continuation(received, boundary)
        assert (request.prompt_token_ids, request.generated_token_ids) == (prompt, answer)
        assert request.token_ids == prompt + answer
        assert request.params.max_tokens == first.params.max_tokens
        assert request.params.min_tokens == first.params.min_tokens
        assert request.params.seed == 7


@given(prompt=tokens, other=tokens, max_tokens=st.none() | st.integers(1, 40))
def test_another_prompt_is_no_continuation(prompt: list[int], other: list[int], max_tokens: int | None) -> None:
    boundary = Boundary.of(parsed(prompt, None), 7, "a-0")
    received = parsed(other, max_tokens)
    if other[: len(prompt)] != prompt:
        assert not boundary.is_continued_by(received)
        assert not boundary.is_repeated_by(received)


@given(prompt=tokens, more=tokens, max_tokens=st.integers(1, 20))
def test_a_longer_prompt_with_the_same_id_is_a_new_request(prompt: list[int], more: list[int], max_tokens: int) -> None:
    """A client that numbers its sessions, and sends the answer back with the next question."""
    boundary = Boundary.of(parsed(prompt, max_tokens), 7, "a-0")
    assert not boundary.is_continued_by(parsed(prompt + more, max_tokens))


kinds = st.sampled_from(["exact, native kernels", "exact, native-amx kernels", "fast"])
types = st.sampled_from(["bfloat16", "int8 of bfloat16"])
digests = st.sampled_from(["", "5f2a", "80c1"])


@given(here=st.tuples(kinds, types, digests), there=st.tuples(kinds, types, digests))
def test_workers_that_compute_otherwise_differ(here: tuple[str, str, str], there: tuple[str, str, str]) -> None:
    boundary = Boundary.decode(Boundary.of(parsed([1, 2], 5), 7, "a-0", 1, *there).encode())
    found = boundary.difference(*here)
    assert (found is None) == (here == there)
    if found is not None:
        name, ours, theirs = next(
            (name, *pair)
            for name, *pair in zip(("numerics", "kv_dtype", "weights"), here, there, strict=True)
            if pair[0] != pair[1]
        )
        assert found == f"{name} is {theirs!r} on the worker that began the answer and {ours!r} on this one"


parts = st.sampled_from(["", "5f2a", "80c1"])
controls = st.builds(lambda *two: ControlDigests(*two) if all(two) else ControlDigests(), parts, parts)


@given(here=st.tuples(parts, controls), there=st.tuples(parts, controls))
def test_an_owner_has_the_model_and_the_controls(
    here: tuple[str, ControlDigests], there: tuple[str, ControlDigests]
) -> None:
    """What one of the two does not know is not compared."""
    boundary = Boundary.decode(Boundary.of(parsed([1, 2], 5), 7, owner_of("a-0", *there)).encode())
    found = boundary.difference("", "", model=here[0], controls=here[1])
    values = [("model", here[0], there[0])]
    values += [(name, getattr(here[1], name), getattr(there[1], name)) for name in ControlDigests.__dataclass_fields__]
    expected = [
        f"{name} is {theirs!r} on the worker that began the answer and {ours!r} on this one"
        for name, ours, theirs in values
        if ours and theirs and ours != theirs
    ]
    assert found == (expected[0] if expected else None)


GOOD = json.loads(Boundary.of(parsed([1, 2], 5), 7, "a-0").encode())


def sealed(**changes: object) -> str:
    """A record with the digest that its fields have after `changes`."""
    values = {name: value for name, value in (GOOD | changes).items() if name != "digest"}
    return json.dumps(values | {"digest": _digest(values)})


@pytest.mark.parametrize(
    "data",
    [
        "",
        "[]",
        "[" * 100_000,
        json.dumps(GOOD | {"version": 1}),
        sealed(version=VERSION - 1),
        sealed(version=VERSION + 1),
        sealed(more=1),
        json.dumps({name: value for name, value in GOOD.items() if name != "seed"}),
        json.dumps({name: value for name, value in GOOD.items() if name != "digest"}),
        sealed(prompt_length=0),
        sealed(max_tokens="5"),
        sealed(max_tokens=10**30),
        sealed(min_tokens=6),
        sealed(seed=2**64),
        sealed(attempts=True),
        sealed(owner=None),
        sealed(owner="a" * 1000),
        sealed(numerics=3),
        sealed(kv_dtype=None),
        sealed(weights=None),
        sealed(adapter=None),
    ],
)
def test_what_is_no_record_is_refused(data: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Boundary.decode(data.encode())


@given(st.data())
def test_an_altered_record_is_none(data: st.DataObject) -> None:
    """Any byte of it: a seed with another digit would go on with other tokens."""
    written = bytearray(Boundary.of(parsed([1, 2], 5, 3), 2**63 + 12345, "a-0").encode())
    place = data.draw(st.integers(0, len(written) - 1))
    altered = data.draw(st.integers(0, 255).filter(lambda byte: byte != written[place]))
    written[place] = altered
    with pytest.raises(ValueError, match=r"."):
        Boundary.decode(bytes(written))


@given(st.integers(0, 200))
def test_a_record_that_was_cut_off_is_none(length: int) -> None:
    written = Boundary.of(parsed([1, 2], 5, 3), 7, "a-0").encode()
    if length < len(written):
        with pytest.raises(ValueError, match=r"."):
            Boundary.decode(written[:length])


def test_a_record_nested_to_any_depth_is_none() -> None:
    """Reader and writer of JSON give up at depths that differ by one."""
    for depth in range(800, 1100):
        written = b'{"version":%d,"digest":"","x":%b1%b}' % (VERSION, b"[" * depth, b"]" * depth)
        with pytest.raises(ValueError, match=r"altered|nested too deeply"):
            Boundary.decode(written)


def test_the_version_is_of_the_random_numbers_too() -> None:
    """Workers whose numbers differ must not go on with each other's answers: raise it with them."""
    numbers = [uniform(7, 1, 9, purpose) for purpose in (SAMPLE, SAMPLE_AGAIN, 2 * SAMPLE_AGAIN)]
    assert (VERSION, numbers) == (5, [0.4684407293269623, 0.2318924754042721, 0.6718774986371892])
