"""Flags of vLLM on the worker's command line, read by vLLM's own parser."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from worker.arguments import OPTIONS, meant
from worker.engines.vllm.package import read_package
from worker.errors import ConfigurationError, one_line


def read_flags(argv: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``AsyncEngineArgs`` that flags give, by name, as the installed version reads
    them.

    Args:
        argv: Arguments of the command line that are none of the worker's own options.

    Raises:
        ConfigurationError: a flag is unknown or malformed.
        StartupError: vLLM cannot be imported.
    """
    if not argv:
        return {}
    package = read_package()
    parser = _parser()
    package.engine_args.add_cli_args(parser, async_args_only=False)
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # only what is given
    try:
        found: dict[str, Any] = vars(parser.parse_args(list(argv)))
    except ConfigurationError:
        raise
    except Exception as error:  # of vLLM's parser: a file of --config, a dotted flag without its value
        raise ConfigurationError(f"vLLM cannot read {' '.join(argv)}: {one_line(error)}") from error
    return found


def _parser() -> Any:
    """vLLM's parser, whose errors are `ConfigurationError`."""
    base: Any = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser

    class Parser(base):  # type: ignore[misc]  # vLLM may be missing here
        def error(self, message: str) -> Any:
            said = " ".join(message.split())
            flags = [flag for action in self._actions for flag in action.option_strings]
            hint = meant(said, [*flags, *(option.flag for option in OPTIONS)])
            raise ConfigurationError(f"{said} (of the worker, or of vLLM){hint}")

    return Parser(prog="python -m worker", add_help=False, allow_abbrev=False)
