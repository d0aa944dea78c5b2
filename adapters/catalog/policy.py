"""The operator's policy: mandatory, default and forbidden processors per served model.

A YAML file::

    keys:
      house: {file: /run/secrets/watermark}
    models:
      my-model:
        mandatory:
          - {name: watermark, args: {key_id: house}}
        default:
          - {name: loop_stop}
        forbidden: [mirostat]
      "*":
        forbidden: [watermark]

A request field that is equivalent to a processor (`FieldValue`) counts as that processor: it
overrides a default, cannot change a mandatory one, and is refused for a forbidden one.

Keys are hexadecimal digits, in a file or an environment variable (``env: NAME``). ``"*"`` is for
models without a section of their own. Whatever is unknown in the file is an error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from adapters.catalog.catalog import Catalog
from adapters.catalog.selection import Origin, Requested, Selection, SelectionError, parse_processor
from adapters.contract import Context
from adapters.processors.watermark import checked_key, read_key

ANY_MODEL = "*"


class PolicyError(ValueError):
    """The policy file cannot be honoured.

    Args:
        file: Path of the policy file.
        key: Key in it, ``models.my-model.default[0].args.n``; empty for the whole.
        problem: Expected value and the given one.
    """

    def __init__(self, file: str, key: str, problem: str) -> None:
        super().__init__(f"{file}: {key}: {problem}" if key else f"{file}: {problem}")
        self.file = file
        self.key = key
        self.problem = problem


GRAMMARS = frozenset({"json_schema", "regex", "choice", "grammar", "structural_tag", "tool_calls"})
"""Processors that constrain the whole answer: a default one yields to any of the client's."""


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A processor that a client asks for, by its name or by an equivalent request field.

    Attributes:
        requested: The processor with its arguments; for a field, the path is the field's.
        is_neutral: The value changes no token.
    """

    requested: Requested
    is_neutral: bool = False


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """The operator's policy for one served model.

    Attributes:
        mandatory: Processors of every chain, before the client's.
        default: Processors of every chain whose client neither names them nor sets their fields,
            before the client's.
        forbidden: Names of processors that clients cannot select, by name or by a field.
    """

    mandatory: tuple[Requested, ...] = ()
    default: tuple[Requested, ...] = ()
    forbidden: frozenset[str] = frozenset()

    def apply(self, selection: Selection, catalog: Catalog, fields: Sequence[FieldValue] = ()) -> Selection:
        """``selection`` with the operator's processors added; those of ``fields`` stay outside.

        Raises:
            SelectionError: the client asks for a forbidden processor, or for a mandatory one with
                other arguments.
        """
        if not (self.mandatory or self.default or self.forbidden):
            return selection
        self._refuse_forbidden(selection, fields)
        by_field = {value.requested.name: value for value in fields}
        mandatory = [self._kept(requested, selection, by_field, catalog) for requested in self.mandatory]
        taken = _controlled({*by_field, *(requested.name for requested in selection.processors)})
        default = (requested for requested in self.default if requested.name not in taken)
        names = {requested.name for requested in self.mandatory}
        own = (requested for requested in selection.processors if requested.name not in names)
        return replace(selection, processors=(*(each for each in mandatory if each is not None), *default, *own))

    def _refuse_forbidden(self, selection: Selection, fields: Sequence[FieldValue]) -> None:
        for requested in selection.processors:
            if requested.name in self.forbidden:
                problem = f"the logits processor {requested.name} is not allowed for this model"
                raise SelectionError(f"{requested.path}.name", problem)
        for value in fields:
            if value.requested.name in self.forbidden and not value.is_neutral:
                problem = f"asks for the logits processor {value.requested.name}, which is not allowed for this model"
                raise SelectionError(value.requested.path, problem)

    @staticmethod
    def _kept(
        mandatory: Requested, selection: Selection, by_field: Mapping[str, FieldValue], catalog: Catalog
    ) -> Requested | None:
        """The mandatory processor, or the client's equal one; None where a field is equal to it."""
        named = [requested for requested in selection.processors if requested.name == mandatory.name]
        in_field = by_field.get(mandatory.name)
        values = [FieldValue(requested) for requested in named] + ([] if in_field is None else [in_field])
        for value in values:
            if not _same(value, mandatory, catalog):
                problem = f"the logits processor {mandatory.name} is set by the operator and cannot be changed"
                raise SelectionError(value.requested.path, problem)
        if in_field is not None:
            return None
        return replace(named[0], args=mandatory.args) if named else mandatory


def _controlled(names: Collection[str]) -> Collection[str]:
    """``names``, and those of the processors that are the same control."""
    return {*names, *GRAMMARS} if GRAMMARS.intersection(names) else names


def _same(asked: FieldValue, set_by_operator: Requested, catalog: Catalog) -> bool:
    if asked.requested.scope != set_by_operator.scope:
        return False
    try:
        args = catalog.find(asked.requested).parse_args(asked.requested)
    except SelectionError:
        if asked.is_neutral:  # an empty list, which the processor itself does not accept
            return False
        raise
    own = catalog.find(set_by_operator).parse_args(set_by_operator)
    return args == own or all(
        _is_as_near_as_32_bits(value, getattr(own, name)) for name, value in args if value != getattr(own, name)
    )


def _is_as_near_as_32_bits(value: object, other: object) -> bool:
    """Whether two numbers are equal as float32: Dynamo's frontend sends 0.7 as 0.699999988."""
    return isinstance(value, float) and isinstance(other, float) and math.isclose(value, other, rel_tol=2**-24)


