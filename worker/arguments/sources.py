"""The worker's options from the command line, the environment and a YAML file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worker import __version__
from worker.arguments.contradictions import refuse_contradictions
from worker.arguments.dynamo import PREFIXES, Layer, Row, rows_for, take_dotted
from worker.arguments.dynamo.row import ByVariable, ToOption, negation
from worker.arguments.kubernetes import without_services
from worker.arguments.option import Option, StrictParser, dashed, from_environment
from worker.arguments.table import ENVIRONMENT_PREFIX, OPTIONS, Arguments
from worker.errors import ConfigurationError

_BY_NAME = {option.name: option for option in OPTIONS}
_FLAGS = frozenset(option.flag for option in OPTIONS)


def parse_arguments(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Arguments:
    """Read the options: the command line wins over the environment, both over the defaults.

    Options and variables of Dynamo's own workers count, too (`worker.arguments.dynamo`).
    A YAML file given with ``--extra-engine-args`` may not contradict either of them.

    Raises:
        ConfigurationError: an option is unknown, malformed, contradictory, refused or missing.
        SystemExit: ``--help`` or ``--version`` was given.
    """
    argv = sys.argv[1:] if argv is None else argv
    environ = without_services(os.environ if environ is None else environ)
    engine = _engine(argv, environ)
    rows = rows_for(engine)
    variables = _from_environment(rows, environ, engine)
    line, rest = _from_command_line(rows, argv, engine)
    given = variables.values | line.values
    # With --engine trtllm the file has TensorRT-LLM's own names: worker/engines/trtllm/settings.py
    # reads it.
    if given.get("extra_engine_args") is not None and given.get("engine") != "trtllm":
        given = _with_file(given, str(given["extra_engine_args"]))
    given["engine_settings"] = tuple((variables.settings | line.settings).values())
    given["engine_flags"] = tuple(rest)
    return _checked(_with_full_endpoint(given), environ)


def _engine(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The engine that is asked for; whether there is such a one is found out later."""
    option = _BY_NAME["engine"]
    parser = StrictParser(allow_abbrev=False, add_help=False)
    parser.add_argument(option.flag, dest="engine", action="append", nargs="?")
    asked = parser.parse_known_args(argv)[0].engine or [None]
    return str(asked[-1] or environ.get(option.env) or option.default)


def _from_environment(rows: Sequence[Row], environ: Mapping[str, str], engine: str) -> Layer:
    layer = Layer(_BY_NAME)
    for name in from_environment(OPTIONS, ENVIRONMENT_PREFIX, environ):
        layer.add_option(name, environ[_BY_NAME[name].env], _BY_NAME[name].env)
    known = {variable: row for row in rows for variable in row.env}
    for variable in sorted(environ):
        row = known.get(variable)
        if row is not None and not isinstance(row.meaning, ByVariable):
            layer.add_row(row, environ[variable], variable)
        elif row is None and environ[variable]:
            _refuse_variable(variable, engine)
    return layer


def _refuse_variable(name: str, engine: str) -> None:
    """Raises `ConfigurationError` for a variable of one of Dynamo's workers without a row."""
    owner = next((owner for prefix, owner in PREFIXES.items() if name.startswith(prefix)), engine)
    if owner != engine:
        raise ConfigurationError(f"{name} needs --engine {owner}, but the engine is {engine}")
    if name.startswith(tuple(PREFIXES)):
        raise ConfigurationError(f"unknown environment variable {name}")


_VLLMS = frozenset({"kv_cache_dtype", "lora_dtype", "quantization"})
"""Options of the embedded engine whose flags are vLLM's with ``--engine vllm``."""


def _from_command_line(rows: Sequence[Row], argv: Sequence[str], engine: str) -> tuple[Layer, list[str]]:
    """The values, and the arguments that vLLM's own parser has to read."""
    options = [option for option in OPTIONS if engine != "vllm" or option.name not in _VLLMS]
    parser = _parser(options, rows)
    if engine == "vllm":
        own = {flag for row in rows for flag in row.spellings}
        argv = dashed(argv, own | {option.flag for option in options})
    texts, rest = parser.parse_known_args(argv)
    layer = Layer(_BY_NAME)
    by_flag = {flag: row for row in rows for flag in row.flags}
    for option in options:
        given = getattr(texts, option.name)
        if given is None:
            continue
        if len(given) > 1 and not option.many:
            raise ConfigurationError(f"{option.flag} is given {len(given)} times")
        row, text = by_flag.get(option.flag), ",".join(given)
        if row is None:
            layer.add_option(option.name, text, option.flag)
        else:
            layer.add_row(row, text, option.flag)
    for row in rows:
        for flag, text in getattr(texts, row.name, None) or ():
            layer.add_row(row, text, flag)
    if engine == "trtllm":
        rest = take_dotted(rest, layer)
    if rest and engine != "vllm":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return layer, rest


