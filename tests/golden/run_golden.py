"""``scripts/golden``: runs the golden matrix, prints it and compares it with docs/exactness.md."""

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
from golden_report import differences, documented_runs, terminal, write
from golden_served import NUM_KILLS, SERVED_MODES
from golden_workers import Bench
from transformers.utils.logging import disable_progress_bar

from worker.errors import StartupError
from worker.models import DEFAULT_MODEL, model_cache, prepare_default_model
from worker.tiny_model import write_tiny_model

TINY = "tiny"
NUM_TOKENS = 16
"""Tokens of a text at most."""

NUM_TOKENS_SERVED = 230
"""The same over real processes: an answer must last long enough for a worker to be killed under it,
and for prompt and answer to need a second page of KV.
"""

NUM_TOKENS_LARGE = 8
"""The same of a model that is not tiny, with one set of arguments per processor."""

NUM_TOKENS_VLLM = 16
"""The same inside vLLM."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 if every cell is equal or refused and as the page shows it, 1 if not, 2 if
    there is no model.
    """
    options = _options(argv)
    disable_progress_bar()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="golden-") as directory:
        try:
            name, model = _model(options, Path(directory))
            matrix = asyncio.run(_run(name, model, Path(directory), options))
        except StartupError as error:
            say(f"error: {error}")
            return 2
    sys.stdout.write(f"{terminal(matrix.as_json())}\n")
    written = f"written to {options.json}, " if options.json else ""
    say(f"{written}{time.monotonic() - began_s:.0f} s")
    try:
        matrix.check()
    except CellFailed as failure:
        sys.stdout.write(f"\n{failure}\n")
        return 1
    different = differences(matrix.as_json()) if _name(name, options) in documented_runs() else []
    sys.stdout.writelines(f"{line}\n" for line in different)
    return 1 if different else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/golden", description=(__doc__ or "").partition(": ")[2])
    models = f"checkpoint directory, {TINY} (default; vLLM has no kernels for it), or default for {DEFAULT_MODEL}"
    parser.add_argument("--model", help=models)
    served = (
        f"over real processes, Dynamo's frontend and at least {NUM_KILLS} killed workers, instead of in one process"
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--all", action="store_true", help=served)
    way.add_argument("--vllm", action="store_true", help="inside vLLM, in .venv-vllm of scripts/install --vllm")
    parser.add_argument("--device", default="cpu", help="device of the engines in this process (default: cpu)")
    parser.add_argument("--json", type=Path, help="file to put the run into, beside others that it has")
    options = parser.parse_args(argv)
    options.model = options.model or ("default" if options.vllm else TINY)
    return options


def _name(model: str, options: argparse.Namespace) -> str:
    """The name of a run."""
    where = "vLLM" if options.vllm else "processes" if options.all else "in-process"
    return f"{model}, {where}" if options.device == "cpu" else f"{model}, {where}, {options.device}"


def _model(options: argparse.Namespace, directory: Path) -> tuple[str, Path]:
    """Name and checkpoint of a model; the default one in the form that the launch scripts serve."""
    given = options.model
    if given == TINY:
        return TINY, write_tiny_model(directory / TINY)
    if given == "default":
        return DEFAULT_MODEL, prepare_default_model(model_cache(os.environ), say, keeps_blocks=not options.vllm)
    return Path(given).name, Path(given)


async def _run(name: str, model: Path, directory: Path, options: argparse.Namespace) -> Matrix:
    operator = directory / "operator"
    operator.mkdir()
    is_large, served = name != TINY, options.all
    bench = Bench(model, operator, is_large=is_large, device=options.device)

    def save(matrix: Matrix) -> None:
        if options.json:
            write(options.json, _name(name, options), matrix.as_json())

    try:
        if options.vllm:
            from golden_vllm import run_in_vllm

            return await run_in_vllm(bench, name, NUM_TOKENS_VLLM, save=save)
        ours = [mode for mode in MODES if options.device == "cpu" or "stand-in" not in mode.name]
        modes = SERVED_MODES if served else ours
        num_tokens = NUM_TOKENS_LARGE if is_large else NUM_TOKENS_SERVED if served else NUM_TOKENS
        return await run(bench, modes, name, num_tokens, is_short=is_large or served, save=save)
    finally:
        await bench.close()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # at the interpreter's end Triton's extension, which torch imports, writes pages about leaks
