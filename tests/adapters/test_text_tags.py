"""Scopes of a model whose thinking tags are texts of several tokens, split in any way."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch

from adapters.catalog import Catalog, Requested, Selection
from adapters.chain import ProcessorFailed
from adapters.contract import ThinkingTracker, is_allowed

sys.path.append(str(Path(__file__).parent / "processors"))
from vocab_for_tests import END, context, run_row, vocabulary

START, STOP = "[THINK]", "[/THINK]"
VOCABULARY = vocabulary()
FACTS = context(think_start=tuple(VOCABULARY.encode(START)), think_end=tuple(VOCABULARY.encode(STOP)))
PROMPT = VOCABULARY.encode("the fox")
ARRAY = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3}


def pieces(text, choose):
    """Ids of ``text``, split at random places."""
    ids = []
    while text:
        length = choose.randint(1, 4)
        ids += VOCABULARY.encode(text[:length])
        text = text[length:]
    return ids


def chain_of(*processors, scope="answer"):
    chosen = tuple(Requested(name, args, scope, "p") for name, args in processors)
    chain = Catalog.default().build_chain(Selection(chosen), FACTS)
    chain.start(PROMPT)
    return chain


def allows(chain, token_id):
    """Whether the chain leaves ``token_id`` to the model."""
    row = run_row(chain, torch.zeros(VOCABULARY.size))
    return bool(row[token_id] > -torch.inf)


def write(chain, text, choose=None):
    for token_id in VOCABULARY.encode(text) if choose is None else pieces(text, choose):
        assert allows(chain, token_id), (VOCABULARY.decode(chain.tokens), VOCABULARY.decode([token_id]))
        chain.accept(token_id, chain.position)


def test_the_tags_are_several_tokens() -> None:
    assert min(len(FACTS.think_start), len(FACTS.think_end)) > 2


@pytest.mark.parametrize("seed", range(30))
def test_sections_are_those_of_the_text(seed) -> None:
    choose = random.Random(seed)
    parts = [choose.choice(["fox ", START, STOP, "[", "THINK]", "the dog", "[/"]) for _ in range(12)]
    ids = pieces("".join(parts), choose)
    tracker = ThinkingTracker.of(VOCABULARY, FACTS.think_start, FACTS.think_end)
    for count, token_id in enumerate(ids, 1):
        tracker.accept(token_id)
        text, thinking = b"".join(VOCABULARY.token_bytes[i] for i in ids[:count]).decode(), False
        while (tag := STOP if thinking else START) in text:
            text, thinking = text.partition(tag)[2], not thinking
        assert tracker.thinking == thinking


@pytest.mark.parametrize("seed", range(8))
def test_a_model_thinks_first_or_answers_at_once(seed) -> None:
    choose = random.Random(seed)
    chain = chain_of(("json_schema", {"schema": ARRAY}))
    write(chain, START)
    assert not allows(chain, END)  # the answer is still to come
    write(chain, f"the fox [1, {STOP[:5]}", choose)
    write(chain, f"{STOP}[7,12]", choose)
    assert allows(chain, END)
    assert not allows(chain, VOCABULARY.encode("a")[0])
    write(chain_of(("json_schema", {"schema": ARRAY})), "[4]")  # begins as the opening tag does


def test_a_tag_begun_against_the_grammar_must_be_completed() -> None:
    chain = chain_of(("choice", {"choices": ["yes", "no"]}))
    write(chain, "[")
    assert not allows(chain, VOCABULARY.encode("yes")[0])
    write(chain, START[1:] + "the dog" + STOP + "no")
    assert allows(chain, END)
    forced = chain_of(("forced_sequence", {"text": "the dog"}))
    first, second = VOCABULARY.encode("the dog")[:2]
    assert [allows(forced, i) for i in (first, FACTS.think_start[0], END)] == [True, True, False]
    forced.accept(FACTS.think_start[0], forced.position)
    assert [allows(forced, i) for i in (second, FACTS.think_start[1])] == [False, True]


def test_the_tokens_of_a_tag_are_not_counted() -> None:
    chain = chain_of(("min_tokens", {"n": 2}))
    write(chain, START + STOP)
    chain.accept(VOCABULARY.encode("a")[0], chain.position)
    assert not allows(chain, END)
    chain.accept(VOCABULARY.encode("a")[0], chain.position)
    assert allows(chain, END)
    thinking = chain_of(("frequency_penalty", {"penalty": 1.0}), scope="thinking")
    write(thinking, f"{START}a{STOP[:-1]}")
    assert thinking.members[0].processor.num_generated > 1
    write(thinking, STOP[-1])
    assert thinking.members[0].processor.num_generated == 1


@pytest.mark.parametrize("seed", range(12))
def test_rewinding_and_replay_are_as_step_by_step(seed) -> None:
    choose = random.Random(seed)
    asked = [("regex", {"pattern": "[a-z ]+"}), ("presence_penalty", {"penalty": 0.5}), ("min_tokens", {"n": 3})]
    script = pieces(f"{START}the [ fox{STOP}the dog{START}and {STOP} so", choose)
    row = torch.linspace(-1, 1, VOCABULARY.size)

    def outcome(chain):
        try:
            return run_row(chain, row)
        except (ProcessorFailed, AssertionError) as failure:
            return str(type(failure))

    chain, rows = chain_of(*asked), []
    for token_id in script:
        rows.append(outcome(chain))
        chain.accept(token_id, chain.position)
    for _ in range(25):
        k = choose.randrange(min(len(script), len(chain.tokens) - len(PROMPT) + 1))
        chain.rewind(len(PROMPT) + k)
        fresh = chain_of(*asked)
        fresh.start(PROMPT, script[:k])
        for other in (outcome(chain), outcome(fresh)):
            assert torch.equal(other, rows[k]) if isinstance(rows[k], torch.Tensor) else other == rows[k]
        more = script[k : k + choose.randint(0, 9)]
        for token_id in more:
            chain.accept(token_id, chain.position)


def test_an_array_is_valid_json_behind_the_tag() -> None:
    chain = chain_of(("json_schema", {"schema": ARRAY}))
    for token_id in VOCABULARY.encode(f"{START}so{STOP}"):
        chain.accept(token_id, chain.position)
    begin = len(chain.tokens)
    choose = random.Random(3)
    while not allows(chain, END):
        plan = chain.plan()
        options = [i for i in range(VOCABULARY.num_tokens) if all(is_allowed(mask, i) for mask in plan.allows)]
        chain.accept(choose.choice(options), chain.position)
    assert isinstance(json.loads(VOCABULARY.decode(chain.tokens[begin:])), list)
