"""The built-in processors, one file per family. They do not know which engine runs them."""

from __future__ import annotations

from adapters.contract import Processor
from adapters.processors.grammar import Choice, Grammar, JsonSchema, Regex
from adapters.processors.stochastic import Mirostat, Xtc
from adapters.processors.truncation import (
    EpsilonCutoff,
    EtaCutoff,
    MinP,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
)
from adapters.processors.watermark import Watermark

BUILTINS: tuple[type[Processor], ...] = (
    JsonSchema,
    Regex,
    Choice,
    Grammar,
    Temperature,
    TopK,
    TopP,
    MinP,
    TypicalP,
    TopNSigma,
    EpsilonCutoff,
    EtaCutoff,
    Xtc,
    Mirostat,
    Watermark,
)
"""Every built-in, in the order law's order and within a stage in the order of the documentation."""
