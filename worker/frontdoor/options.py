"""The front door's options, from the command line and the environment."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.processors.tool_calls import FORMATS
from worker.arguments import OPTIONS as WORKER_OPTIONS
from worker.errors import ConfigurationError
from worker.frontdoor.tools import CallFormat
from worker.frontdoor.upstreams import Upstream

ENVIRONMENT_PREFIX = "FRONT_DOOR_"
NO_FORMAT = "none"


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise ValueError("a port number")
    return int(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError("an integer of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or float(text) == 0:
        raise ValueError("a number of seconds above 0")
    return float(text)


def _rate(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        raise ValueError("a number of KiB per second")
    return float(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(re.fullmatch(r"[A-Za-z0-9._:-]+", name) for name in names):
        raise ValueError("host names without ports, separated by commas")
    return names


def _header(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]+", text):
        raise ValueError("the name of a header")
    return text


def _upstreams(text: str) -> tuple[Upstream, ...]:
    try:
        return tuple(Upstream.of(url.strip()) for url in text.split(","))
    except ValueError:
        raise ValueError("http://host:port, several separated by commas") from None


def _call_format(text: str) -> str:
    if text != NO_FORMAT and text not in FORMATS:
        raise ValueError(f"one of {', '.join(FORMATS)} or {NO_FORMAT}")
    return text


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("a non-empty text")
    return text


def _option(default: Any, help: str, parse: Callable[[str], Any]) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option of ``python -m worker.frontdoor``; the table of `docs/front-door.md`."""

    host: str = _option("127.0.0.1", "Address to serve on.", _text)
    port: int = _option(8000, "Port to serve on; 0 takes a free one, which the first line of the log names.", _port)
    upstream: tuple[Upstream, ...] = _option(
        (), "Dynamo frontends, http://host:port, separated by commas; requests take them in turn. Required.", _upstreams
    )
    api_key_file: str | None = _option(
        None, "File of API keys, one per line; a request must bring one, but for GET /health and /live.", _text
    )
    allowed_hosts: tuple[str, ...] = _option(
        (),
        "Names that Host headers may have beside localhost and the address served on, separated by commas. Without it "
        "Host is checked on loopback without API keys alone.",
        _names,
    )
    client_header: str | None = _option(
        None,
        "Header in which a trusted proxy says who a client is; without API keys clients take turns by it, or else by "
        "address.",
        _header,
    )
    body_limit_mib: int = _option(8, "Largest body of a request, MiB; beyond it, a 413.", _count)
    max_connections: int = _option(4096, "Connections of clients at a time; one more gets a 503.", _count)
    header_timeout_s: float = _option(10.0, "Seconds in which the head of a request must arrive.", _seconds)
    body_timeout_s: float = _option(60.0, "Seconds in which the body of a request must arrive.", _seconds)
    body_rate_kib_s: float = _option(
        1.0, "Least rate of a body, KiB per second; one that comes slower for 10 seconds is a 408.", _rate
    )
    idle_timeout_s: float = _option(75.0, "Seconds that a connection may stay without a request.", _seconds)
    send_timeout_s: float = _option(
        60.0, "Seconds that a client may take none of its answer; then its request is cancelled.", _seconds
    )
    connect_timeout_s: float = _option(2.0, "Seconds to wait for a connection to a frontend.", _seconds)
    drain_timeout_s: float = _option(120.0, "Seconds that answers under way get after SIGTERM.", _seconds)
    worker_metrics: tuple[Upstream, ...] = _option(
        (),
        "System ports of workers, http://host:port, separated by commas, whose metrics /metrics has beside the "
        "frontend's.",
        _upstreams,
    )
    tool_call_format: str | None = _option(
        None,
        f"How the models write tool calls, which are then held to their tools: {', '.join(FORMATS)}, or {NO_FORMAT}. "
        "By default the workers' --dyn-tool-call-parser.",
        _call_format,
    )
    playground: bool = _option(
        False, "Serve a web page at /playground to try the model and its processors; true or false.", _truth
    )
    logits_processor: tuple[str, ...] = ()
    allow_logits_processors: tuple[str, ...] = ()
    dyn_tool_call_parser: str | None = None
    dyn_reasoning_parser: str | None = None
    migration: str = "off"

    @property
    def carries_guides(self) -> bool:
        """Whether grammars go to the workers as processors: Dynamo's frontend does not migrate
        guides. With a reasoning parser they stay guides, because those begin after the thinking.
        """
        return self.migration == "on" and self.dyn_reasoning_parser is None

    @property
    def calls(self) -> CallFormat | None:
        """How the models write tool calls, None if calls are not held to anything."""
        name = self.tool_call_format or self.dyn_tool_call_parser
        if name not in FORMATS:
            return None
        return CallFormat(name, "answer" if self.dyn_reasoning_parser else "all")


