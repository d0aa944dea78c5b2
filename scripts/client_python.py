"""The Python client's module of builders, one function for each processor of the catalogue."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from client_arguments import Argument, Described, Spelling, objects, processors

from adapters.catalog import Catalog

PYTHON = Spelling(
    text="str",
    integer="int",
    number="float",
    boolean="bool",
    null="None",
    anything="Any",
    sequence="Sequence[{}]",
    mapping="Mapping[str, {}]",
    literals=(", ", "Literal[{}]"),
)

HEAD = '''"""Builders of entries of a selection: a function for each processor of the worker's catalogue.

Written by ``scripts/generate_clients.py`` of dynamo-logits-worker; do not edit. An argument that is
not given, or equals its default, is not sent. The server checks the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

__all__ = [
{}]
'''

TAIL = '''

def _entry(name: str, needed: dict[str, Any], /, **others: tuple[Any, Any]) -> dict[str, Any]:
    """An entry with the needed arguments, and with the others that differ from their defaults."""
    args = dict(needed)
    for key, (value, default) in others.items():
        given = list(value) if isinstance(value, tuple) else value
        if type(given) is not type(default) or given != default:
            args[key] = given
    return {"name": name, "args": args}
'''


def python_module(catalog: Catalog) -> str:
    """The source of ``dynamo_logits_client.processors``, formatted."""
    found = list(processors(catalog))
    names = "".join(f'    "{name}",\n' for name in sorted(each.name for each in found))
    parts = [HEAD.format(names), *map(_typed_dict, objects(catalog)), *map(_builder, found), TAIL]
    return formatted("\n\n".join(parts), "processors.py")


def formatted(source: str, name: str) -> str:
    """The source as ``ruff format`` writes it."""
    command = [str(Path(sys.executable).with_name("ruff")), "format", "--stdin-filename", name, "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def _typed_dict(described: Described) -> str:
    """A `TypedDict`; its base has the keys that must be given, since Python 3.10 marks them so."""
    name = described.name
    needed = [each for each in described.arguments if each.required]
    others = [each for each in described.arguments if not each.required]
    lines = [f"class _{name}(TypedDict):", *(f"    {each.name}: {PYTHON.of(each.schema)}" for each in needed), "", ""]
    lines += [f"class {name}(_{name}, total=False):", *_docstring(described, "Attributes")]
    lines += ["", *(f"    {each.name}: {PYTHON.of(each.schema)}" for each in others)]
    return "\n".join(lines)


def _builder(described: Described) -> str:
    parameters = ", ".join(map(_parameter, described.arguments))
    needed = ", ".join(f'"{each.name}": {each.name}' for each in described.arguments if each.required)
    others = "".join(
        f", {each.name}=({each.name}, {each.default!r})" for each in described.arguments if not each.required
    )
    return "\n".join(
        [
            f"def {described.name}(*, {parameters}) -> dict[str, Any]:",
            *_docstring(described, "Args"),
            f'    return _entry("{described.name}", {{{needed}}}{others})',
        ]
    )


def _parameter(argument: Argument) -> str:
    kind = PYTHON.of(argument.schema)
    if argument.required:
        return f"{argument.name}: {kind}"
    default = tuple(argument.default) if isinstance(argument.default, list) else argument.default
    return f"{argument.name}: {kind} = {default!r}"


def _docstring(described: Described, section: str) -> Iterator[str]:
    """Lines of at most 100 characters."""
    yield from _wrapped([f'"""{described.summary}'], "    ")
    documented = [each for each in described.arguments if each.description]
    if documented:
        yield ""
        yield f"    {section}:"
        for argument in documented:
            yield from _wrapped([f"{argument.name}: {argument.description}"], "        ")
    yield '    """'


def _wrapped(paragraphs: Iterable[str], indent: str) -> Iterator[str]:
    for text in paragraphs:
        yield from textwrap.wrap(
            text,
            100,
            initial_indent=indent,
            subsequent_indent=indent + "    " * (len(indent) > 4),
            break_long_words=False,
            break_on_hyphens=False,
        )
