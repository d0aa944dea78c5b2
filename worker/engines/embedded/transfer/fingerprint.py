"""Fingerprint of a model, so that no worker reads the KV of another model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from hashlib import blake2b
from pathlib import Path

from worker.engines.daemon_threads import in_daemon_thread
from worker.errors import StartupError
from worker.models.beside import copies_of, file_digests

_DIGEST_BYTES = 16
_VOLATILE = ("_name_or_path", "transformers_version")
_INDEX = "*.safetensors.index.json"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth")


def fingerprint(model_path: str | Path, packed_copy: str = "auto") -> str:
    """128 bits over a model's configuration, and the names and every byte of its weights' files.

    Files are read once: their digests are kept where `packed_copy` says (`beside.copies_of`). Two
    copies of a checkpoint have the same one, wherever they lie.

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
        digests = file_digests(directory, weight_files(directory), copies_of(directory, packed_copy))
        for path, found in digests.items():
            name = os.path.relpath(path, directory)
            digest.update(json.dumps([name, found]).encode())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise StartupError(f"--model-path {model_path}: {error}") from None
    return digest.hexdigest()


def fingerprint_beside(model_path: str | Path, packed_copy: str = "auto") -> Future[str]:
    """`fingerprint`, in a thread of its own: a model loads meanwhile."""
    return in_daemon_thread("fingerprint", lambda: fingerprint(model_path, packed_copy))


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint's weights, in order: those that lie in it or in directories in it,
    hidden ones left out, and those that its index names; other formats only without safetensors.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is malformed.
    """
    found = {path for path in _files(directory) if path.suffix == ".safetensors" and path.is_file()}
    found.update(directory / name for index in directory.glob(_INDEX) for name in _shards(index))
    if not found:
        found.update(path for pattern in _OTHER_WEIGHTS for path in directory.glob(pattern) if path.is_file())
    return sorted(found)


def _files(directory: Path) -> Iterator[Path]:
    """Files in a directory and below it, without hidden ones: other workers write there."""
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _shards(index: Path) -> Iterable[str]:
    content = json.loads(index.read_text(encoding="utf-8"))
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{index.name}: weight_map must be an object of file names")
    return set(shards.values())
