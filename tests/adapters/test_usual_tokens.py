"""Texts that a grammar forces are written in their usual tokens, unless those are forbidden."""

from __future__ import annotations

import json
import pickle
import random
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.catalog import Catalog, parse_selection
from adapters.chain import ProcessorChain, ProcessorFailed, apply_chain, apply_plan
from adapters.contract import Reads, ShapingProcessor, Stage
from adapters.grammars import forced_text
from adapters.processors.grammar import JsonSchema
from adapters.testing.kit_model import kit_context
from adapters.trtllm.native_controls import EmbeddingBias
from adapters.vocabulary import ByteIndex

CATALOG = Catalog.default()
FORCED_ID = forced_text._FORCED_ID
PROMPT = [40, 41, 42]
KEYS = ["the quick brown fox", "sleeps", "über", "答案", "Answer: the"]
SCHEMA = {
    "type": "object",
    "properties": {key: {"enum": ["fox", "the fox jumps", "dog"]} for key in KEYS},
    "required": KEYS,
    "additionalProperties": False,
}
BY_SCHEMA = {"name": "json_schema", "args": {"schema": SCHEMA}}


class Opaque(ShapingProcessor):
    """A third party's: what it makes of a row is not known before."""

    name = "opaque"
    stage = Stage.SOFT
    reads = Reads.NOTHING

    def shape(self, logits: torch.Tensor) -> None:
        pass


class ThirdPartySchema(JsonSchema):
    """A grammar of a third party."""


def chain_of(*processors: dict[str, Any], alone: bool = True) -> ProcessorChain:
    text = json.dumps({"version": 1, "processors": list(processors)})
    chain = CATALOG.build_chain(parse_selection(text), kit_context())
    chain.masks_alone = alone
    chain.start(PROMPT)
    return chain


def encode(text: str) -> list[int]:
    return kit_context().vocabulary.encode(text)


def sampled(chain: ProcessorChain, source: random.Random) -> int:
    """A token of the plan: one that is drawn from those left."""
    row = torch.zeros(kit_context().vocabulary.size)
    apply_chain(chain, row)
    left: list[int] = (row > -torch.inf).nonzero()[:, 0].tolist()
    return source.choice(left)


def answer(chain: ProcessorChain, source: random.Random) -> tuple[list[int], list[int | None]]:
    """Tokens of an answer to its end, and the token that was forced at each position."""
    tokens, forced = list[int](), list[int | None]()
    while not tokens or tokens[-1] not in kit_context().end_token_ids:
        token_id = sampled(chain, source)
        forced.append(chain.plan().force)
        chain.accept(token_id, chain.position)
        tokens.append(token_id)
    return tokens, forced


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_keys_are_written_as_the_tokenizer_writes_them(seed: int) -> None:
    tokens, forced = answer(chain_of(BY_SCHEMA), random.Random(seed))
    text = kit_context().vocabulary.decode(tokens[:-1])
    value = json.loads(text)
    assert list(value) == KEYS
    any_tokens, _ = answer(chain_of(BY_SCHEMA, alone=False), random.Random(seed))
    assert sum(each is not None for each in forced) > len(forced) / 2
    assert len(tokens) < len(any_tokens)
    for key in KEYS[1:]:  # somewhere in the answer stand the tokens of the key, in order
        inner = encode(key)[1:-1]
        assert any(tokens[at : at + len(inner)] == inner for at in range(len(tokens)))


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_what_is_forced_is_a_function_of_the_history(seed: int, data: st.DataObject) -> None:
    chain = chain_of(BY_SCHEMA)
    tokens, forced = answer(chain, random.Random(seed))
    kept = data.draw(st.integers(0, len(tokens) - 1))
    replayed = chain_of(BY_SCHEMA)
    replayed.start(PROMPT, tokens[:kept])
    chain.rewind(len(PROMPT) + kept)
    moved: ProcessorChain = pickle.loads(pickle.dumps(chain)) if kit_context().vocabulary.address else chain
    assert replayed.plan().force == chain.plan().force == moved.plan().force == forced[kept]
    assert [plan.force for plan in replayed.peek(tokens[kept:-1])] == forced[kept:]


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), banned=st.sets(st.integers(256, 379), max_size=60))
def test_another_processor_may_forbid_the_usual_token(seed: int, banned: set[int]) -> None:
    never = sorted(banned - kit_context().end_token_ids)
    bans = {"name": "banned_tokens", "args": {"token_ids": never}}
    chain = chain_of(BY_SCHEMA, *([bans] if never else []))
    tokens, _ = answer(chain, random.Random(seed))
    assert not banned & set(tokens[:-1])
    assert list(json.loads(kit_context().vocabulary.decode(tokens[:-1]))) == KEYS


