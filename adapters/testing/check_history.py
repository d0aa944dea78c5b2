"""Checks that a processor is a function of token history, not of the calls made to it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from adapters.chain import ProcessorChain, ProcessorFailed, RowPlan, apply_edits
from adapters.contract import Reads
from adapters.testing.reference_runs import (
    Outcome,
    ReferenceRun,
    chosen,
    difference,
    expect,
    follow,
    reference_runs,
    restarted,
    rows_differ,
    run_reference,
    step,
)
from adapters.testing.registry import check
from adapters.testing.settings import shared_settings
from adapters.testing.subject import CheckFailed, Subject
from adapters.trtllm import ChainAdapter


@check("double_call", "a repeated plan at a position, or the same token accepted again, changes nothing")
def double_call(subject: Subject) -> None:
    """See `CHECKS`."""
    for run in reference_runs(subject):
        chain = subject.chain(run.case)
        chain.start(run.prompt)
        for index in range(len(run.outcomes)):
            for _ in range(2):
                _plan(chain)
            for call in ("first", "second"):
                expect(step(chain, run.logits[index]), run, index, f"{call} of two calls")
            if index < len(run.tokens):
                for _ in range(2):
                    chain.accept(run.tokens[index], len(run.prompt) + index)


@check("chunked_prefill", "TensorRT-LLM may call for each chunk of the prompt, or twice for a token: the same edits")
def chunked_prefill(subject: Subject) -> None:
    """See `CHECKS`."""
    for run in reference_runs(subject):
        adapter = _adapter(subject, run, lagged=False)
        for index in range(len(run.outcomes)):
            for chunk in range(3 if index == 0 else index % 2):
                discarded = run.logits[(index + chunk + 1) % len(run.logits)].clone()
                adapter("kit", discarded.view(1, 1, -1), [run.history(index)])
                if adapter.failure is not None and run.outcomes[index].failure is None:
                    raise CheckFailed(f"failed on a discarded row: {adapter.failure} ({run.at(index)})")
            _expect_dense(adapter, run, index, run.history(index), "called again for the same ids")


@check("lag", "processors that read no history give the same edits under overlapped scheduling; others are refused")
def lag(subject: Subject) -> str:
    """See `CHECKS`."""
    refused = False
    for run in reference_runs(subject):
        if run.case.scope != "all":
            continue  # the end of a thinking section is history too
        try:
            adapter = _adapter(subject, run, lagged=True)
        except ValueError:
            refused = True
            continue
        for index in range(len(run.outcomes)):
            shown = run.history(max(index - 1, 0))
            _expect_dense(adapter, run, index, shown, "where the newest token is shown late")
    return "reads history: refused where steps overlap" if refused else "exact where steps overlap"


def _adapter(subject: Subject, run: ReferenceRun, *, lagged: bool) -> ChainAdapter:
    chain = subject.chain(run.case)
    chain.start(run.prompt)
    return ChainAdapter(chain, end_id=min(subject.context.end_token_ids, default=0), lagged=lagged)


def _expect_dense(adapter: ChainAdapter, run: ReferenceRun, index: int, shown: list[int], what: str) -> None:
    logits = run.logits[index].clone().view(1, 1, -1)
    adapter("kit", logits, [shown])
    expected = run.outcomes[index]
    if expected.failure is not None or index >= len(run.tokens):
        if adapter.failure is None:
            raise CheckFailed(f"{what}: no failure where there is one otherwise ({run.at(index)})")
        return
    if adapter.failure is not None:
        raise CheckFailed(f"{what}: {adapter.failure} ({run.at(index)})")
    problem = rows_differ(expected.dense(), logits[0, 0])
    if problem is not None:
        raise CheckFailed(f"{what}: {problem} ({run.at(index)})")


@check("replay", "restarted after k generated tokens, for every k, it gives the same edits as step by step")
def replay(subject: Subject) -> None:
    """See `CHECKS`."""
    for run in reference_runs(subject):
        for index in range(len(run.outcomes)):
            follow(restarted(subject, run, index), run, index, index + 2, f"continued after {index} tokens")


@check("rewind", "rejected draft tokens, at every position, leave no trace, nor does peeking at them")
def rewind(subject: Subject) -> None:
    """See `CHECKS`."""
    for run in reference_runs(subject):
        chain = subject.chain(run.case)
        chain.start(run.prompt)
        for index in range(len(run.outcomes)):
            _speculate(subject, chain, run, index)
            follow(chain, run, index, index + 1, "after rejected draft tokens")
        for index in reversed(range(len(run.tokens))):
            chain.rewind(len(run.prompt) + index)
            expect(step(chain, run.logits[index]), run, index, "rewound from the end, token by token")
        follow(chain, run, 0, len(run.outcomes), "from the beginning again, after rewinding")
        for index in range(0, len(run.tokens), 6):
            chain.sync(run.history(index))
            expect(step(chain, run.logits[index]), run, index, "rewound at once")
            follow(chain, run, index, len(run.outcomes), "after rewinding at once")


def _speculate(subject: Subject, chain: ProcessorChain, run: ReferenceRun, index: int) -> None:
    """Peek along the reference run, then take another branch of up to three tokens and rewind."""
    draft = run.tokens[index : index + 3]
    if run.outcomes[index].failure is None:
        _expect_plans(chain, chain.peek(draft), run, index)
    if chain.position != len(run.prompt) + index:
        raise CheckFailed(f"peeking moved the history to {chain.position} ({run.at(index)})")
    for ahead in range(min(3, len(run.outcomes) - index)):
        other = _second_best(step(chain, run.logits[index + ahead]), subject)
        if other is None:
            break
        chain.accept(other, chain.position)
    chain.rewind(len(run.prompt) + index)


def _expect_plans(chain: ProcessorChain, plans: list[RowPlan], run: ReferenceRun, index: int) -> None:
    """Plans made ahead equal those made in time; rows only, as shaping needs its own position."""
    if chain.has_shaping:
        return
    for ahead, plan in enumerate(plans):
        expected = run.outcomes[index + ahead] if index + ahead < len(run.outcomes) else None
        if expected is None or expected.failure is not None:
            return
        row = run.logits[index + ahead].unsqueeze(0).clone()
        apply_edits(row, [(0, chain, plan)])
        expect(Outcome(plan.force, row[0]), run, index + ahead, "peeked")


@check("pickling", "the copy of a chain pickled in mid-stream continues as the original does")
def pickling(subject: Subject) -> str:
    """See `CHECKS`."""
    largest = 0
    for run in reference_runs(subject):
        chain = subject.chain(run.case)
        chain.start(run.prompt)
        for index in range(len(run.outcomes)):
            if index in (0, 1, 7, len(run.outcomes) - 1):
                blob = pickle.dumps(ChainAdapter(chain, end_id=0))
                largest = max(largest, len(blob))
                copy = pickle.loads(blob).chain
                follow(copy, run, index, index + 6, "in a pickled copy")
            follow(chain, run, index, index + 1, "after pickling")
    return f"{largest} bytes"


@check("choices", "two choices built from the same arguments share no state")
def choices(subject: Subject) -> None:
    """See `CHECKS`."""
    runs = reference_runs(subject)
    for run, other in zip(runs, runs[1:] + runs[:1], strict=True):
        arguments = subject.parse(run.case.arguments)
        pair = [subject.chain_of(subject.processor.build(arguments, subject.context), run.case.scope) for _ in range(2)]
        pair[0].start(run.prompt)
        pair[1].start(other.prompt)
        for index in range(len(run.outcomes)):
            follow(pair[0], run, index, index + 1, "beside another choice of the same request")
            token_id = _second_best(step(pair[1], other.logits[index % len(other.logits)]), subject)
            if token_id is not None:
                pair[1].accept(token_id, pair[1].position)


@check(
    "determinism",
    "the same arguments, history and logits give the same bits; no global generator or setting is used or changed",
)
def determinism(subject: Subject) -> None:
    """See `CHECKS`."""
    settings = shared_settings()
    try:
        with _own_generators():
            for run in reference_runs(subject):
                _run_again(subject, run)
                _check_settings(settings)
    except CheckFailed:
        raise
    except Exception as error:  # the processor boundary: or a setting has broken the run
        _check_settings(settings, error)
        raise


def _run_again(subject: Subject, run: ReferenceRun) -> None:
    torch.manual_seed(run.seed + 77)
    random.seed(run.seed + 77)
    np.random.seed(run.seed + 77)
    before = _generators()
    again = run_reference(subject, run.case, run.seed)
    if _generators() != before:
        raise CheckFailed(f"uses a global random generator; use adapters.contract.random_numbers ({run})")
    for index, outcome in enumerate(again.outcomes[: len(run.outcomes)]):
        expect(outcome, run, index, "run again")


def _check_settings(settings: Mapping[str, object], error: Exception | None = None) -> None:
    """Raise `CheckFailed` if one of `settings` has been changed; `error` is what came of it."""
    for name, value in shared_settings().items():
        if value != settings[name]:
            raise CheckFailed(f"changed {name}, which all requests share, to {value}") from error


@contextmanager
def _own_generators() -> Iterator[None]:
    """Leaves the global random generators as they were: they are the test session's."""
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)


