"""State made of logits is a function of history, bans and logits, by whatever path."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from backtracking_world import World
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

from adapters.chain import ProcessorChain, ProcessorFailed, apply_chain, replay
from adapters.contract import (
    Context,
    Edit,
    Force,
    Processor,
    ProcessorArgs,
    Reads,
    Scope,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
)
from adapters.processors.stochastic import Mirostat
from adapters.third_party import third_party_processor
from adapters.vocabulary import Vocabulary

SIZE = 24
PROMPT = [1, 2]
THINK, ANSWER = (16, 17, 18, 19, 20), (21, 17, 18, 19, 22)
CONTEXT = Context(Vocabulary(SIZE), think_start=THINK, think_end=ANSWER)


class SumsProbabilities:
    """A Dynamo processor: what it adds depends on every row that it has been shown."""

    def __init__(self) -> None:
        self.sum = 0.0

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        self.sum += float(logits.softmax(-1)[3:7].sum())
        logits[8] += self.sum


class SumsIds(LogitsProcessor):
    """A Hugging Face processor that reads all ids, and sums what it has been shown."""

    def __init__(self) -> None:
        self.sum = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.sum += float(scores.softmax(-1)[0, 9:12].sum())
        scores[0, 5] += self.sum + (input_ids[0] * torch.arange(1, input_ids.shape[1] + 1)).sum() % 97 / 97
        return scores


class ForcesSome(SteeringProcessor):
    """Forces a token, of which nobody sees logits, after every token that is a multiple of 5."""

    name = "forces_some"
    stage = Stage.FORCE
    reads = Reads.GENERATED
    Args = ProcessorArgs

    def edit(self) -> Edit | None:
        return Force(7) if self.num_generated and (self.last_token or 0) % 5 == 0 else None


def chain_of(scopes: Sequence[Scope]) -> ProcessorChain:
    count = len(scopes)
    processors: list[Processor] = [Mirostat(Mirostat.Args(tau=6.0, eta=0.7), CONTEXT) for _ in range(count)]
    processors += [third_party_processor(SumsProbabilities) for _ in range(count)]
    processors += [third_party_processor(SumsIds) for _ in range(count)]
    processors.append(ForcesSome(None, CONTEXT))
    return ProcessorChain(processors, CONTEXT, scopes=[*scopes, *scopes, *scopes, "all"])


def row_of(history: Sequence[int]) -> torch.Tensor:
    """Logits of a model, float32 ``[SIZE]``."""
    generator = torch.Generator().manual_seed(sum((place + 1) * token for place, token in enumerate(history)))
    return 2.0 * torch.randn(SIZE, generator=generator)


def shaped(chain: ProcessorChain) -> torch.Tensor:
    row = row_of(chain.tokens)
    apply_chain(chain, row)
    return row


def fresh(scopes: Sequence[Scope], history: Sequence[int]) -> ProcessorChain:
    chain, generated = chain_of(scopes), history[len(PROMPT) :]
    rows = [row_of(history[: len(PROMPT) + count]) for count in range(len(generated))]
    replay(chain, PROMPT, generated, torch.stack(rows) if rows else torch.empty(0, SIZE))
    return chain


def follow(chain: ProcessorChain, tokens: Sequence[int]) -> None:
    """Decode tokens, or the one that is forced in place of one of them."""
    for token_id in tokens:
        shaped(chain)
        force = chain.plan().force
        chain.accept(token_id if force is None else force, chain.position)


def check(chain: ProcessorChain, scopes: Sequence[Scope]) -> None:
    assert torch.equal(shaped(chain), shaped(fresh(scopes, chain.tokens))), chain.tokens[len(PROMPT) :]


histories = st.lists(
    st.one_of(st.sampled_from([THINK, ANSWER, ANSWER[:3], THINK[:4]]), st.integers(3, 15).map(lambda token: (token,))),
    max_size=6,
).map(lambda parts: [token for part in parts for token in part])


moves = st.lists(
    st.tuples(histories, st.integers(0, 30), st.sampled_from(["rewind", "peek", "pickle", "stay"])), max_size=5
)


@settings(max_examples=examples(50))
@given(st.lists(st.sampled_from(["all", "thinking", "answer"]), min_size=1, max_size=2), moves)
def test_every_path_to_a_history_leads_to_the_same_state(scopes: list[Scope], moves: list[Any]) -> None:
    chain = chain_of(scopes)
    chain.start(PROMPT)
    for added, back, kind in moves:
        follow(chain, added)
        if kind == "rewind":
            chain.rewind(max(len(PROMPT), chain.position - back))
        elif kind == "peek":
            chain.peek([*THINK, 5, *ANSWER])
        elif kind == "pickle":
            chain = pickle.loads(pickle.dumps(chain))
        check(chain, scopes)


TAGGED = [3, *THINK, 4, 6, *ANSWER, 6, *THINK, 9, 12, 13, 8, *ANSWER, 7]


@pytest.mark.parametrize("cut", range(len(TAGGED)))
@pytest.mark.parametrize("scope", ["all", "thinking", "answer"])
def test_a_rewind_into_a_tag_brings_back_what_its_logits_were(scope: Scope, cut: int) -> None:
    chain = chain_of([scope])
    chain.start(PROMPT)
    follow(chain, TAGGED)
    chain.rewind(len(PROMPT) + cut)
    check(chain, [scope])
    follow(chain, [8, 9])
    check(chain, [scope])


def test_a_rewind_into_a_tag_completed_long_ago_fails() -> None:
    chain = chain_of(["thinking"])
    chain.start(PROMPT)
    follow(chain, [*THINK, 3, *ANSWER] * 9)
    chain.rewind(len(PROMPT) + len(THINK) + 4)
    with pytest.raises(ProcessorFailed, match="the state inside a tag that was completed long ago"):
        follow(chain, [3])


class ExitsWhenCopied(Mirostat):
    """A third party's, whose copy cannot be made."""

    name = "exits_when_copied"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise SystemExit(3)


