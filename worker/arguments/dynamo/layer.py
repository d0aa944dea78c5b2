"""Values of options from one kind of source, under this worker's names and Dynamo's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.arguments.dynamo.row import Row, ToOption, ToSetting
from worker.arguments.option import Option
from worker.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Setting:
    """An argument of the engine's library that an option of Dynamo's worker gives.

    Attributes:
        path: Names of the argument, and of the keys in it.
        value: Value of the argument.
        source: Flag or variable that gave it.
    """

    path: tuple[str, ...]
    value: Any
    source: str


class Layer:
    """Values that the command line gives, or the environment.

    Args:
        options: Every option of this worker, by name.
    """

    def __init__(self, options: Mapping[str, Option]) -> None:
        self._options = options
        self._sources: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.settings: dict[tuple[str, ...], Setting] = {}

    def add_option(self, name: str, text: str, source: str) -> None:
        """Take an option's text from a source.

        Raises:
            ConfigurationError: the text is malformed, or another source has another value.
        """
        value = self._options[name].read(text, source)
        if self.values.setdefault(name, value) != value:
            raise ConfigurationError(
                f"{source} says {value}, but {self._sources[name]} says {self.values[name]}; give one of them"
            )
        self._sources.setdefault(name, source)

    def add_row(self, row: Row, given: str, source: str) -> None:
        """Take the text of an option of Dynamo's worker; an empty one is as none.

        Raises:
            ConfigurationError: the text is refused or malformed, or another source has another
                value.
        """
        if not given:
            return
        text, meaning = row.text(given, source), row.meaning
        row.check(text, source)
        if isinstance(meaning, ToOption):
            self.add_option(meaning.name, meaning.values.get(text, text), source)
        elif isinstance(meaning, ToSetting):
            try:
                value = meaning.parse(text)
            except ValueError as error:
                raise ConfigurationError(f"{source} must be {error}, got {text!r}") from None
            self.add_setting(Setting(tuple(meaning.path.split(".")), value, source))

    def add_setting(self, setting: Setting) -> None:
        """Raises `ConfigurationError` if another source has another value."""
        other = self.settings.setdefault(setting.path, setting)
        if other.value != setting.value:
            raise ConfigurationError(
                f"{setting.source} says {setting.value}, but {other.source} says {other.value}; give one of them"
            )
