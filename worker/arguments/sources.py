"""The worker's options from the command line, the environment and a YAML file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from worker import __version__
from worker.arguments.contradictions import refuse_contradictions
from worker.arguments.option import StrictParser, from_environment
from worker.arguments.table import ENVIRONMENT_PREFIX, OPTIONS, Arguments
from worker.errors import ConfigurationError

# Kubernetes describes a Service named "worker" to every pod in these variables; they are not
# options.
_KUBERNETES_SERVICE = re.compile(r"WORKER_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_\w+)?)")


def parse_arguments(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Arguments:
    """Read the options: the command line wins over the environment, both over the defaults.

    A YAML file given with ``--extra-engine-args`` may not contradict either of them.

    Raises:
        ConfigurationError: an option is unknown, malformed, contradictory or missing.
        SystemExit: ``--help`` or ``--version`` was given.
    """
    environ = os.environ if environ is None else environ
    given = from_environment(OPTIONS, ENVIRONMENT_PREFIX, environ, _KUBERNETES_SERVICE) | _from_command_line(argv)
    # With --engine trtllm the file has TensorRT-LLM's own names: worker/engines/trtllm/settings.py
    # reads it.
    if given.get("extra_engine_args") is not None and given.get("engine") != "trtllm":
        given = _with_file(given, str(given["extra_engine_args"]))
    return _checked(_with_full_endpoint(given), environ)


def _from_command_line(argv: Sequence[str] | None) -> dict[str, Any]:
    parser = StrictParser(
        prog="python -m worker",
        description="Serve a model through NVIDIA Dynamo, over NATS, or behind OpenEngine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dynamo-logits-worker {__version__}")
    for option in OPTIONS:
        option.add_to(parser, "append")
    texts = vars(parser.parse_args(argv))
    values = {}
    for option in OPTIONS:
        if texts[option.name] is not None:
            if len(texts[option.name]) > 1 and not option.many:
                raise ConfigurationError(f"{option.flag} is given {len(texts[option.name])} times")
            values[option.name] = option.read(",".join(texts[option.name]), option.flag)
    return values


class _UniqueKeys(yaml.SafeLoader):
    """YAML keeps the last of two equal keys in silence; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} is given twice")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _with_file(given: dict[str, Any], path: str) -> dict[str, Any]:
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


def load_yaml(path: str, flag: str = "--extra-engine-args") -> dict[str, Any]:
    """The mapping in the file that ``flag`` names. Raises `ConfigurationError`."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{flag} {path}: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{flag} {path}: must be a mapping of option names to values")
    return {str(key): value for key, value in content.items()}


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
    names = frozenset(given)
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
