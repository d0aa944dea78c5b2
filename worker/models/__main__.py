"""``python -m worker.models [MODEL]``: prints the directory of a checkpoint, made if needed.

MODEL is a GGUF file, or an id on the Hugging Face Hub, whose files are downloaded if needed.
Without one, it is the model that the launch scripts serve by default. Progress and errors go to
stderr; exit 1 after an error.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from worker import standard_error
from worker.errors import StartupError, one_line
from worker.models import (
    convert_gguf,
    find_gguf,
    hub_checkpoint,
    is_hub_id,
    model_cache,
    prepare_default_model,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m worker.models", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", nargs="?", help="GGUF file, or id on the Hugging Face Hub")
    parser.add_argument("--revision", help="branch, tag or commit of an id")
    parser.add_argument("--cache", metavar="DIR", type=Path, default=model_cache(), help="where checkpoints are kept")
    parser.add_argument(
        "--quantised", action="store_true", help="keep blocks as they are where the embedded engine reads them"
    )
    parser.add_argument("--caller", metavar="NAME", default="models", help="what lines on stderr begin with")
    options = parser.parse_args(argv)

    def say(line: str) -> None:
        standard_error.say(f"{options.caller}: {line}")

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what is half done is removed
    try:
        if options.model is None:
            path = prepare_default_model(options.cache, say, options.quantised)
        elif is_hub_id(options.model):
            path = hub_checkpoint(options.model, options.revision, say)
        else:
            path = convert_gguf(_gguf_in(Path(options.model)), options.cache, say, options.quantised)
    except StartupError as error:
        say(one_line(error))
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(path)
    return 0


def _gguf_in(path: Path) -> Path:
    found = find_gguf(path)
    if found is None:
        raise StartupError(f"--model-path {path}: no GGUF file")
    return found


if __name__ == "__main__":
    sys.exit(main())
