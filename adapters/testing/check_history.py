"""Checks that a processor is a function of token history, never of how often or in what order it
was called.
"""

from __future__ import annotations

import pickle
import random

import numpy as np
import torch

from adapters.chain import ProcessorChain, ProcessorFailed, RowPlan, apply_edits
from adapters.contract import Reads
from adapters.testing.registry import check
from adapters.testing.stories import (
    Outcome,
    Story,
    chosen,
    difference,
    expect,
    follow,
    restarted,
    rows_differ,
    step,
    stories,
    tell,
)
from adapters.testing.subject import CheckFailed, Subject
from adapters.trtllm import ChainAdapter


@check("double_call", "asking again at the same position, or telling the same token again, changes nothing")
def double_call(subject: Subject) -> None:
    """See `CHECKS`."""
    for story in stories(subject):
        chain = subject.chain(story.case)
        chain.start(story.prompt)
        for index in range(len(story.outcomes)):
            for _ in range(2):
                _plan(chain)
            for call in ("first", "second"):
                expect(step(chain, story.logits[index]), story, index, f"{call} of two calls")
            if index < len(story.tokens):
                for _ in range(2):
                    chain.accept(story.tokens[index], len(story.prompt) + index)


@check("chunked_prefill", "TensorRT-LLM may call for each chunk of the prompt, or twice for a token: the same edits")
def chunked_prefill(subject: Subject) -> None:
    """See `CHECKS`."""
    for story in stories(subject):
        adapter = _adapter(subject, story, lagged=False)
        for index in range(len(story.outcomes)):
            for chunk in range(3 if index == 0 else index % 2):
                discarded = story.logits[(index + chunk + 1) % len(story.logits)].clone()
                adapter("kit", discarded.view(1, 1, -1), [story.history(index)])
                if adapter.failure is not None and story.outcomes[index].failure is None:
                    raise CheckFailed(f"failed on a discarded row: {adapter.failure} ({story.at(index)})")
            _expect_dense(adapter, story, index, story.history(index), "called again for the same ids")


@check("lag", "what reads no history gives the same edits where the newest token is shown late; the rest is refused")
def lag(subject: Subject) -> str:
    """See `CHECKS`."""
    refused = False
    for story in stories(subject):
        if story.case.scope != "all":
            continue  # where a thinking section ends is history too
        try:
            adapter = _adapter(subject, story, lagged=True)
        except ValueError:
            refused = True
            continue
        for index in range(len(story.outcomes)):
            shown = story.history(max(index - 1, 0))
            _expect_dense(adapter, story, index, shown, "where the newest token is shown late")
    return "reads history: refused where steps overlap" if refused else "exact where steps overlap"


def _adapter(subject: Subject, story: Story, *, lagged: bool) -> ChainAdapter:
    chain = subject.chain(story.case)
    chain.start(story.prompt)
    return ChainAdapter(chain, end_id=min(subject.context.end_token_ids, default=0), lagged=lagged)


def _expect_dense(adapter: ChainAdapter, story: Story, index: int, shown: list[int], what: str) -> None:
    logits = story.logits[index].clone().view(1, 1, -1)
    adapter("kit", logits, [shown])
    expected = story.outcomes[index]
    if expected.failure is not None or index >= len(story.tokens):
        if adapter.failure is None:
            raise CheckFailed(f"{what}: no failure where there is one otherwise ({story.at(index)})")
        return
    if adapter.failure is not None:
        raise CheckFailed(f"{what}: {adapter.failure} ({story.at(index)})")
    problem = rows_differ(expected.dense(), logits[0, 0])
    if problem is not None:
        raise CheckFailed(f"{what}: {problem} ({story.at(index)})")


@check("replay", "started again after k generated tokens, for every k, it does what it did step by step")
def replay(subject: Subject) -> None:
    """See `CHECKS`."""
    for story in stories(subject):
        for index in range(len(story.outcomes)):
            follow(restarted(subject, story, index), story, index, index + 2, f"continued after {index} tokens")


@check("rewind", "after rejected draft tokens, for every k, it is as if they had never been; peeking leaves no trace")
def rewind(subject: Subject) -> None:
    """See `CHECKS`."""
    for story in stories(subject):
        chain = subject.chain(story.case)
        chain.start(story.prompt)
        for index in range(len(story.outcomes)):
            _speculate(subject, chain, story, index)
            follow(chain, story, index, index + 1, "after rejected draft tokens")
        for index in reversed(range(len(story.tokens))):
            chain.rewind(len(story.prompt) + index)
            expect(step(chain, story.logits[index]), story, index, "rewound from the end, token by token")
        follow(chain, story, 0, len(story.outcomes), "from the beginning again, after rewinding")
        for index in range(0, len(story.tokens), 6):
            chain.sync(story.history(index))
            expect(step(chain, story.logits[index]), story, index, "rewound at once")
            follow(chain, story, index, len(story.outcomes), "after rewinding at once")


