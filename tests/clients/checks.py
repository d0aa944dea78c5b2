"""Runs the checks of one client, in the client's own environment: the standard library alone.

A check is a function ``check_...(url, model)`` of the module that calls `run`; it passes unless it
raises. A connection that is left open is an error.
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
                sys.stdout.write(f"FAILED {name.removeprefix('check_')}\n{traceback.format_exc()}\n")
            else:
                sys.stdout.write(f"passed {name.removeprefix('check_')}\n")
    return 1 if failed else 0
