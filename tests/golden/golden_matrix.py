"""The golden matrix: processors × modes, each text compared with that of an aggregated worker."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from golden_cases import NO_PROCESSOR, SHORT_TEXT, TEXT, Case, Cases, Sampling
from golden_modes import Mode, Request, aggregated
from golden_workers import Bench, Refused

EQUAL = "equal"


Judge = Callable[[Request, Sequence[int]], Awaitable[Sequence[int]]]
"""What the tokens of a request must be, given those that it got."""


class CellFailed(Exception):
    """Cells are neither equal nor refused; the message has a line for each."""


@dataclass
class Cell:
    """All texts of one processor in one mode, greedy or seeded.

    Attributes:
        num_equal: Texts that are equal.
        refusals: Reasons of requests that were refused before their first token.
        problems: What else happened; empty in a matrix that holds.
    """

    num_equal: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """``equal``, ``refused: reason``, or what is wrong."""
        if self.problems:
            return self.problems[0]
        if self.num_equal and not self.refusals:
            return EQUAL
        if len(self.refusals) == 1 and not self.num_equal:
            return f"refused: {next(iter(self.refusals))}"
        return f"{self.num_equal} texts are equal, and others refused: {dict(self.refusals)}"

    @property
    def holds(self) -> bool:
        """Whether the cell is equal or refused."""
        return self.outcome == EQUAL or self.outcome.startswith("refused: ")


Cells = dict[tuple[str, str, Sampling], Cell]
"""By row, mode and sampling."""


@dataclass
class Matrix:
    """What one run found.

    Attributes:
        model: Name of the model.
        computed_by: What the bits of its logits depend on.
        cells: By processor, mode and sampling.
        acting: Processors that changed the text of the model.
        left_out: Arguments that this model cannot honour, with the reason.
        not_happened: Modes whose texts prove nothing, with the reason.
    """

    model: str
    computed_by: str = ""
    cells: Cells = field(default_factory=dict)
    acting: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    not_happened: list[str] = field(default_factory=list)

    def cell(self, case: Case, mode: str) -> Cell:
        """The cell that a text of ``case`` belongs to."""
        return self.cells.setdefault((case.row, mode, case.sampling), Cell())

    @property
    def rows(self) -> list[str]:
        """Processors, and names of fields."""
        return list(dict.fromkeys(processor for processor, _, _ in self.cells))

    @property
    def modes(self) -> list[str]:
        """Names of the modes."""
        return list(dict.fromkeys(mode for _, mode, _ in self.cells))

    def check(self) -> None:
        """Raises `CellFailed` if a cell is empty or does not hold, or a processor never acted."""
        lines = [
            f"{processor}, {mode}, {sampling}: {problem}"
            for (processor, mode, sampling), cell in self.cells.items()
            if not cell.holds
            for problem in (cell.problems[:3] or [cell.outcome])
        ]
        asked = dict.fromkeys((row, sampling) for row, _, sampling in self.cells)
        lines += [
            f"{row}, {mode}, {sampling}: no text was compared"
            for mode in self.modes
            for row, sampling in asked
            if (row, mode, sampling) not in self.cells
        ]
        lines += [f"{name}: no text differs from the plain one" for name in self.rows if name not in self.acting]
        lines += self.not_happened
        if lines:
            raise CellFailed("\n".join(lines))

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON data; the key order is stable."""
        return {
            "model": self.model,
            "computed_by": self.computed_by,
            "modes": self.modes,
            "texts": {mode: self.num_equal(mode) for mode in self.modes},
            "cells": {name: self._row(name) for name in self.rows},
            "left_out": self.left_out,
        }

    def _row(self, processor: str) -> dict[str, dict[str, str]]:
        row: dict[str, dict[str, str]] = {mode: {} for mode in self.modes}
        for (name, mode, sampling), cell in self.cells.items():
            if name == processor:
                row[mode][sampling] = cell.outcome
        return row

    def num_equal(self, mode: str) -> int:
        """Texts of a column that are equal."""
        return sum(cell.num_equal for (_, name, _), cell in self.cells.items() if name == mode)


def say(line: str) -> None:
    """Progress, to standard error."""
    sys.stderr.write(f"golden: {line}\n")


