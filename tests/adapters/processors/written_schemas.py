"""Schemas as they are sent and published, with values that they allow and values that they do not.

Written for these tests after the manner of their kinds: tools of agents, models of Pydantic and of
OpenAPI, configuration files, messages and records.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Example(NamedTuple):
    """A schema and values.

    Attributes:
        schema: The schema.
        valid: Values that it allows.
        invalid: Values that it does not allow.
        refused: The beginning of the reason, where it cannot be enforced.
    """

    schema: dict[str, Any]
    valid: list[Any]
    invalid: list[Any]
    refused: str = ""


DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"
DRAFT_2019, DRAFT_2020 = (f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12"))


def closed(properties: dict[str, Any], *optional: str, **more: Any) -> dict[str, Any]:
    """An object with these members, of which those are optional."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))

PET = {
    "$defs": {
        "Cat": closed({"pet_type": {"const": "cat", "type": "string"}, "lives": INTEGER}),
        "Dog": closed({"pet_type": {"const": "dog", "type": "string"}, "breed": {"anyOf": [STRING, {"type": "null"}]}}),
        "Lizard": closed({"pet_type": {"enum": ["reptile", "lizard"], "type": "string"}, "scales": BOOLEAN}),
    },
    **closed(
        {
            "pet": {
                "discriminator": {"mapping": {"cat": "#/$defs/Cat"}, "propertyName": "pet_type"},
                "oneOf": [{"$ref": f"#/$defs/{name}"} for name in ("Cat", "Dog", "Lizard")],
            },
            "n": INTEGER,
        }
    ),
}

