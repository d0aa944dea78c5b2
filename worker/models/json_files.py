"""JSON files of a checkpoint, read before any engine reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker.errors import StartupError, one_line


def read_json_file(path: Path) -> dict[str, Any]:
    """The object in a file, empty if there is no such file.

    Raises:
        StartupError: it cannot be read, or holds no object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"--model-path: cannot read {path}: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise StartupError(f"--model-path: {path} does not hold a JSON object")
    return content


def has_code(model_path: str) -> bool:
    """Whether a checkpoint names code of its own, for its model or its tokenizer.

    Raises:
        StartupError: one of its files cannot be read.
    """
    files = ("config.json", "tokenizer_config.json")
    return any("auto_map" in read_json_file(Path(model_path) / name) for name in files)
