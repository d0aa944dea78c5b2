"""`LogitsPipe`: a chain of processors, checked when it is made and fused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from adapters.contract import ShapingProcessor
from adapters.pipe.compiler import compile_processors, listed_checks, listed_rules
from adapters.pipe.fusion_rules import FusionRule, joint_rule
from adapters.pipe.legalization import LegalizationError, infer_initial_type, legalize_processors
from adapters.pipe.op import Op
from adapters.pipe.operators import LogitsSampleOp, LogitsTopKOp, ProbsSampleOp, ProbsTopKOp
from adapters.pipe.processors import LogitsProcessor
from adapters.pipe.shaping import as_processor
from adapters.pipe.types import TaggedTensor, TensorType
from adapters.pipe.validators import CompileError, ValidityCheck

logger = logging.getLogger(__name__)

_HALF = (torch.float16, torch.bfloat16)


class LogitsPipe:
    """A chain of processors as one function.

    Args:
        processors: Processors in the order in which they act; a class of shaping processors stands
            for `Shaping` of it.
        compile: Fuse the ops now; otherwise `compile` may do so later.
        input_type: LOGITS or PROBS; needed where the first processor takes both.
        custom_fusion_rules: Fusion rules beside the built-in ones, for this and every later
            `compile`.
        custom_validity_checks: Checks of the ops beside the built-in ones, likewise.

    Attributes:
        processors: List of the given processors.
        ops: The ops of the processors, not fused.
        compiled_ops: The fused ops, None until compiled.

    Raises:
        TypeError: an item is no processor, or what is given beside them no type, rule or check.
        ValueError: the processors make no chain; ``__cause__`` is the `LegalizationError` or
            `CompileError`.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor | type[ShapingProcessor]],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: Sequence[FusionRule] | None = None,
        custom_validity_checks: Sequence[ValidityCheck] | None = None,
    ) -> None:
        if not processors:
            raise ValueError("Pipeline cannot be empty")
        if not isinstance(input_type, TensorType | None):
            raise TypeError(f"input_type: expected TensorType.LOGITS or TensorType.PROBS, got {input_type!r}")
        self.processors = [as_processor(item) for item in processors]
        self._rules = listed_rules(custom_fusion_rules)
        self._checks = listed_checks(custom_validity_checks)
        self.compiled_ops: list[Op] | None = None
        try:
            self._initial_type = input_type or infer_initial_type(self.processors)
            self.ops = legalize_processors(self.processors, self._initial_type)
        except LegalizationError as error:
            raise ValueError(f"Pipeline creation failed: {error}") from error
        if compile:
            self.compile()

    @property
    def initial_type(self) -> TensorType:
        """The type of a plain tensor given to the pipe."""
        return self._initial_type

    def compile(
        self,
        custom_fusion_rules: Sequence[FusionRule] | None = None,
        custom_validity_checks: Sequence[ValidityCheck] | None = None,
    ) -> None:
        """Checks and fuses the ops, with these rules and checks beside the constructor's.

        Raises:
            TypeError: what is given is no rule or check.
            ValueError: they do not compile; ``__cause__`` is the `CompileError` or
                `LegalizationError`. What a custom check or rule raises otherwise is not touched.
        """
        rules = [*self._rules, *listed_rules(custom_fusion_rules)]
        checks = [*self._checks, *listed_checks(custom_validity_checks)]
        try:
            self.compiled_ops = compile_processors(self.processors, self._initial_type, self.ops, rules, checks)
        except (CompileError, LegalizationError) as error:
            raise ValueError(f"Compilation failed: {error}") from error

    def __call__(self, x: torch.Tensor | TaggedTensor, **kwargs: Any) -> torch.Tensor:
        """The result of the chain.

        Args:
            x: ``[B, V]``, a plain tensor of the pipe's initial type or a tagged one. It is not
                changed.
            **kwargs: Parameters of the ops; they win over those given to the processors. A pipe
                that samples, and has none of `TopK`, `TopP` and `MinP`, takes ``top_k`` too: it
                samples among the k highest.

        Returns:
            Logits or probabilities, float32 or float64 (float16 or bfloat16 if ``x`` was and its
            type is unchanged), or token ids.

        Raises:
            ValueError: an op raised, its error is the cause; or no op of the pipe takes one of the
                parameters; or the highest result of a row is beyond half precision.
        """
        if self.compiled_ops is None:
            logger.warning("Pipeline is not compiled, running discrete ops.")
        ops: Sequence[Op] = with_joint_windows(self.ops) if self.compiled_ops is None else self.compiled_ops
        if "top_k" in kwargs:
            ops = with_top_k(ops, self.ops)
        _check_run_time_names(ops, kwargs)
        tensor = first = x if isinstance(x, TaggedTensor) else TaggedTensor(x, self._initial_type)
        for index, op in enumerate(ops):
            try:
                tensor = op(tensor, **op.accepted(kwargs))
            except Exception as error:  # the boundary to a user's op
                raise ValueError(f"Error executing operator {index} ({type(op).__name__}): {error}") from error
        if first.dtype in _HALF and tensor.type is first.type:
            return _narrowed(tensor.data, first.dtype)
        return tensor.data

    def __repr__(self) -> str:
        compiled = _names(self.compiled_ops or [])
        return f"LogitsPipe([{_names(self.processors)}], ops=[{_names(self.ops)}], compiled_ops=[{compiled}])"


