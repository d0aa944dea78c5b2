from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from worker.tiny_model import ARCHITECTURES, TinyModelError, main, write_tiny_model


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def tokenizer(llama: Path) -> Tokenizer:
    return Tokenizer.from_file(str(llama / "tokenizer.json"))


def test_two_processes_write_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "worker.tiny_model", str(tmp_path / "again")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(llama)


def test_the_seed_changes_the_weights_and_nothing_else(llama: Path, tmp_path: Path) -> None:
    other = contents(write_tiny_model(tmp_path / "other", seed=1))
    changed = {name for name, content in contents(llama).items() if other[name] != content}
    assert changed == {"model.safetensors", "tiny_model.json"}


def test_writing_over_an_own_output_replaces_it(llama: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, arch="qwen2", seed=3)
    write_tiny_model(tmp_path)
    write_tiny_model(tmp_path)
    assert contents(tmp_path) == contents(llama)


def test_a_foreign_directory_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not empty" in error
    assert contents(tmp_path) == {"config.json": b"{}"}


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(TinyModelError, match="not a directory"):
        write_tiny_model(tmp_path / "file")


@pytest.mark.parametrize("arguments", [{"arch": "gpt2"}, {"seed": -1}])
def test_bad_arguments(tmp_path: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        write_tiny_model(tmp_path, **arguments)  # type: ignore[arg-type]


@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_hello_world(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world!").ids
    assert 1 < len(ids) < 8
    assert tokenizer.decode(ids) == "Hello world!"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_row_is_wider_than_the_tokenizer(arch: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, arch=arch)
    config = json.loads((tmp_path / "config.json").read_text())
    size = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    assert config["vocab_size"] % 64 == 0
    assert config["vocab_size"] > size
    assert config["model_type"] == arch


def test_chat_template_and_end_of_turn(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    generation = json.loads((llama / "generation_config.json").read_text())
    assert generation["eos_token_id"][0] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_thinking_tags_are_single_ids_and_stay_in_the_text(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    ids = tokenizer("<think>a</think><|im_end|>")["input_ids"]
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"
