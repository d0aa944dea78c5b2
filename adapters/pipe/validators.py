"""Validity checks of a chain of ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from adapters.pipe.op import Op
from adapters.pipe.operators import SoftmaxOp
from adapters.pipe.types import TensorType


class CompileError(Exception):
    """A chain of ops that cannot be compiled."""


ValidityCheck: TypeAlias = Callable[[list[Op]], None]
"""Raises `CompileError` for ops that it rejects."""


def single_softmax_rule(ops: Sequence[Op]) -> None:
    """R1: at most one softmax."""
    if sum(isinstance(op, SoftmaxOp) for op in ops) > 1:
        raise CompileError("Multiple Softmax operators found. Only one Softmax is allowed per pipeline.")


def indices_terminal_rule(ops: Sequence[Op]) -> None:
    """R3': nothing comes after token ids."""
    for op, following in pairwise(ops):
        if op.OUT is TensorType.INDICES:
            raise CompileError(
                f"No operator may follow one that outputs Indices. Found {type(following).__name__} after "
                f"{type(op).__name__} which outputs Indices."
            )


def type_chain_rule(ops: Sequence[Op]) -> None:
    """Each op takes what the one before it returns, and the first takes LOGITS or PROBS."""
    if ops[0].IN not in (TensorType.LOGITS, TensorType.PROBS):
        raise CompileError(
            f"First operator ({type(ops[0]).__name__}) cannot accept standard pipeline inputs. "
            f"Expected LOGITS or PROBS, but operator accepts: {ops[0].IN}"
        )
    current: TensorType = ops[0].IN
    for index, op in enumerate(ops):
        if op.IN is not current:
            raise CompileError(
                f"Type mismatch at operator {index} ({type(op).__name__}). Expected input type: {current}, "
                f"but operator accepts: {op.IN}. Previous operator output: {current}"
            )
        current = op.OUT


def get_default_validity_checks() -> list[ValidityCheck]:
    """The built-in checks of every compiler."""
    return [single_softmax_rule, indices_terminal_rule]


def validate_pipeline(ops: list[Op], custom_checks: Sequence[ValidityCheck] | None = None) -> None:
    """Runs the default checks and the custom ones; raises `CompileError` where one of them does."""
    if not ops:
        raise CompileError("Pipeline cannot be empty")
    for check in [*get_default_validity_checks(), *(custom_checks or ())]:
        check(ops)
