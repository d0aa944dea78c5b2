"""Rows that count with an engine of this worker."""

from __future__ import annotations

from dataclasses import replace

from worker.arguments.dynamo.row import Only, Row, ToSetting
from worker.arguments.dynamo.shared import SHARED
from worker.arguments.dynamo.trtllm import PREFIX as TRTLLM_PREFIX
from worker.arguments.dynamo.trtllm import TRTLLM
from worker.arguments.dynamo.vllm import PREFIX as VLLM_PREFIX
from worker.arguments.dynamo.vllm import VLLM

PREFIXES = {TRTLLM_PREFIX: "trtllm", VLLM_PREFIX: "vllm"}
"""Engines by the beginning of the variables of Dynamo's worker around them."""

_OF_ENGINE = {"trtllm": TRTLLM, "vllm": VLLM}


def rows_for(engine: str) -> tuple[Row, ...]:
    """The rows of Dynamo's worker around the same engine.

    With the embedded engine, around which Dynamo has none, both workers' flags count, so that a
    model can be served with it for a try.
    """
    if engine in _OF_ENGINE:
        return (*SHARED, *_OF_ENGINE[engine])
    found: dict[str, Row] = {}
    for row in (*TRTLLM, *VLLM):
        if row.flags and row.flags[0] not in found:
            meaning = Only((), "it needs --engine trtllm") if isinstance(row.meaning, ToSetting) else row.meaning
            found[row.flags[0]] = replace(row, env=(), meaning=meaning)
    return (*SHARED, *found.values())
