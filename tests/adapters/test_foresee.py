"""What a chain foresees: exactly what it then forces, and the text that a grammar leaves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.catalog import Catalog, parse_selection
from adapters.chain import ProcessorChain
from adapters.contract import Context, Edit, Force, Reads, Stage, SteeringProcessor
from adapters.processors.multiple_choice import MultipleChoice
from adapters.testing.kit_model import kit_context

CATALOG = Catalog.default()
PROMPT = [40, 41, 42]


def chain_of(*processors: dict[str, Any]) -> ProcessorChain:
    text = json.dumps({"version": 1, "processors": list(processors)})
    chain = CATALOG.build_chain(parse_selection(text), kit_context())
    chain.start(PROMPT)
    return chain


def encode(text: str) -> list[int]:
    tokenizer = kit_context().vocabulary.tokenizer
    assert tokenizer is not None
    return list(tokenizer.encode(text, add_special_tokens=False))


def follow(chain: ProcessorChain, tokens: list[int]) -> None:
    for token_id in tokens:
        chain.plan()
        chain.accept(token_id, chain.position)


@pytest.mark.parametrize(
    ("processor", "before"),
    [
        ({"name": "forced_sequence", "args": {"text": "Yes, the fox."}}, ""),
        ({"name": "forced_prefix", "args": {"text": "Yes, the fox"}}, ""),
        ({"name": "trigger_phrase", "args": {"text": " Wait, let me think.", "trigger": " fox"}}, "the fox"),
        ({"name": "multiple_choice", "args": {"choices": ["The quick brown fox", "no"]}}, "The"),
        ({"name": "thinking_budget", "args": {"tokens": 1, "message": " So, yes."}}, "<think>a"),
        ({"name": "force_last_phrase", "args": {"text": " Hello world!"}}, "<first>"),
    ],
)
def test_what_is_foreseen_is_what_is_forced(processor: dict[str, Any], before: str) -> None:
    chain = chain_of(processor)
    if before == "<first>":
        follow(chain, encode(" Hello world!")[:1])
    elif before.startswith("<think>"):
        follow(chain, [*kit_context().think_start, *encode(before.removeprefix("<think>"))])
    else:
        follow(chain, encode(before))
    foreseen = list(chain.foresee(32))
    assert len(foreseen) >= 2
    assert list(chain.foresee(2)) == foreseen[:2]
    for token_id in foreseen:
        assert chain.plan().force == token_id
        chain.accept(token_id, chain.position)


def test_a_grammar_foresees_its_forced_text_and_stays_unchanged() -> None:
    schema = {
        "type": "object",
        "properties": {"customer_name": {"enum": ["Ada", "Bob"]}},
        "additionalProperties": False,
    }
    schema["required"] = ["customer_name"]
    chain = chain_of({"name": "json_schema", "args": {"schema": schema}})
    before = chain.plan().allows[0].clone()
    foreseen = list(chain.foresee(64))
    tokenizer = kit_context().vocabulary.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(foreseen)
    assert text
    assert '{"customer_name":"'.startswith(text)
    assert bool((chain.plan().allows[0] == before).all())
    follow(chain, foreseen)  # every one of them is allowed
    assert chain.failure is None


class Foreseeing(SteeringProcessor):
    """A third party's processor, of which nothing is asked in advance."""

    name = "foreseeing"
    stage = Stage.FORCE
    reads = Reads.NOTHING

    def edit(self) -> Edit:
        return Force(7)

    def foresee(self, limit: int) -> list[int]:
        raise AssertionError("asked")


def test_third_party_processors_are_not_asked() -> None:
    context: Context = kit_context()
    chain = ProcessorChain([Foreseeing(None, context)], context)
    chain.start(PROMPT)
    assert list(chain.foresee(4)) == []


def test_a_scope_that_is_not_reached_foresees_nothing() -> None:
    args = {"text": "Yes, the fox", "scope": "thinking"}
    chain = chain_of({"name": "forced_prefix", "args": args})
    assert list(chain.foresee(4)) == []
    follow(chain, list(kit_context().think_start))
    assert list(chain.foresee(4)) == encode("Yes, the fox")[:4]


def test_a_panic_while_foreseeing_foresees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def panics(self: MultipleChoice, limit: int) -> list[int]:
        raise BaseException  # as a panic in Rust

    chain = chain_of({"name": "multiple_choice", "args": {"choices": ["The quick brown fox", "no"]}})
    monkeypatch.setattr(MultipleChoice, "foresee", panics)
    assert chain.foresees
    assert chain.foresee(8) == ()
    assert chain.plan().acts
