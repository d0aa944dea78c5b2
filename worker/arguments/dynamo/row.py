"""One option of a Dynamo worker, and its meaning here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.errors import ConfigurationError

Takes = Literal["value", "switch", "values"]
"""A value; none, with ``--no-`` before the name for false; or any number of values."""

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class ToOption:
    """The value of an option of this worker.

    Attributes:
        name: Field of `worker.arguments.Arguments`.
        values: Texts that have another spelling here.
        refused: Reasons to refuse a text.
    """

    name: str
    values: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToSetting:
    """The value of an argument of the engine's library.

    Attributes:
        path: Name of the argument, and of the key in it, separated by dots.
        parse: Turns the text into the value; raises `ValueError` with what was expected.
        refused: Reasons to refuse a text.
    """

    path: str
    parse: Callable[[str], Any]
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Only:
    """Values that ask for what this worker does anyway; others are refused.

    Attributes:
        values: Accepted texts; none for an option that is refused whatever its value.
        reason: Reason to refuse the others, with what to use instead.
    """

    values: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ByVariable:
    """The option's variable is read by Dynamo's runtime, so the flag is refused in its favour."""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Accepted whatever its value. The reason says why nothing follows from it."""

    reason: str


Meaning = ToOption | ToSetting | Only | ByVariable | NoEffect


@dataclass(frozen=True, slots=True)
class Row:
    """One option of a Dynamo worker.

    Attributes:
        flags: Spellings of the option, the newest first; none for a variable without a flag.
        env: Variables of the option.
        meaning: The option's meaning here.
        takes: Number of values behind a flag.
    """

    flags: tuple[str, ...]
    env: tuple[str, ...]
    meaning: Meaning
    takes: Takes = "value"

    @property
    def name(self) -> str:
        """The flag, or the variable of a row without one."""
        return (*self.flags, *self.env)[0]

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every flag; of a switch also the negations."""
        return self.flags + tuple(_negation(flag) for flag in self.flags if self.takes == "switch")

    def text(self, given: str, source: str) -> str:
        """The text in this worker's spelling: ``true`` or ``false`` of a switch.

        Raises:
            ConfigurationError: the value of a switch is neither.
        """
        if self.takes != "switch":
            return given
        if given.lower() in _TRUE:
            return "true"
        if given.lower() in _FALSE:
            return "false"
        raise ConfigurationError(f"{source} must be true or false, got {given!r}")

    def check(self, text: str, source: str) -> None:
        """Raises `ConfigurationError` if the value is refused."""
        meaning = self.meaning
        if isinstance(meaning, ByVariable):
            raise ConfigurationError(f"{source} is not an option here: set {self.env[0]}, which Dynamo's runtime reads")
        if isinstance(meaning, Only) and text not in meaning.values:
            raise ConfigurationError(f"{self._shown(text, source)}: {meaning.reason}")
        if isinstance(meaning, (ToOption, ToSetting)) and text in meaning.refused:
            raise ConfigurationError(f"{self._shown(text, source)}: {meaning.refused[text]}")

    def _shown(self, text: str, source: str) -> str:
        is_plain_flag = self.takes == "switch" and source.startswith("--")
        return f"{source} is refused" if is_plain_flag else f"{source} {text} is refused"


def negation(flag: str) -> bool:
    """Whether this spelling of a switch says false."""
    return flag.startswith("--no-")


def _negation(flag: str) -> str:
    return "--no-" + flag.removeprefix("--")


def rows(prefix: str, meanings: Mapping[str, Meaning], takes: Takes = "value") -> Iterator[Row]:
    """Rows of options whose variables are their flags' names behind a prefix.

    Args:
        prefix: Beginning of the variables, such as ``DYN_TRTLLM_``.
        meanings: Meanings of the options, by flag.
        takes: Number of values behind each flag.
    """
    for flag, meaning in meanings.items():
        name = flag.removeprefix("--").replace("-", "_").upper()
        yield Row((flag,), (prefix + name,), meaning, takes)


def refused(prefix: str, reason: str, *flags: str) -> Iterator[Row]:
    """Rows of options that are refused whatever their value."""
    return rows(prefix, dict.fromkeys(flags, Only((), reason)))


def off(prefix: str, reason: str, *flags: str) -> Iterator[Row]:
    """Rows of switches that are refused unless they are off."""
    return rows(prefix, dict.fromkeys(flags, Only(("false",), reason)), "switch")