async def run(
    bench: Bench,
    modes: Sequence[Mode],
    name: str,
    max_tokens: int,
    *,
    is_short: bool = False,
    rows: Collection[str] = (),
    save: Callable[[Matrix], None] = lambda matrix: None,
) -> Matrix:
    """Compare every mode with an aggregated worker, processor by processor.

    Args:
        bench: Starts the workers.
        modes: Columns.
        name: Name of the model.
        max_tokens: Tokens of each text at most.
        is_short: One set of arguments per processor.
        rows: Processors and names of fields; all of them if there are none.
        save: Called with what there is after each mode.
    """
    began_s = time.monotonic()
    matrix = Matrix(name)
    texts = await _alone(bench, matrix, max_tokens, is_short, rows)
    say(f"{name}: {len(texts)} texts of one aggregated worker, {time.monotonic() - began_s:.0f} s")
    for mode in modes:
        began_s = time.monotonic()
        try:
            async with mode.running(bench):
                await compare_all(mode, texts, matrix)
        except AssertionError as error:
            matrix.not_happened.append(f"{mode.name}: {error}")
        save(matrix)
        num_equal = matrix.num_equal(mode.name)
        say(f"{name}: {mode.name}: {num_equal} texts are equal, {time.monotonic() - began_s:.0f} s")
    return matrix


async def _alone(
    bench: Bench, matrix: Matrix, max_tokens: int, is_short: bool, rows: Collection[str]
) -> list[tuple[Case, list[int]]]:
    """The text of every case, from an aggregated worker that has nothing else to do."""
    mode = aggregated()
    texts = []
    plain_texts: dict[str, list[int]] = {}
    async with mode.running(bench):
        assert bench.info is not None
        assert bench.chains is not None
        matrix.computed_by = bench.info.computed_by
        text = SHORT_TEXT if bench.is_large else TEXT
        cases = Cases(bench.chains.vocabulary, max_tokens, text=text, is_short=is_short)
        for case in cases.all(await mode.tokens(Request(cases.plain(), ()))):
            if rows and case.row not in rows:
                continue
            try:
                tokens = await mode.tokens(Request(case.reference, ()))
            except Refused as refusal:
                matrix.left_out[str(case)] = str(refusal)
                continue
            key = str((case.prompt, case.plain.sampling_options, case.beside))
            if key not in plain_texts:
                plain_texts[key] = await mode.tokens(Request(case.plain, ()))
            if tokens != plain_texts[key] or case.row == NO_PROCESSOR:
                matrix.acting.add(case.row)
            texts.append((case, tokens))
    return texts


async def as_alone(request: Request, tokens: Sequence[int]) -> Sequence[int]:
    """The text of a worker that had nothing else to do."""
    return request.expected


async def compare_all(
    mode: Mode, texts: Sequence[tuple[Case, list[int]]], matrix: Matrix, judge: Judge = as_alone
) -> None:
    """Compare the texts of all cases in one mode, which is running; the result is in ``matrix``."""
    places = asyncio.Semaphore(mode.at_once)

    async def compare(case: Case, request: Request) -> None:
        async with places:
            await _compare(mode, request, matrix.cell(case, mode.name), judge)

    waiting = []
    for case, text in texts:
        try:
            requests = await mode.requests(case, text)
        except Refused as refusal:
            matrix.cell(case, mode.name).refusals[str(refusal)] += 1
            continue
        waiting += [asyncio.create_task(compare(case, request)) for request in requests]
        if mode.at_once == 1:
            await asyncio.gather(*waiting)
    await asyncio.gather(*waiting)


async def _compare(mode: Mode, request: Request, cell: Cell, judge: Judge) -> None:
    try:
        tokens = await mode.tokens(request)
        expected = await judge(request, tokens)
    except Refused as refusal:
        cell.refusals[str(refusal)] += 1
    except Exception as error:  # a text that is missing is a finding as a wrong one is
        cell.problems.append(f"{request}: {type(error).__name__}: {error}")
    else:
        if list(tokens) == list(expected):
            cell.num_equal += 1
        else:
            cell.problems.append(f"{request}: {_difference(tokens, expected)}")


def _difference(tokens: Sequence[int], expected: Sequence[int]) -> str:
    same = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
    place = min(len(tokens), len(expected)) if same is None else same
    around = slice(max(0, place - 2), place + 3)
    return f"differs at token {place}: ...{list(tokens[around])} for ...{list(expected[around])}"
