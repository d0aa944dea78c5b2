"""Chains over a batch: all rows' edits merged and applied in a handful of operations.

Used by the embedded engine (many rows) and by the TensorRT-LLM adapter (one row), so that a chain
does the same on both. Batch-invariant: a row's result never depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time
from typing import TypeAlias, TypeVar

import torch

from adapters.chain.chain import ProcessorChain
from adapters.chain.failures import ProcessorFailed
from adapters.chain.members import Member
from adapters.chain.plan import RowPlan
from adapters.contract import (
    Allow,
    Ban,
    Bias,
    Edit,
    MalformedEdit,
    Scale,
    ShapingProcessor,
    Sparse,
    Stage,
    apply_allows,
    apply_sparse,
    check_in_place,
)
from adapters.devices import upload_ids

T = TypeVar("T")

Planned = tuple[int, ProcessorChain, RowPlan]
"""Row of the logits, its chain, and the chain's plan for it."""

MaskNever: TypeAlias = "Callable[[torch.Tensor], None]"
"""Masks the ids that are no token in rows of logits, ``[R, V]``, in place."""

_Step = tuple[int, ProcessorChain, Edit | Member]
"""Row of the logits, its chain, and an edit of it or a shaping member."""

_SOFT_STAGES = (Stage.GUIDANCE, Stage.BIAS, Stage.PENALTY, Stage.SOFT)
_LATE_STAGES = (Stage.MASK, Stage.FORCE, Stage.TEMPERATURE, Stage.TRUNCATION, Stage.SAMPLING)


PROBLEMS = {
    "nan": "left NaN in the logits",
    "infinite": "left +inf in the logits",
    "empty": "left no token that can be sampled",
}
"""Message for each result of `row_problem`."""


def row_problem(row: torch.Tensor) -> str | None:
    """The problem that keeps ``row`` (``[V]``) from being sampled: a key of `PROBLEMS`, or None.

    The maximum decides all three, because it propagates NaN: one pass, and on CUDA one host
    synchronisation.
    """
    highest = float(row.max())
    if highest != highest:
        return "nan"
    if highest == torch.inf:
        return "infinite"
    return "empty" if highest == -torch.inf else None


def plan_rows(chains: Sequence[tuple[int, ProcessorChain]]) -> tuple[list[Planned], dict[int, ProcessorFailed]]:
    """Plans of ``(row, chain)`` pairs, and failures by row.

    Needs no logits: call it while the forward pass runs.
    """
    planned: list[Planned] = []
    failures: dict[int, ProcessorFailed] = {}
    for row, chain in chains:
        try:
            plan = chain.plan()
        except ProcessorFailed as failure:
            failures[row] = failure.without_frames()
            continue
        if plan.acts:
            planned.append((row, chain, plan))
    return planned, failures


def edit_elements_alone(planned: Sequence[Planned]) -> bool:
    """Whether plans add to elements, scale and mask them, and no processor maps a whole row: a
    device then computes the bits of the CPU.
    """
    return not any(chain.has_shaping for _, chain, _ in planned)


def apply_edits(logits: torch.Tensor, planned: Sequence[Planned]) -> dict[int, ProcessorFailed]:
    """Apply the order law up to the hard masks to the rows that are not forced.

    Forced rows are left untouched.

    Args:
        logits: float32 ``[B, V]``, edited in place.
        planned: Result of `plan_rows`.

    Returns:
        Failures by row. A failed row may be partly edited; it must not be sampled.
    """
    failures: dict[int, ProcessorFailed] = {}
    soft: dict[Stage, list[_Step]] = {stage: [] for stage in _SOFT_STAGES}
    bans: list[tuple[int, Sparse]] = []
    allows: dict[int, Allow] = {}
    for row, chain, plan in planned:
        if plan.force is not None:
            continue
        for _, stage, edit, _, _ in plan.acts:
            if isinstance(edit, Ban):
                bans.append((row, edit))
            elif isinstance(edit, Allow):
                allows[row] = _both(allows[row], edit) if row in allows else edit
            elif stage in soft:
                soft[stage].append((row, chain, edit))
    for steps in soft.values():
        _apply_soft(logits, steps, failures)
    apply_sparse(logits, bans)
    apply_allows(logits, list(allows.items()))
    return failures


