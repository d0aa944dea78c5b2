"""Runs the checks of one client, in the client's own environment: the standard library alone.

A check is a function ``check_CASE(url, model)`` or ``check_CASE_...`` of the module that calls
`run`; it passes unless it raises. The cases are columns of benchmarks/results/clients.md. A
connection that is left open is an error.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

OSLO = "What is the weather in Oslo?"
ADA = "Ada is 36 years old. Give her name and age as JSON."


def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"It is raining in {city}."


def beginning(text: str) -> dict[str, Any]:
    """The further field by which an answer begins with the text, and goes on by itself.

    A small model seldom calls a tool unless it must, and seldom keeps to a schema that it is told;
    what is tested is what becomes of an answer that does.
    """
    return {"logits_processors": [{"name": "forced_prefix", "args": {"text": text}}]}


def written_call(tool: str, arguments: str) -> str:
    """A call as the model writes it; ``arguments`` are JSON."""
    return f'<tool_call>{{"name": "{tool}", "arguments": {arguments}}}</tool_call>'


def writing(*cities: str, tool: str = "get_weather") -> dict[str, Any]:
    """The further field by which the model calls the tool for these cities, then goes on itself."""
    return beginning("\n".join(written_call(tool, f'{{"city":"{city}"}}') for city in cities))


def refusal(kind: type[Exception], call: Callable[..., Any], **fields: Any) -> str:
    """Message of the error that ``call`` must raise."""
    try:
        call(**fields)
    except kind as error:
        return str(error)
    raise AssertionError(f"{fields} was taken")


def run(module: ModuleType) -> int:
    """With the command line ``URL MODEL``; prints a line for each check. The exit status."""
    url, model = sys.argv[1:]
    failed = 0
    checks = {name: each for name, each in vars(module).items() if name.startswith("check_")}
    for name, check in checks.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            try:
                asyncio.run(check(url, model)) if inspect.iscoroutinefunction(check) else check(url, model)
            except Exception:  # the boundary of a check: the others run too
                failed += 1
                sys.stdout.write(f"\nFAILED {name.removeprefix('check_')}\n{traceback.format_exc()}\n")
            else:
                sys.stdout.write(f"\npassed {name.removeprefix('check_')}\n")
    return 1 if failed else 0
