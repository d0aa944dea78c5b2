"""The command line: ``python -m worker quantize MODEL --to int8 [--report] [--output DIR]``.

Rows that meet quantised weights are rounded to 8 bits in the report, as they are when the model is
served, unless ``--activation-dtype none`` says otherwise. With ``--kv-cache-dtype int8``
or ``int16`` the report is of a quantised KV cache, too, or of it alone; by default it is of weights
and rows alone, with a KV cache of elements.
Nothing is written without ``--output``. Exit 1 after an error, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from adapters.standard_output import may_be_cut_off
from worker.engines.embedded.config import ACTIVATION_DTYPES, DTYPES, KV_CACHE_DTYPES
from worker.engines.embedded.model.quantisation import FORMATS
from worker.errors import ServingError, StartupError, one_line
from worker.models import convert_gguf, find_gguf, hub_checkpoint, is_hub_id, model_cache
from worker.quantize.output import check_is_new, write_quantised
from worker.quantize.report import report
from worker.standard_error import say


def main(argv: Sequence[str]) -> int:
    """The exit status; trouble is one line on stderr."""
    options = _parse(argv)
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # removes what is half done
    try:
        if options.output is not None:
            check_is_new(options.output)  # a report takes minutes
        source = _checkpoint(options.model)
        if options.report:
            measured = report(source, options.to, options.activation_dtype, options.kv_cache_dtype, options.dtype)
            with may_be_cut_off():
                print(*measured, sep="\n")
        if options.output is not None:
            write_quantised(source, options.to, options.output)
    except (ServingError, OSError, ValueError) as error:
        say(f"worker quantize: error: {one_line(error)}")
        return 1
    finally:
        signal.signal(signal.SIGTERM, earlier)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m worker quantize",
        description="Say what quantisation does to a model's predictions, and write the quantised checkpoint.",
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="directory of a checkpoint, its id, or a GGUF file")
    parser.add_argument("--to", choices=FORMATS, help="what weights are rounded to")
    parser.add_argument("--activation-dtype", choices=ACTIVATION_DTYPES, default="auto", help="of the report")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of the report")
    parser.add_argument("--report", action="store_true", help="print perplexity and the agreement of greedy tokens")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="of the report's forward passes")
    parser.add_argument("--output", metavar="DIR", type=Path, help="directory to write, which must not exist")
    options = parser.parse_args(argv)
    if not options.report and options.output is None:
        parser.error("give --report, --output DIR, or both")
    if options.to is None and (options.output is not None or options.kv_cache_dtype in ("auto", "none")):
        parser.error("give --to; a report is also of --kv-cache-dtype int8 or int16 alone")
    if options.activation_dtype != "auto" and not (options.report and options.to):
        parser.error("--activation-dtype is of a report on quantised weights; give --report and --to, too")
    if options.kv_cache_dtype != "auto" and not options.report:
        parser.error("--kv-cache-dtype is of a report; a checkpoint says nothing about the KV cache")
    return options


def _say(line: str) -> None:
    say(f"quantize: {line}")


def _checkpoint(path: Path) -> Path:
    """The checkpoint, dequantised, of `path`, or of the id that it is. Raises `StartupError`."""
    if is_hub_id(str(path)):
        return hub_checkpoint(str(path), None, _say)
    file = find_gguf(path)
    if file is not None:
        return convert_gguf(file, model_cache(os.environ), _say)
    if not path.exists():
        raise StartupError(f"{path}: no such directory")
    if not (path / "config.json").is_file():
        raise StartupError(f"{path}: no config.json, so not a Hugging Face checkpoint")
    return path
