"""The order of temperature and truncation that a request names, against each one by itself."""

from __future__ import annotations

import json
import random

import pytest
import torch

from adapters import client
from adapters.catalog import Catalog, Requested, Selection, SelectionError, parse_selection, selection_schema
from adapters.chain import apply_edits, apply_late, plan_rows
from adapters.contract import Context
from adapters.vocabulary import Vocabulary

V = 60
CATALOG = Catalog.default()
CONTEXT = Context(Vocabulary(V), end_token_ids=frozenset({0}))
LATE = {
    "temperature": {"value": 1.7},
    "dynamic_temperature": {"low": 0.5, "high": 2.0},
    "top_k": {"k": 20},
    "top_p": {"p": 0.8},
    "min_p": {"p": 0.05},
    "typical_p": {"p": 0.7},
    "top_n_sigma": {"n": 1.2},
}


def chain_of(names, order=()):
    selection = Selection(tuple(Requested(name, LATE[name], path="p") for name in names), order=tuple(order))  # type: ignore[arg-type]
    chain = CATALOG.build_chain(selection, CONTEXT)
    chain.start([1, 2])
    return chain


def applied(chains, rows):
    logits = rows.clone()
    planned, failures = plan_rows(list(enumerate(chains)))
    assert not failures
    assert not apply_edits(logits, planned)
    assert not apply_late(logits, planned)
    return logits


@pytest.mark.parametrize("seed", range(6))
def test_every_row_of_a_batch_keeps_its_own_order(seed) -> None:
    choose = random.Random(seed)
    rows = torch.randn(8, V, generator=torch.Generator().manual_seed(seed)) * 3
    chains, expected = [], []
    for row in rows:
        order = choose.sample(list(LATE), len(LATE))
        chains.append(chain_of(choose.sample(order, len(order)), order))
        for name in order:
            row = applied([chain_of([name])], row.unsqueeze(0))[0]
        expected.append(row)
    assert [member.name for member in chains[-1].members] == order
    assert torch.equal(applied(chains, rows), torch.stack(expected))


def test_unnamed_processors_follow_the_named_in_the_order_law() -> None:
    names = ["min_p", "top_k", "temperature", "top_p"]
    chain = chain_of(names, ["top_p", "dynamic_temperature"])
    assert [member.name for member in chain.members] == ["top_p", "temperature", "min_p", "top_k"]
    assert [member.name for member in chain_of(names).members] == ["temperature", "min_p", "top_k", "top_p"]


def test_sampling_stays_last_and_what_is_early_first() -> None:
    early = Requested("logit_bias", {"bias": {"3": 1.0}}, path="p")
    last = Requested("watermark", {"key_id": "k"}, path="p")
    top_k = Requested("top_k", {"k": 3}, path="p")
    context = Context(Vocabulary(V), watermark_keys={"k": bytes(32)})
    chain = CATALOG.build_chain(Selection((last, top_k, early), order=("top_k",)), context)
    assert [member.name for member in chain.members] == ["logit_bias", "top_k", "watermark"]


def test_an_order_alone_does_not_ask_for_a_draw() -> None:
    chain = chain_of([], ["top_k", "temperature"])
    assert chain.shapes_late
    assert not chain.wants_random_sampling


def test_the_channel() -> None:
    assert parse_selection(client.selection(order=["min_p", "temperature"])).order == ("min_p", "temperature")
    assert parse_selection(client.selection()).order == ()
    body = client.logits_processors(order=["min_p"])
    assert parse_selection(body["nvext"]["annotations"][0].removeprefix(client.ANNOTATION)).order == ("min_p",)
    names = selection_schema(CATALOG)["properties"]["order"]["items"]["enum"]
    assert "xtc" in names
    assert "watermark" not in names


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("min_p", "order: expected a list"),
        ([1], r"order\[0\]: expected a processor's name"),
        (["min_p", "min_p"], r"order\[1\]: min_p is named twice"),
        (["top_k"] * 17, "order: expected a list of at most 16 names"),
        (["min_q"], r"order\[0\]: unknown logits processor \"min_q\"; did you mean min_p"),
        (["top_k", "watermark"], r"order\[1\]: expected processors of temperature and truncation"),
    ],
)
def test_what_is_refused(order, problem) -> None:
    text = json.dumps({"version": 1, "order": order})
    with pytest.raises(SelectionError, match=problem):
        CATALOG.build_chain(parse_selection(text), CONTEXT)
