"""What a docstring says of arguments is said of those that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from document_pages import ROOT

_ARGS = re.compile(r"^Args:\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\S[\w, *`]*):", re.MULTILINE)
_AS_ELSEWHERE = re.compile(r"arguments as `")
"""Names another function that the rest of the arguments are explained at."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def described(node: Function | ast.ClassDef) -> list[str]:
    """The arguments that the docstring of a function or class has entries of."""
    found = _ARGS.search(ast.get_docstring(node) or "")
    entries = _ENTRY.findall(found[1]) if found else []
    return [name.strip(" `*") for entry in entries for name in entry.split(",")]


def taken(function: Function) -> list[str]:
    """The arguments of a function, in its order."""
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    names = [each.arg for each in every if each is not None]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for folder in ("worker", "adapters", "clients", "examples", "launch", "scripts", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                yield str(path.relative_to(ROOT)), node


def test_described_arguments_are_those_of_the_signature() -> None:
    wrong: list[tuple[str, str, object]] = []
    for path, node in nodes():
        if isinstance(node, ast.ClassDef) and (told := described(node)):
            made = [each for each in node.body if isinstance(each, Function) and each.name == "__init__"]
            fields = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]  # type: ignore[union-attr]
            wrong += [(path, node.name, name) for name in told if name not in (taken(made[0]) if made else fields)]
        elif isinstance(node, Function) and (told := described(node)):
            every = taken(node)
            if node.name.startswith("_") or _AS_ELSEWHERE.search(ast.get_docstring(node) or ""):
                every = [name for name in every if name in told]
            wrong += [(path, node.name, told)] if told != every else []
    assert wrong == []
