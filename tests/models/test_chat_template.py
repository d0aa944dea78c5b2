"""The chat template of a model is found in its files, wherever it is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from gguf_files import CONTROL, NORMAL, USER_DEFINED
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from adapters.calls.detection import tool_support
from worker.errors import StartupError
from worker.models.chat_template import read_chat_template

USER = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def checkpoint(path: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, (str, bytes)) else json.dumps(content)
        (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def shown(path: Path, *, tools: bool = False, **options: Any) -> str:
    template = read_chat_template(path, **options).template
    assert template is not None
    return template.render(USER, TOOLS if tools else None)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "a{{ bos_token }}", "bos_token": "<s>"}}, ("a<s>", "a<s>")),
        (
            {"tokenizer_config.json": {"chat_template": "{{ eos_token }}", "eos_token": {"content": "<b>"}}},
            ("<b>",) * 2,
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "default", "template": "a"},
                        {"name": "tool_use", "template": "b"},
                        {"name": "rag", "template": "{% broken"},
                    ]
                }
            },
            ("a", "b"),
        ),
        ({"tokenizer_config.json": {}, "chat_template.json": {"chat_template": "a"}}, ("a", "a")),
        ({"tokenizer_config.json": {"chat_template": "a"}, "chat_template.jinja": "b"}, ("b", "b")),
        ({"chat_template.jinja": "a", "additional_chat_templates/tool_use.jinja": "b"}, ("a", "b")),
    ],
)
def test_where_a_template_is(tmp_path: Path, files: dict[str, Any], expected: tuple[str, str]) -> None:
    path = checkpoint(tmp_path, files)
    assert (shown(path), shown(path, tools=True)) == expected
    (tmp_path / "other.jinja").write_text("other")
    assert shown(path, override=tmp_path / "other.jinja") == "other"


def test_a_checkpoint_without_a_template(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path).template is None
    added = {"added_tokens_decoder": {"5": {"content": "[ARGS]"}, "6": {"content": 3}}}
    found = read_chat_template(checkpoint(tmp_path, {"tokenizer_config.json": added}))
    assert found.template is None
    assert found.added_tokens == {"[ARGS]"}


def test_added_tokens_of_a_tokenizer_that_transformers_5_wrote(tmp_path: Path) -> None:
    """It names them in the tokenizer's file alone: a Mistral's calls were read in an older form."""
    backend = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    tokenizer.add_tokens(["[TOOL_CALLS]", "[ARGS]"])
    tokenizer.chat_template = "{{ tools }}[TOOL_CALLS]"
    tokenizer.save_pretrained(tmp_path)
    found = read_chat_template(tmp_path)
    assert found.added_tokens == {"[TOOL_CALLS]", "[ARGS]"}
    assert tool_support(*found).format == "mistral_args"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: "),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json: it is not a JSON object"),
        ({"tokenizer_config.json": "[" * 100_000}, "tokenizer_config.json: "),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja: "),
        ({"additional_chat_templates/rag.jinja": b"\xff"}, "rag.jinja: "),
        ({"tokenizer_config.json": {"chat_template": "{% broken"}}, "the chat template cannot be read"),
        ({"chat_template.jinja": f"{{{{ {'(' * 4000}1{')' * 4000} }}}}"}, "the chat template cannot be read"),
        ({"chat_template.jinja": "{% for a in b %}" * 30 + "{% endfor %}" * 30}, "the chat template cannot be read"),
    ],
)
def test_damage_is_named(tmp_path: Path, files: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_chat_template(checkpoint(tmp_path, files))


def write_gguf(path: Path, template: str | list[dict[str, str]]) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(["<s>", "a", "[ARGS]"])
    writer.add_token_types([CONTROL, NORMAL, USER_DEFINED])
    writer.add_bos_token_id(0)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "{{ bos_token }}a")
    assert shown(path) == shown(tmp_path) == "<s>a"
    assert read_chat_template(path).added_tokens == {"<s>", "[ARGS]"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    path = write_gguf(tmp_path / "b.gguf", named)
    assert (shown(path), shown(path, tools=True)) == ("a", "a")  # workers have the default one alone
    with pytest.raises(StartupError, match="2 GGUF files"):
        read_chat_template(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"b\.gguf: its header"):
        read_chat_template(path)
