"""YAML of operators: its safe types, and each key once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


def read_yaml(text: str) -> object:
    """The data in a text; a key that occurs twice is an error, not the last one's value.

    Raises:
        yaml.YAMLError: it is no YAML, a key occurs twice, it is nested too deep, or it has a value
            that Python refuses, as a date that no calendar has, or an integer of too many digits.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deep") from None
    except (ValueError, ArithmeticError, LookupError, AttributeError) as error:  # the library's own, of values
        raise yaml.YAMLError(f"a value cannot be read: {error}") from None


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the base class refuses it
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
