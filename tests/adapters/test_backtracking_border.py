"""Nothing before a chain's border is ever taken back: tried with every text of a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import inf

import pytest
from backtracking_world import PROMPT, World
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.contract import BacktrackingProcessor, Context, Reads
from adapters.vocabulary import Vocabulary

History = tuple[int, ...]


WORLDS = {
    "the issue's": World("inst", ["in", "st"]),
    "in two processors": World("inst", ["in"], ["st"]),
    "chained": World("abcd", ["ab", "bc", "cda"]),
    "overlapping itself": World("ab", ["aab", "abab", "bbb"]),
    "several characters a token": World(["a", "b", "ab", "ba"], ["bab", "abba"]),
    "parts of characters": World([b"\xc3", b"\xa9", "é", "a"], ["éa", "a\ufffd"]),
    "no characters": World([b"\xe4", b"\xb8", b"\xb8\xad\xe4", "a"], ["\ufffd"]),
    "folded": World(["s", "S", "ß", "x"], ["ssx", "SSS"]),
    "without text": World(["a", "", "b"], ["ab", "ba"]),
}

LENGTHS = {2: 8, 3: 6, 4: 5}
"""Tokens of the longest texts, by the number of pieces."""


def rewinds_to(chain: ProcessorChain, *, ends: bool) -> int | None:
    found = [one.processor for one in chain.members if isinstance(one.processor, BacktrackingProcessor)]
    asked = [one.rewinds_to_at_end if ends else one.rewinds_to for one in found]
    return min((each for each in asked if each is not None), default=None)


class Graph:
    """Every text of a world, where each next token leads, and the least that is taken back."""

    def __init__(self, world: World, length: int) -> None:
        size, self.length = len(world.pieces), length
        texts = [h for count in range(self.length + 1) for h in product(range(size), repeat=count)]
        chains = {history: world.chain(history) for history in texts}
        self.back = {history: rewinds_to(chain, ends=False) for history, chain in chains.items()}
        self.back_at_end = {history: rewinds_to(chain, ends=True) for history, chain in chains.items()}
        self.live = [history for history in texts if not world.breaks(history)]
        held = {history: chains[history].held_from for history in self.live}
        self.held = {h: None if position is None else position - len(PROMPT) for h, position in held.items()}
        self.least: dict[History, float] = dict.fromkeys(self.live, inf)
        while self._spread(size):
            pass

    def _spread(self, size: int) -> bool:
        before = dict(self.least)
        for history in reversed(self.live):
            found = [self.least[history]]
            if (index := self.back_at_end[history]) is not None:
                found += [index, self.least[history[:index]]]
            for token_id in range(size) if len(history) < self.length else ():
                longer = (*history, token_id)
                index = self.back[longer]
                found += [self.least[longer]] if index is None else [index, self.least[longer[:index]]]
            self.least[history] = min(found)
        return before != self.least


@cache
def graph_of(name: str) -> Graph:
    return Graph(WORLDS[name], LENGTHS[len(WORLDS[name].pieces)])


def check_border(graph: Graph) -> None:
    for history in graph.live:
        held, least = graph.held[history], graph.least[history]
        assert least >= (len(history) if held is None else held), (history, held, least)


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_before_the_border_is_taken_back(name: str) -> None:
    check_border(graph_of(name))


@pytest.mark.parametrize("name", WORLDS)
def test_no_token_waits_in_vain(name: str) -> None:
    graph = graph_of(name)
    waiting = [history for history in graph.live if graph.held[history] is not None]
    waiting = [history for history in waiting if len(history) + WORLDS[name].longest <= graph.length]
    assert waiting
    for history in waiting:
        assert graph.held[history] == graph.least[history], history


texts = st.text("ab", min_size=1, max_size=3)


@settings(max_examples=examples(25))
@given(
    st.lists(texts, min_size=2, max_size=3, unique=True), st.lists(st.lists(texts, min_size=1), min_size=1, max_size=2)
)
def test_no_phrases_of_any_vocabulary_take_back_what_was_sent(pieces: list[str], phrases: list[list[str]]) -> None:
    check_border(Graph(World(pieces, *phrases), 5))


@pytest.mark.parametrize("name", WORLDS)
def test_a_phrase_is_taken_back_as_soon_as_it_is_written(name: str) -> None:
    world, graph = WORLDS[name], graph_of(name)
    for history in graph.live:
        for token_id in range(len(world.pieces)) if len(history) < graph.length else ():
            longer = (*history, token_id)
            index = graph.back[longer]
            assert (index is not None) == world.breaks(longer), longer
            assert index is None or not world.breaks(longer[:index]), longer
        assert (graph.back_at_end[history] is not None) == world.breaks(history, ends=True), history


@pytest.mark.parametrize(
    ("pieces", "phrases", "index"),
    [
        (["x", "a", "b"], ["ab"], 1),
        (["xa", "b"], ["ab"], 0),
        ([b"\xc3", b"\xa9a", "b"], ["éa"], 0),
        ([b"\xc3", b"\xa9a", "b"], ["ab"], 1),
        (["x", b"\xe4", b"\xb8", b"\xad\xe4", b"\xb8\xad"], ["中"], 1),
        (["x", b"\xe4a", "b"], ["ab"], 1),
        (["x", "a", "b", "cd"], ["abc", "bc", "d"], 1),
        (["x", "a", "b", "cd"], ["d", "bc", "abc"], 1),
    ],
)
def test_a_phrase_is_taken_back_to_its_first_token(pieces: list[str | bytes], phrases: list[str], index: int) -> None:
    """Of several that one token completes, to that of the one that begins first."""
    chain = World(pieces, phrases).chain()
    for token_id in range(len(pieces)):
        chain.accept(token_id, chain.position)
        if (found := rewinds_to(chain, ends=False)) is not None:
            break
    assert found == index


def test_to_ask_at_the_end_changes_nothing() -> None:
    chain = World(["x", "a", b"\xc3", b"\xa9"], ["a\ufffd", "aéx"]).chain((0, 1, 2))
    assert [rewinds_to(chain, ends=True) for _ in range(3)] == [1, 1, 1]
    chain.accept(3, chain.position)
    assert rewinds_to(chain, ends=True) is None
    chain.accept(0, chain.position)
    assert rewinds_to(chain, ends=False) == 1


class TakesBackTheFirst(BacktrackingProcessor):
    """Takes the first token back when there are four, and answers as it is told until then."""

    name = "takes_back_the_first"
    reads = Reads.GENERATED

    def __init__(self, answer: object) -> None:
        self.answer = answer

    @property
    def held_from(self) -> int | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if self.num_generated in (1, 2, 3) else None  # type: ignore[return-value]

    @property
    def rewinds_to(self) -> int | None:
        return 0 if self.num_generated == 4 else None


def test_a_sent_token_is_not_rewound_but_fails_its_processor() -> None:
    chain = ProcessorChain([TakesBackTheFirst(None)], Context(Vocabulary(8)))
    chain.start(PROMPT)
    for token_id in range(3):
        chain.accept(token_id, chain.position)
        assert chain.held_from is None
        assert chain.rewind_if_asked(chain.position) is None
    chain.accept(3, chain.position)
    for num_sent in (3, 1):
        with pytest.raises(ProcessorFailed, match="takes back generated token 0, which was sent since held"):
            chain.rewind_if_asked(len(PROMPT) + num_sent)
        assert chain.tokens == [*PROMPT, 0, 1, 2, 3]
    assert chain.rewind_if_asked(len(PROMPT)) == len(PROMPT)


def test_a_rewound_token_is_masked_until_an_earlier_one_changes() -> None:
    chain = ProcessorChain([TakesBackTheFirst(0)], Context(Vocabulary(8)))
    chain.start(PROMPT)
    for token_id in (3, 4, 5, 6):
        chain.accept(token_id, chain.position)
    assert chain.rewind_if_asked(2) == 2
    assert [ban.token_ids.tolist() for ban in chain.plan().bans] == [[3]]
    chain.accept(7, 2)
    assert not chain.plan().bans
    chain.rewind(2)
    assert [ban.token_ids.tolist() for ban in chain.plan().bans] == [[3]]
    chain.start(PROMPT)
    assert not chain.plan().bans


class TakesBackTheNewest(BacktrackingProcessor):
    """Takes a token back as soon as it comes, if it is the one."""

    name = "takes_back_the_newest"
    reads = Reads.GENERATED
    held_from = None

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    @property
    def rewinds_to(self) -> int | None:
        return self.num_generated - 1 if self.num_generated and self.last_token == self.token_id else None


def test_what_another_processor_takes_back_ends_a_mask_after_it() -> None:
    chain = ProcessorChain([TakesBackTheNewest(3), TakesBackTheFirst(0)], Context(Vocabulary(8)))
    chain.start(PROMPT)
    for token_id in (4, 5, 3):
        chain.accept(token_id, chain.position)
        chain.rewind_if_asked(2)
    assert [ban.token_ids.tolist() for ban in chain.plan().bans] == [[3]]
    for token_id in (6, 7):
        chain.accept(token_id, chain.position)
    assert chain.rewind_if_asked(2) == 2
    for token_id in (1, 5):
        chain.accept(token_id, chain.position)
        assert not chain.plan().bans


def test_a_replay_rules_out_only_what_can_be_taken_back() -> None:
    """A processor that takes back the newest token alone never holds one."""
    chain = ProcessorChain([TakesBackTheNewest(3)], Context(Vocabulary(8)))
    chain.start(PROMPT)
    assert not chain.rule_out(4)
    assert chain.rule_out(3)
    assert chain.tokens == list(PROMPT)
    assert [ban.token_ids.tolist() for ban in chain.plan().bans] == [[3]]


def test_what_was_ruled_out_leaves_no_trace_in_a_state() -> None:
    world = WORLDS["the issue's"]
    chain = world.chain()
    assert chain.rule_out(0)
    for token_id in (1, 0):
        chain.accept(token_id, chain.position)
    fresh = world.chain((1, 0))
    assert chain.held_from == fresh.held_from == len(PROMPT) + 1
    chain.accept(1, chain.position)
    assert rewinds_to(chain, ends=False) == 1


def test_a_mask_is_shown_as_that_of_its_processor_alone() -> None:
    chain = ProcessorChain([TakesBackTheFirst(0), TakesBackTheNewest(3)], Context(Vocabulary(8)))
    chain.start(PROMPT)
    newest = chain.members[1]
    chain.accept(3, chain.position)
    assert chain.rewind_if_asked() == len(PROMPT)
    found = [(member, [ban.token_ids.tolist() for ban in plan.bans]) for member, plan in chain.plan_each()]
    assert found == [(newest, [[3]])]


def test_each_token_that_was_taken_back_is_counted_and_copied() -> None:
    world = World("abcd", ["a", "b", "c"])
    chain, copy = world.chain(), world.chain()
    for token_id in (0, 1):
        chain.accept(token_id, chain.position)
        assert chain.rewind_if_asked() == len(PROMPT)
    copy.copy_ruled_out(chain)
    assert copy.rule_out(2)
    assert (copy.num_ruled_out, chain.num_ruled_out) == (3, 2)
    chain.accept(3, chain.position)
    assert chain.members[0].record.rollbacks == 2


@pytest.mark.parametrize("answer", ["0", 1.0, True, -1, 1, ValueError("no")])
def test_an_answer_that_is_no_index_fails_its_processor(answer: object) -> None:
    chain = ProcessorChain([TakesBackTheFirst(answer)], Context(Vocabulary(8)))
    if isinstance(answer, Exception):
        with pytest.raises(ProcessorFailed, match="takes_back_the_first: raised ValueError"):
            chain.start(PROMPT)
        return
    chain.start(PROMPT)
    with pytest.raises(ProcessorFailed, match=r"held_from is .*, expected None or an index below 1"):
        chain.accept(3, 2)


def test_a_processor_added_late_holds_tokens_like_an_early_one() -> None:
    world = WORLDS["in two processors"]
    history = [2, 0, 2, 0]
    joined = world.chain(history)
    late = ProcessorChain([], joined.context)
    late.start(PROMPT, history)
    late.add([member.processor for member in world.chain().members])
    assert late.held_from == joined.held_from == 2
    assert late.receipt.as_json() | {"processors": ()} == joined.receipt.as_json() | {"processors": ()}


class Unlisted(dict[int, set[int]]):
    """Must not be gone through from the first on."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError


def test_a_rewind_does_not_look_at_earlier_bans() -> None:
    """A long answer with many of them looked at all for each token that was taken back."""
    chain, first = WORLDS["the issue's"].chain((0, 1, 1, 0, 1, 1)), len(PROMPT)
    backtracking = chain._history.backtracking
    assert backtracking is not None
    backtracking._bans = [Unlisted({first: {5}, first + 2: {6}, first + 5: {7}, first + 3: {8}})]
    chain.rewind(first + 3)
    assert dict(backtracking._bans[0].items()) == {first: {5}, first + 2: {6}, first + 3: {8}}
    chain.rewind(first + 2)
    assert list(backtracking._bans[0].keys()) == [first, first + 2]
