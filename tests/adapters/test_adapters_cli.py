from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from adapters.catalog import TABLE_BEGIN, TABLE_END, Catalog, describe, loading, selection_schema, table, with_table
from adapters.command import main
from adapters.standard_output import write

LOUD = ["--logits-processor", "acme/loud=third_party:Loud"]


def test_list_has_a_line_for_each_processor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *LOUD]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*Catalog.default().names, "acme/loud"]
    assert lines[-1].split(maxsplit=3) == ["acme/loud", "bias", "nothing", "Raises the logit of one token."]


CHECK = ["check", "adapters.processors.masks:BannedTokens", "--example", '{"token_ids": [1]}', "--only", "declares"]


@pytest.mark.parametrize("command", [["list"], ["schema"], CHECK])  # less and more than a pipe holds
def test_the_status_is_the_commands_where_nobody_reads(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        for stdout in (broken, None):  # closed by its reader, or by who started the command
            monkeypatch.setattr(sys, "stdout", stdout)
            assert main(command) == 0
        monkeypatch.undo()


def test_detection_needs_no_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "FILE").write_text("[1, 2, 3]")
    (tmp_path / "KEY").write_text("7" * 32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["detect", "FILE", "--key-file", "KEY"]) == 0


@pytest.mark.parametrize("command", [["list"], ["schema"], CHECK, ["check", "--list"]])
def test_a_full_disk_is_no_failed_check(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(command) == 2
        monkeypatch.undo()
    assert capsys.readouterr().err == "[Errno 28] No space left on device\n"


def test_an_encoding_without_a_character_has_its_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", bare)
    write("\u00fc\n")
    assert bare.buffer.getvalue() == b"\\xfc\n"


def test_a_name_of_no_letters_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["list", "--allow-logits-processors", "a,,b"])
    assert "--allow-logits-processors: expected a list separated by commas" in capsys.readouterr().err


def test_show_tells_arguments_with_their_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "acme/loud", *LOUD]) == 0
    page = capsys.readouterr().out
    for line in ("  kind     steering", "  stage    bias", "  reads    nothing", "  token_id: integer 0 to 100"):
        assert line in page.splitlines()
    assert "source   --logits-processor acme/loud=third_party:Loud" in page
    assert "scope: all or thinking or answer, default all" in page


def test_every_processor_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for name in Catalog.default().names:
        assert main(["show", name]) == 0
        assert capsys.readouterr().out.startswith(f"{name}\n")


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == selection_schema(Catalog.default())
    assert main(["schema", "top_k"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["k"]["maximum"] == 2**31 - 1


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["show", "topk"], 'unknown logits processor "topk"; did you mean top_k'),
        (["list", "--logits-processor", "x"], "expected NAME=module:Class"),
        (["list", "--logits-processor", "acme/loud=third_party:Loud, y"], "processor y: expected NAME=module:Class"),
        (["list", "--allow-logits-processors", "missing, too"], "offers the logits processor missing, too"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert problem in err
    assert len(err.splitlines()) == 1


def test_one_that_is_installed_but_not_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = EntryPoint("acme/loud", "third_party:Loud", loading.GROUP)
    monkeypatch.setattr(loading, "entry_points", lambda group: EntryPoints([point]))
    for command in ("show", "schema"):
        assert main([command, "acme/loud"]) == 2
        told = "acme/loud is installed, but not allowed: give --allow-logits-processors acme/loud\n"
        assert capsys.readouterr().err == told
        assert main([command, "acme/loud", "--allow-logits-processors", "acme/loud"]) == 0
        capsys.readouterr()


def test_table_is_written_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{TABLE_BEGIN}\nold\n{TABLE_END}\nafter\n")
    assert main(["table", str(page)]) == 0
    text = page.read_text()
    assert text == f"before\n{TABLE_BEGIN}\n\n{table(Catalog.default())}\n{TABLE_END}\nafter\n"
    assert main(["table", str(page)]) == 0
    assert page.read_text() == text
    page.write_text("no markers")
    assert main(["table", str(page)]) == 2
    assert main(["table", str(tmp_path / "none.md")]) == 2


def test_the_module_runs() -> None:
    command = [sys.executable, "-m", "adapters", "show", "top_k"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("top_k\n")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 5}, "integer 0 to 5"),
        ({"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.5}, "number > 0 and ≤ 1.5"),
        ({"type": "number"}, "number"),
        ({"type": "string", "minLength": 1, "maxLength": 9}, "text of 1 to 9 characters"),
        ({"type": "array", "maxItems": 4, "items": {"type": "integer", "minimum": 0}}, "list of 0 to 4 integers ≥ 0"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text"),
        ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "text or true or false"),
        ({"enum": ["a", "b"]}, "a or b"),
        ({"$ref": "#/$defs/P"}, "{text: text; n: integer}"),
        ({"type": "array", "items": {"$ref": "#/$defs/P"}}, "list of {text: text; n: integer}"),
        (
            {"type": "object", "maxProperties": 3, "additionalProperties": {"type": "number"}},
            "object of 0 to 3 numbers",
        ),
        ({"type": "object", "patternProperties": {"^a$": {"type": "integer"}}}, "object of integers"),
        ({"type": "array", "items": {"type": "array", "items": {"enum": [1]}}}, "list of lists of 1"),
        ({"type": "object"}, "object"),
        ({}, "any JSON"),
    ],
)
def test_schemas_in_a_few_words(schema: dict[str, object], text: str) -> None:
    definitions = {"P": {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}}
    assert describe(schema, definitions) == text


def test_the_documentation_has_the_catalogues_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "processors.md").read_text(encoding="utf-8")
    assert page == with_table(page, Catalog.default()), "run: python -m adapters table docs/processors.md"