@dataclass(frozen=True)
class Policy:
    """The policies of all served models, and the watermark keys.

    Attributes:
        file: Path that it was read from.
        models: Policies by served model name.
        watermark_keys: Keys by key id; never shown, including in errors.
    """

    file: str = ""
    models: Mapping[str, ModelPolicy] = field(default_factory=dict)
    watermark_keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, path: str | Path, catalog: Catalog, environment: Mapping[str, str] = os.environ) -> Policy:
        """Read a policy file.

        Args:
            path: Path of the file.
            catalog: Every processor that it names must be there.
            environment: Variables for keys given by ``env``.

        Raises:
            PolicyError: the file, or one of its keys, cannot be honoured.
        """
        return _Reader(str(path), catalog, environment).policy()

    def for_model(self, name: str) -> ModelPolicy:
        """The policy of the served model ``name``."""
        return self.models.get(name) or self.models.get(ANY_MODEL) or ModelPolicy()

    def check(self, model: str, catalog: Catalog, context: Context) -> None:
        """Build every processor of a model's policy once, so that a bad policy stops the start.

        Args:
            model: Served model name.
            catalog: Every processor that the policy names must be there.
            context: Context of that model, with `watermark_keys`.

        Raises:
            PolicyError: one of them cannot be honoured.
        """
        policy = self.for_model(model)
        for requested in (*policy.mandatory, *policy.default):
            try:
                catalog.find(requested).build(requested, context)
            except SelectionError as error:
                raise PolicyError(self.file, error.path, error.problem) from error


class _Reader:
    """Parses one file into a `Policy`; every error names the file and the key."""

    def __init__(self, file: str, catalog: Catalog, environment: Mapping[str, str]) -> None:
        self._file = file
        self._catalog = catalog
        self._environment = environment

    def policy(self) -> Policy:
        data = self._mapping(self._yaml(), "", ("keys", "models"))
        keys = self._mapping(data.get("keys"), "keys")
        models = self._mapping(data.get("models"), "models")
        return Policy(
            self._file,
            {name: self._model(section, f"models.{name}") for name, section in models.items()},
            {key_id: self._key(source, f"keys.{key_id}") for key_id, source in keys.items()},
        )

    def _yaml(self) -> object:
        from yaml import YAMLError  # a worker without a policy starts without the library

        from adapters.strict_yaml import read_yaml

        try:
            return read_yaml(Path(self._file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            self._fail("", f"cannot be read: {error}")
        except YAMLError as error:
            self._fail("", f"is not YAML: {' '.join(str(error).split())}")

    def _model(self, section: object, key: str) -> ModelPolicy:
        data = self._mapping(section, key, ("mandatory", "default", "forbidden"))
        mandatory = self._processors(data.get("mandatory"), f"{key}.mandatory", "mandatory")
        default = self._processors(data.get("default"), f"{key}.default", "default")
        forbidden = self._names(data.get("forbidden"), f"{key}.forbidden")
        seen: dict[str, str] = dict.fromkeys(forbidden, "forbidden")
        for kind, group in (("mandatory", mandatory), ("default", default)):
            for requested in group:
                if requested.name in seen:
                    self._fail(requested.path, f"{requested.name} is named before, as {seen[requested.name]}")
                seen[requested.name] = kind
        return ModelPolicy(mandatory, default, frozenset(forbidden))

    def _processors(self, value: object, key: str, origin: Origin) -> tuple[Requested, ...]:
        found = []
        for i, entry in enumerate(self._list(value, key)):
            try:
                requested = replace(parse_processor(entry, f"{key}[{i}]"), origin=origin)
                self._catalog.find(requested).parse_args(requested)
            except SelectionError as error:
                self._fail(error.path, error.problem)
            found.append(requested)
        return tuple(found)

    def _names(self, value: object, key: str) -> list[str]:
        names = self._list(value, key)
        for i, name in enumerate(names):
            if not isinstance(name, str) or name not in self._catalog:
                self._fail(f"{key}[{i}]", f"expected the name of a processor in the catalogue, got {name!r}")
        return names

    def _key(self, source: object, key: str) -> bytes:
        data = self._mapping(source, key, ("file", "env"))
        if len(data) != 1 or not all(isinstance(value, str) for value in data.values()):
            self._fail(key, "expected either file: PATH or env: NAME")
        try:
            return read_key(Path(data["file"])) if "file" in data else self._key_from_environment(data["env"])
        except (OSError, ValueError) as error:
            self._fail(key, str(error))

    def _key_from_environment(self, name: str) -> bytes:
        if name not in self._environment:
            raise ValueError(f"the environment variable {name} is not set")
        try:
            key = bytes.fromhex(self._environment[name])
        except ValueError:
            raise ValueError(f"the environment variable {name} does not hold hexadecimal digits") from None
        return checked_key(key)

    def _mapping(self, value: object, key: str, known: Sequence[str] | None = None) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._fail(key, f"expected a mapping, got {type(value).__name__}")
        for name in value:
            if not isinstance(name, str):
                self._fail(key, f"expected text as the key, got {name!r}")
            if known is not None and name not in known:
                self._fail(f"{key}.{name}" if key else name, f"unknown key; known are {', '.join(known)}")
        return value

    def _list(self, value: object, key: str) -> list[Any]:
        if value is not None and not isinstance(value, list):
            self._fail(key, f"expected a list, got {type(value).__name__}")
        return value or []

    def _fail(self, key: str, problem: str) -> NoReturn:
        raise PolicyError(self._file, key, problem)
