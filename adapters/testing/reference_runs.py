"""Reference runs: a chain run step by step over generated logits, with its outcome for each row.

Every other way of running the same chain is compared with its reference run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from adapters.chain import ProcessorChain, ProcessorFailed, apply_edits, apply_late, plan_rows, replay
from adapters.contract import Context
from adapters.testing.subject import Case, CheckFailed, Subject

NUM_STEPS = 21
SEEDS = (0, 1)

_PROMPTS = (
    "The quick brown fox jumps over the lazy dog. Yes or no? 1, 2, 3. The quick brown fox",
    "Let me think about this: ",
)


@dataclass(frozen=True)
class Outcome:
    """The effect of a chain on one row: the forced token, the edited row, or the failure.

    Attributes:
        row: float32 ``[V]``.
    """

    forced: int | None = None
    row: torch.Tensor | None = None
    failure: ProcessorFailed | None = None

    def dense(self) -> torch.Tensor:
        """The row for engines without forcing: 0 at the forced token and -inf elsewhere."""
        assert self.row is not None
        if self.forced is None:
            return self.row
        row = torch.full_like(self.row, -torch.inf)
        row[self.forced] = 0.0
        return row


@dataclass
class ReferenceRun:
    """One step-by-step run of a chain.

    Attributes:
        logits: float32 ``[n, V]``, the model's own, one row per outcome.
        tokens: Generated tokens; one fewer than the outcomes if the last one left no token.
    """

    case: Case
    seed: int
    prompt: list[int]
    logits: torch.Tensor
    tokens: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.case}, run {self.seed}"

    def at(self, index: int) -> str:
        """The run and position, for failure messages."""
        return f"{self}, generated token {index}"

    def history(self, index: int) -> list[int]:
        """Prompt and the first ``index`` generated tokens."""
        return self.prompt + self.tokens[:index]


def prompt_of(context: Context, seed: int) -> list[int]:
    """A prompt."""
    vocabulary = context.vocabulary
    if vocabulary.tokenizer is not None:
        return vocabulary.encode(_PROMPTS[seed % len(_PROMPTS)])
    return [(7 * i * i + seed) % vocabulary.num_tokens for i in range(12)]


def logits_of(context: Context, seed: int, num_steps: int = NUM_STEPS) -> torch.Tensor:
    """Logits float32 ``[num_steps, V]`` of a model that repeats itself, thinks and ends at times.

    Padding is at -inf, as an engine has it.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = context.vocabulary
    logits = torch.randn(num_steps, vocabulary.size, generator=generator) * 2.0
    favourites = _favourites(context)
    for step in range(num_steps):
        pool = favourites if seed % 2 else favourites[:4]
        logits[step, pool] += 4.0
        cycle = favourites[step % 3] if seed % 2 else favourites[(step * step) % len(favourites)]
        logits[step, cycle] += 3.0
        for tag, period in ((context.think_start, 5), (context.think_end, 9)):
            if tag and (step + seed) % 12 >= period and (step + seed) % 12 < period + len(tag):
                logits[step, tag[(step + seed) % 12 - period]] += 12.0
        if step % 17 == 16:
            logits[step, sorted(context.end_token_ids)] += 8.0
    logits[:, vocabulary.num_tokens :] = -torch.inf
    return logits


def observe(chains: Sequence[ProcessorChain], logits: torch.Tensor, rows: Sequence[int] | None = None) -> list[Outcome]:
    """One step of several chains as an engine makes it: planned, merged, applied.

    Args:
        chains: One for each of ``rows``.
        logits: float32 ``[B, V]``, edited in place.
        rows: Rows of the chains, the first ones by default.
    """
    rows = range(len(chains)) if rows is None else rows
    planned, failures = plan_rows(list(zip(rows, chains, strict=True)))
    for apply in (apply_edits, apply_late):
        failures |= apply(logits, [entry for entry in planned if entry[0] not in failures])
    forced = {row: plan.force for row, _, plan in planned}
    return [
        Outcome(failure=failures[row]) if row in failures else Outcome(forced.get(row), logits[row].clone())
        for row in rows
    ]


def step(chain: ProcessorChain, row: torch.Tensor) -> Outcome:
    """`observe` for one chain; ``row`` (float32 ``[V]``) is left as it is."""
    return observe([chain], row.unsqueeze(0).clone())[0]


def chosen(outcome: Outcome, context: Context) -> int | None:
    """The token an engine would sample greedily, None if there is none."""
    if outcome.failure is not None:
        return None
    if outcome.forced is not None:
        return outcome.forced
    assert outcome.row is not None
    offered = outcome.row[: context.vocabulary.num_tokens]
    best = int(offered.nan_to_num(nan=-torch.inf).argmax())
    return best if bool(offered[best] > -torch.inf) else None


