"""The golden matrix: a part of it that is cheap, its page, and that a wrong text is found."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from golden_cases import FIELDS, SAMPLINGS, THIRD_PARTIES, Case
from golden_matrix import CellFailed, Matrix, compare_all, run
from golden_modes import MODES, Request
from golden_report import DOCUMENT, differences, documented_cells, documented_runs, markdown, read, terminal, write
from golden_served import SERVED_MODES, Rounds, error_of
from golden_vllm import COLUMN, MIGRATED, Replays
from golden_workers import Bench, Failed, Refused

from adapters.processors import BUILTINS
from worker.tiny_model import write_tiny_model

NAMES = [*FIELDS, *(builtin.name for builtin in BUILTINS), *THIRD_PARTIES]


@pytest.mark.timeout(600)
async def test_every_processor_in_every_mode_of_the_embedded_engine(tmp_path: Path) -> None:
    """Short texts, migrated after every token. `tests/tensorrt` compares the stand-in's texts."""
    modes = [mode for mode in MODES if "stand-in" not in mode.name]
    model = write_tiny_model(tmp_path / "tiny")
    bench = Bench(model, tmp_path)
    try:
        matrix = await run(bench, modes, "tiny", 8, is_short=True)
    finally:
        await bench.close()
    matrix.check()
    assert set(matrix.rows) == set(NAMES)
    assert matrix.modes == [mode.name for mode in modes]
    assert not matrix.left_out


QUANTISED_KV_ROWS = {"(no processor)", "(penalty fields)", "json_schema", "mirostat", "dry"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv", ["int8", "int16"])
async def test_some_processors_in_every_mode_with_quantised_kv(kv: str, tmp_path: Path) -> None:
    modes = [mode for mode in MODES if "stand-in" not in mode.name]
    bench = Bench(write_tiny_model(tmp_path / "tiny"), tmp_path, kv_cache_dtype=kv)
    try:
        matrix = await run(bench, modes, "tiny", 12, is_short=True, rows=QUANTISED_KV_ROWS)
    finally:
        await bench.close()
    matrix.check()
    assert f"{kv} KV cache" in matrix.computed_by
    assert set(matrix.rows) == QUANTISED_KV_ROWS
    assert matrix.modes == [mode.name for mode in modes]


# The page


RUNS = {
    "tiny, in-process": [],
    "SmolLM2-135M-Instruct, in-process": ["--model", "default"],
    "tiny, processes": ["--all"],
}
"""Arguments of ``scripts/golden`` by the name of their run."""

VLLM_RUN = "SmolLM2-135M-Instruct, vLLM"
"""The run in vLLM's environment; `scripts/test --all` compares it, and `tests/vllm` a short one."""


def test_the_page_is_complete_and_every_cell_holds() -> None:
    assert set(documented_runs()) == {*RUNS, VLLM_RUN}
    cells = documented_cells()
    assert set(cells) == set(NAMES)
    outcome = "(equal|refused: [^,]+.*)"
    for row in cells.values():
        assert list(row) == [*dict.fromkeys(mode.name for mode in (*MODES, *SERVED_MODES)), COLUMN, MIGRATED]
        for text in row.values():
            assert re.fullmatch(f"{outcome}|greedy {outcome}, seeded {outcome}", text)


@pytest.mark.campaign
@pytest.mark.real_model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RUNS)
def test_the_page_is_what_the_script_finds(name: str, tmp_path: Path) -> None:
    script = DOCUMENT.parents[1] / "scripts" / "golden"
    done = subprocess.run(
        [script, *RUNS[name], "--json", tmp_path / "runs.json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert differences(read(tmp_path / "runs.json")[name]) == []


def test_cells_that_are_not_as_on_the_page_are_found() -> None:
    cells = {"greedy": "refused: n must be 1 when decoding is greedy, got 3", "seeded": "equal"}
    run = {"cells": {"top_k": {"migrated": dict.fromkeys(SAMPLINGS, "equal"), "n-th choice, offline": cells}}}
    assert differences(run) == []
    run["cells"]["top_k"]["migrated"]["seeded"] = "refused: why"  # type: ignore[index]
    assert differences(run) == ["top_k, migrated: greedy equal, seeded refused: why; docs/exactness.md has equal"]


# What the comparison finds


class Answers:
    """A mode that says what it is told to."""

    name = "told"
    at_once = 2

    def __init__(self, *answers: list[int] | Exception) -> None:
        self._answers = list(answers)

    @asynccontextmanager
    async def running(self, bench: Bench) -> AsyncIterator[None]:
        yield

    async def requests(self, case: Case, alone: Sequence[int]) -> Sequence[Request]:
        return [Request(case, tuple(alone), num_sent=number) for number in range(len(self._answers))]

    async def tokens(self, request: Request) -> list[int]:
        answer = self._answers[request.num_sent]
        if isinstance(answer, Exception):
            raise answer
        return answer


CASE = Case("top_k", {"k": 5}, "seeded", (1, 2, 3), 4)
TEXT = [5, 6, 7, 8]


async def told(*answers: list[int] | Exception) -> Matrix:
    matrix = Matrix("tiny", acting={"top_k"})
    await compare_all(Answers(*answers), [(CASE, TEXT)], matrix)
    return matrix


def outcome(matrix: Matrix) -> str:
    return str(matrix.as_json()["cells"]["top_k"]["told"]["seeded"])


async def test_equal_and_refused_cells_hold() -> None:
    equal, refused = await told(TEXT, TEXT), await told(Refused("top_k: not here"), Refused("top_k: not here"))
    equal.check()
    refused.check()
    assert (outcome(equal), outcome(refused)) == ("equal", "refused: top_k: not here")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ([5, 6, 9, 8], r"after 1 tokens: differs at token 2: \.\.\.\[5, 6, 9, 8\] for \.\.\.\[5, 6, 7, 8\]"),
        ([5, 6, 7], "differs at token 3"),
        ([5, 6, 7, 8, 9], "differs at token 4"),
        (RuntimeError("broke"), "RuntimeError: broke"),
        (Refused("only this one"), "1 texts are equal, and others refused"),
    ],
)
async def test_one_wrong_text_fails_its_cell(wrong: list[int] | Exception, problem: str) -> None:
    matrix = await told(TEXT, wrong)
    with pytest.raises(CellFailed, match=f"top_k, told, seeded: .*{problem}"):
        matrix.check()


