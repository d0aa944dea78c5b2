"""Dynamo logits processors as TensorRT-LLM logits-processor callables.

The calling contract (PyTorch backend): ``lp(req_id, logits, token_ids, stream_ptr, client_id)``
once per sampled token, ``logits`` a view of shape ``[beams, 1, V]`` that is edited in place,
``token_ids`` one list of prompt + generated ids per beam, ``stream_ptr`` a CUDA stream handle or
None. An exception inside a callable fails every request of the batch in TensorRT-LLM, so nothing is
ever raised here: a failing processor's edit is undone, the failure is reported, and the row is
forced to ``end_id`` from then on.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch

from adapters.chain import PROBLEMS, ProcessorChain, ProcessorFailed, apply_plan, row_problem
from adapters.contract import MalformedEdit, check_in_place
from adapters.interrupts import is_interrupt


@runtime_checkable
class BaseLogitsProcessor(Protocol):
    """Dynamo's processor protocol, restated for use without ai-dynamo installed."""

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Edit ``logits`` (shape ``[V]``) in place, given prompt + generated ids."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a processor; serialisable as JSON for another process.

    Attributes:
        request_id: The id the engine called with.
        processor: Name of the processor.
        reason: ``raised``, ``nan``, ``infinite``, ``empty``, ``shape``, ``unsatisfiable``,
            ``budget`` or ``skipped``.
        message: One sentence for the caller; no prompt text, no path.
        position: Absolute index of the token that was to be sampled, -1 if unknown.
    """

    request_id: str
    processor: str
    reason: str
    message: str
    position: int = -1

    def __str__(self) -> str:
        return f"logits processor {self.processor}: {self.message}"


Report = Callable[[Failure], None]


@dataclass(frozen=True, slots=True)
class Step:
    """Edits of one position, sent by the engine process's copy of a chain to the worker's copy.

    Attributes:
        position: Absolute index of the token that was to be sampled.
        edits: `ProcessorChain.last_edits` of the engine's process.
        seconds: CPU time spent in each member since the report before. Not in all: ranks differ in
            speed, and either's report may be the one that counts.
        logprobs: ``(token id, log probability, rank)`` of the sampled token, then of the top n, if
            wanted.
    """

    position: int
    edits: tuple[tuple[int, str, int], ...] = ()
    seconds: tuple[float, ...] = ()
    logprobs: tuple[tuple[int, float, int], ...] | None = None


Watch = Callable[[Step], None]

_CALL_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("req_id", "logits", "token_ids", "stream_ptr", "client_id")
    ]
)


_OURS = ("end_id", "report", "failure", "fails_open", "_known", "_unusable")
"""State of an adapter that is this package's own; the rest may hold third-party objects."""


