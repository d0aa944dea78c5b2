"""Diagnosis of a tokenizer that could not be read: the file and the key that are wrong.

transformers and tokenizers raise errors of any class for a damaged file, most without its name, so
the files are looked at once more where they have raised one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from tokenizers import Tokenizer

from adapters.first_problem import first_problem
from adapters.strict_json import RepeatedKey, read_object

CONFIG, TOKENIZER = "tokenizer_config.json", "tokenizer.json"

_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files that hold a tokenizer alone."""

_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
"""Files of chat templates, which are read with a tokenizer."""

_SHOWN = 60
"""Characters of a value that an error shows."""


class TokenizerDamaged(ValueError):
    """A file of a tokenizer cannot be read; one line that names it, without the directory."""


class _Token(BaseModel):
    model_config = ConfigDict(strict=True)

    content: str


class _Config(BaseModel):
    """The keys of ``tokenizer_config.json`` whose values have to be of one type."""

    model_config = ConfigDict(strict=True)

    tokenizer_class: str | None = None
    added_tokens_decoder: dict[str, _Token] | None = None
    extra_special_tokens: list[Any] | dict[str, Any] | None = None
    additional_special_tokens: list[Any] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    auto_map: dict[str, Any] | None = None
    padding_side: Literal["left", "right"] = "right"
    truncation_side: Literal["left", "right"] = "right"


def explain(directory: Path, error: Exception) -> TokenizerDamaged:
    """The damage in a tokenizer for which a library raised `error`; names the file and the key."""
    if not any((directory / name).is_file() for name in (CONFIG, TOKENIZER, *_OTHERS)):
        return TokenizerDamaged(f"it has no tokenizer: neither {TOKENIZER} nor {CONFIG}")
    found = _damage_in_config(directory) or _damage_in_tokenizer(directory) or _damage_in_templates(directory)
    return TokenizerDamaged(found or f"its tokenizer cannot be read: {_said(error)}")


def _damage_in_config(directory: Path) -> str | None:
    for name in (CONFIG, "special_tokens_map.json", "added_tokens.json"):
        try:
            found = read_object((directory / name).read_bytes())
        except FileNotFoundError:
            continue
        except RepeatedKey:  # transformers takes the last one
            continue
        except OSError as error:
            return f"{name}: cannot be read: {error.strerror or error}"
        except ValueError as error:
            return f"{name}: {' '.join(str(error).split())}"
        if name == CONFIG and (wrong := _wrong_key(found)):
            return f"{CONFIG}: {wrong}"
    return None


def _wrong_key(config: dict[str, Any]) -> str | None:
    try:
        _Config.model_validate(config)
    except ValidationError as error:
        return first_problem(error, lambda value: repr(value)[:_SHOWN], (_Token.__name__,))
    for number in config.get("added_tokens_decoder") or ():
        if not number.isdecimal():
            return f"added_tokens_decoder: keys must be ids of tokens, got {number[:_SHOWN]!r}"
    return None


def _damage_in_tokenizer(directory: Path) -> str | None:
    path = directory / TOKENIZER
    if not path.is_file():
        return None
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        return f"{TOKENIZER}: {_said(error)}"
    return None


def _damage_in_templates(directory: Path) -> str | None:
    for pattern in _TEMPLATES:
        for path in sorted(directory.glob(pattern)):
            try:
                path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                return f"{path.relative_to(directory)}: {_said(error)}"
    return None


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
