"""A text prompt is the same token ids behind Dynamo's frontend and behind OpenEngine, also where
the tokenizer would add some.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from e2e_stack import Stack, running_stack
from engine_stack import running_engines
from front_door_process import Door
from transformers import AutoTokenizer

TEXT = "Hello there"


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer puts a special token before every text."""
    path = shutil.copytree(tiny_model, tmp_path / "tiny")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    first = tokenizer["added_tokens"][0]
    name, texts = first["content"], [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"]
    begin = {"SpecialToken": {"id": name, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, texts[0]],
        "pair": [begin, *texts],
        "special_tokens": {name: {"id": name, "ids": [first["id"]], "tokens": [name]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def prompt_ids(stack: Stack) -> list[int]:
    stack.start_frontend()
    stack.start_worker("--device", "cpu", "--dtype", "float32")
    status, body = Door(stack).post("completions", prompt=TEXT, max_tokens=1, return_token_ids=True)
    assert status == 200, body
    ids: list[int] = json.loads(body)["choices"][0]["prompt_token_ids"]
    return ids


def test_a_text_is_the_same_ids_everywhere(model: Path, tmp_path: Path) -> None:
    with running_stack(tmp_path / "dynamo", model) as stack:
        found = prompt_ids(stack)
    with running_engines(tmp_path / "openengine", model) as engines:
        assert prompt_ids(engines) == found
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert found == tokenizer.encode(TEXT, add_special_tokens=False) != tokenizer.encode(TEXT)
