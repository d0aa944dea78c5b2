"""The chat template of a model, read without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from adapters.calls.template import DEFAULT, WITH_TOOLS, ChatTemplate, TemplateFailed
from worker.models.checkpoint import find_gguf
from worker.models.gguf_file import GgufError, GgufFile

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_ADDED = (3, 4)
"""Types of tokens in a GGUF file that were added: control and user defined ones."""

TEMPLATES = "additional_chat_templates"
"""Folder of a checkpoint with the templates that have other names than the default one."""

_CONFIG, _TOKENIZER, _JINJA, _JSON = (
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "chat_template.json",
)


class FoundTemplate(NamedTuple):
    """Chat template of a checkpoint, with what it needs.

    Attributes:
        template: The chat template, None if there is none.
        added_tokens: Texts of the tokens that were added to the vocabulary.
    """

    template: ChatTemplate | None
    added_tokens: frozenset[str]


def read_chat_template(path: Path, override: Path | None = None) -> FoundTemplate:
    """The chat template of a checkpoint's directory or of a GGUF file.

    Args:
        path: The directory or the file.
        override: File of a template that is used in place of the checkpoint's own.

    Raises:
        ValueError: it cannot be read; one line, which names the file.
        OSError: it cannot be opened.
        StartupError: it is a directory with several GGUF files.
    """
    path.stat()  # a checkpoint without any of its files is no checkpoint without a template
    file = find_gguf(path)
    name, sources, special, added = _of_directory(path) if file is None else _of_gguf(file)
    if override is not None:
        name, sources = override.name, {DEFAULT: _source(override)}
    texts = {key: source for key, source in sources.items() if isinstance(source, str) and source}
    used = {key: source for key, source in texts.items() if key in (DEFAULT, WITH_TOOLS)} or texts
    try:
        return FoundTemplate(ChatTemplate(used, special) if used else None, added)
    except TemplateFailed as error:
        raise ValueError(f"{name}: {error}") from None


_Parts: TypeAlias = tuple[str, dict[str, Any], dict[str, str], frozenset[str]]
"""Name for errors, sources by name, special tokens by name, and added tokens."""


def _of_gguf(path: Path) -> _Parts:
    try:
        metadata = GgufFile(path).metadata
    except GgufError as error:
        raise ValueError(f"{path.name}: {error}") from None
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    sources = {DEFAULT: metadata.get("tokenizer.chat_template")}  # as workers have it, without those of other names
    special = {
        name: tokens[number]
        for name, key in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"))
        if isinstance(number := metadata.get(f"tokenizer.ggml.{key}"), int) and 0 <= number < len(tokens)
    }
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    added = frozenset(token for token, kind in zip(tokens, kinds, strict=False) if kind in _ADDED)
    return path.name, sources, special, added


def _of_directory(path: Path) -> _Parts:
    config = _read(path / _CONFIG) or {}
    given = config.get("chat_template")
    sources: dict[str, Any] = {}
    if isinstance(given, list):
        sources |= {str(one.get("name")): one.get("template") for one in given if isinstance(one, dict)}
    else:
        sources[DEFAULT] = given
    sources |= {DEFAULT: found} if (found := (_read(path / _JSON) or {}).get("chat_template")) else {}
    if (path / _JINJA).is_file():  # as transformers, it wins over the others
        sources[DEFAULT] = _source(path / _JINJA)
    sources |= {file.stem: _source(file) for file in (path / TEMPLATES).glob("*.jinja")}
    special = {name: text for name in _TOKENS if (text := _text(config.get(name))) is not None}
    added = map(_text, _added_tokens(path, config))
    return path.name, sources, special, frozenset(text for text in added if text is not None)


def _added_tokens(path: Path, config: dict[str, Any]) -> list[Any]:
    """The tokens that were added to the vocabulary; from version 5 on transformers writes them into
    the tokenizer's file alone.
    """
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        return list(decoder.values())
    added = (_read(path / _TOKENIZER) or {}).get("added_tokens")
    return added if isinstance(added, list) else []


def _source(path: Path) -> str:
    """The template in a file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None if there is no file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name}: it is not a JSON object")
    return found


def _text(token: Any) -> str | None:
    """Text of a token, which is that itself or an object that has it."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
