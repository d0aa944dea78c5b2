"""The catalogue as text: a line or a section per processor; the table of ``docs/processors.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from adapters.catalog.catalog import Catalog
from adapters.catalog.entry import Entry

TABLE_BEGIN = "<!-- table of processors: written by `python -m adapters table`, checked by a test -->"
TABLE_END = "<!-- end of the table -->"

_PLURALS = {"integer": "integers", "number": "numbers", "text": "texts", "list": "lists", "object": "objects"}


def render_list(catalog: Catalog) -> str:
    """One line for each processor: name, stage, what it reads, summary."""
    rows = [(e.name, e.processor.stage.name.lower(), e.processor.reads.value, e.summary) for e in catalog.entries]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return "".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) + "\n" for row in rows)


def render_entry(entry: Entry) -> str:
    """All there is to know about one processor."""
    processor = entry.processor
    facts = {
        "version": str(processor.version),
        "kind": entry.kind,
        "stage": processor.stage.name.lower(),
        "reads": processor.reads.value + (", and the logits" if processor.observes_logits else ""),
        "source": entry.source,
    }
    lines = [entry.name, f"  {entry.summary}", ""]
    lines += [f"  {name:<8} {value}" for name, value in facts.items()]
    lines += ["", "arguments"]
    for name, kind, default, description in arguments(entry):
        lines.append(f"  {name}: {kind}{default}")
        if description:
            lines.append(f"      {description}")
    return "\n".join(lines) + "\n"


def table(catalog: Catalog) -> str:
    """The table of processors in Markdown."""
    rows = ["| name | arguments | stage | reads | what it does |", "| --- | --- | --- | --- | --- |"]
    for entry in catalog.entries:
        args = "<br>".join(f"`{name}`: {kind}{default}" for name, kind, default, _ in arguments(entry, scope=False))
        cells = [
            f"`{entry.name}`",
            args,
            entry.processor.stage.name.lower(),
            entry.processor.reads.value,
            entry.summary,
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def with_table(page: str, catalog: Catalog) -> str:
    """``page`` with its table of processors written anew. Raises `ValueError` as `with_section`."""
    return with_section(page, f"\n\n{table(catalog)}\n", TABLE_BEGIN, TABLE_END)


def with_section(text: str, section: str, begin: str, end: str) -> str:
    """``text`` with another section between two markers, of which it has the first ones.

    Raises:
        ValueError: it lacks one of the markers.
    """
    head, first, rest = text.partition(begin)
    _, last, tail = rest.partition(end)
    if not first or not last:
        raise ValueError(f"expected the lines {begin!r} and {end!r}")
    return f"{head}{begin}{section}{end}{tail}"


def arguments(entry: Entry, *, scope: bool = True) -> list[tuple[str, str, str, str]]:
    """Name, type with range, default and description of each argument; ``scope`` last."""
    schema = entry.args_schema()
    definitions, required = schema.get("$defs", {}), schema.get("required", ())
    found = []
    for name, field in schema["properties"].items():
        if name == "scope" and not scope:
            continue
        default = "" if name in required or field.get("default") is None else f", default {_value(field['default'])}"
        if name not in required and field.get("default") is None:
            default = ", optional"
        found.append((name, describe(field, definitions), default, field.get("description", "")))
    return found


def describe(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON Schema of an argument in a few words, ranges included."""
    if "$ref" in schema:
        return describe(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "enum" in schema or "const" in schema:
        return " or ".join(_value(value) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema or "oneOf" in schema:
        options = schema.get("anyOf") or schema["oneOf"]
        return " or ".join(dict.fromkeys(describe(x, definitions) for x in options if x.get("type") != "null"))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_count(schema, 'Items')}{_plural(schema.get('items', {}), definitions)}"
    if kind == "object":
        return _describe_object(schema, definitions)
    if kind == "string":
        pattern = f" like {schema['pattern']}" if "pattern" in schema else ""
        return f"text{pattern}" + (f" of {_count(schema, 'Length')}characters" if _count(schema, "Length") else "")
    if kind in ("integer", "number"):
        return f"{kind}{_range(schema)}"
    return "true or false" if kind == "boolean" else "any JSON"


def _describe_object(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "properties" in schema:
        fields = (f"{name}: {describe(field, definitions)}" for name, field in schema["properties"].items())
        return "{" + "; ".join(fields) + "}"
    values = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    if isinstance(values[0], dict) and values[0]:
        return f"object of {_count(schema, 'Properties')}{_plural(values[0], definitions)}"
    return "object"


def _plural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    one = describe(schema, definitions)
    noun = one.partition(" ")[0]
    return _PLURALS.get(noun, noun) + one[len(noun) :]


def _count(schema: Mapping[str, Any], what: str) -> str:
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if high is None:
        return f"at least {low} " if low else ""
    return f"{low} to {high} " if low != high else f"{low} "


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    parts: Sequence[tuple[str, Any]] = (("≥", low), (">", above), ("≤", high), ("<", below))
    if low is not None and high is not None:
        return f" {_value(low)} to {_value(high)}"
    shown = [f"{sign} {_value(value)}" for sign, value in parts if value is not None]
    return f" {' and '.join(shown)}" if shown else ""


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
