"""``scripts/golden``: runs the golden matrix, prints it and writes it as JSON."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from golden_matrix import CellFailed, Matrix, run, say
from golden_modes import MODES
from golden_report import RECORD, terminal, write
from golden_workers import Bench

from transformers.utils.logging import disable_progress_bar

from worker.errors import StartupError
from worker.models import DEFAULT_MODEL, model_cache, prepare_default_model
from worker.tiny_model import write_tiny_model

TINY = "tiny"
TOKENS = {TINY: 24}
"""Tokens of a text, by model; another model is slower and answers shorter."""

FEWER_TOKENS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a cell is neither equal nor refused."""
    options = _options(argv)
    disable_progress_bar()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="golden-") as directory:
        try:
            name, model = _model(options.model, Path(directory))
            matrix = asyncio.run(_run(name, model, Path(directory)))
        except StartupError as error:
            say(f"error: {error}")
            return 2
    print(terminal(matrix.as_json()))
    write(options.json, name, matrix.as_json())
    say(f"{options.json} has the run {name}; {time.monotonic() - began_s:.0f} s")
    try:
        matrix.check()
    except CellFailed as failure:
        print(f"\n{failure}")
        return 1
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/golden", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument(
        "--model", default=TINY, help=f"checkpoint directory, {TINY} (default), or default for {DEFAULT_MODEL}"
    )
    parser.add_argument("--json", type=Path, default=RECORD, help=f"file of the runs (default: {RECORD.name} in docs)")
    return parser.parse_args(argv)


def _model(given: str, directory: Path) -> tuple[str, Path]:
    """Name and checkpoint of a model."""
    if given == TINY:
        return TINY, write_tiny_model(directory / TINY)
    if given == "default":
        return DEFAULT_MODEL, prepare_default_model(model_cache(os.environ), say)
    return Path(given).name, Path(given)


async def _run(name: str, model: Path, directory: Path) -> Matrix:
    operator = directory / "operator"
    operator.mkdir()
    bench = Bench(model, operator)
    try:
        return await run(bench, MODES, name, TOKENS.get(name, FEWER_TOKENS), is_short=name != TINY)
    finally:
        await bench.close()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Triton's extension, which torch imports, writes pages about leaks of its own at the interpreter's end
