"""The catalogue: every processor that a request may name, and how a selection becomes a chain.

`catalog` has the entries (`entry`; those of third parties come by `loading`) and builds chains;
`selection` reads what a request selects, as bounded JSON data (`schema` is its JSON Schema);
`model` makes what all requests to a model share; `policy` is what the operator mandates, defaults
and forbids; `render` writes the catalogue as text.
"""

from adapters.catalog.catalog import Catalog, RuledOut
from adapters.catalog.entry import BUILT_IN, BuildFailed, Entry
from adapters.catalog.loading import CatalogError, is_offered, load_class
from adapters.catalog.model import model_context, precompute
from adapters.catalog.policy import FieldValue, ModelPolicy, Policy, PolicyError
from adapters.catalog.render import TABLE_BEGIN, TABLE_END, describe, render_entry, render_list, table, with_table
from adapters.catalog.schema import selection_schema
from adapters.catalog.selection import (
    ANNOTATION,
    MAX_BYTES,
    MAX_CHOICES,
    MAX_PROCESSORS,
    METADATA_KEY,
    NAME,
    SCOPES,
    Origin,
    Requested,
    Selection,
    SelectionError,
    from_channels,
    parse_selection,
    shown,
)

__all__ = [
    "ANNOTATION",
    "BUILT_IN",
    "MAX_BYTES",
    "MAX_CHOICES",
    "MAX_PROCESSORS",
    "METADATA_KEY",
    "NAME",
    "SCOPES",
    "TABLE_BEGIN",
    "TABLE_END",
    "BuildFailed",
    "Catalog",
    "CatalogError",
    "Entry",
    "FieldValue",
    "ModelPolicy",
    "Origin",
    "Policy",
    "PolicyError",
    "Requested",
    "RuledOut",
    "Selection",
    "SelectionError",
    "describe",
    "from_channels",
    "is_offered",
    "load_class",
    "model_context",
    "parse_selection",
    "precompute",
    "render_entry",
    "render_list",
    "selection_schema",
    "shown",
    "table",
    "with_table",
]