def _parser(options: Sequence[Option], rows: Sequence[Row]) -> StrictParser:
    aliases = [each for row in rows if isinstance(row.meaning, ToOption) for each in row.flags]
    others = ", ".join(sorted(set(aliases) - _FLAGS))
    parser = StrictParser(
        prog="python -m worker",
        description="Serve a model through NVIDIA Dynamo, over NATS, or behind OpenEngine.",
        epilog="doctor, inspect, quantize and replay as the first argument are commands, each with its own --help. "
        f"Names of Dynamo's own workers count, too: {others} and more (docs/migrating/). "
        "With --engine vllm, so do vLLM's own flags.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dynamo-logits-worker {__version__}")
    for option in options:
        option.add_to(parser)
    for row in rows:
        spellings = [each for each in row.spellings if each not in _FLAGS]
        if spellings:
            parser.add_argument(
                *spellings, dest=row.name, action=_Spelled, nargs=_NARGS[row.takes], help=argparse.SUPPRESS
            )
    return parser


_NARGS = {"value": None, "switch": 0, "values": "*"}


class _Spelled(argparse.Action):
    """Keeps each flag as it was spelled, with its text; that of a switch is ``true`` or
    ``false``.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        assert flag is not None
        if self.nargs == 0:
            values = "false" if negation(flag) else "true"
        text = values if isinstance(values, str) else ",".join(values)
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), (flag, text)])


def _with_file(given: dict[str, Any], path: str) -> dict[str, Any]:
    from worker.arguments.yaml_file import load_yaml  # few starts need the library

    engine_options = {option.name: option for option in OPTIONS if option.engine}
    merged = dict(given)
    for key, raw in load_yaml(path).items():
        option = engine_options.get(key)
        if option is None:
            known = ", ".join(sorted(engine_options))
            raise ConfigurationError(f"--extra-engine-args {path}: unknown engine option {key!r}; known: {known}")
        if isinstance(raw, (bool, list, dict)) or raw is None:
            raise ConfigurationError(f"--extra-engine-args {path}: {key} must be one value, got {raw!r}")
        value = option.read(str(raw), f"--extra-engine-args {path}: {key}")
        if merged.setdefault(key, value) != value:
            raise ConfigurationError(
                f"{option.flag} is {merged[key]} but {path} says {key}: {value}; give it in one place"
            )
    return merged


def _with_full_endpoint(given: dict[str, Any]) -> dict[str, Any]:
    """Split ``dyn://namespace.component.endpoint``, Dynamo's long form, into the three names."""
    endpoint = given.get("endpoint")
    if endpoint is None or not endpoint.startswith("dyn://"):
        return given
    parts = endpoint.removeprefix("dyn://").split(".")
    if len(parts) != 3 or not all(parts):
        raise ConfigurationError(f"--endpoint must be a name or dyn://namespace.component.endpoint, got {endpoint!r}")
    merged = dict(given)
    del merged["endpoint"]
    for name, part in zip(("namespace", "component", "endpoint"), parts, strict=True):
        if merged.setdefault(name, part) != part:
            raise ConfigurationError(f"--endpoint {endpoint} contradicts --{name} {merged[name]}")
    return merged


def _checked(given: dict[str, Any], environ: Mapping[str, str]) -> Arguments:
    if given.get("model_path") is None:
        raise ConfigurationError("--model-path is required")
    names = frozenset(given) - {"engine_settings", "engine_flags"}
    given.setdefault("served_model_name", Path(os.path.abspath(given["model_path"])).name.removesuffix(".gguf"))
    if given.get("disaggregation_mode") == "agg":
        given["disaggregation_mode"] = "aggregated"
    if given.get("disaggregation_mode") == "prefill":
        given.setdefault("component", "prefill")
    suffix = environ.get("DYN_NAMESPACE_WORKER_SUFFIX")
    if suffix:  # Dynamo's rule for several pools of workers of one model
        given["namespace"] = f"{given.get('namespace', 'dynamo')}-{suffix}"
    arguments = Arguments(**given, given=names)
    refuse_contradictions(arguments)
    return arguments
