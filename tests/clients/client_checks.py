"""Checks of clients, such as ``ask_CLIENT.py``, in the clients' environments."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from client_environments import HERE, REQUIREMENTS, command_of, run

CASES = {
    "plain": "plain",
    "structured": "structured",
    "tools_streamed": "tools, streamed",
    "tools": "tools",
    "parallel": "parallel",
    "required": "required, named",
    "round_trip": "round trip",
    "responses": "Responses",
    "messages": "Messages",
}
"""Columns of the table, by the beginning of the name of a check."""


def _files(client: str) -> list[Path]:
    stem = f"ask_{client.replace('-', '_')}"
    return [path for name in (f"{stem}.py", f"{stem}_responses.py", f"{stem}.mjs") if (path := HERE / name).exists()]


CHECKED = {client: files for client in REQUIREMENTS if (files := _files(client))}
"""Files with checks, by client."""


def case_of(check: str) -> str:
    """The case that a check is of."""
    return next(case for case in CASES if check.startswith(case))


def run_checks(client: str, url: str, model: str, directory: Path) -> dict[str, str]:
    """Failures of each check of a client, empty where nothing went wrong.

    Raises:
        AssertionError: its program ended before its checks did.
    """
    results: dict[str, str] = {}
    for file in CHECKED[client]:
        program = file
        if file.suffix == ".mjs":
            program = Path(shutil.copy(file, directory))
        done = run(client, [*command_of(client, program), url, model], directory, timeout_s=900)
        found = re.split(r"^(passed|FAILED) (\w+)$", done.stdout, flags=re.MULTILINE)[1:]
        made = {name: "" if word == "passed" else text for word, name, text in zip(*[iter(found)] * 3, strict=True)}
        assert made, done.stdout[-2000:] + done.stderr[-4000:]
        assert (done.returncode != 0) == any(made.values()), done.stderr[-4000:]
        results |= made
    return results