class TrtllmAdapter:
    """Base of the callables: CUDA stream, shape check, sticky failure, forced end token.

    Subclasses edit one row. TensorRT-LLM is not imported for it (that needs a GPU's driver, even
    where the package is installed): `join_library` makes it a subclass of the library's own.

    Attributes:
        failure: The first failure, None while all is well. Once set, every call forces ``end_id``.
        fails_open: A failing processor's edit is undone and reported once, and decoding continues
            without it: the behaviour of Dynamo's own adapter.
    """

    fails_open = False
    _named = ""

    # TensorRT-LLM calls `inspect.signature` for the arity on every call: 15 us without this
    # attribute, 3 us with it.
    __signature__ = _CALL_SIGNATURE

    def __init__(self, *, end_id: int | None = None, report: Report | None = None) -> None:
        self.end_id = end_id
        self.report = report
        self.failure: Failure | None = None
        self._known = False
        self._unusable: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle processors separately: one that cannot load must not kill the engine process."""
        ours = {name: self.__dict__[name] for name in _OURS if name in self.__dict__}
        rest = {name: value for name, value in self.__dict__.items() if name not in _OURS}
        try:
            packed = pickle.dumps(rest)
        except BaseException as error:  # of any class: third-party code
            if is_interrupt(error):
                raise
            raise pickle.PicklingError(f"{self._unpicklable()}: {type(error).__name__}: {error}") from error
        return {**ours, "_named": self._suspects(), "_packed": packed}

    def _unpicklable(self) -> str:
        """Name of the processor that cannot be pickled."""
        return self.name

    def _suspects(self) -> str:
        """Names of the processors that may prove to be impossible to load."""
        return self.name

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state.pop("_packed")
        self.__dict__.update(state)
        try:
            self.__dict__.update(pickle.loads(packed))
        except BaseException as error:  # the callback boundary: third-party code, which may exit or panic
            if is_interrupt(error):
                raise
            self._unusable = f"cannot be loaded in the engine's process ({type(error).__name__})"

    @abstractmethod
    def edit_row(self, req_id: int | str, token_ids: Sequence[int], logits: torch.Tensor) -> Failure | None:
        """Edit ``logits`` (``[1, 1, V]``) in place, or leave them as they were and return why."""

    def __call__(
        self,
        req_id: int | str,
        logits: torch.Tensor,
        token_ids: Sequence[Sequence[int]],
        stream_ptr: int | None = None,
        client_id: int | None = None,
    ) -> None:
        if stream_ptr is None:
            self._step(req_id, logits, token_ids)
            return
        with _on_stream(stream_ptr, logits):
            self._step(req_id, logits, token_ids)

    def _step(self, req_id: int | str, logits: torch.Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        if self.failure is None:
            shape = logits.shape
            if self._unusable is not None:
                failure: Failure | None = Failure(str(req_id), self._named, "raised", self._unusable)
            elif len(shape) == 3 and shape[0] == 1 and shape[1] == 1 and len(token_ids) == 1:
                failure = self.edit_row(req_id, token_ids[0], logits)
            else:
                message = (
                    f"takes one sequence and one beam, logits [1, 1, V]; got {list(shape)}, {len(token_ids)} lists"
                )
                failure = Failure(str(req_id), self.name, "shape", message)
            if failure is None:
                return
            self._fail(failure)
        if not self.fails_open:
            self._force_end(logits)

    @property
    def name(self) -> str:
        """Name of the processor in reports."""
        return type(self).__name__

    def _fail(self, failure: Failure) -> None:
        known, self._known = self._known, True
        if not self.fails_open:
            self.failure = failure
        if self.report is not None and not known:
            # the callback boundary: a broken reporter must not fail the batch either
            with contextlib.suppress(Exception):
                self.report(failure)

    def _force_end(self, logits: torch.Tensor) -> None:
        if self.end_id is not None:
            logits.fill_(-torch.inf)
            logits[..., self.end_id] = 0.0


class DynamoAdapter(TrtllmAdapter):
    """One Dynamo `BaseLogitsProcessor` as one TensorRT-LLM callable."""

    def __init__(
        self, processor: BaseLogitsProcessor, *, end_id: int | None = None, report: Report | None = None
    ) -> None:
        super().__init__(end_id=end_id, report=report)
        self.processor = processor

    def with_processor(self, processor: BaseLogitsProcessor) -> Self:
        """The same for another processor; what it reports failures to is shared."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), processor=processor)
        return made

    @property
    def name(self) -> str:
        return type(self.processor).__name__

    def edit_row(self, req_id: int | str, token_ids: Sequence[int], logits: torch.Tensor) -> Failure | None:
        row = logits[0, 0].clone()  # the processor may keep it, and write to it when others' logits are there
        failure = self._run(req_id, token_ids, row)
        if failure is None:
            logits[0, 0] = row
        return failure

    def _run(self, req_id: int | str, token_ids: Sequence[int], row: torch.Tensor) -> Failure | None:
        position, shown = len(token_ids), row.view(-1)
        process: Callable[..., object] = self.processor
        try:
            check_in_place(process(list(token_ids), shown), shown, row)
        except MalformedEdit as error:
            return Failure(str(req_id), self.name, "raised", f"{error} at position {position}", position)
        except BaseException as error:  # the callback boundary: third-party code, which may exit or panic
            if is_interrupt(error):
                raise
            message = f"raised {type(error).__name__} at position {position}"
            return Failure(str(req_id), self.name, "raised", message, position)
        problem = row_problem(row)
        if problem is None:
            return None
        return Failure(str(req_id), self.name, problem, f"{PROBLEMS[problem]} at position {position}", position)


