"""Combinations of features where no front door compares the answers: prefill and decode workers, an
answer that another worker has begun, and the offline engine.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from combined_requests import CHAT, COMPLETIONS, ENDS, Fields, Row, body, features, rows
from effort import examples
from golden_modes import Disaggregated, aggregated
from golden_workers import Bench, Failed, Refused

from adapters.catalog import ANNOTATION, Catalog
from worker.engines.embedded import Engine
from worker.errors import InvalidRequest
from worker.frontdoor.errors import Refused as RefusedByDoor
from worker.frontdoor.openengine.body import read_body
from worker.frontdoor.openengine.prompts import Prompts
from worker.frontdoor.options import parse_options
from worker.frontdoor.requests import rewritten_fields
from worker.frontdoor.tools import ToolCallSettings
from worker.requests.request import parse_request
from worker.tiny_model import write_tiny_model

ROWS = 100
AT_ONCE = 16
CATALOG = Catalog.default()
BLAMED = (
    *("processors", "guide", "tools", "format", "allowed", "bad words", "ends", "least", "order", "stop"),
    *("scores", "length", "temperature", "prediction", "drafts"),
)
"""Features, of which one after the other is left out of a request that is not served."""

LEFT_OUT = ("n", "echo", "usage", "ids", "mode", "names", "prompt scores", "deadline")
"""Features of the front door's own, and a time that an answer may depend on."""

Message = dict[str, Any]


class SomeDisaggregated(Disaggregated):
    """Prefill and decode workers, which refuse some of their requests."""

    def _check(self) -> None:
        assert self._decode.engine.transfers().get("received", 0) > 0


class Reading:
    """The front door's reading of requests.

    Args:
        model: Directory of the checkpoint.
    """

    def __init__(self, model: Path) -> None:
        options = parse_options(["--port", "0", "--upstream", "grpc://127.0.0.1:1", "--model-path", str(model)], {})
        self._calls: ToolCallSettings | None = options.calls
        self._prompts = Prompts.load(model, None)

    def message(self, path: str, row: Row) -> Message | None:
        """The request of a row as a worker gets it; None if it is refused before."""
        known = features(path)
        kept = {name: value for name, value in row.items() if name not in LEFT_OUT}
        kept["prompt"] = 2 * (row["prompt"] % 2) if path == CHAT else row["prompt"] % 2
        assert kept.keys() <= known.keys()
        request: Fields = {"model": "tiny", **body(path, kept)}
        try:
            (made,) = rewritten_fields(path, request, {}, CATALOG, self._calls)
            fields = self._prompts.request(read_body(path, json.loads(made), {}, thinks=False).message).fields
        except (RefusedByDoor, InvalidRequest):
            return None
        return {name: value for name, value in fields.items() if name != "model"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_combined_features_in_other_modes(tmp_path: Path, path: str) -> None:
    bench = Bench(write_tiny_model(tmp_path / "tiny"), tmp_path)
    reading, limit = Reading(bench.model), asyncio.Semaphore(AT_ONCE)
    alone, disaggregated = aggregated(), SomeDisaggregated("disaggregated")
    problems: list[str] = []
    numbers = {"served": 0, "refused": 0, "failed": 0}

    async def check(row: Row) -> None:
        outcome = "refused"
        async with limit:
            while outcome != "served":
                message = reading.message(path, row)
                if message is not None:
                    outcome = await compare(message)
                    numbers[outcome] += 1
                row = {**row, next(name for name in BLAMED if row.get(name)): 0} if outcome != "served" else row

    async def compare(message: Message) -> str:
        expected, outcome = await asked(alone, message)
        found = {"disaggregated": (await asked(disaggregated, message))[0]}
        if isinstance(expected, list) and len(expected) > 1:
            found["continued"] = await continued(message, expected)
        if outcome != "refused":
            found["offline"] = await asyncio.to_thread(offline, message)
        for mode, text in found.items():
            if not is_same(mode, message, expected, text):
                problems.append(f"{json.dumps(message)}\n{mode}: {text}\nalone: {expected}")
        return outcome

    async def continued(message: Message, expected: list[int]) -> Any:
        number = (1 + len(expected)) // 2
        info = alone.info
        known = {"generated_tokens": number, "numerics": info.made_by, "kv_dtype": info.kv_dtype}
        moved = {**message, "token_ids": message["token_ids"] + expected[:number], "continues": known}
        text, _ = await asked(alone, moved)
        return expected[:number] + text if isinstance(text, list) else text

    def offline(message: Message) -> Any:
        params = parse_request(message, bench.limits).params
        selection = selection_of(message)
        stops = message["stop_conditions"].get("stop")
        try:
            (result,) = engine.generate(
                [message["token_ids"]],
                replace(
                    params, stop=stops, skip_special_tokens=False, end_id=None, stop_token_ids=params.stop_token_ids
                ),
                processors=selection.get("processors", []),
                progress=False,
            )
        except (InvalidRequest, ValueError) as error:
            return str(error)
        return result.outputs[0].error or result.outputs[0].token_ids

    try:
        async with alone.running(bench), disaggregated.running(bench):
            engine = await asyncio.to_thread(
                Engine, bench.model, device="cpu", dtype="float32", numerics="exact", catalog=CATALOG
            )
            await asyncio.gather(*(check(row) for row in rows(path, examples(ROWS))))
    finally:
        await bench.close()
    assert numbers["served"] == examples(ROWS)
    assert not problems, f"{len(problems)} of {numbers}\n\n" + "\n\n".join(problems[:5])


async def asked(mode: Any, message: Message) -> tuple[Any, str]:
    """The tokens of an answer, or its error; and what became of it."""
    try:
        return await mode.answer(message), "served"
    except Refused as refused:
        return str(refused), "refused"
    except Failed as failed:
        return str(failed).partition(" (after")[0], "failed"


def selection_of(message: Message) -> dict[str, Any]:
    """The selection of processors in a message."""
    for annotation in message.get("annotations") or ():
        if annotation.startswith(ANNOTATION):
            selection: dict[str, Any] = json.loads(annotation.removeprefix(ANNOTATION))
            return selection
    return {}


def is_same(mode: str, message: Message, expected: Any, found: Any) -> bool:
    """Whether a mode's answer is the expected one."""
    if mode != "offline":
        return bool(found == expected) or _path(found) == _path(expected) is not None
    if selection_of(message).get("order"):
        return True  # which the offline engine does not take
    if isinstance(expected, str) or isinstance(found, str):
        return type(expected) is type(found)
    if message["sampling_options"].get("include_stop_str_in_output") and found[-1:] and found[-1] in ENDS:
        found = found[:-1]  # which shows all end tokens
    if message["stop_conditions"].get("stop"):
        return bool(expected[: len(found)] == found)  # without the tokens of the stop string
    return bool(expected == found)


def _path(refusal: Any) -> str | None:
    """The field of a refusal: a prefill worker, whose answer has no length, may know another
    reason. None for anything else.
    """
    is_refusal = isinstance(refusal, str) and not refusal.startswith("logits processor ")
    return refusal.partition(": ")[0] if is_refusal else None