def apply_late(
    logits: torch.Tensor, planned: Sequence[Planned], mask_never: MaskNever | None = None
) -> dict[int, ProcessorFailed]:
    """Apply shaping processors from the mask stage on to rows not forced; else as `apply_edits`.

    ``mask_never`` rules out the ids that are no token, where one may have written. It is called
    before the temperature, so that truncation does not count them, before a draw, and at the end.
    A third party's processor that undoes any other mask fails; where its class is wrapped, and
    knows of no masks, they are put back.
    """
    failures: dict[int, ProcessorFailed] = {}
    queues = [(row, chain, plan.late) for row, chain, plan in planned if chain.has_shaping and plan.force is None]
    for stage in _LATE_STAGES:
        if queues and mask_never is not None and stage in (Stage.TEMPERATURE, Stage.SAMPLING):
            mask_never(logits)
        steps = [(r, c, [m for m in members if m.turn == stage]) for r, c, members in queues]
        _in_waves(steps, lambda wave: _shape(logits, wave, failures, mask_never))
    if queues and mask_never is not None:
        mask_never(logits)
    return failures


def apply_chain(chain: ProcessorChain, row: torch.Tensor, never_ids: Sequence[int] = ()) -> bool:
    """Apply one chain, forcing included, to one row in place: the dense form for TensorRT-LLM.

    Args:
        chain: Chain at the position of the row.
        row: float ``[V]``, edited in place.
        never_ids: Ids that are no token, masked in the row: what a processor writes there is ruled
            out as in `apply_late`.

    Returns:
        True if the row must be checked: masks, shaping processors or a third party's edits may have
        left NaN, or no token.

    Raises:
        ProcessorFailed: as `ProcessorChain.plan`, or a processor failed on the logits.
    """
    return apply_plan(chain, chain.plan(), row, never_ids)


def apply_plan(chain: ProcessorChain, plan: RowPlan, row: torch.Tensor, never_ids: Sequence[int] = ()) -> bool:
    """Apply a plan that was made before; else as `apply_chain`."""
    if plan.is_empty:
        return False
    if plan.force is not None:
        if bool(row[plan.force] == -torch.inf):
            raise chain.fail("forcing", "unsatisfiable", f"token {plan.force} cannot be sampled by this model")
        row.fill_(-torch.inf)
        row[plan.force] = 0.0
        return False
    work = row.unsqueeze(0) if row.dtype == torch.float32 else row.float().unsqueeze(0)
    planned = [(0, chain, plan)]
    never = list(never_ids)

    def mask_never(rows: torch.Tensor) -> None:
        rows[:, never] = -torch.inf

    for failure in apply_edits(work, planned).values():
        raise failure
    for failure in apply_late(work, planned, mask_never if never else None).values():
        raise failure
    if row.dtype != torch.float32:
        row.copy_(work[0])
    return chain.is_checked or plan.masks


Sample: TypeAlias = "Callable[[ProcessorChain, torch.Tensor], int]"
"""Plans and applies a chain to float32 logits ``[V]`` of its position, which it may overwrite, and
samples the token from them, as the step of an engine does. Raises `ProcessorFailed`.
"""


def replay(
    chain: ProcessorChain,
    prompt: Sequence[int],
    generated: Sequence[int],
    logits: torch.Tensor,
    sample: Sample | None = None,
) -> None:
    """Rebuild a logits-dependent chain by re-applying it to the logits of the generated positions.

    Args:
        chain: The chain to rebuild.
        prompt: Token ids of the prompt.
        generated: Tokens of the earlier run.
        logits: float32 ``[len(generated), V]``, the model's own logits at those positions;
            overwritten.
        sample: Sampler of the earlier run; needed where the chain backtracks.

    Raises:
        ProcessorFailed: as `apply_chain`.
        ValueError: the chain backtracks, and there is no ``sample``.
    """
    chain.start(prompt, mode="migrated")
    for token_id, row in zip(generated, logits, strict=True):
        replay_token(chain, token_id, row, sample)