def test_a_copy_that_exits_is_lost_and_nothing_else() -> None:
    processor = ExitsWhenCopied(Mirostat.Args(tau=6.0, eta=0.7), CONTEXT)
    chain = ProcessorChain([processor], CONTEXT, scopes=["thinking"])
    chain.start(PROMPT)
    follow(chain, [*THINK, 3, *ANSWER, 5])
    chain.rewind(len(PROMPT) + len(THINK) + 3)
    with pytest.raises(ProcessorFailed, match="the state inside a tag"):
        follow(chain, [3])


@dataclass(slots=True)
class SlottedSums(ShapingProcessor):
    """State of logits in slots."""

    args: Any
    context: Any
    sums: list[float] = field(default_factory=list)

    name = "slotted_sums"
    stage = Stage.TEMPERATURE
    observes_logits = True
    Args = ProcessorArgs

    def reset(self) -> None:
        self.sums = [0.0]

    def shape(self, logits: torch.Tensor) -> None:
        del self.sums[self.num_generated + 1 :]
        self.sums.append(self.sums[-1] + float(logits.softmax(-1)[3]))
        logits[4] += self.sums[-1]

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        return True


@pytest.mark.parametrize("cut", range(len(TAGGED)))
@pytest.mark.parametrize("scope", ["thinking", "answer"])
def test_state_in_slots_is_brought_back_too(scope: Scope, cut: int) -> None:
    def chain_of_it() -> ProcessorChain:
        return ProcessorChain([SlottedSums(None, CONTEXT)], CONTEXT, scopes=[scope])

    chain, again = chain_of_it(), chain_of_it()
    chain.start(PROMPT)
    follow(chain, TAGGED)
    chain.rewind(len(PROMPT) + cut)
    rows = [row_of(chain.tokens[: len(PROMPT) + count]) for count in range(cut)]
    replay(again, PROMPT, TAGGED[:cut], torch.stack(rows) if rows else torch.empty(0, SIZE))
    assert torch.equal(shaped(chain), shaped(again))


class SumsLogits(ShapingProcessor):
    """State of logits, which it cannot bring back."""

    name = "sums_logits"
    stage = Stage.TEMPERATURE
    observes_logits = True
    Args = ProcessorArgs

    def reset(self) -> None:
        self.sum = 0.0

    def shape(self, logits: torch.Tensor) -> None:
        self.sum += float(logits.softmax(-1)[3])
        logits[4] += self.sum


def test_a_processor_that_cannot_rewind_its_state_fails() -> None:
    chain = ProcessorChain([SumsLogits(None, CONTEXT)], CONTEXT)
    chain.start(PROMPT)
    follow(chain, [3, 4, 6])
    chain.rewind(len(PROMPT) + 1)
    with pytest.raises(ProcessorFailed, match=r"sums_logits: rewind_state\(\) did not bring back"):
        chain.plan()
    chain.start(PROMPT)
    chain.plan()


# -- beside processors that take tokens back

LENGTH = 14
WORLD = World([*"abcdefghij", "ab", "é", b"\xc3", b"\xa9", "", "bc"], ["ab", "CA", "dé", "f", "gh"], ["bc", "a\ufffd"])
NEVER = list(range(len(WORLD.pieces), SIZE))


def sample(chain: ProcessorChain, row: torch.Tensor) -> int:
    """Draw the next token of a chain from its logits, by the history alone."""
    row[NEVER] = -torch.inf
    apply_chain(chain, row)
    return int((row + row_of([*chain.tokens, 23])).argmax())


def decode(chain: ProcessorChain, suspended: Sequence[int] = ()) -> list[int]:
    """The answer of an engine that holds tokens back, and is suspended after some steps."""
    end, sent, steps = len(PROMPT) + LENGTH, chain.position, 0
    while chain.position < end:
        chain.accept(sample(chain, row_of(chain.tokens)), chain.position)
        chain.rewind_if_asked(sent, ends=chain.position == end)
        held = chain.held_from
        sent = max(sent, chain.position if held is None else held)
        steps += 1
        if steps in suspended:
            chain.rewind(sent)
    return chain.tokens[len(PROMPT) :]


def begun(prompt: Sequence[int]) -> ProcessorChain:
    steep = Mirostat(Mirostat.Args(tau=1.0, eta=1.0), CONTEXT)
    chain = WORLD.chain(others=[third_party_processor(SumsProbabilities, stage=Stage.TRUNCATION), steep])
    chain.start(prompt)
    return chain


@settings(max_examples=examples(10))
@given(st.integers(0, 10**6), st.lists(st.integers(1, 30), max_size=4))
def test_an_answer_is_the_same_wherever_it_is_cut(seed: int, suspended: list[int]) -> None:
    prompt = [0, seed]
    answer = decode(begun(prompt))
    assert not WORLD.breaks(answer, ends=True)
    assert decode(begun(prompt), suspended) == answer
    rows = torch.stack([row_of([*prompt, *answer[:count]]) for count in range(LENGTH)])
    rows[:, NEVER] = -torch.inf
    for cut in range(1, LENGTH):
        continued = begun(prompt)
        replay(continued, prompt, answer[:cut], rows[:cut].clone(), sample)
        assert decode(continued) == answer, cut