def flag(name: str) -> str:
    """The command-line flag of an option."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of an option."""
    return ENVIRONMENT_PREFIX + name.upper()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigurationError(message)


def parse_options(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """Read the options: the command line wins over the environment, both over the defaults.

    Arguments after ``--`` are those of the workers behind: which third-party processors they take,
    the front door takes too, their tool-call parser, and whether they migrate. The workers'
    environment variables count as well.

    Raises:
        ConfigurationError: an option is unknown, malformed or missing.
        SystemExit: ``--help`` was given.
    """
    environ = os.environ if environ is None else environ
    table = {field.name: field for field in dataclasses.fields(Options) if field.metadata}
    parser = _Parser(
        prog="python -m worker.frontdoor",
        description="An OpenAI-compatible endpoint before Dynamo's frontends: every control arrives or is refused.",
        epilog="Arguments after -- are the workers'; those about processors and parsers count here too.",
        allow_abbrev=False,
    )
    for name, field in table.items():
        default = "" if field.default in (None, ()) else f" Default: {field.default}."
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if isinstance(field.default, bool) else {}
        shown = f"{field.metadata['help']}{default} [{variable(name)}]"
        parser.add_argument(flag(name), metavar="VALUE", help=shown, **switch)
    parser.add_argument("workers", nargs="*", help=argparse.SUPPRESS)
    given = vars(parser.parse_args(argv))
    workers = given.pop("workers")
    values = {}
    known = {variable(name): name for name in table}
    for key in sorted(environ):
        if key.startswith(ENVIRONMENT_PREFIX) and key not in known:
            raise ConfigurationError(f"unknown environment variable {key}")
        if key in known and environ[key]:  # an empty variable is how a shell leaves an option unset
            values[known[key]] = _read(table[known[key]].metadata["parse"], environ[key], key)
    for name, text in given.items():
        if text is not None:
            values[name] = _read(table[name].metadata["parse"], text, flag(name))
    if not values.get("upstream"):
        raise ConfigurationError("--upstream is required")
    return Options(**values, **_of_workers(workers, environ))


_WORKERS = (
    "logits_processor",
    "allow_logits_processors",
    "dyn_tool_call_parser",
    "dyn_reasoning_parser",
    "migration",
)


def _of_workers(workers: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """What the workers' own arguments and environment say of requests: which third-party processors
    they take, how their models write tool calls and thinking, and whether requests migrate.
    """
    options = [option for option in WORKER_OPTIONS if option.name in _WORKERS]
    parser = _Parser(allow_abbrev=False, add_help=False)
    for option in options:
        parser.add_argument(option.flag, dest=option.name, action="append")
    given = vars(parser.parse_known_args(workers)[0])  # the rest is the workers' alone
    texts = {option: _joined(option.name, given[option.name]) or environ.get(option.env) for option in options}
    return {option.name: option.read(text, option.flag) for option, text in texts.items() if text}


def _joined(name: str, texts: Sequence[str] | None) -> str:
    """An option that may be repeated, as one text; of another the last."""
    return ",".join((texts or ()) if name.endswith(("processor", "processors")) else (texts or ())[-1:])


def _read(parse: Callable[[str], Any], text: str, source: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigurationError(f"{source} must be {error}, got {text!r}") from None
