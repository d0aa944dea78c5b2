"""The rows of vLLM's batch that have a chain: built off the step, applied together.

A failing chain ends its own request: its row is left one token, an end token, from then on, and the
failure is reported. Nothing is raised in vLLM's step, and other rows keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any, Protocol

import torch

from adapters.catalog import BuildFailed, SelectionError
from adapters.chain import (
    PROBLEMS,
    Planned,
    ProcessorChain,
    ProcessorFailed,
    apply_edits,
    apply_late,
    plan_rows,
)
from adapters.contract import highest_values, mask_rows
from adapters.devices import upload_ids
from adapters.interrupts import is_interrupt
from adapters.vllm.model import ServedModel
from adapters.vllm.reports import REPORTS, Failure
from adapters.vllm.requests import Asked, Params, chain_of, read

ROWS = "logits_processors_rows"
"""Key in ``extra_args`` of requests' rows, which live as long as vLLM keeps the parameters."""

NUM_BUILDERS = 4
"""Threads that build chains while the prompt is computed."""


class Row:
    """One request with a chain, for as long as vLLM keeps it: preempted and resumed too.

    Args:
        built: The chain, not started.
        end_id: Token that ends the answer when the chain fails.
        report: Name under which failure and receipt are kept, None if nobody reads them.
        count: Counts a failure that ended the request; None if nobody counts.

    Attributes:
        failed_at: Position of the token at which the chain failed, None if it did not: every row
            from there on is the end token.
        chain: The chain, None until `chain_after` has returned.
        num_known: Tokens of the chain that vLLM has shown; those after them are drafts.
        applied: Whether the chain has been applied to logits.
        output: The list in which vLLM's first interface keeps the answer, newly made at times.
    """

    def __init__(
        self,
        built: Future[ProcessorChain],
        end_id: int,
        report: str | None = None,
        count: Callable[[Failure], None] | None = None,
    ) -> None:
        self.end_id = end_id
        self.failed_at: int | None = None
        self._built = built
        self.output: list[int] | None = None
        self._report, self._count = report, count
        self._provisional: Failure | None = None
        self.chain: ProcessorChain | None = None
        self.num_known = 0
        self.applied = False

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether this row has been applied to the beginning of ``tokens``, prompt and answer."""
        return self.chain is not None and self.chain.tokens[: self.num_known] == list(tokens[: self.num_known])

    @property
    def has_ended(self) -> bool:
        """Whether the newest token of the chain ends the answer."""
        chain = self.chain
        if chain is None or chain.position == chain.prompt_length:
            return False
        context = chain.context
        return chain.tokens[-1] in context.end_token_ids or chain.position - chain.prompt_length == context.max_tokens

    def chain_after(self, prompt: Sequence[int]) -> ProcessorChain:
        """The chain; the first time it is waited for, and started after ``prompt``.

        Raises:
            ProcessorFailed: it cannot be built, or a processor raised on the prompt.
        """
        if self.chain is None:
            try:
                chain = self._built.result()
            except BaseException as error:  # admission has built it once; a third party's code may differ, or exit
                if is_interrupt(error) or isinstance(error, ProcessorFailed):
                    raise
                problem = error if isinstance(error, SelectionError) else f"raised {type(error).__name__}"
                name = error.processor if isinstance(error, BuildFailed) else "chain"
                raise ProcessorFailed(name, "raised", f"cannot be built: {problem}") from error
            if chain.tokens[: len(prompt)] != list(prompt):  # a worker's own begins so, unless pictures became tokens
                end = len(prompt) - len(chain.tokens) + chain.prompt_length  # the rest was generated before
                chain.start(prompt[:end], prompt[end:], mode="migrated" if end < len(prompt) else "aggregated")
            REPORTS.began(self._report, chain)
            self.chain, self.num_known = chain, len(prompt)
        return self.chain

    def fail(self, error: ProcessorFailed, *, after_draft: bool = False) -> None:
        """End the request's answer, and report why; the first failure counts.

        None behind the answer's end does: with asynchronous scheduling vLLM has begun a step there
        before it sees the end, and drops the token.

        Args:
            error: The failure.
            after_draft: Whether a draft precedes the position, which may not be accepted.
        """
        if self.failed_at is None and not self.has_ended:
            position = -1 if self.chain is None else self.chain.position
            self.failed_at = max(position, 0)
            self._provisional = REPORTS.failed(self._report, error.without_frames(), position)
            if not after_draft:
                self.settle()

    def has_failed(self, length: int) -> bool:
        """Whether the chain has failed, at a step where the request has ``length`` tokens.

        A failure after a draft that was not accepted is none.
        """
        if self.failed_at is not None and self._provisional is not None and length <= self.failed_at:
            REPORTS.withdraw(self._provisional)
            self.failed_at = self._provisional = None
        self.settle()
        return self.failed_at is not None

    def settle(self) -> None:
        """Log and count the failure, if any: its drafts were accepted, or the request has left."""
        if self._provisional is not None:
            REPORTS.settled(self._provisional)
            if self._count is not None:
                self._count(self._provisional)
        self._provisional = None


class _Rows(tuple[Row, ...]):
    """Rows that share parameters; a type of its own, which no client can send."""


def follow(row: Row, end: int, token_at: Callable[[int], int]) -> ProcessorChain:
    """Bring a row's chain to the end of the tokens; drafts that were not accepted are rewound.

    Args:
        row: A row whose chain was started.
        end: Number of tokens, prompt and answer.
        token_at: The token at a position; asked for those that vLLM had not shown before.

    Raises:
        ProcessorFailed: a token was sampled without the chain and its state depends on that, or
            vLLM does not show the token yet.
    """
    chain = row.chain_after(())
    if chain.position > end:
        chain.rewind(end)
    if chain.observes_logits and end - chain.position > int(row.applied):
        raise chain.fail("chain", "skipped", "lost what it knew of the logits when vLLM started the request anew")
    for position in range(row.num_known, end):
        token_id = token_at(position)
        if token_id < 0:
            problem = "the newest token is not known: name adapters.vllm:Processors with --logits-processors"
            raise chain.fail("chain", "skipped", problem)
        chain.accept(token_id, position)
    row.num_known = end
    return chain


def rows_of(params: Params) -> tuple[Row, ...]:
    """Rows of requests with these parameters."""
    found = (params.extra_args or {}).get(ROWS)
    return found if isinstance(found, _Rows) else ()  # a client may write anything there


def only_row(fitting: Sequence[Row]) -> Row | None:
    """The row, of those that fit a resumed request, with which it goes on; None for a new one.

    Requests for several answers share rows, and equal tokens do not tell theirs apart. Rows after
    equal tokens are equal, but for a state made of logits, which may differ: such a request goes on
    with a row of its own alone, and fails where that is not known.
    """
    if len(fitting) > 1 and any(row.applied and row.chain and row.chain.observes_logits for row in fitting):
        return None
    return max(fitting, key=lambda row: row.num_known, default=None)


def with_row(params: Params, row: Row) -> Row:
    """The row, kept with the parameters of its request."""
    params.extra_args = {**(params.extra_args or {}), ROWS: _Rows((*rows_of(params), row))}
    return row


class MakesRows(Protocol):
    """Makes the rows of requests.

    Attributes:
        never_ids: Ids of a row of logits that are no token.
    """

    never_ids: Sequence[int]

    def new_row(self, params: Params, *, is_resumed: bool = False) -> Row | None:
        """The row of a request, kept with its parameters; None if it has no chain.

        Args:
            params: Parameters of the request.
            is_resumed: Whether it goes on, and vLLM has kept no row with these parameters.
        """


class Builder:
    """Makes rows: reads what a request asks for, and builds its chain in threads.

    Args:
        model: The served model.
        count: Counts failures that ended their requests; None if nobody counts.
        shared_seed: A number that all processes have which apply the same chains, so that they draw
            the same tokens, and none of them by its own clock; None if this one is alone.
    """

    def __init__(
        self,
        model: ServedModel,
        count: Callable[[Failure], None] | None = None,
        shared_seed: int | None = None,
    ) -> None:
        self._model, self._count = model, count
        self._seeds = None if shared_seed is None else Random(shared_seed)
        self.never_ids: Sequence[int] = model.never_ids
        self._threads = ThreadPoolExecutor(NUM_BUILDERS, thread_name_prefix="chain-builder")

    def new_row(self, params: Params, *, is_resumed: bool = False) -> Row | None:
        """The row of a request; None if nothing is asked.

        Args:
            params: Parameters of the request, which requests for several answers may share; the row
                is kept with them.
            is_resumed: Ignored: reports have names that clients give, and several requests may
                share one.
        """
        some_end = min(self._model.context.vocabulary.eos_token_ids, default=0)
        drawn_seed = None if self._seeds is None else self._seeds.getrandbits(64)
        try:
            asked = read(params, self._model, drawn_seed)
        except SelectionError as error:  # the policy was changed since the request was admitted
            refused: Future[ProcessorChain] = Future()
            refused.set_exception(error)
            return Row(refused, some_end, count=self._count)
        if asked is None:
            return None
        end_id = asked.context.end_token_id
        built = self._threads.submit(self._build, asked, params)
        return with_row(params, Row(built, some_end if end_id is None else end_id, asked.report, self._count))

    def _build(self, asked: Asked, params: Params) -> ProcessorChain:
        chain, _ = chain_of(asked, params, self._model)
        if self._seeds is not None:
            chain.failures.step_budget_s = math.inf
        return chain


class RowEditor:
    """Applies the chains of some rows of logits together.

    Args:
        never_ids: Ids of a row that are no token: no row with a chain is given them.
    """

    def __init__(self, never_ids: Sequence[int]) -> None:
        self._never_ids = list(never_ids)

    def apply(
        self, logits: torch.Tensor, rows: Sequence[tuple[int, Row, ProcessorChain]], *, after_drafts: bool = False
    ) -> None:
        """Edit rows whose chains stand at the position of their token.

        Args:
            logits: float32 ``[B, V]``, edited in place.
            rows: Index in ``logits``, row and chain of each.
            after_drafts: Whether drafts precede the positions.
        """
        by_index = {index: row for index, row, _ in rows}
        for row in by_index.values():
            row.applied = True
        planned, failures = plan_rows([(index, chain) for index, _, chain in rows])
        self.mask_never(logits, list(by_index))
        failures |= apply_edits(logits, planned)
        late = [each for each in planned if each[0] not in failures]
        shaped = [index for index, chain, plan in late if chain.has_shaping and plan.force is None]
        failures |= apply_late(logits, late, lambda rows: self.mask_never(rows, shaped if rows is logits else None))
        failures |= _force(logits, [each for each in planned if each[0] not in failures])
        failures |= _unusable(logits, [each for each in planned if each[0] not in failures])
        for index, failure in failures.items():
            by_index[index].fail(failure, after_draft=after_drafts)
            end(logits, index, by_index[index])

    def mask_never(self, logits: torch.Tensor, rows: Sequence[int] | None = None) -> None:
        """Rule out the ids that are no token, in all rows of ``logits`` unless some are named."""
        if not self._never_ids or (rows is not None and not rows):
            return
        columns = upload_ids(self._never_ids, logits.device)
        if rows is None:
            logits.index_fill_(-1, columns, -torch.inf)
        else:
            logits[upload_ids(rows, logits.device)[:, None], columns] = -torch.inf


def end(logits: torch.Tensor, index: int, row: Row) -> None:
    """Leave a row of ``logits`` (``[B, V]``) its end token alone."""
    logits[index] = -torch.inf
    logits[index, row.end_id] = 0.0


def _force(logits: torch.Tensor, planned: Sequence[Planned]) -> dict[int, ProcessorFailed]:
    """Leave the forced rows their token; a failure where the model or vLLM rules that out."""
    forced = [(index, chain, plan.force) for index, chain, plan in planned if plan.force is not None]
    if not forced:
        return {}
    rows = upload_ids([index for index, _, _ in forced], logits.device)
    columns = upload_ids([token_id for _, _, token_id in forced], logits.device)
    ruled_out: list[Any] = (logits[rows, columns] == -torch.inf).tolist()
    mask_rows(logits, [index for index, _, _ in forced])
    logits[rows, columns] = 0.0
    return {
        index: chain.fail("forcing", "unsatisfiable", f"token {token_id} is ruled out by the model or another field")
        for (index, chain, token_id), is_out in zip(forced, ruled_out, strict=True)
        if is_out
    }


def _unusable(logits: torch.Tensor, planned: Sequence[Planned]) -> dict[int, ProcessorFailed]:
    """The rows of which nothing can be sampled any more."""
    checked = [
        (index, chain) for index, chain, plan in planned if plan.force is None and (chain.is_checked or plan.masks)
    ]
    if not checked:
        return {}
    highest = highest_values(logits, [index for index, _ in checked])
    found = {}
    for (index, chain), value in zip(checked, highest, strict=True):
        problem = "nan" if value != value else {torch.inf: "infinite", -torch.inf: "empty"}.get(value)
        if problem is not None:
            found[index] = chain.failures.unusable(problem, PROBLEMS[problem])
    return found
