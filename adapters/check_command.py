"""``python -m adapters check module:Class``: runs the conformance checks."""

from __future__ import annotations

import argparse
import json
from typing import Any

from adapters.catalog import CatalogError, load_class
from adapters.standard_output import write


def add_check_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``check``; exit status 0 if every check passed, 1 if one failed, 2 if it could not be run."""
    parser = subparsers.add_parser("check", help="whether a processor class keeps the contract")
    parser.add_argument(
        "target", metavar="module:Class", help="a processor class, or a third-party one that can be wrapped"
    )
    parser.add_argument(
        "--example",
        metavar="JSON",
        action="append",
        default=[],
        type=_arguments,
        help="arguments that the processor accepts; give several",
    )
    parser.add_argument("--only", metavar="NAME", action="append", help="run this check only; give several")
    parser.add_argument("--list", action=_ListChecks, nargs=0, help="list the checks and their meaning")
    parser.set_defaults(run=run_check_command)


def run_check_command(arguments: argparse.Namespace) -> int:
    """Check one class and print the report; returns the exit status."""
    from adapters.testing import check_processor

    processor = load_class(arguments.target, "check")
    try:
        report = check_processor(processor, arguments.example, only=arguments.only)
    except (TypeError, ValueError, ModuleNotFoundError) as error:
        raise CatalogError(f"check {arguments.target}: {error}") from error
    write(str(report))
    return 0 if report.passed else 1


class _ListChecks(argparse.Action):
    """Prints the checks and exits, as ``--help`` does."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> None:
        from adapters.testing import CHECKS

        write("".join(f"{check.name:<18}{check.meaning}\n" for check in CHECKS))
        parser.exit()


def _arguments(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(data, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return data
