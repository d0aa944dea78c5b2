"""The contract of a logits processor, which is all that an author needs.

`processor` has the classes to derive from; `context` the arguments and the context that they are
built with; `stage` their place in the order law; `companion` the processors that need a second row
of logits; `edits` what a steering processor returns, and `bitmasks` the packed masks among it;
`argument_types` bounded types for arguments; `scope` how a processor is limited to the thinking
section or to the answer; `random_numbers` counter-based random numbers.
"""

from adapters.contract.argument_types import MAX_INT, MAX_LIST, MAX_TEXT, Count, PositiveCount, Text, TokenId, TokenIds
from adapters.contract.bitmasks import (
    bitmask_of,
    count_allowed,
    highest_values,
    is_allowed,
    mask_rows,
)
from adapters.contract.companion import CompanionProcessor, SecondRow
from adapters.contract.context import ArgumentError, Context, ProcessorArgs
from adapters.contract.edits import (
    Allow,
    Ban,
    Bias,
    Edit,
    Force,
    MalformedEdit,
    Scale,
    Sparse,
    apply_allows,
    apply_bitmask,
    apply_sparse,
    check_edit,
    check_in_place,
)
from adapters.contract.processor import (
    ALWAYS,
    BacktrackingProcessor,
    Processor,
    ShapingProcessor,
    StateLost,
    SteeringProcessor,
    Unsatisfiable,
    state_methods,
    tells_how_long,
)
from adapters.contract.random_numbers import SAMPLE, uniform, uniform_rows, uniforms, uniforms_at
from adapters.contract.scope import Scope, ThinkingTracker, turn_begin
from adapters.contract.stage import Reads, Stage

__all__ = [
    "ALWAYS",
    "MAX_INT",
    "MAX_LIST",
    "MAX_TEXT",
    "SAMPLE",
    "Allow",
    "ArgumentError",
    "BacktrackingProcessor",
    "Ban",
    "Bias",
    "CompanionProcessor",
    "Context",
    "Count",
    "Edit",
    "Force",
    "MalformedEdit",
    "PositiveCount",
    "Processor",
    "ProcessorArgs",
    "Reads",
    "Scale",
    "Scope",
    "SecondRow",
    "ShapingProcessor",
    "Sparse",
    "Stage",
    "StateLost",
    "SteeringProcessor",
    "Text",
    "ThinkingTracker",
    "TokenId",
    "TokenIds",
    "Unsatisfiable",
    "apply_allows",
    "apply_bitmask",
    "apply_sparse",
    "bitmask_of",
    "check_edit",
    "check_in_place",
    "count_allowed",
    "highest_values",
    "is_allowed",
    "mask_rows",
    "state_methods",
    "tells_how_long",
    "turn_begin",
    "uniform",
    "uniform_rows",
    "uniforms",
    "uniforms_at",
]