def _generators() -> tuple[bytes, object, str]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())


@check("reads", "history that it declares not to read makes no difference")
def reads(subject: Subject) -> str | None:
    """See `CHECKS`."""
    for run in reference_runs(subject):
        if run.case.scope != "all":
            continue
        members = subject.chain(run.case).members
        declared = {member.processor.reads for member in members}
        if Reads.PROMPT_AND_GENERATED in declared:
            return "reads everything"
        _with_other_history(subject, run, keep_generated=declared != {Reads.NOTHING})
    return None


def _with_other_history(subject: Subject, run: ReferenceRun, *, keep_generated: bool) -> None:
    """Repeat the run with another prompt and, if nothing is read, other unforced tokens."""
    num_tokens = subject.context.vocabulary.num_tokens
    chain = subject.chain(run.case)
    chain.start([(token_id * 31 + 17) % num_tokens for token_id in run.prompt])
    what = "with another prompt" if keep_generated else "with another history"
    for index, outcome in enumerate(run.outcomes):
        got = step(chain, run.logits[index])
        problem = difference(outcome, got)
        if problem is not None:
            raise CheckFailed(f"{what}: {problem}; declare what is read in `reads` ({run.at(index)})")
        if index < len(run.tokens):
            other = run.tokens[index] if keep_generated else _second_best(got, subject)
            chain.accept(run.tokens[index] if other is None else other, chain.position)


def _second_best(outcome: Outcome, subject: Subject) -> int | None:
    """A token that the engine might have sampled instead: the second best if there is one."""
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