@pytest.mark.parametrize("seed", [0, 1])
def test_a_dense_bias_may_rule_out_the_usual_token(seed: int) -> None:
    tokens, forced = answer(chain_of(BY_SCHEMA), random.Random(seed))
    num_others = 0
    for at, usual in enumerate(forced):
        any_tokens, chain = chain_of(BY_SCHEMA, alone=False), chain_of(BY_SCHEMA)
        any_tokens.start(PROMPT, tokens[:at])
        others = [each for each in range(380) if each != usual and any_tokens.plan().permits(each)]
        if usual is None or not others:
            continue
        bias = torch.zeros(kit_context().vocabulary.size)
        bias[usual] = -torch.inf
        chain.start(PROMPT, tokens[:at])
        chain.add(EmbeddingBias.members(bias))
        assert not chain.plan().permits(usual)
        num_others += 1
    assert num_others > 3


GRAMMARS: list[dict[str, Any]] = [
    BY_SCHEMA,
    {"name": "regex", "args": {"pattern": "(the quick brown (fox|foxes)[.] ?)+|Answer: über the [a-z]{1,3} fox"}},
    {"name": "choice", "args": {"choices": ["the quick brown fox", "the quick brown fox jumps", "答案 über"]}},
    {"name": "grammar", "args": {"lark": 'start: "the quick" (<[300]> " brown fox " | " brown ") "the" <[40]>'}},
]


@settings(max_examples=examples(600), deadline=None)
@given(
    named=st.sampled_from(GRAMMARS),
    seed=st.integers(0, 2**32),
    banned=st.sets(st.integers(256, 379), max_size=20),
    forced=st.sampled_from([None, "the ", "the quick", '{"the']),
)
def test_what_is_sure_needs_no_mask(named: dict[str, Any], seed: int, banned: set[int], forced: str | None) -> None:
    """A position is planned as from the mask of the grammar, whatever others forbid or force."""
    others: list[dict[str, Any]] = [{"name": "frequency_penalty", "args": {"penalty": 0.5}}]
    if never := sorted(banned - kit_context().end_token_ids):
        others.append({"name": "banned_tokens", "args": {"token_ids": never}})
    if forced is not None:
        others.append({"name": "forced_prefix", "args": {"text": forced}})
    chain, by_masks, source = chain_of(named, *others), chain_of(named, *others), random.Random(seed)
    by_masks._sure = None
    while chain.position < len(PROMPT) + 60:
        if source.random() < 0.3:
            chain.foresee(8)
        found, expected = planned(chain), planned(by_masks)
        assert found == expected
        if isinstance(found, str):
            break
        token_id = source.choice(found[1])
        for one in (chain, by_masks):
            one.accept(token_id, one.position)
        if token_id in kit_context().end_token_ids:
            break
        if source.random() < 0.1:
            position = source.randrange(len(PROMPT), chain.position)
            chain.rewind(position)
            by_masks.rewind(position)
    assert without_times(chain) == without_times(by_masks)


def test_a_named_token_is_not_the_text_of_its_bytes() -> None:
    """That of byte 255 is, like any other, spelled with that byte and its id in a forced text."""
    token_id = kit_context().vocabulary.token_bytes.index(b"\xff")
    grammar = f'start: "the quick" <[{token_id}]> " brown fox jumps"'
    named = {"name": "grammar", "args": {"lark": grammar}}
    tokens, forced = answer(chain_of(named), random.Random(0))
    for kept in range(len(tokens)):
        replayed = chain_of(named)
        replayed.start(PROMPT, tokens[:kept])
        assert replayed.plan().force == forced[kept]
    assert encode("the quick") == tokens[: tokens.index(token_id)]


