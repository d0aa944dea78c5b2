"""Writes a GGUF file as a safetensors checkpoint, once, into the cache.

Its blocks are dequantised, or kept in the form that `quantised` describes.

The directory of a checkpoint is named by the file's SHA-256. It is written beside its place and
then renamed, behind a lock, so that processes that start together write it once, and one that is
killed leaves nothing that looks whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.errors import StartupError
from worker.models.architectures import Architecture
from worker.models.beside import work_directory
from worker.models.gguf_file import GgufError, GgufFile, parts_of
from worker.models.gguf_weights import Weight
from worker.models.numbers import BYTES, decoded, encoded
from worker.models.quantised import (
    CODES,
    MOST_E8M0,
    OFFSETS,
    SCALES,
    TRANSPOSED,
    Codes,
    quantization_config,
    unpack_blocks,
)
from worker.models.safetensors_file import Stored, write_safetensors
from worker.models.tokenizer import GgufTokenizer

FORMAT = 5
"""Part of a directory's name: raised when the same file would be written differently."""

Say = Callable[[str], None]
"""Takes one line for the operator."""

SUFFIX = ".gguf"
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_NUMPY_CODES = {"uint8": "U8", "int8": "I8", "float16": "F16", "float32": "F32"}
_HASHED_AT_ONCE = 16 * 2**20
_SECONDS_BETWEEN_LINES = 2.0