def _speculate(subject: Subject, chain: ProcessorChain, story: Story, index: int) -> None:
    """Peek along the story, then really go up to three tokens along another branch, and come
    back.
    """
    draft = story.tokens[index : index + 3]
    if story.outcomes[index].failure is None:
        _expect_plans(chain, chain.peek(draft), story, index)
    if chain.position != len(story.prompt) + index:
        raise CheckFailed(f"peeking moved the history to {chain.position} ({story.at(index)})")
    for ahead in range(min(3, len(story.outcomes) - index)):
        other = _second_best(step(chain, story.logits[index + ahead]), subject)
        if other is None:
            break
        chain.accept(other, chain.position)
    chain.rewind(len(story.prompt) + index)


def _expect_plans(chain: ProcessorChain, plans: list[RowPlan], story: Story, index: int) -> None:
    """Plans made ahead are those made in time; for rows only, since shaping needs the state of
    its own position.
    """
    if chain.has_shaping:
        return
    for ahead, plan in enumerate(plans):
        expected = story.outcomes[index + ahead] if index + ahead < len(story.outcomes) else None
        if expected is None or expected.failure is not None:
            return
        row = story.logits[index + ahead].unsqueeze(0).clone()
        apply_edits(row, [(0, chain, plan)])
        expect(Outcome(plan.force, row[0]), story, index + ahead, "peeked")


@check("pickling", "a chain pickled in mid-stream goes on in the copy as it would have gone on itself")
def pickling(subject: Subject) -> str:
    """See `CHECKS`."""
    largest = 0
    for story in stories(subject):
        chain = subject.chain(story.case)
        chain.start(story.prompt)
        for index in range(len(story.outcomes)):
            if index in (0, 1, 7, len(story.outcomes) - 1):
                blob = pickle.dumps(ChainAdapter(chain, end_id=0))
                largest = max(largest, len(blob))
                copy = pickle.loads(blob).chain
                follow(copy, story, index, index + 6, "in a pickled copy")
            follow(chain, story, index, index + 1, "after pickling")
    return f"{largest} bytes"


@check("choices", "two choices built from the same arguments share no state")
def choices(subject: Subject) -> None:
    """See `CHECKS`."""
    told = stories(subject)
    for story, other in zip(told, told[1:] + told[:1], strict=True):
        arguments = subject.parse(story.case.arguments)
        pair = [
            subject.chain_of(subject.processor.build(arguments, subject.context), story.case.scope) for _ in range(2)
        ]
        pair[0].start(story.prompt)
        pair[1].start(other.prompt)
        for index in range(len(story.outcomes)):
            follow(pair[0], story, index, index + 1, "beside another choice of the same request")
            token_id = _second_best(step(pair[1], other.logits[index % len(other.logits)]), subject)
            if token_id is not None:
                pair[1].accept(token_id, pair[1].position)


@check("determinism", "the same arguments, history and logits give the same bits; no global random generator is used")
def determinism(subject: Subject) -> None:
    """See `CHECKS`."""
    for story in stories(subject):
        torch.manual_seed(story.seed + 77)
        random.seed(story.seed + 77)
        np.random.seed(story.seed + 77)
        before = _generators()
        again = tell(subject, story.case, story.seed)
        if _generators() != before:
            raise CheckFailed(f"draws from a global random generator; use adapters.contract.draws ({story})")
        for index, outcome in enumerate(again.outcomes[: len(story.outcomes)]):
            expect(outcome, story, index, "run again")


def _generators() -> tuple[bytes, object, str]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())


@check("reads", "what it declares not to read makes no difference")
def reads(subject: Subject) -> str | None:
    """See `CHECKS`."""
    for story in stories(subject):
        if story.case.scope != "all":
            continue
        members = subject.chain(story.case).members
        declared = {member.processor.reads for member in members}
        if Reads.PROMPT_AND_GENERATED in declared:
            return "reads everything"
        _with_other_history(subject, story, keep_generated=declared != {Reads.NOTHING})
    return None


def _with_other_history(subject: Subject, story: Story, *, keep_generated: bool) -> None:
    """The story again with another prompt, and if nothing is read with other generated tokens
    that were not forced.
    """
    num_tokens = subject.context.vocabulary.num_tokens
    chain = subject.chain(story.case)
    chain.start([(token_id * 31 + 17) % num_tokens for token_id in story.prompt])
    what = "with another prompt" if keep_generated else "with another history"
    for index, outcome in enumerate(story.outcomes):
        got = step(chain, story.logits[index])
        problem = difference(outcome, got)
        if problem is not None:
            raise CheckFailed(f"{what}: {problem}; declare what is read in `reads` ({story.at(index)})")
        if index < len(story.tokens):
            other = story.tokens[index] if keep_generated else _second_best(got, subject)
            chain.accept(story.tokens[index] if other is None else other, chain.position)


def _second_best(outcome: Outcome, subject: Subject) -> int | None:
    """A token that the engine might have taken instead: the second best where there is one."""
    best = chosen(outcome, subject.context)
    if best is None or outcome.forced is not None:
        return best
    assert outcome.row is not None
    row = outcome.row.clone()
    row[best] = -torch.inf
    second = chosen(Outcome(row=row), subject.context)
    return best if second is None else second


def _plan(chain: ProcessorChain) -> None:
    try:
        chain.plan()
    except ProcessorFailed as failure:
        if failure.reason != "unsatisfiable":
            raise
