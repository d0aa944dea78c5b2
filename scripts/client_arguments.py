"""Arguments of the catalogue's processors, as the generators of the client packages need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from adapters.catalog import Catalog
from adapters.catalog.render import describe

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a processor, or one key of an object in it.

    Attributes:
        name: Name that is sent.
        schema: JSON Schema of its value.
        required: Whether it must be given.
        default: Value if it is not given; None where there is none.
        description: A sentence about it, with its bounds.
    """

    name: str
    schema: Schema
    required: bool
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class Described:
    """A processor with its arguments, or the kind of an object in them."""

    name: str
    summary: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Spelling:
    """The names of JSON's types in a language; ``{}`` stands for the type within.

    Attributes:
        literals: Separator of texts of which a value is one, and the whole of them.
    """

    text: str
    integer: str
    number: str
    boolean: str
    null: str
    anything: str
    sequence: str
    mapping: str
    literals: tuple[str, str]

    def of(self, schema: Schema) -> str:
        """The type of the values that a JSON Schema of an argument describes."""
        if "$ref" in schema:
            return class_name(schema["$ref"])
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            separator, whole = self.literals
            return whole.format(separator.join(f'"{value}"' for value in values))
        if "anyOf" in schema or "oneOf" in schema:
            return " | ".join(dict.fromkeys(self.of(each) for each in schema.get("anyOf") or schema["oneOf"]))
        match schema.get("type"):
            case "array":
                return self.sequence.format(self.of(schema["items"]))
            case "object":
                within = next(iter(schema.get("patternProperties", {}).values()), None)
                return self.mapping.format(self.anything if within is None else self.of(within))
            case "string":
                return self.text
            case "integer":
                return self.integer
            case "number":
                return self.number
            case "boolean":
                return self.boolean
            case "null":
                return self.null
        raise ValueError(f"no type is known for {schema!r:.200}")


def class_name(reference: str) -> str:
    """The name of a definition that ``$ref`` leads to."""
    return reference.rpartition("/")[2].rpartition(".")[2]


def processors(catalog: Catalog) -> Iterator[Described]:
    """Every processor, in the catalogue's order."""
    for entry in catalog.entries:
        schema = entry.args_schema()
        yield Described(entry.name, entry.summary, _arguments(schema, schema.get("$defs", {})))


def objects(catalog: Catalog) -> list[Described]:
    """Every kind of object in arguments, each after those that it has in it.

    Raises:
        ValueError: two processors have objects of one name that are not the same.
    """
    found: dict[str, Schema] = {}
    made: dict[str, Described] = {}
    for entry in catalog.entries:
        definitions = entry.args_schema().get("$defs", {})
        for key, definition in definitions.items():
            name = class_name(key)
            if found.setdefault(name, definition) != definition:
                raise ValueError(f"{entry.name}: there is another object of the name {name}")
            made[name] = Described(name, definition["description"], _arguments(definition, definitions))
    return list(made.values())


def _arguments(schema: Schema, definitions: Mapping[str, Schema]) -> tuple[Argument, ...]:
    required = schema.get("required", ())
    names: dict[str, Schema] = {key: {"const": class_name(key)} for key in definitions}  # objects are described once
    return tuple(
        Argument(name, field, name in required, field.get("default"), _sentence(field, describe(field, names)))
        for name, field in schema["properties"].items()
    )


def _sentence(field: Schema, bounds: str) -> str:
    described = field.get("description", "").rstrip(".")
    if "enum" in field or "const" in field or field.get("type") == "boolean":  # the type says it
        return f"{described}." if described else ""
    return f"{described} ({bounds})." if described else f"{bounds[:1].upper()}{bounds[1:]}."
