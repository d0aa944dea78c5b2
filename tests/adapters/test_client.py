from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from adapters import client
from adapters.catalog import Catalog, Requested, from_channels, parse_selection, selection
from adapters.client import from_openai_logit_bias, logits_processors, processor


def test_the_annotation_is_what_the_worker_reads() -> None:
    body = logits_processors(
        processor("top_k", k=3),
        processor("choice", choices=["é", "\N{GRINNING FACE}"], scope="answer"),
        receipt="debug",
    )
    (annotation,) = body["nvext"]["annotations"]
    assert annotation.isascii()
    parsed = from_channels([annotation])
    assert parsed is not None
    assert parsed.receipt == "debug"
    assert parsed.processors == (
        Requested("top_k", {"k": 3}, "all", "processors[0]"),
        Requested("choice", {"choices": ["é", "\N{GRINNING FACE}"]}, "answer", "processors[1]"),
    )
    assert body["nvext"]["extra_fields"] == ["engine_data"]


def test_the_header_is_what_the_worker_reads() -> None:
    text = client.selection(processor("top_k", k=3))
    assert from_channels([], {client.HEADER.removeprefix("x-dynamo-meta-"): text}) == parse_selection(text)
    assert client.ANNOTATION == selection.ANNOTATION


def test_the_deadline() -> None:
    assert parse_selection(client.selection(deadline=1790000000.5)).deadline == 1790000000.5
    assert parse_selection(client.selection()).deadline is None
    body = logits_processors(deadline=1790000000)
    assert parse_selection(body["nvext"]["annotations"][0].removeprefix(client.ANNOTATION)).deadline == 1790000000


def test_other_fields_of_nvext_are_kept() -> None:
    nvext = {"annotations": ["mine"], "extra_fields": ["worker_id", "engine_data"], "max_thinking_tokens": 5}
    body = logits_processors(processor("top_k", k=3), receipt=True, nvext=nvext)
    assert body["nvext"]["annotations"][0] == "mine"
    assert body["nvext"]["extra_fields"] == ["worker_id", "engine_data"]
    assert body["nvext"]["max_thinking_tokens"] == 5
    assert nvext["annotations"] == ["mine"]
    assert "extra_fields" not in logits_processors(processor("top_k", k=3))["nvext"]


def test_openai_logit_bias_becomes_a_processor() -> None:
    for bias in ({"7": 5, "9": -100}, {7: 5, 9: -100}):
        assert from_openai_logit_bias(bias) == processor("logit_bias", bias={"7": 5, "9": -100})
    assert from_openai_logit_bias({"007": 1, "00": 2}) == processor("logit_bias", bias={"7": 1, "0": 2})
    long = "9" * 5000  # more digits than Python reads as a number: whoever knows the vocabulary refuses it
    assert from_openai_logit_bias({long: 1}) == processor("logit_bias", bias={long: 1})


@pytest.mark.parametrize(
    "bias", [{"a": 1}, {"-1": 1}, {"1.0": 1}, {"²": 1}, {"1": 101}, {"1": True}, {"1": float("nan")}]
)
def test_logit_bias_that_openai_would_refuse(bias: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        from_openai_logit_bias(bias)


def test_only_json_data_is_sent() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        logits_processors(processor("top_p", p=float("nan")))
    with pytest.raises(TypeError):
        logits_processors(processor("top_p", p={1}))


def test_the_file_may_be_copied() -> None:
    tree = ast.parse(Path(client.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert modules <= sys.stdlib_module_names | {"collections.abc"}


def test_every_processor_of_the_example_is_in_the_catalogue() -> None:
    example = Path(client.__file__).parents[1] / "examples" / "logits_processors_client.py"
    calls = [node for node in ast.walk(ast.parse(example.read_text())) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "processor"]
    assert named
    for call in named:
        args = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        args.pop("scope", None)
        requested = Requested(ast.literal_eval(call.args[0]), args, path="example")  # type: ignore[arg-type]
        Catalog.default().find(requested).parse_args(requested)


TOOLS = [
    {"type": "function", "function": {"name": "one", "description": "One.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "two"}},
]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", {"choice": "auto"}),
        ("required", {"choice": "required"}),
        ("none", {"choice": "none"}),
        ({"type": "function", "function": {"name": "two"}}, {"choice": "required", "tool": "two"}),
    ],
)
def test_openai_tools_become_a_processor_of_the_catalogue(choice, expected) -> None:
    made = client.from_openai_tools(TOOLS, choice, format="hermes", parallel_tool_calls=False, scope="answer")
    (requested,) = parse_selection(client.selection(made)).processors
    args = Catalog.default().find(requested).parse_args(requested)
    assert requested.scope == "answer"
    assert [tool.name for tool in args.tools] == ["one", "two"]  # type: ignore[attr-defined]
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.parallel is False  # type: ignore[attr-defined]
    assert args.tools[1].parameters == {"type": "object", "properties": {}, "additionalProperties": False}  # type: ignore[attr-defined]


def test_what_is_no_tool_is_refused() -> None:
    with pytest.raises(ValueError, match="tool_choice: expected none"):
        client.from_openai_tools(TOOLS, "any", format="hermes")
    with pytest.raises(ValueError, match="expected a function with a name"):
        client.from_openai_tools([{"type": "retrieval"}], format="hermes")


@pytest.mark.parametrize(
    ("prompt", "sent", "written"),
    [
        ('The link is <a href="http:', "The link is <a", ' href="http:'),
        ("I am inter", "I am", " inter"),
        ("The answer is: ", "The answer is:", " "),
        ("One\n\n", "One", "\n\n"),
        ("a " + "x" * 100, "a " + "x" * 36, "x" * 64),
        ("\u4f60\u597d \u4e16", "\u4f60\u597d", " \u4e16"),
    ],
)
def test_token_healing_takes_the_last_word_off_a_prompt(prompt, sent, written) -> None:
    head, entry = client.healed(prompt)
    assert (head, entry["args"]) == (sent, {"text": written, "heal": True})
    assert head + written == prompt
    (requested,) = parse_selection(client.selection(entry)).processors
    Catalog.default().find(requested).parse_args(requested)


@pytest.mark.parametrize("prompt", ["", "word", " ", "\n\n"])
def test_token_healing_needs_a_prompt_that_is_left(prompt) -> None:
    with pytest.raises(ValueError, match="more than one word"):
        client.healed(prompt)


CLIENT = """
import sys

sys.path.insert(0, sys.argv[1])
from adapters.client import logits_processors, processor

body = logits_processors(processor("min_tokens", n=8), receipt=True)
assert body["nvext"]["annotations"], body
alien = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"adapters", "__main__"}
assert not alien, alien
"""


def test_a_bare_python_imports_it() -> None:
    """One that has the checkout, and no package."""
    command = [sys._base_executable, "-I", "-S", "-c", CLIENT, str(Path(client.__file__).parents[1])]  # type: ignore[attr-defined]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_offers_its_names_all_the_same() -> None:
    import adapters

    assert set(adapters.__all__) <= set(dir(adapters))
    assert all(callable(getattr(adapters, name)) for name in adapters.__all__)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        adapters.missing  # noqa: B018
