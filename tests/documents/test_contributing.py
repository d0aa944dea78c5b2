"""CONTRIBUTING.md: test files lie in the folders that it lists, and names of tests are short."""

from __future__ import annotations

import ast
import re

from document_pages import ROOT, text_of

FILES = sorted((ROOT / "tests").rglob("test_*.py"))
MAX_NAME = 60


def test_test_files_lie_in_the_listed_folders() -> None:
    listed = {
        folder
        for row in re.findall(r"^\| (`tests/.*?) \|", text_of("CONTRIBUTING.md"), re.MULTILINE)
        for folder in re.findall(r"`(tests/\w+)/`", row)
    }
    used = {"/".join(file.relative_to(ROOT).parts[:2]) for file in FILES}
    assert used == listed


def test_names_of_tests_have_at_most_60_characters() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.name} ({len(node.name)})"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > MAX_NAME
    ]
    assert not long, "\n".join(long)
