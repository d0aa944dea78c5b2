"""A damaged tokenizer is refused in one line that names the file and, where there is one, key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.vocabulary import Vocabulary
from worker.tiny_model import write_tiny_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def refusal(checkpoint: Path) -> str:
    with pytest.raises(ValueError) as refused:
        Vocabulary.from_pretrained(str(checkpoint), 1024, (1,))
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("bos_token", 3, "bos_token must be a valid string, got 3"),
        ("eos_token", ["</s>"], "eos_token must be a valid string, got ['</s>']"),
        ("added_tokens_decoder", [], "added_tokens_decoder must be an object, got []"),
        ("added_tokens_decoder", {"5": 3}, "added_tokens_decoder.5 must be an object, got 3"),
        ("added_tokens_decoder", {"x": {"content": "y"}}, "added_tokens_decoder: keys must be ids of tokens, got 'x'"),
        ("tokenizer_class", 3, "tokenizer_class must be a valid string, got 3"),
        ("extra_special_tokens", 3, "extra_special_tokens must be a valid list, got 3"),
        ("auto_map", 3, "auto_map must be an object, got 3"),
        ("padding_side", "up", "padding_side must be 'left' or 'right', got 'up'"),
    ],
)
def test_keys_of_the_configuration(checkpoint: Path, key: str, value: Any, said: str) -> None:
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert refusal(checkpoint) == f"tokenizer_config.json: {said}"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer_config.json", '{"bos_token":', "is not JSON: Expecting value: line 1 column 14"),
        ("tokenizer_config.json", "[]", "must be a JSON object, got list"),
        ("tokenizer_config.json", "\x00\x01", "is not JSON"),
        ("tokenizer.json", '{"model":', "EOF while parsing a value"),
        ("tokenizer.json", "[]", "invalid type: sequence, expected struct Tokenizer"),
        ("tokenizer.json", '{"version": "9"}', "Unknown tokenizer version '9'"),
    ],
)
def test_damaged_files(checkpoint: Path, file: str, content: str, said: str) -> None:
    (checkpoint / file).write_text(content)
    assert refusal(checkpoint).startswith(f"{file}: {said}")


@pytest.mark.parametrize("file", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_templates_that_are_no_text(checkpoint: Path, file: str) -> None:
    (checkpoint / file).parent.mkdir(exist_ok=True)
    (checkpoint / file).write_bytes(b"\xff{{ messages }}")
    assert refusal(checkpoint) == f"{file}: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"


def test_no_tokenizer(checkpoint: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    assert refusal(checkpoint) == "it has no tokenizer: neither tokenizer.json nor tokenizer_config.json"
