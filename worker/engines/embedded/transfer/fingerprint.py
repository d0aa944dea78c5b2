"""What tells models apart, so that no worker reads the KV of another model."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from worker.errors import StartupError

_DIGEST_BYTES = 16
_SAMPLES = 16
_SAMPLE_BYTES = 4096
_VOLATILE = ("_name_or_path", "transformers_version")


def fingerprint(model_path: str | Path) -> str:
    """128 bits over a model's configuration, names and shapes of its weights, and samples of them.

    Reads some kilobytes of each file. Two copies of a checkpoint have the same one, wherever they
    lie.

    Raises:
        StartupError: the checkpoint cannot be read.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES)
    directory = Path(model_path)
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        for name in _VOLATILE:
            config.pop(name, None)
        digest.update(json.dumps(config, sort_keys=True).encode())
        for path in sorted(directory.glob("*.safetensors")):
            _digest_file(digest, path)
    except (OSError, ValueError) as error:
        raise StartupError(f"--model-path {model_path}: {error}") from None
    return digest.hexdigest()


def _digest_file(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}".encode())
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header, 2**24)))
        for sample in range(_SAMPLES):
            file.seek(header + 8 + (size - header - 8) * sample // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