async def test_a_processor_that_changes_no_text_fails() -> None:
    matrix = await told(TEXT)
    matrix.acting.clear()
    with pytest.raises(CellFailed, match="top_k: no text differs from the plain one"):
        matrix.check()


async def test_the_report(tmp_path: Path) -> None:
    matrix = await told(Refused("no"))
    other = await told(TEXT)
    for name, one in (("first", matrix), ("second", other), ("second", matrix)):
        write(tmp_path / "record.json", name, one.as_json())
    assert read(tmp_path / "record.json") == {"first": matrix.as_json(), "second": matrix.as_json()}
    assert terminal(matrix.as_json()).splitlines() == ["processor  told", "top_k      refused [1]", "[1] no"]
    assert (
        markdown([matrix.as_json(), other.as_json()]).splitlines()[2] == "| top_k | seeded refused [1], seeded equal |"
    )


async def test_what_vllms_logits_do_not_give_is_found(tmp_path: Path) -> None:
    bench = Bench(write_tiny_model(tmp_path / "tiny"), tmp_path)
    matrix = Matrix("tiny")
    replays = Replays(bench, matrix)

    async def judged(tokens: list[int]) -> list[int]:
        """The judgement on an answer to logits that are highest for 7, then for 9, then for 9."""
        request = Request(Case("banned_tokens", {"token_ids": [7]}, "greedy", (1, 2, 3), 3), ())
        folder = tmp_path / "logits" / request.id
        folder.mkdir(parents=True)
        for position, best in enumerate((7, 9, 9)[: len(tokens) + 1], 3):
            row = np.zeros(bench.limits.vocab_size, np.float32)
            row[[8, best]] = 1.0, 2.0
            row.tofile(folder / str(position))
        return await replays.judge(request, tokens)

    try:
        worker = await bench.worker()
        assert await judged([8, 9, 9]) == [8, 9, 9]
        assert matrix.acting == {"banned_tokens"}
        assert await judged([7, 9, 9]) == [8, 9, 9]
        assert await judged([8, 8, 9]) == [8, 9, 9]
        with pytest.raises(AssertionError, match="9 is no end token"):
            await judged([8, 9])
        await worker.stop()
    finally:
        await bench.close()


# The rounds of the run with kills


async def test_a_round_begins_when_the_last_one_has_ended() -> None:
    events: list[str] = []

    async def between() -> None:
        events.append("between")

    rounds = Rounds(2, between)

    async def take_part(number: int) -> None:
        async with rounds.member(number) as member:
            events.append(f"{number} {await member.is_longest()}")

    for _ in range(5):
        rounds.expect()
    await asyncio.gather(*(take_part(number) for number in range(5)))
    assert [sorted(events[0:2]), sorted(events[3:5]), events[6]] == [
        ["0 False", "1 True"],
        ["2 False", "3 True"],
        "4 True",
    ]
    assert [event for event in events if event == "between"] == ["between"] * 3


async def test_a_member_can_wait_for_the_others_of_its_round() -> None:
    events: list[str] = []

    async def between() -> None:
        events.append("between")

    rounds = Rounds(3, between)

    async def waits() -> None:
        async with rounds.member(9) as member:
            await member.begin()
            await member.all_have_begun()
            events.append("all have begun")

    async def begins() -> None:
        async with rounds.member(1) as member:
            assert not await member.is_longest()
            events.append("one begins")
            await member.begin()
            await member.all_have_begun()

    async def leaves() -> None:
        async with rounds.member(2) as member:
            assert not await member.is_longest()
            events.append("one leaves")

    for _ in range(3):
        rounds.expect()
    await asyncio.gather(waits(), begins(), leaves())
    assert sorted(events[:2]) == ["one begins", "one leaves"]
    assert events[2:] == ["all have begun", "between"]


# What a client sees over real processes


@pytest.mark.parametrize(
    ("status", "kind"), [(400, Refused), (422, Refused), (500, Failed), (503, Failed), (0, Failed)]
)
def test_an_error_that_is_not_the_clients_fault_is_no_refusal(status: int, kind: type[Exception]) -> None:
    error = error_of(status, {"error": {"message": "Failed to generate completions", "code": status}})
    assert type(error) is kind
    assert str(error) == "Failed to generate completions"
