"""Finds docstrings that open with a fragment: a line must say what a thing is, noun or verb first.

    .venv/bin/python scripts/check_docstrings.py worker adapters

Looks at the first word of each docstring, also of those below an attribute, of each ``name: text``
line of the sections ``Args`` and ``Attributes``, and of the sections ``Returns`` and ``Yields``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FRAGMENT = re.compile(
    r"\s*(Of|What|As|Its|Their|Which|Who|Whose|Where|When|Why|How|Those|That|These|It|They|By|For|From|In|On"
    r"|At|With|Without|Likewise|Also|Under|Behind|Beside|To|Than|Not|Nothing|Nobody|Somebody)\b"
)
"""A first word that leans on something the reader has not read."""

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note|Notes):$")
_ENTRY = re.compile(r"^ {4}\*{0,2}([\w, *`.]+): +(\S+)")
_DESCRIBED = ("Args", "Attributes")
_GIVEN = ("Returns", "Yields")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of attributes too."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for previous, statement in zip([None, *node.body], node.body, strict=False):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if previous is None or isinstance(
                    previous, ast.Assign | ast.AnnAssign
                ):
                    yield statement.lineno, text


def fragments(text: str) -> Iterator[tuple[int, str]]:
    """Offset in lines, and beginning, of each fragment of a docstring."""
    lines = text.splitlines()
    if lines and FRAGMENT.match(lines[0]):
        yield 0, lines[0].strip()
    indent = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    section = None
    for offset, raw in enumerate(lines[1:], 1):
        line = raw[indent:]
        if found := _SECTION.match(line):
            section = found[1]
        elif line and not line.startswith(" "):
            section = None
        else:
            entry = _ENTRY.match(line) if section in _DESCRIBED else None
            is_first = section in _GIVEN and lines[offset - 1].strip() == f"{section}:"
            if FRAGMENT.match(entry[2] if entry else line if is_first else ""):
                yield offset, line.strip()


def main(roots: list[str]) -> int:
    """Print each fragment below `roots`; returns 1 if there are any."""
    paths = sorted(
        path for root in roots for path in ([Path(root)] if root.endswith(".py") else Path(root).rglob("*.py"))
    )
    found = [
        f"{path}:{line + offset}: {text[:90]}"
        for path in paths
        for line, docstring in docstrings(ast.parse(path.read_text()))
        for offset, text in fragments(docstring)
    ]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
