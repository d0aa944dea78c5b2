"""Legalization: from processors to ops, by the type that flows through the pipe."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.pipe.op import Op
from adapters.pipe.processors import LogitsProcessor
from adapters.pipe.types import TensorType


class LegalizationError(Exception):
    """The processors do not make a chain of ops."""


def infer_initial_type(processors: Sequence[LogitsProcessor]) -> TensorType:
    """The type that the first processor takes; LOGITS for no processors.

    Raises:
        LegalizationError: it takes both LOGITS and PROBS, or neither.
    """
    if not processors:
        return TensorType.LOGITS
    name = type(processors[0]).__name__
    types = [type_ for type_ in (TensorType.LOGITS, TensorType.PROBS) if _accepts(processors[0], type_)]
    if not types:
        raise LegalizationError(f"Processor {name} cannot accept standard pipeline inputs (LOGITS or PROBS)")
    if len(types) > 1:
        raise LegalizationError(
            f"Cannot infer input type: {name} can accept both LOGITS and PROBS. "
            "Please specify input_type explicitly when creating the LogitsPipe."
        )
    return types[0]


def legalize_processors(
    processors: Sequence[LogitsProcessor], initial_type: TensorType = TensorType.LOGITS
) -> list[Op]:
    """The ops of all processors, in order.

    Raises:
        LegalizationError: there are none, or one refuses its input type, raises, or makes no ops.
    """
    if not processors:
        raise LegalizationError("Cannot legalize empty processor list")
    ops: list[Op] = []
    for index, processor in enumerate(processors):
        ops += legalize_one(index, processor, ops[-1].OUT if ops else initial_type)
    return ops


def legalize_one(index: int, processor: LogitsProcessor, input_type: TensorType) -> list[Op]:
    """The ops of processor number ``index``; raises as `legalize_processors`."""
    name = type(processor).__name__
    try:
        ops = processor.legalize(input_type)
    except Exception as error:  # the boundary to a user's processor
        raise LegalizationError(f"Failed to legalize processor {index} ({name}): {error}") from error
    if not ops:
        raise LegalizationError(f"Failed to legalize processor {index} ({name}): Processor {name} produced no ops")
    return ops


def validate_processor_chain(processors: Sequence[LogitsProcessor]) -> None:
    """Raises `LegalizationError` unless the processors make a chain of ops."""
    if not processors:
        raise LegalizationError("Processor chain cannot be empty")
    legalize_processors(processors, infer_initial_type(processors))


def _accepts(processor: LogitsProcessor, input_type: TensorType) -> bool:
    try:
        processor.legalize(input_type)
    except (ValueError, LegalizationError):
        return False
    return True