def replay_token(
    chain: ProcessorChain,
    token_id: int,
    row: torch.Tensor,
    sample: Sample | None = None,
    never_ids: Sequence[int] = (),
) -> None:
    """Apply a chain to the logits of its position, and take the token that was sampled from them.

    Tokens that were ruled out there are part of what its processors saw then, and are found again:
    the earlier run sampled the same tokens from the same logits, and rewound those that it did not
    keep. Where it cannot have (numerics that are not exact sampled another one), the rest of that
    position is left to the logits.

    Args:
        chain: Chain at the position of the row.
        token_id: Token of the earlier run.
        row: float32 ``[V]``, overwritten.
        sample: Sampler of the earlier run; needed where the chain backtracks.
        never_ids: Ids that are no token; see `apply_chain`.

    Raises:
        ProcessorFailed, ValueError: as `replay`.
    """
    if not chain.backtracks:
        apply_chain(chain, row, never_ids)
    elif sample is None:
        raise ValueError("a chain that backtracks can be replayed only by drawing its tokens again")
    else:
        sampled = sample(chain, row.clone())
        while sampled != token_id and chain.rule_out(sampled):
            sampled = sample(chain, row.clone())
    chain.replay_token(token_id)


def _apply_soft(logits: torch.Tensor, steps: Sequence[_Step], failures: dict[int, ProcessorFailed]) -> None:
    """Apply the steps of one stage, those of each row in order."""
    if not any(isinstance(step, Member) for _, _, step in steps):
        apply_sparse(logits, _sparse(steps))
        return
    queues: dict[int, tuple[int, ProcessorChain, list[Edit | Member]]] = {}
    for row, chain, step in steps:
        queues.setdefault(row, (row, chain, []))[2].append(step)

    def apply_wave(wave: list[_Step]) -> None:
        apply_sparse(logits, _sparse(wave))
        _shape(logits, [(row, chain, step) for row, chain, step in wave if isinstance(step, Member)], failures)

    _in_waves(list(queues.values()), apply_wave)


def _sparse(steps: Sequence[_Step]) -> list[tuple[int, Sparse]]:
    return [(row, step) for row, _, step in steps if isinstance(step, (Bias, Scale, Ban))]  # faster than a union


def _in_waves(
    queues: Sequence[tuple[int, ProcessorChain, Sequence[T]]],
    apply: Callable[[list[tuple[int, ProcessorChain, T]]], None],
) -> None:
    """Apply the first step of every row together, then the second, ...: rows keep their order."""
    depth = max((len(queue) for _, _, queue in queues), default=0)
    for i in range(depth):
        apply([(row, chain, queue[i]) for row, chain, queue in queues if i < len(queue)])


def _both(one: Allow, other: Allow) -> Allow:
    return Allow(one.bitmask & other.bitmask)


def _shape(
    logits: torch.Tensor,
    wave: list[tuple[int, ProcessorChain, Member]],
    failures: dict[int, ProcessorFailed],
    mask_never: MaskNever | None = None,
) -> None:
    """One shaping step of some rows, each class batched."""
    groups: dict[type[ShapingProcessor], list[tuple[int, ProcessorChain, Member]]] = {}
    for row, chain, member in wave:
        if row not in failures and isinstance(member.processor, ShapingProcessor):
            groups.setdefault(type(member.processor), []).append((row, chain, member))
    for kind, group in groups.items():
        # a class that is not batched runs row by row, so that no processor is called twice when
        # another one of the batch raises
        for part in [group] if _is_batched(kind) else [[single] for single in group]:
            _shape_group(kind, logits, part, failures, mask_never)


def _is_batched(kind: type[ShapingProcessor]) -> bool:
    return kind.shape_rows.__func__ is not ShapingProcessor.shape_rows.__func__  # type: ignore[attr-defined]


