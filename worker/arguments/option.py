"""One option of a command: its flag, its environment variable, and how its text is read."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from worker.arguments.values import text
from worker.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Option:
    """One option, a field of a dataclass such as `Arguments`.

    Attributes:
        name: Field name; ``--`` and hyphens make the command-line flag, underscores the key of the
            YAML file.
        env: Environment variable.
        parse: Turns the given text into the value; raises `ValueError` with what was expected.
        default: Value when it is given nowhere.
        choices: The accepted values, empty when any parsed value is.
        help: One sentence; also the row of `docs/configuration.md`.
        engine: Whether ``--extra-engine-args`` may set it.
        many: Whether the flag may be given several times; the value is a tuple.
    """

    name: str
    env: str
    parse: Callable[[str], Any]
    default: Any
    choices: tuple[str, ...]
    help: str
    engine: bool
    many: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def description(self) -> str:
        """The option's text in ``--help``."""
        choices = f" ({' | '.join(self.choices)})" if self.choices else ""
        default = "" if self.default in (None, ()) else f" Default: {self.default}."
        return f"{self.help}{choices}{default} [{self.env}]"

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Let ``parser`` read the flag as a list of texts, one each time that it is given; that of
        a switch may stand alone.
        """
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if isinstance(self.default, bool) else {}
        text = self.description.replace("%", "%%")
        parser.add_argument(self.flag, dest=self.name, action="append", metavar="VALUE", help=text, **switch)

    def read(self, text: str, source: str) -> Any:
        """The value of ``text``, which came from ``source``. Raises `ConfigurationError`."""
        try:
            text.encode()
        except UnicodeEncodeError:  # names of models and adapters are told to clients
            raise ConfigurationError(f"{source} must be UTF-8, got {text!r}") from None
        if self.choices and text not in self.choices:
            raise ConfigurationError(f"{source} must be one of {', '.join(self.choices)}, got {text!r}")
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigurationError(f"{source} must be {error}, got {text!r}") from None


def option(
    default: Any,
    help: str,
    *,
    env: str | None = None,
    parse: Callable[[str], Any] = text,
    choices: tuple[str, ...] = (),
    engine: bool = False,
    many: bool = False,
) -> Any:
    """A field of a dataclass that is an option; see `Option`."""
    metadata = {"env": env, "parse": parse, "choices": choices, "help": help, "engine": engine, "many": many}
    return dataclasses.field(default=default, metadata=metadata)


def options_of(record: type, prefix: str) -> tuple[Option, ...]:
    """The options among the fields of ``record``; their variables begin with ``prefix``."""
    return tuple(
        Option(name=f.name, default=f.default, **{**f.metadata, "env": f.metadata["env"] or prefix + f.name.upper()})
        for f in dataclasses.fields(record)
        if f.metadata
    )


class StrictParser(argparse.ArgumentParser):
    """A command line whose errors are `ConfigurationError`."""

    def error(self, message: str) -> Any:
        flags = [flag for action in self._actions for flag in action.option_strings]
        raise ConfigurationError(message + meant(message, flags))


def dashed(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """The arguments, with those that are one of these flags but for underscores spelled as it is:
    vLLM takes both.
    """
    found = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        spelled = "--" + name.removeprefix("--").replace("_", "-")
        is_flag = name.startswith("--") and spelled in flags
        found.append(spelled + equals + value if is_flag else argument)
    return found


def meant(message: str, flags: Sequence[str]) -> str:
    """The addition to an error about an unknown flag that is nearly one of these."""
    unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
    close = get_close_matches(unknown[1], flags, n=1, cutoff=0.8) if unknown else []
    return f"; did you mean {close[0]}?" if close else ""


def from_environment(options: Sequence[Option], prefix: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The values of the options whose variable is set, by name.

    Args:
        options: Every option of the command.
        prefix: Beginning of the command's variables.
        environ: The environment, without what Kubernetes describes its Services in.

    Raises:
        ConfigurationError: a variable with the prefix is unknown, or a value is malformed.
    """
    known = {option.env: option for option in options}
    for name in sorted(environ):
        if name.startswith(prefix) and name not in known:
            raise ConfigurationError(f"unknown environment variable {name}")
    # An empty variable is how a shell or a manifest leaves an option unset.
    return {option.name: option.read(environ[name], name) for name, option in known.items() if environ.get(name)}