SHAPE = {
    "oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square"}, {"$ref": "#/$defs/group"}],
    "$defs": {
        "circle": closed({"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}}),
        "square": closed({"kind": {"const": "square"}, "side": {"type": "number", "minimum": 0}}),
        "group": closed({"kind": {"const": "group"}, "items": {"type": "array", "items": {"$ref": "#"}}}),
    },
}

POINT = {"type": "array", "prefixItems": [NUMBER, NUMBER], "minItems": 2, "maxItems": 3, "items": NUMBER}


def geometry(name: str, coordinates: Any) -> dict[str, Any]:
    return closed({"type": {"const": name}, "coordinates": coordinates})


ANY_OF_THREE = [{"required": [name]} for name in ("email", "phone", "post")]

EXAMPLES: dict[str, Example] = {
    "weather tool": Example(
        closed(
            {
                "location": {"type": "string", "description": "City and country"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "unit",
            "days",
        ),
        [{"location": "Bogotá"}, {"location": "x", "unit": "celsius", "days": 14}],
        [{"location": "x", "days": 15}, {"unit": "celsius"}, {"location": "x", "unit": "kelvin"}, {"location": 1}],
    ),
    "discriminated union of pydantic": Example(
        PET,
        [{"pet": {"pet_type": "cat", "lives": 9}, "n": 1}, {"pet": {"pet_type": "dog", "breed": None}, "n": 0}],
        [{"pet": {"pet_type": "cat", "breed": None}, "n": 1}, {"pet": {"pet_type": "cow"}, "n": 1}, {"n": 1}],
    ),
    "recursive union": Example(
        SHAPE,
        [{"kind": "group", "items": [{"kind": "circle", "radius": 0.5}, {"kind": "group", "items": []}]}],
        [{"kind": "group", "items": [{"kind": "circle", "radius": 0}]}, {"kind": "circle", "side": 1}],
    ),
    "geometry": Example(
        {
            "$schema": DRAFT_2020,
            "oneOf": [
                geometry("Point", POINT),
                geometry("LineString", {"type": "array", "items": POINT, "minItems": 2}),
                geometry("Polygon", {"type": "array", "items": {"type": "array", "items": POINT, "minItems": 4}}),
            ],
        },
        [{"type": "Point", "coordinates": [1, 2.5]}, {"type": "LineString", "coordinates": [[0, 0], [1, 1, 5]]}],
        [{"type": "Point", "coordinates": [1]}, {"type": "LineString", "coordinates": [[0, 0]]}, {"type": "Point"}],
    ),
    "payment with dependencies": Example(
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {"name": STRING, "card": {"type": "string", "pattern": "^[0-9]{4}$"}, "address": STRING},
            "required": ["name"],
            "dependencies": {"card": ["address"]},
        },
        [{"name": "a"}, {"name": "a", "card": "1234", "address": "b"}, {"name": "a", "address": "b"}],
        [{"name": "a", "card": "1234"}, {"card": "1234", "address": "b"}, {"name": "a", "card": "1", "address": "b"}],
    ),
    "address by country": Example(
        {
            "type": "object",
            "properties": {"street": STRING, "country": {"default": "US", "enum": ["US", "CA", "NL"]}},
            "required": ["country"],
            "allOf": [
                {
                    "if": {"properties": {"country": {"const": country}}},
                    "then": {"properties": {"code": {"pattern": pattern}}, "required": ["code"]},
                }
                for country, pattern in (
                    ("US", "^[0-9]{5}$"),
                    ("CA", "^[A-Z][0-9][A-Z]$"),
                    ("NL", "^[0-9]{4} [A-Z]{2}$"),
                )
            ],
        },
        [{"country": "US", "code": "20500"}, {"country": "CA", "code": "K1M"}, {"country": "NL", "code": "1234 AB"}],
        [{"country": "US", "code": "K1M"}, {"country": "CA"}, {"country": "DE"}, {}],
    ),
    "rule with if on an absent member": Example(
        {
            "type": "object",
            "properties": {"kind": {"enum": ["email", "sms"]}, "to": STRING, "number": {"type": "integer"}},
            "if": {"properties": {"kind": {"const": "sms"}}, "required": ["kind"]},
            "then": {"required": ["number"]},
            "else": {"required": ["to"], "not": {"required": ["number"]}},
        },
        [{"kind": "sms", "number": 1}, {"kind": "email", "to": "x"}, {"to": "x"}],
        [{"kind": "sms", "to": "x"}, {"kind": "email", "to": "x", "number": 1}, {}],
    ),
    "one of three ways to write": Example(
        {"type": "object", "properties": dict.fromkeys(("email", "phone", "post"), STRING), "oneOf": ANY_OF_THREE},
        [{"email": "a"}, {"post": "b"}, {"phone": "1", "x": 1}],
        [{}, {"email": "a", "phone": "b"}, {"email": 1}],
    ),
    "at least one of three": Example(
        {"type": "object", "properties": dict.fromkeys(("email", "phone", "post"), STRING), "anyOf": ANY_OF_THREE},
        [{"email": "a"}, {"email": "a", "post": "b"}],
        [{}, {"x": 1}],
    ),
    "string or list of strings": Example(
        {"oneOf": [STRING, {"type": "array", "items": STRING, "minItems": 1}, {"type": "null"}]},
        ["a", ["a", "b"], None],
        [[], [1], {}, 1],
    ),
    "ids of 64 bits": Example(
        closed(
            {
                "id": {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
                "owner": {"enum": [1234567890123456789, 1234567890123456788]},
            }
        ),
        [{"id": 2**63 - 1, "owner": 1234567890123456789}],
        [{"id": 2**63, "owner": 1234567890123456789}, {"id": 0, "owner": 1234567890123456787}],
    ),
    "invoice": Example(
        closed(
            {
                "number": {"type": "string", "pattern": "^INV-[0-9]{6}$"},
                "issued": {"type": "string", "format": "date"},
                "lines": {
                    "type": "array",
                    "minItems": 1,
                    "items": closed(
                        {
                            "text": {"type": "string", "minLength": 1, "maxLength": 80},
                            "amount": {"type": "number", "multipleOf": 0.01, "minimum": 0},
                            "quantity": {"type": "integer", "exclusiveMinimum": 0},
                        }
                    ),
                },
                "currency": {"enum": ["EUR", "USD"]},
            }
        ),
        [
            {
                "number": "INV-000001",
                "issued": "2024-02-29",
                "lines": [{"text": "a", "amount": 1.25, "quantity": 1}],
                "currency": "EUR",
            }
        ],
        [
            {
                "number": "INV-000001",
                "issued": "2023-02-29",
                "lines": [{"text": "a", "amount": 1.25, "quantity": 1}],
                "currency": "EUR",
            },
            {"number": "INV-000001", "issued": "2023-02-28", "lines": [], "currency": "EUR"},
        ],
    ),
    "manifest of a package": Example(
        {
            "$schema": DRAFT_7,
            "definitions": {
                "dependency": {"type": "object", "additionalProperties": STRING},
                "person": {
                    "type": ["object", "string"],
                    "required": ["name"],
                    "properties": {"name": STRING, "url": {"type": "string", "format": "uri"}},
                },
            },
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 214, "pattern": "^(?:@[a-z0-9-]+/)?[a-z0-9-]+$"},
                "private": {"anyOf": [BOOLEAN, {"enum": ["false", "true"]}]},
                "author": {"$ref": "#/definitions/person"},
                "dependencies": {"$ref": "#/definitions/dependency"},
                "bin": {"type": ["string", "object"], "additionalProperties": STRING},
            },
            "patternProperties": {"^_": True},
            "additionalProperties": False,
            "anyOf": [{"not": {"required": ["private"]}}, {"required": ["name"]}],
        },
        [{"name": "@a/b", "dependencies": {"x": "1"}}, {"_x": 1, "author": "me", "bin": "x"}, {}],
        [{"private": True}, {"name": "A"}, {"x": 1}, {"dependencies": {"x": 1}}, {"author": {"url": "http://a"}}],
    ),
    "workflow": Example(
        {
            "$schema": DRAFT_7,
            "type": "object",
            "properties": {
                "name": STRING,
                "jobs": {
                    "type": "object",
                    "minProperties": 1,
                    "patternProperties": {
                        "^[_a-zA-Z][a-zA-Z0-9_-]*$": {
                            "oneOf": [
                                closed({"uses": STRING, "with": {"type": "object"}}, "with"),
                                closed(
                                    {
                                        "runs-on": {"type": "string"},
                                        "steps": {
                                            "type": "array",
                                            "items": {
                                                "type": "object",
                                                "properties": {"run": STRING, "uses": STRING, "id": STRING},
                                                "oneOf": [{"required": ["run"]}, {"required": ["uses"]}],
                                                "dependencies": {"with": ["uses"], "shell": ["run"]},
                                            },
                                        },
                                    }
                                ),
                            ]
                        }
                    },
                    "additionalProperties": False,
                },
            },
            "required": ["jobs"],
        },
        [{"jobs": {"a": {"runs-on": "x", "steps": [{"run": "b"}, {"uses": "c", "with": 1}]}, "b": {"uses": "x"}}}],
        [
            {"jobs": {}},
            {"jobs": {"a": {"runs-on": "x", "steps": [{"run": "b", "uses": "c"}]}}},
            {"jobs": {"a": {"runs-on": "x", "steps": [{"run": "b", "with": 1}]}}},
            {"jobs": {"1": {"uses": "x"}}},
        ],
    ),
    "service of a composition": Example(
        {
            "type": "object",
            "properties": {
                "ports": {
                    "type": "array",
                    "items": {
                        "oneOf": [
                            {"type": "number", "format": "ports"},
                            {"type": "string", "pattern": "^[0-9:]+$"},
                            closed({"target": INTEGER, "published": {"type": ["string", "integer"]}}, "published"),
                        ]
                    },
                },
                "environment": {
                    "oneOf": [
                        {
                            "type": "object",
                            "patternProperties": {".+": {"type": ["string", "number", "boolean", "null"]}},
                            "additionalProperties": False,
                        },
                        {"type": "array", "items": STRING},
                    ]
                },
            },
            "patternProperties": {"^x-": {}},
            "additionalProperties": False,
        },
        [{"ports": [80, "80:80", {"target": 1}], "environment": {"A": None}}, {"environment": ["A=b"], "x-a": {}}],
        [{"ports": ["a"]}, {"environment": {"A": []}}, {"ports": [{"published": 1}]}, {"y": 1}],
    ),
    "closed by unevaluatedProperties": Example(
        {
            "$schema": DRAFT_2019,
            "$defs": {"named": {"type": "object", "properties": {"name": STRING}, "required": ["name"]}},
            "allOf": [{"$ref": "#/$defs/named"}],
            "properties": {"size": INTEGER},
            "unevaluatedProperties": False,
        },
        [{"name": "a"}, {"size": 1, "name": "a"}],
        [{"name": "a", "x": 1}, {"size": 1}],
    ),
    "feature flags": Example(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z][a-z0-9_]{0,30}$"},
            "additionalProperties": {
                "type": "object",
                "properties": {"enabled": BOOLEAN, "share": {"type": "number", "minimum": 0, "maximum": 1}},
                "required": ["enabled"],
                "dependentRequired": {"share": ["enabled"]},
            },
        },
        [{"dark_mode": {"enabled": True, "share": 0.25}}, {}],
        [{"Dark": {"enabled": True}}, {"a": {}}, {"a": {"enabled": True, "share": 1.5}}],
    ),
    "draft 4 bounds": Example(
        {
            "$schema": DRAFT_4,
            "id": "http://example.org/thing",
            "type": "object",
            "properties": {
                "ratio": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 1},
                "next": {"$ref": "#"},
            },
            "required": ["ratio"],
        },
        [{"ratio": 1, "next": {"ratio": 0.5}}],
        [{"ratio": 0}, {"ratio": 1, "next": {}}],
    ),
    "roles once each": Example(
        closed({"roles": {"type": "array", "items": {"enum": ["r", "w", "x"]}, "uniqueItems": True, "minItems": 1}}),
        [{"roles": ["w", "r"]}, {"roles": ["x", "r", "w"]}],
        [{"roles": ["r", "r"]}, {"roles": []}],
    ),
    "names once each": Example(
        closed({"names": {"type": "array", "items": STRING, "uniqueItems": True}}),
        [],
        [],
        "#/properties/names: uniqueItems can only be enforced",
    ),
    "file elsewhere": Example({"$ref": "common.json#/definitions/name"}, [], [], '#/$ref: there is no "common.json'),
    "format of a vendor": Example(
        closed({"role": {"type": "string", "format": "role-name"}}),
        [],
        [],
        '#/properties/role/format: unknown format "role-name"',
    ),
    "not the reserved names": Example(
        closed({"user": {"type": "string", "pattern": "^[a-z]{2,8}$", "not": {"enum": ["admin", "root"]}}}),
        [{"user": "ann"}, {"user": "rootx"}],
        [{"user": "root"}, {"user": "admin"}, {"user": "a"}],
    ),
    "tags without a prefix": Example(
        {
            "type": "object",
            "patternProperties": {"^(?!aws:)[a-zA-Z:/_-]{1,16}$": {"type": "string", "maxLength": 8}},
            "additionalProperties": False,
        },
        [{"team": "a"}, {"awsx": ""}],
        [{"aws:team": "a"}, {"": "a"}, {"team": "123456789"}],
    ),
    "password": Example(
        {"type": "string", "pattern": "^(?=.*[a-z])(?=.*[0-9])[a-z0-9]{4,8}$"},
        ["abc1", "1zzzzzzz"],
        ["abcd", "1234", "a1", "ABC1"],
    ),
    "exclusive limits": Example(
        {
            "type": "object",
            "properties": {"min": NUMBER, "max": NUMBER, "exact": NUMBER},
            "oneOf": [
                {"required": ["exact"], "not": {"anyOf": [{"required": ["min"]}, {"required": ["max"]}]}},
                {"anyOf": [{"required": ["min"]}, {"required": ["max"]}], "not": {"required": ["exact"]}},
            ],
            "additionalProperties": False,
        },
        [{"exact": 1}, {"min": 0, "max": 1}, {"max": 1}],
        [{}, {"exact": 1, "min": 0}],
    ),
    "list with a head": Example(
        {
            "$schema": DRAFT_7,
            "type": "array",
            "items": [{"const": "v1"}, INTEGER],
            "additionalItems": STRING,
            "minItems": 2,
        },
        [["v1", 1], ["v1", 2, "a", "b"]],
        [["v1"], ["v2", 1], ["v1", 1, 2]],
    ),
    "expression": Example(
        {
            "$defs": {
                "value": {"oneOf": [NUMBER, {"type": "string"}, {"$ref": "#/$defs/call"}]},
                "call": closed(
                    {"op": {"enum": ["+", "-"]}, "args": {"type": "array", "items": {"$ref": "#/$defs/value"}}}
                ),
            },
            "$ref": "#/$defs/value",
        },
        [1.5, "x", {"op": "+", "args": [1, {"op": "-", "args": ["y"]}]}],
        [{"op": "*", "args": []}, None, {"op": "+", "args": [True]}],
    ),
    "resource of an operator": Example(
        {
            "type": "object",
            "required": ["spec"],
            "properties": {
                "spec": {
                    "type": "object",
                    "properties": {
                        "replicas": {"type": "integer", "format": "int32", "minimum": 0},
                        "port": {"x-kubernetes-int-or-string": True, "anyOf": [INTEGER, STRING]},
                        "selector": {"type": "object", "additionalProperties": STRING, "maxProperties": 3},
                    },
                    "not": {"required": ["port", "selector"]},
                }
            },
        },
        [{"spec": {"replicas": 1, "port": "http"}}, {"spec": {"selector": {"a": "b"}}}],
        [{"spec": {"port": 1, "selector": {}}}, {"spec": {"replicas": -1}}, {}],
    ),
    "log entry with a leap day": Example(
        closed(
            {
                "at": {"type": "string", "format": "date-time"},
                "from": {"type": "string", "format": "ipv4"},
                "id": {"type": "string", "format": "uuid"},
                "level": {"const": "warn"},
            },
            "from",
            "id",
        ),
        [{"at": "2024-02-29T12:00:00Z", "from": "127.0.0.1", "level": "warn"}],
        [
            {"at": "2023-02-29T12:00:00Z", "level": "warn"},
            {"at": "2024-02-28T12:00:00Z", "from": "1.2.3", "level": "warn"},
        ],
    ),
    "amount that is a decimal": Example(
        closed({"amount": {"anyOf": [NUMBER, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}}),
        [{"amount": "12.50"}, {"amount": "-.5"}, {"amount": 3}],
        [{"amount": ""}, {"amount": "-."}, {"amount": "1e5"}, {"amount": None}],
    ),
}
