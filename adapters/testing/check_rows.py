"""Checks of rows of logits: edits, dtypes, batch invariance, masks, padding."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from adapters.chain import ProcessorChain, ProcessorFailed, apply_chain
from adapters.contract import (
    Ban,
    Bias,
    Context,
    Edit,
    MalformedEdit,
    ProcessorArgs,
    Reads,
    Scale,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    Unsatisfiable,
    check_edit,
    is_allowed,
)
from adapters.testing.reference_runs import (
    Outcome,
    ReferenceRun,
    chosen,
    expect,
    observe,
    rebuild,
    reference_runs,
    rows_differ,
    step,
)
from adapters.testing.registry import check
from adapters.testing.subject import CheckFailed, Subject
from adapters.trtllm import ChainAdapter


@check("runs", "over whole runs nothing is raised, and no NaN, no +inf and no row without a token is left")
def runs(subject: Subject) -> str:
    """See `CHECKS`."""
    num_steps = 0
    for run in reference_runs(subject):
        for index, outcome in enumerate(run.outcomes):
            num_steps += 1
            _check_sane(outcome, run.at(index))
        if not run.tokens and run.case.is_example:
            failure = run.outcomes[0].failure
            raise CheckFailed(f"the example leaves no first token: {failure} ({run})")
    return f"{num_steps} steps, {len(subject.cases)} sets of arguments"


def _check_sane(outcome: Outcome, where: str) -> None:
    if outcome.failure is not None:
        if outcome.failure.reason != "unsatisfiable":
            cause = outcome.failure.__cause__
            detail = "" if cause is None else f": {cause}"
            raise CheckFailed(f"failed ({outcome.failure.message}{detail:.200}) ({where})")
        return
    if outcome.forced is not None:
        return
    assert outcome.row is not None
    if bool(outcome.row.isnan().any()):
        raise CheckFailed(f"left NaN in the row ({where})")
    if bool((outcome.row == torch.inf).any()):
        raise CheckFailed(f"left +inf in the row ({where})")
    if bool((outcome.row == -torch.inf).all()):
        raise CheckFailed(f"masked the whole row instead of raising Unsatisfiable ({where})")


@check("edits", "edits have the dtypes and shapes of the contract, distinct ids inside the row and finite values")
def edits(subject: Subject) -> str | None:
    """See `CHECKS`."""
    num_edits = 0
    for run, index, chain in _walk(subject):
        for member in chain.members:
            processor = member.processor
            if not isinstance(processor, SteeringProcessor) or member.scope != "all":
                continue
            processor.catch_up()  # as a chain does before it calls `edit`
            try:
                edit = processor.edit()
            except Unsatisfiable:
                continue
            if edit is not None:
                num_edits += 1
                problem = _edit_problem(edit, processor.stage, subject.context)
                if problem is not None:
                    raise CheckFailed(f"{problem} ({run.at(index)})")
    return f"{num_edits} edits" if num_edits else None


def _edit_problem(edit: Edit, stage: Stage, context: Context) -> str | None:
    vocabulary = context.vocabulary
    try:
        check_edit(edit, soft=stage <= Stage.SOFT, vocab_size=vocabulary.size, num_tokens=vocabulary.size)
    except MalformedEdit as error:
        return str(error)
    if not isinstance(edit, Bias | Scale):
        return None
    if len(set(edit.token_ids.tolist())) != len(edit.token_ids):
        return f"{type(edit).__name__} holds an id twice; ids must be distinct"
    return None


@check("in_place", "a row is edited in place: float32, bfloat16 or float16, and nothing outside it is written")
def in_place(subject: Subject) -> None:
    """See `CHECKS`."""
    for run in reference_runs(subject):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            _run_in_place(subject, run, dtype)
    for run, index, chain in _walk(subject):
        for member in chain.members:
            processor = member.processor
            if isinstance(processor, ShapingProcessor):
                _shape_one(processor, run, index)


def _shape_one(processor: ShapingProcessor, run: ReferenceRun, index: int) -> None:
    buffer = torch.full((3, len(run.logits[index])), 7.0)
    buffer[1] = run.logits[index]
    result: object = processor.shape(buffer[1])
    if result is not None:
        raise CheckFailed(f"shape() returned {type(result).__name__}; edit the row in place, return None")
    if not bool((buffer[[0, 2]] == 7.0).all()):
        raise CheckFailed(f"shape() wrote outside its row ({run.at(index)})")


def _run_in_place(subject: Subject, run: ReferenceRun, dtype: torch.dtype) -> None:
    """Compare a run on views of a larger buffer with one on float32 copies."""
    chain, plain = subject.chain(run.case), subject.chain(run.case)
    chain.start(run.prompt)
    plain.start(run.prompt)
    size = subject.context.vocabulary.size
    for index, token_id in enumerate(run.tokens):
        buffer = torch.full((3, size), 7.0, dtype=dtype)
        buffer[1] = run.logits[index].to(dtype)
        outcome = step(plain, buffer[1].float())
        try:
            apply_chain(chain, buffer[1])
        except ProcessorFailed as failure:
            if outcome.failure is None:
                raise CheckFailed(f"{dtype}: {failure} ({run.at(index)})") from failure
            return
        if outcome.failure is not None:
            return
        problem = rows_differ(outcome.dense().to(dtype), buffer[1])
        if problem is not None:
            raise CheckFailed(f"{dtype}: {problem} ({run.at(index)})")
        if not bool((buffer[[0, 2]] == 7.0).all()):
            raise CheckFailed(f"{dtype}: wrote outside its row ({run.at(index)})")
        for each_chain in (chain, plain):
            each_chain.accept(token_id, each_chain.position)


@check("row_isolation", "other rows, with or without processors, are unchanged bit for bit")
def row_isolation(subject: Subject) -> None:
    """See `CHECKS`."""
    runs = reference_runs(subject)
    for run, mate in zip(runs, runs[1:] + runs[:1], strict=True):
        pair = [run, mate]
        chains = [subject.chain(one.case) for one in pair]
        for chain, one in zip(chains, pair, strict=True):
            chain.start(one.prompt)
        for index in range(min(len(one.tokens) for one in pair)):
            logits = torch.stack([run.logits[index], mate.logits[index]])[[0, 0, 1, 1, 0]] + torch.arange(5.0)[:, None]
            logits[1], logits[3] = run.logits[index], mate.logits[index]
            before = logits.clone()
            for outcome, one in zip(observe(chains, logits, [1, 3]), pair, strict=True):
                expect(outcome, one, index, "beside another row")
            for row in (0, 2, 4):
                problem = rows_differ(before[row], logits[row])
                if problem is not None:
                    raise CheckFailed(f"changed a row that is not its own: {problem} ({run.at(index)})")
            for chain, one in zip(chains, pair, strict=True):
                chain.accept(one.tokens[index], chain.position)


@check("batch_invariance", "in a shuffled batch that requests join and leave, each row is bit for bit what it is alone")
def batch_invariance(subject: Subject) -> None:
    """See `CHECKS`."""
    runs = reference_runs(subject)
    shuffle = random.Random(5)
    chains = [subject.chain(run.case) for run in runs]
    for chain, run in zip(chains, runs, strict=True):
        chain.start(run.prompt)
    done = [0] * len(runs)
    while True:
        left = [i for i, run in enumerate(runs) if done[i] < len(run.outcomes)]
        if not left:
            return
        batch = shuffle.sample(left, shuffle.randint(1, len(left)))
        logits = torch.stack([runs[i].logits[done[i]] for i in batch])
        outcomes = observe([chains[i] for i in batch], logits)
        for i, outcome in zip(batch, outcomes, strict=True):
            run, index = runs[i], done[i]
            expect(outcome, run, index, f"in a batch of {len(batch)}")
            if index < len(run.tokens):
                chains[i].accept(run.tokens[index], chains[i].position)
            done[i] += 1


@check("masked_rows", "masked entries stay masked, and never turn into NaN")
def masked_rows(subject: Subject) -> None:
    """See `CHECKS`."""
    generator = torch.Generator().manual_seed(3)
    for run, index, chain in _walk(subject):
        row, size = run.logits[index], subject.context.vocabulary.size
        for kept in (0.5, 0.05, 0.0):
            hidden = torch.rand(size, generator=generator) >= kept
            hidden[index % size] = False  # a chain fails a row without a token before any processor sees it
            outcome = step(chain, row.masked_fill(hidden, -torch.inf))
            if outcome.failure is not None and outcome.failure.reason == "nan":
                raise CheckFailed(f"left NaN in a row with {int(hidden.sum())} masked entries ({run.at(index)})")
            if outcome.failure is not None and outcome.failure.reason == "raised":
                raise CheckFailed(f"{outcome.failure.message} ({run.at(index)})")
            if outcome.row is None or outcome.forced is not None:
                continue
            if bool(outcome.row.isnan().any()):
                raise CheckFailed(f"left NaN in a row with {int(hidden.sum())} masked entries ({run.at(index)})")
            back = hidden & (outcome.row != -torch.inf)
            if bool(back.any()):
                token_id = int(back.int().argmax())
                raise CheckFailed(f"token {token_id} was masked and came back ({run.at(index)})")
            if bool((outcome.row == torch.inf).any()):
                raise CheckFailed(f"left +inf in a row with masked entries ({run.at(index)})")


@check("padding", "ids beyond the tokenizer's are never forced and never allowed")
def padding(subject: Subject) -> None:
    """See `CHECKS`."""
    vocabulary = subject.context.vocabulary
    beyond = range(vocabulary.num_tokens, vocabulary.size)
    for run, index, chain in _walk(subject):
        try:
            plan = chain.plan()
        except ProcessorFailed:
            continue
        where = f"the tokenizer has {vocabulary.num_tokens} ids, {run.at(index)}"
        if plan.force is not None and not 0 <= plan.force < vocabulary.num_tokens:
            raise CheckFailed(f"forces token {plan.force} ({where})")
        for bitmask in plan.allows:
            offered = [token_id for token_id in beyond if is_allowed(bitmask, token_id)]
            if offered and run.case.scope == "all":
                raise CheckFailed(f"allows token {offered[0]} ({where})")


class _OtherMask(SteeringProcessor):
    """Another processor of the request: masks a fixed set at one position."""

    name = "other_mask"
    stage = Stage.MASK
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def __init__(self, token_ids: list[int], at: int) -> None:
        self._edit, self._at = Ban.of(token_ids), at

    def edit(self) -> Edit | None:
        return self._edit if self.position == self._at else None


@check(
    "banned_tokens", "if another processor bans the tokens it needs, the request ends as unsatisfiable, never with NaN"
)
def banned_tokens(subject: Subject) -> str | None:
    """See `CHECKS`."""
    num_conflicts = 0
    for run in reference_runs(subject):
        for index in _some(len(run.outcomes)):
            outcome = run.outcomes[index]
            if outcome.failure is not None:
                continue
            offered = _offered(outcome, subject.context)
            num_conflicts += 1
            for banned in (offered, list(range(subject.context.vocabulary.size))):
                _check_conflict(subject, run, index, banned)
            _check_single(subject, run, index, chosen(outcome, subject.context))
    return f"{num_conflicts} conflicts"


def _offered(outcome: Outcome, context: Context) -> list[int]:
    if outcome.forced is not None:
        return [outcome.forced]
    assert outcome.row is not None
    return [int(i) for i in (outcome.row > -torch.inf).nonzero().flatten()]


def _with_mask(subject: Subject, run: ReferenceRun, index: int, banned: list[int]) -> tuple[ChainAdapter, torch.Tensor]:
    """A TensorRT-LLM callable whose chain bans ``banned`` at one position, and its row."""
    chain = subject.chain(run.case, _OtherMask(banned, len(run.prompt) + index))
    rebuild(chain, run, index)
    logits = run.logits[index].clone().view(1, 1, -1)
    adapter = ChainAdapter(chain, end_id=min(subject.context.end_token_ids, default=0))
    adapter("kit", logits, [run.history(index)])
    return adapter, logits[0, 0]


def _check_conflict(subject: Subject, run: ReferenceRun, index: int, banned: list[int]) -> None:
    adapter, row = _with_mask(subject, run, index, banned)
    if bool(row.isnan().any()):
        raise CheckFailed(f"left NaN with {len(banned)} tokens banned by another processor ({run.at(index)})")
    if adapter.failure is None:
        left = [int(i) for i in (row > -torch.inf).nonzero().flatten()][:5]
        if set(left) & set(banned) or not left:
            raise CheckFailed(f"tokens {left} are offered although they are banned ({run.at(index)})")
    elif adapter.failure.reason != "unsatisfiable":
        raise CheckFailed(
            f"ended as {adapter.failure.reason}, not as unsatisfiable: {adapter.failure} ({run.at(index)})"
        )


def _check_single(subject: Subject, run: ReferenceRun, index: int, kept: int | None) -> None:
    """Check that the run's own token stays allowed when all others are banned."""
    if kept is None:
        return
    banned = [token_id for token_id in range(subject.context.vocabulary.size) if token_id != kept]
    adapter, row = _with_mask(subject, run, index, banned)
    if bool(row.isnan().any()):
        raise CheckFailed(f"left NaN where one token was left ({run.at(index)})")
    left = [int(i) for i in (row > -torch.inf).nonzero().flatten()]
    if adapter.failure is not None or left != [kept]:
        got = f"it offers {left[:5]}" if adapter.failure is None else f"it failed: {adapter.failure}"
        raise CheckFailed(f"all but token {kept} were banned, {got} ({run.at(index)})")


def _walk(subject: Subject) -> Iterator[tuple[ReferenceRun, int, ProcessorChain]]:
    """Every position of every run, with a chain at it."""
    for run in reference_runs(subject):
        chain = subject.chain(run.case)
        chain.start(run.prompt)
        for index in range(len(run.outcomes)):
            yield run, index, chain
            if index < len(run.tokens):
                step(chain, run.logits[index])
                chain.accept(run.tokens[index], chain.position)


def _some(count: int) -> list[int]:
    """Some positions of a run: the first ones, and every third."""
    return [index for index in range(count) if index < 2 or index % 3 == 0]
