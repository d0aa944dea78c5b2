"""The file that ``dlw-batch results`` writes, where the results cannot be read."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker.runtimes.nats.batch import command
from worker.runtimes.nats.batch.store import DamagedResults, UnknownBatch

LINE = {"custom_id": "a", "response": None, "error": None}


def failing(error: BaseException) -> Any:
    """A store that has one result, and fails behind it."""

    async def results(batch: str) -> AsyncGenerator[Any, None]:
        yield LINE
        raise error

    return lambda client: SimpleNamespace(results=results)


async def write(path: Path) -> int:
    return await command._results(cast(Any, None), SimpleNamespace(batch="b", output=path))


@pytest.mark.parametrize("error", [UnknownBatch("b"), TimeoutError(), ConnectionResetError(), KeyboardInterrupt()])
async def test_a_file_stays_if_results_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A name that is mistyped, or a server that is away, costs nobody the results of before."""
    (tmp_path / "out").write_text("results of yesterday")
    monkeypatch.setattr(command, "BatchStore", failing(error))
    with pytest.raises(type(error)):
        await write(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "results of yesterday"


async def test_whole_results_are_written_beside_damaged_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "BatchStore", failing(DamagedResults("b", {"c": "was altered"})))
    with pytest.raises(DamagedResults):
        await write(tmp_path / "out")
    assert (tmp_path / "out").read_text().startswith('{"custom_id": "a"')
