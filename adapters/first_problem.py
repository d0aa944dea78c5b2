"""The first problem that pydantic finds in the data of a file, in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pydantic import ValidationError

_UNION_MEMBERS = frozenset({"int", "float", "bool", "str", "constrained-int", "constrained-float"})


def first_problem(error: ValidationError, shown: Callable[[object], str], members: Collection[str] = ()) -> str:
    """The first problem that pydantic found: its key, what was expected, and what was there.

    Args:
        error: Error about a whole object.
        shown: Writes a value.
        members: Names of models that are members of unions.
    """
    errors = error.errors(include_url=False, include_context=False)
    key = errors[0]["loc"][:1]
    # of a union that which fits best: the one that looked deepest
    first = max((each for each in errors if each["loc"][:1] == key), key=lambda each: len(each["loc"]))
    # of a union pydantic names the member that it tried, too
    tried = _UNION_MEMBERS.union(members)
    parts = [part for part in first["loc"] if isinstance(part, int) or ("[" not in part and part not in tried)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    problem = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if first["type"] in ("model_type", "dict_type"):
        problem = "must be an object"
    if first["type"] == "value_error":  # says itself which keys do not fit each other
        return f"{name}: {problem}" if name else problem
    return f"{name} {problem[:1].lower()}{problem[1:]}, got {shown(first['input'])}"