def _shape_group(
    kind: type[ShapingProcessor],
    logits: torch.Tensor,
    group: list[tuple[int, ProcessorChain, Member]],
    failures: dict[int, ProcessorFailed],
    mask_never: MaskNever | None,
) -> None:
    """Run one processor class on its rows, batched.

    A row without a token left fails here, before any processor sees it.
    """
    processors = [member.processor for _, _, member in group if isinstance(member.processor, ShapingProcessor)]
    rows = [row for row, _, _ in group]
    index = upload_ids(rows, logits.device)
    with torch.inference_mode(False), torch.no_grad():  # a tensor that threads of a processor's may edit, too
        values = logits.index_select(0, index)  # a copy: if one of them raises, the batch is unchanged
    is_empty = values.amax(-1, keepdim=True) == -torch.inf
    if logits.device.type == "cpu" or not _is_batched(kind):
        empty = [one for one, is_so in zip(group, is_empty[:, 0].tolist(), strict=True) if is_so]
        if empty:
            failures.update((row, chain.failures.no_token_left(before=member)) for row, chain, member in empty)
            alive = [one for one in group if one[0] not in failures]
            if alive:
                _shape_group(kind, logits, alive, failures, mask_never)
            return
    else:  # sync-free: an empty row is computed as zeros and restored, and the sampler reports it
        values.masked_fill_(is_empty, 0.0)
    began = thread_time()
    try:
        with group[0][2].kept():
            result: object = kind.shape_rows(processors, values)
        check_in_place(result, values, values)
        if not _is_batched(kind) or group[0][2].is_third_party:
            _check_form(logits, values, len(rows))
            for (row, chain, member), shaped in zip(group, values, strict=True):
                is_late = member.stage >= Stage.MASK  # no mask comes after it
                if is_late and kind.wraps_third_party:  # transformers' SynthID leaves a finite number there
                    shaped.masked_fill_(logits[row] == -torch.inf, -torch.inf)
                _check_shaped(logits[row], shaped, chain, member)
                if is_late and member.is_third_party:
                    _check_masks(logits[row], shaped, mask_never)
    except BaseException as error:  # the processor boundary: third-party code
        if len(group) == 1:
            failure = group[0][1].failures.raised(group[0][2], error)
            failure.__cause__ = None if isinstance(error, ProcessorFailed) else error
            failures[rows[0]] = failure.without_frames()
            return
        for single in group:  # find the failing one; the others must be unaffected
            _shape_group(kind, logits, [single], failures, mask_never)
        return
    if logits.device.type != "cpu":
        values.masked_fill_(is_empty, -torch.inf)
    logits.index_copy_(0, index, values)
    seconds = (thread_time() - began) / len(group)
    for row, chain, member in group:
        try:
            chain.failures.charge(member, seconds)
        except ProcessorFailed as failure:
            failures[row] = failure.without_frames()


def _check_form(logits: torch.Tensor, values: torch.Tensor, count: int) -> None:
    """Raise if ``values`` are not ``count`` rows of ``logits`` any more."""
    if values.shape != (count, logits.shape[1]) or values.dtype != logits.dtype:
        raise MalformedEdit(f"left {list(values.shape)} {values.dtype}, expected {count} rows of {logits.shape[1]},")


def _check_shaped(before: torch.Tensor, after: torch.Tensor, chain: ProcessorChain, member: Member) -> None:
    """Raise for a row that this processor, and not the model, made unusable for sampling."""
    problem = row_problem(after)
    if problem is not None and row_problem(before) is None:
        reason = "unsatisfiable" if problem == "empty" else problem
        raise ProcessorFailed(member.name, reason, f"{PROBLEMS[problem]} at position {chain.position}")


def _check_masks(before: torch.Tensor, after: torch.Tensor, mask_never: MaskNever | None) -> None:
    """Raise for a row in which a mask was undone, other than those of ``mask_never``."""
    masked = before == -torch.inf
    if mask_never is not None and bool((after[masked] != -torch.inf).any()):
        after = after.clone()
        mask_never(after.unsqueeze(0))
    undone = masked & (after != -torch.inf)
    if bool(undone.any()):
        raise MalformedEdit(f"gave a logit to token {int(undone.int().argmax())}, which was masked,")
