"""Arguments of ``tensorrt_llm.LLM`` that the operator gives by their own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.arguments import Arguments
from worker.arguments.json_text import json_object
from worker.arguments.yaml_file import load_yaml
from worker.errors import ConfigurationError

OVERRIDE = "--override-engine-args"


class GivenArguments:
    """Values by name, and where each came from.

    The file of ``--extra-engine-args`` gives them, ``--override-engine-args`` wins over it, and
    options of Dynamo's worker (`Arguments.engine_settings`) may repeat but not contradict either.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._sources: dict[tuple[str, ...], str] = {}

    @classmethod
    def of(cls, arguments: Arguments) -> GivenArguments:
        """The arguments in the worker's options.

        Raises:
            ConfigurationError: a file or a text cannot be read, or a value has two sources.
        """
        given = cls()
        path = arguments.extra_engine_args
        if path is not None:
            given._merge(load_yaml(path), f"--extra-engine-args {path}")
        if arguments.override_engine_args is not None:
            given._merge(json_object(arguments.override_engine_args, OVERRIDE), OVERRIDE)
        for setting in arguments.engine_settings:
            given._add(setting.path, setting.value, setting.source)
        return given

    def source(self, *path: str) -> str:
        """Source of the value at ``path``, or else of one in it, or around it."""
        for known, source in reversed(self._sources.items()):
            if known[: len(path)] == path or path[: len(known)] == known:
                return source
        return OVERRIDE

    def _merge(self, values: Mapping[str, Any], source: str, section: tuple[str, ...] = ()) -> None:
        """Puts values over those that are there; mappings are merged key by key."""
        into = self._section(section)
        for name, value in values.items():
            path = (*section, name)
            if isinstance(value, dict) and isinstance(into.get(name), dict):
                self._merge(value, source, path)
            else:
                into[name] = dict(value) if isinstance(value, dict) else value
                self._sources.pop(path, None)
                self._sources[path] = source

    def _add(self, path: tuple[str, ...], value: Any, source: str) -> None:
        into, shown = self._section(path[:-1]), ".".join(path)
        if into.setdefault(path[-1], value) != value:
            problem = f"but {self.source(*path)} says {into[path[-1]]}; give it in one place"
            raise ConfigurationError(f"{source} asks for {shown}: {value}, {problem}")
        self._sources.setdefault(path, source)

    def _section(self, path: tuple[str, ...]) -> dict[str, Any]:
        """The mapping at ``path``, made where there is none."""
        into = self.values
        for depth, name in enumerate(path, start=1):
            inner = into.get(name)
            if inner is None:
                inner = into[name] = {}
            if not isinstance(inner, dict):
                shown = ".".join(path[:depth])
                raise ConfigurationError(f"{self.source(*path[:depth])}: {shown}: must be a mapping, got {inner!r}")
            into = inner
        return into
