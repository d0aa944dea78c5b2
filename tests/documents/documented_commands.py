"""Command lines of the documents, as bash reads them and as the commands' own parsers take them.

Bash runs each block with stubs in place of the commands: a stub writes down its arguments and the
exported variables. ``...`` and ``…`` among the arguments stand for further options of the reader.
"""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

from document_pages import ROOT, Block

from worker.arguments import OPTIONS, parse_arguments
from worker.frontdoor.options import parse_options

_STUBS = r"""
command_not_found_handle() {
    local variables=() name
    for name in $(compgen -e); do variables+=("$name=${!name}"); done
    printf '%s\0' "$@" $'\n' "${variables[@]}" $'\n' > "$records/$EPOCHREALTIME.$BASHPID" # a pipe has several at once
}
for name in "${stubs[@]}"; do eval "function $name { command_not_found_handle $name \"\$@\"; }"; done
PATH=/nowhere
"""
_OWN_SCRIPTS = [str(path.relative_to(ROOT)) for folder in ("launch", "scripts") for path in (ROOT / folder).iterdir()]
_PYTHONS = (".venv/bin/python", ".venv-vllm/bin/python")
_STUBBED = [*_OWN_SCRIPTS, *(f"./{name}" for name in _OWN_SCRIPTS), *_PYTHONS]
_SHELL_VARIABLES = {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}

ELLIPSES = ("...", "…")

OTHERS_COMMANDS = {
    *(
        "aiperf",
        "base64",
        "cat",
        "curl",
        "docker",
        "fold",
        "guidellm",
        "head",
        "helm",
        "kubectl",
        "litellm",
        "llm",
        "lm_eval",
    ),
    *("nats", "od", "openssl", "pip", "sed", "tail", "tr"),
}
"""Commands that are not ours, and that have no parser here."""

_WORKER_VARIABLES = {option.env for option in OPTIONS}


@dataclass(frozen=True)
class Command:
    """A simple command with the variables that were exported when it ran."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str]

    def __str__(self) -> str:
        return " ".join(self.arguments)


def commands_of(block: Block) -> list[Command]:
    """The commands of an ``sh`` block, or those behind the prompts of a ``console`` block."""
    if block.language == "console":
        return [command for text in _typed(block.text) for command in _recorded(text)]
    return _recorded(block.text)


def _typed(session: str) -> Iterator[str]:
    """What follows each ``$ ``, with the lines that a quote or a backslash carries on."""
    lines = iter(session.splitlines())
    for line in lines:
        if line.startswith("$ "):
            typed = line.removeprefix("$ ")
            while not _is_complete(typed):
                typed += "\n" + next(lines)
            yield typed


def _is_complete(text: str) -> bool:
    parsed = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    return parsed.returncode == 0 and not text.endswith("\\")


def _recorded(text: str) -> list[Command]:
    with tempfile.TemporaryDirectory() as directory:
        records = Path(directory) / "records"
        records.mkdir()
        stubs = "stubs=(" + " ".join(_STUBBED) + ")"
        script = f"records={records}\n{stubs}\n{_STUBS}\n{text}\nwait"
        ran = subprocess.run(
            ["bash", "--norc", "-c", script], cwd=directory, env={}, text=True, capture_output=True, check=False
        )
        assert ran.stderr == "", ran.stderr
        texts = [record.read_text(encoding="utf-8") for record in sorted(records.iterdir())]
    commands = []
    for text in texts:
        fields = text.split("\0")
        end = fields.index("\n")
        arguments, variables = fields[:end], fields[end + 1 : -2]
        exported = dict(variable.split("=", 1) for variable in variables)
        commands.append(Command(tuple(arguments), {k: v for k, v in exported.items() if k not in _SHELL_VARIABLES}))
    return commands


class _Parsed(Exception):
    """The command's own parser has taken its arguments."""


