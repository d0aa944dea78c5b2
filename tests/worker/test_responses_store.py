"""The store of responses: bounded, with items that responses share kept once, apart for owners."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.responses import store as stores
from worker.frontdoor.responses.store import ResponseStore, StoredItem, StoredResponse, is_stored, stored_item

MIB = 2**20


def item(item_id: str, text: str = "a") -> dict[str, Any]:
    return {"id": item_id, "type": "message", "text": text}


def response(response_id: str, *output: dict[str, Any]) -> dict[str, Any]:
    return {"id": response_id, "output": list(output)}


def test_a_response_comes_back_as_it_was_stored() -> None:
    store = ResponseStore(MIB)
    context = [stored_item(item("i1"))]
    assert store.put("a", response("r1", item("o1", "\u00e9")), context, [b"event"])
    found = store.get("a", "r1")
    assert found is not None
    assert found.read() == response("r1", item("o1", "\u00e9"))
    assert (list(found.context), found.events) == (context, (b"event",))
    stored = store.item("a", "o1")
    assert stored is not None
    assert stored.read() == item("o1", "\u00e9")


def test_items_are_found_while_others_come_and_go() -> None:
    """A request with references is read in a thread, beside the event loop, which stores."""
    store, found, is_over = ResponseStore(MIB), set[bool](), threading.Event()

    def look() -> None:
        while not is_over.is_set():
            found.add(store.item("a", "i1") is not None)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            looking = [threads.submit(look) for _ in range(2)]
            for number in range(3000):
                store.put("a", response(f"r{number}"), [stored_item(item("i1"))])
                store.delete("a", f"r{number - 2}")
            is_over.set()
            for one in looking:
                one.result()
    finally:
        sys.setswitchinterval(interval)
    assert True in found


def test_what_one_owner_stores_is_invisible_to_others() -> None:
    store = ResponseStore(MIB)
    store.put("a", response("r1", item("o1")), [])
    assert store.get("b", "r1") is None
    assert store.item("b", "o1") is None
    assert not store.delete("b", "r1")
    assert store.get("a", "r1") is not None


def test_the_one_that_was_not_used_for_longest_is_dropped() -> None:
    store = ResponseStore(6000)
    for name in ("r1", "r2"):
        store.put("a", response(name, item(f"o-{name}", "x" * 1000)), [])
    assert store.get("a", "r1") is not None
    store.put("a", response("r3", item("o-r3", "x" * 1000)), [])
    assert [store.get("a", name) is not None for name in ("r1", "r2", "r3")] == [True, False, True]
    assert store.item("a", "o-r2") is None


def test_the_number_of_responses_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_RESPONSES", 3)
    store = ResponseStore(MIB)
    for i in range(5):
        store.put("a", response(f"r{i}"), [])
    assert len(store) == 3
    assert store.get("a", "r1") is None


def test_shared_items_are_kept_once_until_the_last_use_ends() -> None:
    store = ResponseStore(MIB)
    store.put("a", response("r1", item("o1", "x" * 1000)), [stored_item(item("i1", "y" * 1000))])
    first = store.get("a", "r1")
    assert first is not None
    before = store.num_bytes
    store.put("a", response("r2", item("o2")), [*first.items()])
    assert store.num_bytes < before + 2000
    store.delete("a", "r1")
    found = store.get("a", "r2")
    assert found is not None
    assert [each.read()["id"] for each in found.items()] == ["i1", "o1", "o2"]
    store.delete("a", "r2")
    assert (store.num_bytes, len(store)) == (0, 0)


def test_an_id_of_several_items_is_that_of_the_most_recent_left() -> None:
    store = ResponseStore(MIB)
    for name in ("first", "second"):
        store.put("a", response(name), [stored_item(item("i1", name))])
    found = store.item("a", "i1")
    assert found is not None
    assert found.read()["text"] == "second"
    first = store.get("a", "first")
    assert first is not None
    store.put("a", response("third"), [*first.items()])
    found = store.item("a", "i1")
    assert found is not None
    assert found.read()["text"] == "first"
    store.delete("a", "third")
    store.delete("a", "second")
    found = store.item("a", "i1")
    assert found is not None
    assert found.read()["text"] == "first"


def test_a_response_larger_than_the_store_is_not_stored() -> None:
    store = ResponseStore(2000)
    store.put("a", response("r1"), [])
    assert not store.put("a", response("r2", item("o", "x" * 3000)), [])
    assert store.get("a", "r2") is None
    assert store.num_bytes <= 2000


@pytest.mark.parametrize(
    ("fields", "max_bytes", "expected"),
    [
        ({}, 1, True),
        ({"store": True}, 1, True),
        ({"store": False}, 1, False),
        ({}, 0, False),
        ({"store": False}, 0, False),
    ],
)
def test_what_is_stored(fields: dict[str, Any], max_bytes: int, expected: bool) -> None:
    assert is_stored(fields, ResponseStore(max_bytes)) is expected


@pytest.mark.parametrize(
    "fields",
    [{"store": True}, {"background": True}, {"previous_response_id": "resp_1"}],
    ids=lambda fields: next(iter(fields)),
)
def test_without_a_store_what_needs_it_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FieldRefused) as caught:
        is_stored(fields, ResponseStore(0))
    assert caught.value.param == next(iter(fields))
    assert "--response-store-mib" in caught.value.message


OWNERS_ = ("a", "b")
OWNERS = st.sampled_from(OWNERS_)
NAMES = st.sampled_from(["r1", "r2", "r3", "r4"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "continue", "get", "delete"]), OWNERS, NAMES, NAMES, st.integers(0, 400)),
    max_size=30,
)


@settings(max_examples=examples(300), deadline=None)
@given(steps=STEPS, max_bytes=st.integers(600, 12000))
def test_the_bytes_are_those_of_what_is_kept(steps: list[tuple[str, str, str, str, int]], max_bytes: int) -> None:
    """Against a plain list of responses, the most recently used last."""
    store = ResponseStore(max_bytes)
    kept: dict[tuple[str, str], tuple[list[StoredItem], Any]] = {}
    for kind, owner, name, other, size in steps:
        if kind == "get":
            found = store.get(owner, name)
            assert (found is not None) == ((owner, name) in kept)
            if found is not None:
                kept[owner, name] = kept.pop((owner, name))
                assert json.dumps(found.read()) == json.dumps(kept[owner, name][1])
        elif kind == "delete":
            assert store.delete(owner, name) == (kept.pop((owner, name), None) is not None)
        else:
            earlier = store.get(owner, other) if kind == "continue" else None
            if earlier is not None:
                kept[owner, other] = kept.pop((owner, other))
            context = [*(earlier.items() if earlier else ()), stored_item(item("given", "x" * size))]
            made = response(name, item(f"out-{name}", "y" * size))
            is_kept = store.put(owner, made, context)
            kept.pop((owner, name), None)
            if is_kept:
                kept[owner, name] = (context, made)
            for each in OWNERS_:  # of an owner the oldest goes, and no other
                while any(key[0] == each and key not in stored(store) for key in kept):
                    kept.pop(next(key for key in kept if key[0] == each))
        responses = stored(store)
        for each in OWNERS_:
            assert [key for key in kept if key[0] == each] == [key for key in responses if key[0] == each]
        assert store.num_bytes <= max_bytes
        assert len(store) == len(responses)
        own = sum(each.num_bytes for each in responses.values())
        unique = {id(each): each for found in responses.values() for each in found.items()}
        assert store.num_bytes == own + sum(len(each.data) + stores._OVERHEAD for each in unique.values())
        for (whose, _), one in responses.items():  # clients may give an id to several items
            assert all(store.item(whose, each.item_id) is not None for each in one.items())
    for owner, name in list(kept):
        store.delete(owner, name)
    assert (store.num_bytes, store._owners) == (0, {})


def stored(store: ResponseStore) -> dict[tuple[str, str], StoredResponse]:
    return {(owner, name): each for owner, owned in store._owners.items() for name, each in owned.responses.items()}


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 8000)), max_size=40))
def test_no_owner_takes_the_share_of_another(puts: list[tuple[str, int]]) -> None:
    store = ResponseStore(30_000)
    for number, (owner, size) in enumerate(puts):
        before = {each: owned.num_bytes for each, owned in store._owners.items()}
        assert store.put(owner, response(f"r{number}", item(f"o{number}", "x" * size)), [])
        assert store.get(owner, f"r{number}") is not None
        now = {each: owned.num_bytes for each, owned in store._owners.items()}
        for each, num_bytes in before.items():
            if each != owner and num_bytes <= 10_000:  # a third
                assert now[each] == num_bytes


def test_a_response_larger_than_the_store_drops_no_other() -> None:
    store = ResponseStore(4000)
    store.put("a", response("r1"), [])
    store.put("b", response("r1"), [])
    assert not store.put("a", response("r2", item("o", "x" * 5000)), [])
    assert len(store) == 2


def test_owners_are_not_all_looked_at_for_each_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large response in place of those of many owners took minutes."""
    many, num_looks = 1000, 0

    class Counted(stores._Owned):
        @property
        def num_bytes(self) -> int:
            nonlocal num_looks
            num_looks += 1
            return self._counted

        @num_bytes.setter
        def num_bytes(self, value: int) -> None:
            self._counted = value

    monkeypatch.setattr(stores, "_Owned", Counted)
    store = ResponseStore(2 * MIB)
    for number in range(many):
        store.put(f"owner {number}", response("r"), [])
    before = num_looks
    assert store.put("last", response("r", item("o", "x" * (2 * MIB - 4096))), [])
    assert len(store) < 10
    assert num_looks - before < 20 * many


def test_changes_leave_no_more_than_the_owners_behind() -> None:
    store = ResponseStore(MIB)
    for number in range(1000):
        store.put("a", response(f"r{number}"), [])
        store.put("b", response("r"), [])
        store.delete("a", f"r{number}")
        store.delete("b", "r")
    assert len(store._largest) < 100
    store.put("a", response("kept"), [])
    for number in range(1000):
        store.put("a", response("r", item(f"o{number}")), [])
    assert len(store._owners["a"].items) == 1


def test_a_large_response_goes_for_those_that_come_later() -> None:
    """It had made room for itself, and was no longer among those that may go."""
    store = ResponseStore(30_000)
    for owner, size in (("b", 12_000), ("a", 25_000), ("b", 12_000)):
        assert store.put(owner, response("r", item("o", "x" * size)), [])
    assert [store.get(owner, "r") is not None for owner in "ab"] == [False, True]
