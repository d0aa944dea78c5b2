"""Sections of the JavaScript client: the arguments of each processor, and their types."""

from __future__ import annotations

import json
from collections.abc import Iterator

from client_arguments import Argument, Described, Spelling, objects, processors

from adapters.catalog import Catalog
from adapters.catalog.render import with_section

BEGIN = "// Section of the catalogue's processors, written by scripts/generate_clients.py; do not edit."
END = "// End of the section."

TYPESCRIPT = Spelling(
    text="string",
    integer="number",
    number="number",
    boolean="boolean",
    null="null",
    anything="unknown",
    sequence="ReadonlyArray<{}>",
    mapping="Readonly<Record<string, {}>>",
    literals=(" | ", "{}"),
)


def with_processors(text: str, section: str) -> str:
    """A file with its section of processors written anew. Raises `ValueError` without markers."""
    return with_section(text, f"\n{section}", BEGIN, END)


def javascript_section(catalog: Catalog, version: str) -> str:
    """Names of the arguments of each processor, those that must be given first."""
    lines = [f"export const VERSION = {json.dumps(version)};", "const ARGUMENTS = {"]
    for each in processors(catalog):
        needed = [one.name for one in each.arguments if one.required]
        others = [one.name for one in each.arguments if not one.required]
        lines.append(f"  {each.name}: [{json.dumps(needed)}, {json.dumps(others)}],")
    return "\n".join([*lines, "};", ""])


def typescript_section(catalog: Catalog) -> str:
    """Interfaces of the arguments, and the type of the object of builders."""
    found = list(processors(catalog))
    lines: list[str] = []
    for described in objects(catalog):
        lines += _interface(described.name, described)
    for described in found:
        lines += _interface(_arguments_name(described), described)
    lines += [
        "/** Builders of entries of a selection, by the names of the catalogue. */",
        "export interface Processors {",
    ]
    for described in found:
        optional = "" if any(each.required for each in described.arguments) else "?"
        lines += [f"  /** {_plain(described.summary)} */"]
        lines += [f"  {described.name}(args{optional}: {_arguments_name(described)}): Processor;"]
    return "\n".join([*lines, "}", "export declare const processors: Readonly<Processors>;", ""])


def _arguments_name(described: Described) -> str:
    return "".join(part.capitalize() for part in described.name.split("_")) + "Arguments"


def _interface(name: str, described: Described) -> Iterator[str]:
    yield f"/** {_plain(described.summary)} */"
    yield f"export interface {name} {{"
    for argument in described.arguments:
        yield f"  /** {_documented(argument)} */"
        yield f"  {argument.name}{'' if argument.required else '?'}: {TYPESCRIPT.of(argument.schema)};"
    yield "}"
    yield ""


def _documented(argument: Argument) -> str:
    default = "" if argument.required or argument.default is None else f" Default {json.dumps(argument.default)}."
    return _plain((argument.description + default).strip() or argument.name)


def _plain(text: str) -> str:
    """Text of a comment, which ``*/`` would end."""
    return text.replace("``", "`").replace("*/", "*\\/")
