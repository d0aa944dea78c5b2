"""Programs of the documents, run as a reader would type them."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from document_pages import BLOCKS

from adapters.testing import kit_vocabulary

RUN_ELSEWHERE = {
    "docs/clients.md": "tests/clients/test_clients.py",
    "docs/nats.md": "tests/runtimes/test_nats_runtime.py",
    "docs/writing-processors.md": "tests/adapters/conformance/test_kit_from_outside.py",
}
"""Pages whose programs another test runs."""

PROGRAMS = sorted({block.page for block in BLOCKS if block.language == "python"} - set(RUN_ELSEWHERE))


def taken_for_granted() -> dict[str, Any]:
    """Names that a page's programs may use without saying where they come from."""
    return {
        "client": openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="unused"),
        "messages": [{"role": "user", "content": "Hello"}],
        "vocabulary": kit_vocabulary(),
    }


@contextlib.contextmanager
def files_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the page are written there and imported from there, and forgotten afterwards."""
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(directory)):
            del sys.modules[name]


def run_programs(page: str, names: dict[str, Any], model: Path, directory: Path) -> None:
    """Those of a page, one after the other; a block that begins with a file's name is that module.

    Args:
        page: Path of the page.
        names: What the programs know, and what they add to it.
        model: Checkpoint in place of ``/models/my-model``.
        directory: Of `files_in`.
    """
    for block in (one for one in BLOCKS if one.page == page and one.language == "python"):
        source = block.text.replace("/models/my-model", str(model))
        module = re.match(r'"""(\w+)\.py"""', source)
        if module:
            (directory / f"{module[1]}.py").write_text(source, encoding="utf-8")
            importlib.import_module(module[1])
        else:
            exec(compile("\n" * (block.line - 1) + source, page, "exec"), names)
