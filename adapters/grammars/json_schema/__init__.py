"""JSON Schemas as grammars, exactly: every value of a schema, and nothing else."""

from adapters.grammars.json_schema.emission import MAX_WORK_OF_ALL, lark_grammar
from adapters.grammars.json_schema.lark_source import MAX_GRAMMAR
from adapters.grammars.json_schema.named_arguments import argument_kinds, arguments_grammar
from adapters.grammars.json_schema.patterns import limited
from adapters.grammars.json_schema.shapes import SchemaRefused, count_cases
from adapters.grammars.json_schema.terminals import literal

__all__ = [
    "MAX_GRAMMAR",
    "MAX_WORK_OF_ALL",
    "SchemaRefused",
    "argument_kinds",
    "arguments_grammar",
    "count_cases",
    "lark_grammar",
    "limited",
    "literal",
]
