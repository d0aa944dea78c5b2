"""``python -m adapters``: what the catalogue holds, and tools for authors and operators.

list                 one line for each processor
show NAME            one processor, its arguments and their ranges
schema [NAME]        JSON Schema of the request channel, or of one processor's arguments
table [FILE]         the Markdown table of processors; with a file, written between its markers
check module:Class   whether a processor class keeps the contract
detect FILE          test whether a text carries the watermark of a key
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from adapters.catalog import (
    Catalog,
    CatalogError,
    Entry,
    is_offered,
    render_entry,
    render_list,
    selection_schema,
    table,
    with_table,
)
from adapters.check_command import add_check_command
from adapters.processors.detection import add_detect_command
from adapters.standard_output import discard, write
from adapters.whole_files import write_whole

Subparsers = argparse._SubParsersAction  # argparse has no public name for it


def add_list_command(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """``list``."""
    parser = commands.add_parser("list", help="one line for each processor")
    _add_catalog_options(parser)
    parser.set_defaults(run=lambda arguments: _write(render_list(_catalog(arguments))))


def add_show_command(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """``show NAME``."""
    parser = commands.add_parser("show", help="one processor, its arguments and their ranges")
    parser.add_argument("name", metavar="NAME")
    _add_catalog_options(parser)
    parser.set_defaults(run=lambda arguments: _write(render_entry(_entry(arguments))))


def add_schema_command(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """``schema [NAME]``."""
    parser = commands.add_parser("schema", help="JSON Schema of the request channel, or of one processor's arguments")
    parser.add_argument("name", metavar="NAME", nargs="?")
    _add_catalog_options(parser)
    parser.set_defaults(run=_run_schema)


def add_table_command(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """``table [FILE]``."""
    parser = commands.add_parser("table", help="the Markdown table of built-ins; with a file, written into it")
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path)
    parser.set_defaults(run=_run_table)


COMMANDS: tuple[Callable[[Subparsers[argparse.ArgumentParser]], None], ...] = (
    add_list_command,
    add_show_command,
    add_schema_command,
    add_table_command,
    add_check_command,
    add_detect_command,
)
"""Each adds one subparser whose ``run`` takes the parsed arguments and returns the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m adapters", description="Logits processors.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_command in COMMANDS:
        add_command(commands)
    try:
        arguments = parser.parse_args(argv)  # which may print the checks
        status: int = arguments.run(arguments)
    except (CatalogError, KeyError) as error:
        sys.stderr.write(f"{error.args[0]}\n")
        return 2
    except OSError as error:  # as of a full disk
        discard()
        sys.stderr.write(f"{error}\n")
        return 2
    return status


def _add_catalog_options(parser: argparse.ArgumentParser) -> None:
    """The worker's own, which give several separated by commas or one by one."""
    parser.add_argument(
        "--logits-processor",
        action="extend",
        type=_separated,
        default=[],
        metavar="NAME=module:Class",
        help="add third parties' processors, separated by commas",
    )
    parser.add_argument(
        "--allow-logits-processors",
        action="extend",
        type=_separated,
        default=[],
        metavar="NAME",
        help="add those that installed distributions offer, separated by commas",
    )


def _separated(text: str) -> list[str]:
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise argparse.ArgumentTypeError("expected a list separated by commas")
    return entries


def _catalog(arguments: argparse.Namespace) -> Catalog:
    return Catalog.load(allow=arguments.allow_logits_processors, options=arguments.logits_processor)


def _entry(arguments: argparse.Namespace) -> Entry:
    """The entry of the name. Raises `CatalogError` and `KeyError`."""
    catalog, name = _catalog(arguments), arguments.name
    if name not in catalog and is_offered(name):
        raise CatalogError(f"{name} is installed, but not allowed: give --allow-logits-processors {name}")
    return catalog[name]


def _run_schema(arguments: argparse.Namespace) -> int:
    schema = _entry(arguments).args_schema() if arguments.name else selection_schema(_catalog(arguments))
    return _write(json.dumps(schema, indent=2) + "\n")


def _run_table(arguments: argparse.Namespace) -> int:
    catalog = Catalog.default()
    if arguments.file is None:
        return _write(table(catalog))
    try:
        write_whole(arguments.file, with_table(arguments.file.read_text(encoding="utf-8"), catalog))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{arguments.file}: {error}\n")
        return 2
    return 0


def _write(text: str) -> int:
    write(text)
    return 0