def planned(chain: ProcessorChain) -> tuple[list[tuple[str, str, int]], list[int]] | str:
    """What each processor does at a position, and the tokens that are left; or why none is."""
    try:
        plan = chain.plan()
        row = torch.zeros(kit_context().vocabulary.size)
        apply_plan(chain, plan, row)
    except ProcessorFailed as failure:
        return str(failure)
    kinds = [(record.name, kind, masked) for record, _, _, kind, masked in plan.acts]
    return kinds, (row > -torch.inf).nonzero()[:, 0].tolist()


def without_times(chain: ProcessorChain) -> Any:
    found: Any = chain.receipt.as_json()
    for record in found["processors"]:
        record.pop("seconds", None)
    return found


def test_near_its_end_a_token_may_reach_beyond_the_forced_text() -> None:
    chain = chain_of({"name": "regex", "args": {"pattern": "the (quick|[a-z]+)"}})
    plan = chain.plan()
    assert plan.force is None or len(kit_context().vocabulary.token_bytes[plan.force]) < len("the ")
    permitted = {each for each in range(kit_context().vocabulary.num_tokens) if plan.permits(each)}
    assert plan.force is not None or len(permitted) > 1


def test_what_may_mask_tokens_unseen_leaves_all_of_them() -> None:
    assert chain_of(BY_SCHEMA).plan().force is not None
    assert chain_of(BY_SCHEMA, alone=False).plan().force is None
    chain = chain_of(BY_SCHEMA)
    chain.add([Opaque(None, kit_context())])
    assert chain.plan().force is None


def test_the_receipt_counts_and_inspection_shows_forced_tokens() -> None:
    chain = chain_of(BY_SCHEMA)
    _, forced = answer(chain, random.Random(0))
    (record,) = chain.receipt.records
    assert record.tokens_forced == sum(each is not None for each in forced)
    chain.rewind(len(PROMPT))
    ((member, plan),) = chain.plan_each()
    assert (member.name, plan.force) == ("json_schema", forced[0])


@pytest.mark.parametrize("scope", ["all", "answer"])
def test_a_thinking_section_may_be_opened_and_is_free(scope: str) -> None:
    chain = chain_of({"name": "json_schema", "args": {"schema": SCHEMA, "scope": scope}})
    assert (chain.plan().force is None) == (scope == "answer")
    if scope == "answer":
        for token_id in [*kit_context().think_start, *encode("the fox"), *kit_context().think_end]:
            plan = chain.plan()
            assert plan.force is None
            assert plan.permits(token_id)
            chain.accept(token_id, chain.position)
        assert chain.plan().force is not None


class Pattern:
    """The pattern of tokens that are ids, which counts the bytes that it is given."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def split(self, text: bytes, maxsplit: int = 0) -> list[bytes]:
        self.num_bytes += len(text)
        return FORCED_ID.split(text, maxsplit)


class Matcher:
    """A matcher whose grammar forces a text."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def compute_ff_bytes(self) -> bytes:
        return self._text

    def copied(self) -> Any:
        return self


PARTS = st.one_of(
    st.sampled_from([b"the " * 62, b"fox", b" "]), st.integers(0, 2**32).map(lambda one: b"\xff[%d]" % one)
)


@settings(deadline=None)
@given(st.lists(PARTS), st.lists(st.integers(0, 255), min_size=1, max_size=9), st.booleans())
def test_a_long_forced_text_is_not_read_to_its_end(parts: list[bytes], others: list[int], has_usual: bool) -> None:
    """The token that is found is the one that all of the text would give."""
    vocabulary, whole = kit_context().vocabulary, b"".join(parts) + b"the " * 10_000
    text = FORCED_ID.split(whole, maxsplit=1)[0]
    usual = list(vocabulary.encode(text[:256].decode(errors="ignore")))[:1]
    allowed = [*others, *(usual if has_usual else [])]
    has_room = max(len(vocabulary.token_bytes[token_id]) for token_id in allowed) <= len(text)
    pattern = Pattern()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forced_text, "_FORCED_ID", pattern)
        found = forced_text.ForcedText(vocabulary).first_token(lambda: Matcher(whole), allowed)  # type: ignore[arg-type, return-value]
    assert found == (usual[0] if usual and usual[0] in allowed and has_room else None)
    assert pattern.num_bytes < 1000