def _narrowed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``rows`` (``[B, V]``) in half precision.

    Raises:
        ValueError: the highest value of a row is beyond its range, and would be infinite.
    """
    found = rows.to(dtype)
    highest = rows.amax(-1)
    beyond = highest.isfinite() & found.amax(-1).isinf()
    if bool(beyond.any()):
        row = int(beyond.nonzero()[0, 0])
        raise ValueError(f"row {row} is beyond {dtype}: its highest value is {float(highest[row])}")
    return found


def with_joint_windows(ops: Sequence[Op]) -> list[Op]:
    """``ops`` with joint top-k and top-p as one op, which no chain of separate ops equals."""
    rule = joint_rule()
    span = len(rule.pattern)
    joined: list[Op] = []
    for op in ops:
        joined.append(op)
        window = joined[-span:]
        if len(window) == span and all(map(isinstance, window, rule.pattern)) and rule.guard(window):
            joined[-span:] = [rule.build(window)]
    return joined


def with_top_k(ops: Sequence[Op], discrete: Sequence[Op]) -> Sequence[Op]:
    """``ops`` with a top-k before sampling, if they sample without top-k, top-p or min-p.

    FlashInfer's documentation passes ``top_k`` to pipes that only sample, where FlashInfer ignores
    it.

    Args:
        ops: The ops that run.
        discrete: The ops before fusion.
    """
    kinds: dict[type[Op], type[Op]] = {LogitsSampleOp: LogitsTopKOp, ProbsSampleOp: ProbsTopKOp}
    truncation = kinds.get(type(ops[-1]))
    takes = [op.names_taken() for op in (*ops, *discrete)]
    if truncation is None or any(names is None or names & {"top_k", "top_p", "min_p"} for names in takes):
        return ops
    return [*ops[:-1], truncation(), ops[-1]]


def _check_run_time_names(ops: Sequence[Op], given: dict[str, Any]) -> None:
    known: set[str] = set()
    for op in ops:
        names = op.names_taken()
        if names is None:
            return
        known |= names
    for name in given:
        if name not in known:
            takes = ", ".join(sorted(known)) or "none"
            raise ValueError(f"Unknown run-time parameter '{name}'; the operators of this pipe take: {takes}")


def _names(items: Sequence[object]) -> str:
    return " -> ".join(type(item).__name__ for item in items)
