"""``python -m adapters detect``: whether a text carries a watermark."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adapters.processors.synthid import DEFAULT_DEPTH, detect_synthid
from adapters.processors.watermark import DEFAULT_CONTEXT, detect, read_key
from adapters.standard_output import write


def add_detect_command(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``detect`` to a program's subcommands; its ``run`` returns the exit status."""
    parser = subparsers.add_parser("detect", help="test whether a text carries the watermark of a key")
    parser.add_argument(
        "--watermark", choices=("watermark", "synthid"), default="watermark", help="the processor's name"
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="text (with --tokenizer), or a JSON list of token ids")
    parser.add_argument("--key-file", type=Path, required=True, help="the key, in hexadecimal digits")
    parser.add_argument(
        "--context", type=int, default=DEFAULT_CONTEXT, help="the processor's context (default %(default)s)"
    )
    parser.add_argument(
        "--depth", type=int, default=DEFAULT_DEPTH, help="the processor's depth, of synthid (default %(default)s)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="the model's directory; FILE is then UTF-8 text")
    parser.add_argument("--vocab-size", type=int, default=2**31, help="ids must be below it")
    parser.set_defaults(run=run_detect)


def run_detect(arguments: argparse.Namespace) -> int:
    """Print the score as one JSON object. Exit status: 0, or 2 if an input cannot be used."""
    try:
        token_ids = _read_ids(arguments.file, arguments.tokenizer)
        key, size, context = read_key(arguments.key_file), arguments.vocab_size, arguments.context
        if arguments.watermark == "synthid":
            score = detect_synthid(token_ids, key, size, context, arguments.depth)
        else:
            score = detect(token_ids, key, size, context)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"detect: {error}\n")
        return 2
    write(json.dumps(asdict(score)) + "\n")
    return 0


def _read_ids(path: Path, tokenizer: str | None) -> list[int]:
    text = path.read_text(encoding="utf-8")
    if tokenizer is not None:
        if not Path(tokenizer).is_dir():  # which transformers would look for on the Hub
            raise ValueError(f"--tokenizer {tokenizer}: no such directory")
        from transformers import AutoTokenizer

        encode = AutoTokenizer.from_pretrained(tokenizer).encode
        return [int(token_id) for token_id in encode(text, add_special_tokens=False)]
    try:
        token_ids = json.loads(text)
    except (ValueError, RecursionError):  # a text, perhaps
        token_ids = None
    if not isinstance(token_ids, list) or any(type(token_id) is not int for token_id in token_ids):
        raise ValueError(f"{path} does not hold a JSON list of token ids; for text give --tokenizer")
    return token_ids