class ChainAdapter(TrtllmAdapter):
    """A `ProcessorChain` as one TensorRT-LLM callable; batching engines take ``chain`` out of it.

    It may be called again for a position (chunked prefill), or after tokens were dropped. A skipped
    position (an engine that preempted the request) is a failure, since its token was sampled
    without the chain. So a history one token longer than at the last call of the same request
    extends the last one, and only its newest tokens are compared; any other is compared in full. A
    history with another prompt is a failure: a callable serves one choice of one request.

    Attributes:
        watch: Called with every step, if set. Must pickle like ``report``.
        num_logprobs: Report log probabilities of the unedited row: of the sampled token and this
            many of the most likely. Only for a chain that leaves one token. None for no report.

    Args:
        chain: Started after the request's prompt.
        lagged: The engine uses overlapped scheduling, so that ``token_ids`` may lack the newest
            token. The position is then counted by calls, and the prompt must be prefilled in one
            chunk.

    Raises:
        ValueError: ``lagged``, and the chain needs the last sampled token.
    """

    def __init__(
        self,
        chain: ProcessorChain,
        *,
        end_id: int | None = None,
        report: Report | None = None,
        lagged: bool = False,
    ) -> None:
        super().__init__(end_id=end_id, report=report)
        if lagged and chain.needs_last_token:
            names = ", ".join(member.name for member in chain.members)
            raise ValueError(f"{names} need the last sampled token, which overlapped scheduling shows late")
        self.chain = chain
        self.lagged = lagged
        self.watch: Watch | None = None
        self.num_logprobs: int | None = None
        self.handed_over = 0  # tokens after the prompt that another engine has sampled
        self._called_for: int | str | None = None
        self._spent: list[float] = []  # CPU time in each member up to the last report

    @property
    def name(self) -> str:
        return "chain"

    def _unpicklable(self) -> str:
        return self.chain.unpicklable()

    def _suspects(self) -> str:
        return self.chain.suspects

    def edit_row(self, req_id: int | str, token_ids: Sequence[int], logits: torch.Tensor) -> Failure | None:
        chain, row, before = self.chain, None, None
        try:
            self._move_to(req_id, token_ids)
            plan = chain.plan()
            if not plan.is_empty:
                row = logits[0, 0]
                keep = self.end_id is None or self.fails_open  # no forced end token will overwrite it
                shown = self.num_logprobs is not None
                empties = keep and bool(plan.bans or plan.allows or chain.is_checked)
                before = row.clone() if chain.has_shaping or empties or shown else None
                if apply_plan(chain, plan, row):
                    self._check(row)
            if self.watch is not None:
                self._tell(self.watch, logits[0, 0], before)
        except ProcessorFailed as failed:
            if row is not None and before is not None:
                row.copy_(before)
            self._tell_unedited(token_ids, logits)
            return Failure(str(req_id), failed.processor, failed.reason, failed.message, chain.position)
        except Exception as error:  # the callback boundary: nothing may reach the engine
            message = f"raised {type(error).__name__} at position {chain.position}"
            return Failure(str(req_id), self.name, "raised", message, chain.position)
        return None

    def _tell_unedited(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Report the log probabilities of a token that is sampled without the chain: the most
        likely one, since the engine is greedy where the chain has them.
        """
        if self.fails_open and self.watch is not None and self.num_logprobs is not None:
            row, position = logits[0, 0], self.chain.position if self.lagged else len(token_ids)
            with contextlib.suppress(Exception):  # the callback boundary: a broken report must not fail the batch
                self.watch(Step(position, logprobs=_logprobs(row, int(row.argmax()), self.num_logprobs)))

    def _tell(self, watch: Watch, row: torch.Tensor, before: torch.Tensor | None) -> None:
        chain, logprobs = self.chain, None
        if self.num_logprobs is not None:
            logprobs = _logprobs(row if before is None else before, int(row.argmax()), self.num_logprobs)
        spent, before_step = self._times(), self._spent
        self._spent = spent
        seconds = tuple(now - then for now, then in zip(spent, before_step, strict=True))
        watch(Step(chain.position, tuple(chain.last_edits()), seconds, logprobs))

    def _move_to(self, req_id: int | str, token_ids: Sequence[int]) -> None:
        chain, known = self.chain, self._called_for is not None
        if not known:
            self._spent = self._times()
        if not self.lagged:
            length = chain.position
            if known and len(token_ids) > length + 1:
                message = f"were not called for position {length + 1}: the engine went on without them"
                raise chain.fail(self._names(), "skipped", message)
            goes_on = self._called_for == req_id and len(token_ids) == length + 1
            try:
                chain.sync(token_ids, unchanged=max(0, length - _NEWEST) if goes_on else 0)
            except ValueError as error:
                raise chain.fail(self._names(), "skipped", f"were called for another request: {error}") from error
        else:
            for _ in range(1 if known else self.handed_over):
                chain.accept(_UNSEEN, chain.position)
        self._called_for = req_id

    def _check(self, row: torch.Tensor) -> None:
        problem = row_problem(row)
        if problem is not None:
            reason = "unsatisfiable" if problem == "empty" else problem
            raise self.chain.fail(self._names(), reason, f"{PROBLEMS[problem]} at position {self.chain.position}")

    def _times(self) -> list[float]:
        return [member.record.seconds for member in self.chain.members]

    def _names(self) -> str:
        return ", ".join(dict.fromkeys(member.name for member in self.chain.members))


def _logprobs(row: torch.Tensor, token_id: int, count: int) -> tuple[tuple[int, float, int], ...]:
    """Log probabilities of the sampled token, then of the top ``count``; ties by rising id."""
    logprobs = row.double().log_softmax(-1)
    values, ids = logprobs.sort(descending=True, stable=True)
    rank = int((ids == token_id).nonzero()[0, 0]) + 1
    top = zip(ids[:count].tolist(), values[:count].tolist(), strict=True)
    most_likely = [(each, value, rank) for rank, (each, value) in enumerate(top, 1) if value > -torch.inf]
    return ((token_id, float(logprobs[token_id]), rank), *most_likely)


_NEWEST = 32
"""Newest known tokens compared at a step that appends one: an engine changes these if any."""

_UNSEEN = -1
"""Placeholder for a sampled token not shown yet; no processor of a lagged chain reads it."""


def create_trtllm_adapters(
    processors: Sequence[BaseLogitsProcessor | ProcessorChain],
    *,
    end_id: int | None = None,
    report: Report | None = None,
    lagged: bool = False,
) -> list[TrtllmAdapter]:
    """TensorRT-LLM logits-processor callables for Dynamo processors or chains, in order.

    Args:
        processors: Callables ``(input_ids, logits[V]) -> None`` that edit in place, or
            `ProcessorChain` objects.
        end_id: Token that a row is forced to once its processor has failed. Without it a failed row
            is only left as it was.
        report: Called once per failing processor with a `Failure`. It must pickle where the engine
            runs in another process.
        lagged: The engine uses overlapped scheduling, so that the ids may lack the newest token
            (chains only).

    Returns:
        One callable per processor. They pickle if the processors do, carry a cached
        ``__signature__``, and are instances of ``tensorrt_llm.sampling_params.LogitsProcessor``
        where that has been imported.

    Raises:
        TypeError: a processor is not callable, or is a class instead of an instance.
        ValueError: ``lagged``, and a chain needs the last sampled token.
    """
    join_library()
    adapters: list[TrtllmAdapter] = []
    for index, processor in enumerate(processors):
        if isinstance(processor, ProcessorChain):
            adapters.append(ChainAdapter(processor, end_id=end_id, report=report, lagged=lagged))
        elif isinstance(processor, type) or not callable(processor):
            raise TypeError(f"processors[{index}] must be a callable (input_ids, logits), got {processor!r}")
        else:
            adapters.append(DynamoAdapter(processor, end_id=end_id, report=report))
    return adapters


def join_library() -> None:
    """Make the callables instances of TensorRT-LLM's ``LogitsProcessor``, if it is loaded.

    That is an abstract base class, with which `TrtllmAdapter` is registered. Nothing is imported.
    """
    library = getattr(sys.modules.get("tensorrt_llm.sampling_params"), "LogitsProcessor", None)
    if library is not None and not issubclass(TrtllmAdapter, library):
        library.register(TrtllmAdapter)


def _on_stream(stream_ptr: int | None, logits: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The caller's CUDA stream; nothing to do on a CPU, where a handle has no meaning."""
    if stream_ptr is None or not logits.is_cuda:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream_ptr))  # type: ignore[no-untyped-call]