def model_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of checkpoints unless another one is named."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or tempfile.gettempdir()) / ".cache"
    return Path(base) / "dynamo-logits-worker" / "models"


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` names: itself, or the only one in a directory that is no
    checkpoint.

    Raises:
        StartupError: there are several, or this user may not look.
    """
    try:
        return _find_gguf(path)
    except OSError as error:  # of a name that is too long, too
        raise StartupError(f"--model-path {path}: cannot be read: {error.strerror or error}") from None


def _find_gguf(path: Path) -> Path | None:
    if path.is_file() and path.suffix.lower() == SUFFIX:
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(each for each in path.iterdir() if each.suffix.lower() == SUFFIX)
    try:
        if found and parts_of(found[0]) == found:
            return found[0]
    except GgufError:
        pass  # the file itself says what is missing
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:3])
        raise StartupError(f"--model-path {path}: it has {len(found)} GGUF files ({names}); name one of them")
    return found[0] if found else None


def convert_gguf(path: Path, cache: Path, say: Say, keeps_blocks: bool = False) -> Path:
    """The checkpoint of a GGUF file, written into `cache` if it is not there yet.

    With `keeps_blocks`, quantised weights stay so where the embedded engine can read them.

    Raises:
        StartupError: the file cannot be read or is not supported, or the cache cannot be written.
    """

    def state() -> list[tuple[int, ...]]:
        found = [each.stat() for each in parts_of(path) if each.exists()]  # missing ones are refused later, by name
        return [(each.st_size, each.st_ino, each.st_mtime_ns) for each in found]

    def check() -> None:
        if state() != before:
            raise GgufError("it has changed while it was read; start again")

    try:
        before = state()
        return cached_checkpoint(_digest(parts_of(path)), path.stem, cache, say, lambda _: path, keeps_blocks, check)
    except GgufError as error:
        raise StartupError(f"--model-path {path}: {error}") from None
    except OSError as error:
        raise StartupError(f"--model-path {path}: cannot convert it in {cache}: {error}") from None


def cached_checkpoint(
    digest: str,
    name: str,
    cache: Path,
    say: Say,
    obtain: Callable[[Path], Path],
    keeps_blocks: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """The checkpoint called `name` of the file with SHA-256 `digest`.

    Args:
        digest: Digest of the file.
        name: Last part of the checkpoint's path.
        cache: Directory of all checkpoints.
        say: Takes lines about the progress.
        obtain: Returns the file; it may write it into the directory that it is given, which goes
            away. Called only if there is no such checkpoint yet.
        keeps_blocks: See `convert_gguf`.
        check: Called once all is written; what it raises keeps the checkpoint from being kept.

    Raises:
        GgufError: the file cannot be read or is not supported.
        OSError: the cache cannot be written.
    """
    target = cache / f"{digest[:16]}-{FORMAT}{'-quantised' if keeps_blocks else ''}" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent.with_suffix(".lock"), name, say):
        if target.is_dir():
            return target
        with work_directory(target.parent, "partial-") as work:
            written = work / name
            written.mkdir()
            write_checkpoint(obtain(work), written, name, say, keeps_blocks)
            check()
            written.rename(target)
    return target


def write_checkpoint(source: Path, directory: Path, name: str, say: Say, keeps_blocks: bool = False) -> None:
    """Write the checkpoint of the GGUF file `source` into an empty directory.

    Raises:
        GgufError: the file cannot be read or is not supported.
        OSError: a file cannot be read or written.
    """
    file = GgufFile(source)
    architecture = Architecture(file)
    tokenizer = GgufTokenizer(file.metadata, architecture.config["vocab_size"])
    config = architecture.config | tokenizer.special_ids
    kept = [each for each in architecture.weights if each.can_keep_blocks] if keeps_blocks else []
    if kept:
        config["quantization_config"] = quantization_config(", ".join(sorted({each.tensor.kind.name for each in kept})))
    files = tokenizer.files(config["max_position_embeddings"])
    files["config.json"] = _json(config)
    files["generation_config.json"] = _json(tokenizer.special_ids)
    for each, text in files.items():
        (directory / each).write_text(text, encoding="utf-8")
    with (directory / "model.safetensors").open("wb") as output:
        progress = _Progress(f"converting {name}", say)
        write_safetensors(output, list(_stored(file, architecture, kept)), {"format": "pt"}, progress.show)
        output.flush()
        os.fsync(output.fileno())


def _stored(file: GgufFile, architecture: Architecture, kept: list[Weight]) -> Iterator[Stored]:
    names = {weight.name for weight in kept}
    for weight in architecture.weights:
        if weight.name in names:
            yield from _stored_codes(file, weight)
            continue
        parts = partial(_dense_parts, file, weight)
        size = math.prod(weight.shape) * BYTES[weight.dtype]
        yield Stored(weight.name, _CODES[weight.dtype], weight.shape, size, parts)


def _dense_parts(file: GgufFile, weight: Weight) -> Iterator[bytes]:
    for rows in weight.values(file):
        values = encoded(rows, weight.dtype)
        if not np.isfinite(rows).all() or not np.isfinite(decoded(values)).all():
            raise GgufError(f"tensor {weight.tensor.name} holds a number that is infinite or not a number")
        yield values.tobytes()


def _stored_codes(file: GgufFile, weight: Weight) -> Iterator[Stored]:
    """Codes, scales and, where there are any, offsets."""
    first = unpack_blocks(next(file.packed_rows(weight.tensor, weight.rows[:1])), weight.tensor.kind)
    *experts, rows = (*weight.shape[:-2], weight.shape[-1 if weight.turns else -2])
    name = weight.name + (TRANSPOSED if weight.turns else "")
    for suffix, which in ((CODES, "codes"), (SCALES, "scales"), (OFFSETS, "offsets")):
        sample = getattr(first, which)
        if sample is not None:
            shape = (*experts, rows, sample.shape[1])
            parts = partial(_code_parts, file, weight, attrgetter(which))
            size = math.prod(shape[:-1]) * sample.nbytes
            yield Stored(name + suffix, _NUMPY_CODES[str(sample.dtype)], shape, size, parts)


def _code_parts(file: GgufFile, weight: Weight, which: Callable[[Codes], npt.NDArray[Any]]) -> Iterator[bytes]:
    for packed in weight.packed_rows(file):
        found = unpack_blocks(packed, weight.tensor.kind)
        part = which(found)
        is_finite = bool(np.isfinite(part).all()) if part.dtype.kind == "f" else True
        if found.scales.dtype == np.uint8 and part is found.scales:  # exponents
            is_finite = bool((part <= MOST_E8M0).all())
        if not is_finite:
            raise GgufError(f"tensor {weight.tensor.name} holds a scale that is infinite or not a number")
        yield part.tobytes()


class _Progress:
    """Says how far a long work is, every few seconds."""

    def __init__(self, work: str, say: Say) -> None:
        self._work, self._say = work, say
        self._last = time.monotonic()
        say(f"{work} ...")

    def show(self, part: float) -> None:
        """Args: `part` is between 0 and 1."""
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._say(f"{self._work} ... {part:.0%}")


@contextlib.contextmanager
def _locked(path: Path, name: str, say: Say) -> Iterator[None]:
    """Hold the lock at `path`; the kernel gives it back if the process dies."""
    with path.open("a+b") as lock:  # with "+" the opening of a pipe waits for nobody
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {name} ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(paths: list[Path]) -> str:
    """SHA-256 of all files, one after another; missing ones are refused later, by name."""
    digest = hashlib.sha256()
    for path in paths:
        if path is not paths[0] and not path.is_file():
            continue
        with path.open("rb") as file:
            while part := file.read(_HASHED_AT_ONCE):
                digest.update(part)
    return digest.hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
