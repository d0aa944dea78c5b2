"""The tokenizer of a checkpoint, from the copy beside it if it has one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from adapters.vocabulary import CopiedTokenizer, Vocabulary
from worker.models.beside import Provenance, copies_of, keep, opened, sealed
from worker.models.regular_files import read_regular

logger = logging.getLogger(__name__)

FORMAT = 5
"""Raised when the same tokenizer would be copied differently, or its tokens have other bytes."""

_NAME = "tokenizer.json"
_SOURCES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def load_vocabulary(
    checkpoint: Path, size: int, eos_token_ids: tuple[int, ...], packed_copy: str = "auto"
) -> Vocabulary:
    """The vocabulary of a checkpoint, with a `CopiedTokenizer` if one can stand for its tokenizer.

    Args:
        checkpoint: Directory of the checkpoint.
        size: Width of a row of logits.
        eos_token_ids: Ids that end an answer.
        packed_copy: See `copies_of`; ``off`` loads transformers' own tokenizer.

    Raises:
        OSError, ValueError: there is no tokenizer that can be read.
    """
    copies = copies_of(checkpoint, packed_copy)
    if copies is None:
        return Vocabulary.from_pretrained(str(checkpoint), size, eos_token_ids)
    provenance = Provenance(checkpoint, _SOURCES, FORMAT, copies)
    path = copies / _NAME
    copied = _read(path, provenance)
    if copied is not None:
        return Vocabulary(size, copied, eos_token_ids, path=str(checkpoint))
    vocabulary = Vocabulary.from_pretrained(str(checkpoint), size, eos_token_ids)
    try:
        content = CopiedTokenizer.to_json(vocabulary.tokenizer)
    except Exception as error:  # the tokenizers library raises bare Exception for a text that it cannot write
        logger.debug("the tokenizer is not copied: %s", error)
        return vocabulary
    if content is None:
        logger.debug("the tokenizer is not copied: a copy would differ")
    else:
        _write(path, provenance, content)
    return vocabulary


def copied_tokenizer(checkpoint: Path, packed_copy: str = "auto") -> CopiedTokenizer | None:
    """The copy that `load_vocabulary` would use; None if there is none."""
    copies = copies_of(checkpoint, packed_copy)
    return None if copies is None else _read(copies / _NAME, Provenance(checkpoint, _SOURCES, FORMAT, copies))


def _read(path: Path, provenance: Provenance) -> CopiedTokenizer | None:
    try:
        content = opened(json.loads(read_regular(path)))
        provenance.check(content["provenance"])
        return CopiedTokenizer(content["tokenizer"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.info("the copied tokenizer %s is made again: %s", path, error)
        return None


def _write(path: Path, provenance: Provenance, tokenizer: dict[str, Any]) -> None:
    """Logs why if it cannot be written."""

    def write(partial: Path) -> None:
        content = {"provenance": provenance.record(), "tokenizer": tokenizer}
        partial.write_text(json.dumps(sealed(content)), encoding="utf-8")

    try:
        keep(path, write)
    except BlockingIOError:
        logger.debug("another process writes %s", path)
    except OSError as error:
        logger.info("the tokenizer is not copied to %s: %s", path, error)