def run_reference(subject: Subject, case: Case, seed: int) -> ReferenceRun:
    """Run a fresh chain step by step."""
    context = subject.context
    run = ReferenceRun(case, seed, prompt_of(context, seed), logits_of(context, seed))
    chain = subject.chain(case)
    chain.start(run.prompt)
    for row in run.logits:
        outcome = step(chain, row)
        run.outcomes.append(outcome)
        token_id = chosen(outcome, context)
        if token_id is None:
            break
        chain.accept(token_id, chain.position)
        run.tokens.append(token_id)
    return run


def reference_runs(subject: Subject) -> list[ReferenceRun]:
    """A reference run for each case and seed, made once per subject."""
    runs: list[ReferenceRun] | None = vars(subject).get("_reference_runs")
    if runs is None:
        runs = [run_reference(subject, case, seed) for case in subject.cases for seed in SEEDS]
        vars(subject)["_reference_runs"] = runs
    return runs


def restarted(subject: Subject, run: ReferenceRun, index: int) -> ProcessorChain:
    """A fresh chain that continues a run after ``index`` generated tokens, as after migration."""
    chain = subject.chain(run.case)
    rebuild(chain, run, index)
    return chain


def rebuild(chain: ProcessorChain, run: ReferenceRun, index: int) -> None:
    """Start ``chain`` after ``index`` generated tokens of a run."""
    if chain.observes_logits:
        replay(chain, run.prompt, run.tokens[:index], run.logits[:index].clone(), _sampled)
    else:
        chain.start(run.prompt, run.tokens[:index])


def _sampled(chain: ProcessorChain, row: torch.Tensor) -> int:
    """The token that a run samples; see `adapters.chain.Sample`."""
    outcome = step(chain, row)
    if outcome.failure is not None:
        raise outcome.failure
    token_id = chosen(outcome, chain.context)
    return -1 if token_id is None else token_id


def expect(outcome: Outcome, run: ReferenceRun, index: int, what: str) -> None:
    """Compare an outcome with the reference run's.

    Raises:
        CheckFailed: they differ in a bit.
    """
    problem = difference(run.outcomes[index], outcome)
    if problem is not None:
        raise CheckFailed(f"{what}: {problem} ({run.at(index)})")


def follow(chain: ProcessorChain, run: ReferenceRun, start: int, stop: int, what: str) -> None:
    """Step ``chain`` along a run from generated token ``start`` and compare each outcome.

    Raises:
        CheckFailed: one differs.
    """
    for index in range(start, min(stop, len(run.outcomes))):
        expect(step(chain, run.logits[index]), run, index, what)
        if index < len(run.tokens):
            chain.accept(run.tokens[index], chain.position)


def difference(expected: Outcome, got: Outcome) -> str | None:
    """Difference of two outcomes, None if they are equal in every bit."""
    if expected.failure is not None or got.failure is not None:
        reasons = [None if o.failure is None else (o.failure.processor, o.failure.reason) for o in (expected, got)]
        return None if reasons[0] == reasons[1] else f"expected {_did(expected)}, got {_did(got)}"
    if expected.forced != got.forced:
        return f"expected {_did(expected)}, got {_did(got)}"
    if expected.forced is not None:
        return None
    assert expected.row is not None
    assert got.row is not None
    return rows_differ(expected.row, got.row)


def rows_differ(expected: torch.Tensor, got: torch.Tensor) -> str | None:
    """The first entry in which two rows (``[V]``, same dtype) differ bitwise, None if equal."""
    bits = {4: torch.int32, 2: torch.int16}[expected.element_size()]
    unequal = expected.contiguous().view(bits) != got.contiguous().view(bits)
    if not bool(unequal.any()):
        return None
    token_id = int(unequal.int().argmax())
    count = int(unequal.sum())
    more = f" and {count - 1} more" if count > 1 else ""
    return f"token {token_id} expected at {float(expected[token_id])}, got {float(got[token_id])}{more}"


def _did(outcome: Outcome) -> str:
    if outcome.failure is not None:
        return f"the failure {outcome.failure.reason} ({outcome.failure.message})"
    return "a row of logits" if outcome.forced is None else f"token {outcome.forced} forced"


def _favourites(context: Context) -> list[int]:
    vocabulary = context.vocabulary
    if vocabulary.tokenizer is None:
        return [(11 * i + 3) % vocabulary.num_tokens for i in range(8)]
    ids = vocabulary.encode(" the fox. Yes,\n")
    return list(dict.fromkeys(ids))