class Words:
    """A vocabulary of texts, of which the first one is empty: what they cannot spell is that."""

    address = None

    def __init__(self, token_bytes: list[bytes]) -> None:
        self.token_bytes = token_bytes
        self._derived: dict[str, Any] = {}

    def derived(self, key: str, make: Any) -> Any:
        return self._derived.setdefault(key, make())

    def encode(self, text: str) -> list[int]:
        spelled = ByteIndex(self.token_bytes).spell(text.encode())
        return [0] if spelled is None else spelled


@settings(max_examples=examples(1000), deadline=None)
@given(
    words=st.lists(st.text("ab", min_size=1, max_size=4).map(str.encode), min_size=1, max_size=10),
    text=st.text("ab", min_size=1, max_size=9).map(str.encode),
    most=st.integers(2, 8),
    turns=st.lists(st.integers(0, 9), min_size=9, max_size=9),
)
def test_what_is_sure_is_what_any_mask_would_tell(words: list[bytes], text: bytes, most: int, turns: list[int]) -> None:
    """Of `most` tokens or more a mask tells nothing; behind the text, any may follow."""
    vocabulary: Any = Words([b"", *words])
    kept: forced_text.ForcedText | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forced_text, "MAX_ALLOWED", most)
        for turn in turns:
            whole = Matcher(text)
            allowed = [i for i, word in enumerate(words, 1) if text.startswith(word) or word.startswith(text)]
            within = [i for i in allowed if text.startswith(words[i - 1])]
            if not within:
                return
            reaches_beyond = any(len(words[i - 1]) > len(text) for i in allowed)
            usual = None if reaches_beyond else vocabulary.encode(text.decode())[0] or None
            found = forced_text.ForcedText(vocabulary)
            assert found.first_token(whole.copied, allowed) == usual
            kept = kept or found
            sure = kept.sure_token()
            assert sure is None or (len(allowed) < most and sure == (allowed[0] if len(allowed) == 1 else usual))
            taken = within[turn % len(within)]
            kept.take(taken)
            text = text[len(words[taken - 1]) :]
            if not text:
                assert kept.sure_token() is None
                whole, found = Matcher(2 * words[taken - 1]), forced_text.ForcedText(vocabulary)
                next_ones = [one.first_token(whole.copied, [taken]) for one in (kept, found)]
                assert next_ones[0] == next_ones[1]
                return


@pytest.mark.parametrize(("kind", "is_asked"), [(JsonSchema, True), (ThirdPartySchema, False)])
def test_a_third_party_is_asked_for_its_mask_alone(kind: type[JsonSchema], is_asked: bool) -> None:
    chain = ProcessorChain([kind(JsonSchema.Args.model_validate({"schema": SCHEMA}), kit_context())], kit_context())
    chain.masks_alone = True
    chain.start(PROMPT)
    assert (chain.plan().force is not None) == is_asked
    assert bool(chain.foresee(8)) == is_asked == chain.foresees


@pytest.mark.parametrize("is_first", [False, True])
def test_a_usual_token_is_counted_for_its_grammar(is_first: bool) -> None:
    everything = {"name": "allowed_tokens", "args": {"token_ids": [*range(kit_context().vocabulary.num_tokens)]}}
    chain = chain_of(*([BY_SCHEMA, everything] if is_first else [everything, BY_SCHEMA]))
    token_id = chain.plan().force
    assert token_id is not None
    chain.accept(token_id, chain.position)
    assert {record.name: record.tokens_forced for record in chain.receipt.records} == {
        "json_schema": 1,
        "allowed_tokens": 0,
    }
