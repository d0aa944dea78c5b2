"""The files of a Hugging Face checkpoint beside its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer

from worker.errors import StartupError
from worker.models.config_json import check_config, read_config, read_generation_config
from worker.models.model_table import refusal_of
from worker.models.problems import ModelFileError
from worker.models.quantization_config import quantization_of

Given = TypeVar("Given")
Result = TypeVar("Result")

_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_STRETCHED_ONCE = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Model types whose RoPE of type ``dynamic`` has, beside an ``alpha``, one base for all lengths."""


def read_settings(directory: Path) -> dict[str, Any]:
    """``config.json``.

    Raises:
        StartupError: it is missing or unreadable, or of an architecture that is not served.
    """
    if not directory.is_dir():
        raise StartupError(f"--model-path {directory}: no such directory")
    settings = _told(directory, read_config, directory)
    if settings is None:
        raise StartupError(f"--model-path {directory}: it has no config.json")
    reason = refusal_of(settings.get("model_type"))
    if reason is not None:
        raise StartupError(f"--model-path {directory}: config.json: {reason}")
    _told(directory, check_config, settings)
    _told(directory, quantization_of, settings)
    for key in _ROPE_KEYS:
        rope = settings.get(key) or {}
        is_static = settings["model_type"] in _STRETCHED_ONCE and rope.get("alpha")
        if "dynamic" in _rope_types(rope) and not is_static:
            raise StartupError(
                f"--model-path {directory}: config.json: {key}: rope type 'dynamic' is not served by the embedded "
                "engine: its frequencies depend on the longest sequence of a batch, so that cached keys would change"
            )
    if not any(directory.glob("*.safetensors")):
        raise StartupError(f"--model-path {directory}: it has no safetensors weights")
    return settings


def has_longrope(settings: dict[str, Any]) -> bool:
    """Whether RoPE depends on the context that is served; see `longrope`."""
    return any("longrope" in _rope_types(settings.get(key) or {}) for key in _ROPE_KEYS)


def _rope_types(rope: dict[str, Any]) -> set[str]:
    """RoPE types; Gemma-3 has one for each kind of layer."""
    found = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return {str(each.get("rope_type", each.get("type"))) for each in found}


def checkpoint_dtype(settings: dict[str, Any]) -> torch.dtype:
    """The data type of a checkpoint with this ``config.json``."""
    name = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    dtype: torch.dtype = getattr(torch, name)  # one of `config_json.DTYPES`
    return dtype


def eos_token_ids(directory: Path, settings: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer. Raises `StartupError` for a file that cannot be read."""
    found = _told(directory, read_generation_config, directory).get("eos_token_id", settings.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def undecodable_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that the tokenizer does not have; none without a ``tokenizer.json``. Of ids that share a
    piece it has all. Tokens that other files add to it have the next ids, as in transformers.

    Raises:
        StartupError: it cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return ()
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise StartupError(f"--model-path {directory}: tokenizer.json: {first_line(error)}") from error
    tokenizer.add_tokens([text for text in _added_texts(directory) if tokenizer.token_to_id(text) is None])
    known = set(tokenizer.get_vocab(with_added_tokens=True).values())
    return tuple(token for token in range(vocab_size) if token not in known and tokenizer.id_to_token(token) is None)


def _added_texts(directory: Path) -> Iterator[str]:
    """Texts of the tokens that files beside ``tokenizer.json`` name; some may be there twice."""
    config = _object_in(directory / "tokenizer_config.json")
    added: Any = config.get("added_tokens_decoder")
    named = [config]
    if added is None:  # files of older versions count then
        added = _object_in(directory / "added_tokens.json")
        yield from added
        named.append(_object_in(directory / "special_tokens_map.json"))
    tokens: list[Any] = list(added.values()) if isinstance(added, dict) else []
    for found in named:
        tokens += [found.get(key) for key in _SPECIAL_TOKENS]
        for key in ("extra_special_tokens", "additional_special_tokens"):
            more = found.get(key)
            tokens += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    for token in tokens:
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            yield text


def _object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty without one: whoever reads the tokenizer says what is wrong
    with it.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _told(directory: Path, read: Callable[[Given], Result], given: Given) -> Result:
    """``read(given)``; what is wrong with a file is told with the checkpoint's directory."""
    try:
        return read(given)
    except ModelFileError as error:
        raise StartupError(f"--model-path {directory}: {error}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