def check(command: Command) -> None:
    """Raises what the command's own parser raises, or `AssertionError` for an unknown one."""
    name, *rest = command.arguments
    name = name.removeprefix("./")
    given = [one for one in rest if one not in ELLIPSES]
    if {"--help", "-h", "--version"} & {*given}:
        given = given[:2] if given[0] == "-m" else []
    if name.startswith("launch/"):
        _check_launch(name, given, command.variables)
    elif name.startswith("scripts/"):
        usage = _text_of(name, "tests/golden/run_golden.py")  # which scripts/golden runs
        flags = [one.partition("=")[0] for one in given if one.startswith("-")]
        assert all(re.search(rf"{re.escape(one)}\b", usage) for one in flags), command
    elif name in _PYTHONS:  # another one lacks the package
        _check_python(given, command.variables, is_cut=len(given) < len(rest))
    elif name == "dlw-batch":
        _check_argparse(partial(importlib.import_module("worker.runtimes.nats.batch.command").main, given))
    else:
        assert name in OTHERS_COMMANDS, command
    for path in re.findall(r"(?<![\w./-])(?:k8s|examples)/[\w./-]+", str(command)):
        assert (ROOT / path).exists(), path


def _text_of(*names: str) -> str:
    return "".join((ROOT / name).read_text(encoding="utf-8") for name in names)


def _check_launch(name: str, given: Sequence[str], variables: Mapping[str, str]) -> None:
    usage = _text_of(name, "launch/lib.sh", "launch/several.sh")
    unknown = [one for one in variables if one not in _WORKER_VARIABLES and not re.search(rf"\b{one}\b", usage)]
    assert not unknown, f"{name}: {unknown}"
    engine = ["--engine", variables["ENGINE"]] if "ENGINE" in variables else []
    parse_arguments(["--model-path", "M", *engine, *given], _of_worker(variables))


def _of_worker(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name in _WORKER_VARIABLES}


def _check_python(given: list[str], variables: Mapping[str, str], *, is_cut: bool) -> None:
    known = {*_WORKER_VARIABLES, "DLW_POOL_SECRET", "OMP_NUM_THREADS", "NATS_SERVER", "ETCD_ENDPOINTS"}
    unknown = [one for one in variables if one not in known and not one.startswith("DYN_")]
    assert not unknown, unknown
    if given[0] != "-m":
        beside = [str((ROOT / given[0]).parent), *sys.path]  # as Python does for a script
        with patch.object(sys, "argv", given), patch.object(sys, "path", beside):
            _check_argparse(lambda: runpy.run_path(str(ROOT / given[0]), run_name="__main__"))
        return
    module, rest = given[1], given[2:]
    if module == "worker":
        _check_worker(rest, ["--model-path", "M"] if is_cut and "--model-path" not in rest else [], variables)
    elif module == "worker.frontdoor":
        parse_options(rest, {})
    elif module == "dynamo.frontend":
        with patch.object(sys, "argv", ["frontend", *rest]):
            importlib.import_module("dynamo.frontend.main").parse_args()
    elif module == "adapters":
        _check_argparse(lambda: importlib.import_module("adapters.command").main(rest))
    elif module not in ("pip", "pytest"):
        _check_argparse(lambda: importlib.import_module(module).main(rest))


def _check_worker(given: list[str], added: list[str], variables: Mapping[str, str]) -> None:
    if given[:1] == ["replay"]:
        importlib.import_module("worker.replay.command")._parse([*given[1:], *added])
    elif given[:1] == ["inspect"]:
        importlib.import_module("worker.inspect.command")._parse(given[1:])
    elif given[:1] == ["quantize"]:
        importlib.import_module("worker.quantize.command")._parse(given[1:])
    elif given[:1] == ["doctor"]:
        importlib.import_module("worker.doctor.command")._parse(given[1:])
    else:
        parse_arguments([*added, *given], _of_worker(variables))


def _check_argparse(main: Callable[[], object]) -> None:
    """Calls it until `argparse` has parsed."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: object, **named: object) -> None:
        parse(parser, *arguments, **named)
        raise _Parsed

    with patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop):
        try:
            main()
        except _Parsed:
            return
        except SystemExit as ended:  # of a command that is done with that, or of a refusal
            if not ended.code:
                return
            raise
    raise AssertionError("it has not parsed its arguments with argparse")
