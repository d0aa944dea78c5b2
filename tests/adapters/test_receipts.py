"""What a receipt says: attribution once, at the end; nothing that was said before changes."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from adapters.chain import ProcessorChain, receipts
from adapters.contract import Allow, Ban, Context, Edit, ProcessorArgs, Reads, Stage, SteeringProcessor
from adapters.vocabulary import Vocabulary

CONTEXT = Context(Vocabulary(80), end_token_ids=frozenset({1}))


class Bans(SteeringProcessor):
    """Bans one token everywhere."""

    name = "bans"
    stage = Stage.MASK
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def edit(self) -> Edit | None:
        return Ban.of([20])


def begun() -> ProcessorChain:
    chain = ProcessorChain([Bans(None, CONTEXT), Bans(None, CONTEXT)], CONTEXT, attribution=True)
    chain.start([2, 3, 4])
    return chain


def accept(chain: ProcessorChain, count: int) -> None:
    for _ in range(count):
        chain.plan()
        chain.accept(9, chain.position)


def test_a_report_does_not_change_afterwards() -> None:
    chain = begun()
    accept(chain, 2)
    told = [chain.receipt.as_json(), chain.receipt.as_json(attribution=False)]
    known = copy.deepcopy(told)
    accept(chain, 3)
    chain.rewind(4)
    assert told == known


def test_attribution_is_left_out_but_where_it_is_asked_for() -> None:
    chain = begun()
    accept(chain, 2)
    assert "tokens" not in chain.receipt.as_json(attribution=False)
    assert chain.receipt.as_json()["tokens"][0] == {"position": 3, "token_id": 9, "processor": "bans", "did": "masked"}


class AllowsEveryBit(Bans):
    """Its mask has the bits of ids that the row does not have."""

    name = "all"

    def edit(self) -> Edit | None:
        return Allow(torch.full((3,), -1, dtype=torch.int32))


def test_bits_beyond_the_vocabulary_are_no_tokens() -> None:
    chain = ProcessorChain([AllowsEveryBit(None, CONTEXT)], CONTEXT)
    chain.start([2, 3, 4])
    accept(chain, 2)
    assert chain.members[0].record.tokens_masked == 0


def test_a_report_without_attribution_does_not_grow() -> None:
    chain = begun()
    accept(chain, 100)
    before = len(json.dumps(chain.receipt.as_json(attribution=False)))
    accept(chain, 800)
    assert len(json.dumps(chain.receipt.as_json(attribution=False))) <= before + 8  # digits


def test_attribution_is_bounded_and_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MAX_ATTRIBUTED", 7)
    chain = begun()
    accept(chain, 3)
    assert "tokens_left_out" not in chain.receipt.as_json()
    accept(chain, 3)
    report = chain.receipt.as_json()
    assert [each["position"] for each in report["tokens"]] == [3, 3, 4, 4, 5, 5, 6]
    assert report["tokens_left_out"] == 5
    chain.rewind(5)
    accept(chain, 1)
    assert [each["position"] for each in chain.receipt.as_json()["tokens"]] == [3, 3, 4, 4, 5, 5]
