"""Environments of clients, and programs that run in them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
REQUIREMENTS: dict[str, list[str]] = {
    line.split(": ")[0]: line.split(": ")[1].split()
    for line in (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
}
"""Packages of each client's environment, by its name."""

_DROPPED = ("PYTHONPATH", "VIRTUAL_ENV")
_NOWHERE = "http://127.0.0.1:9"
_SETTINGS = {
    "NO_COLOR": "1",
    # no client asks anybody but the server: what is not on loopback is refused
    **{f"{scheme}_PROXY": _NOWHERE for scheme in ("HTTP", "HTTPS", "ALL")},
    "NO_PROXY": "127.0.0.1,localhost",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # its list of prices is fetched otherwise
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "MSWEA_SILENT_STARTUP": "1",
}

_OWN_SETTINGS = {"aiperf": {"HF_HUB_OFFLINE": ""}}  # offline it takes a directory for the name of a repository


def version_of(client: str) -> str:
    """The version of the first package that a client is made of."""
    name = next(each for each in REQUIREMENTS[client] if each != "npm")
    return re.split("==|(?<=.)@", name)[1]


@cache
def environment_of(client: str) -> Path:
    """The client's environment, which is made if there is none."""
    command = [str(REPOSITORY / "scripts" / "clients"), client]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip()) / client


def settings_of(client: str, directory: Path, **more: str) -> dict[str, str]:
    """Environment variables of a client's process, whose home is ``directory``."""
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    path = f"{environment_of(client) / 'bin'}:{os.environ['PATH']}" if client in REQUIREMENTS else os.environ["PATH"]
    return kept | _SETTINGS | _OWN_SETTINGS.get(client, {}) | {"HOME": str(directory), "PATH": path} | more


def command_of(client: str, program: Path) -> list[str]:
    """The command that runs a program; one for node is put beside what it imports."""
    if program.suffix == ".mjs":
        (program.parent / "node_modules").unlink(missing_ok=True)
        (program.parent / "node_modules").symlink_to(environment_of(client) / "node_modules")
        return ["node", str(program)]
    if program.suffix == ".sh":
        return ["bash", "-euo", "pipefail", str(program)]
    return [str(environment_of(client) / "bin" / "python"), str(program)]


def run(
    client: str, command: Sequence[str], directory: Path, *, timeout_s: float = 540, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The end of a command and what it printed, in ``directory``."""
    return subprocess.run(
        command,
        env=settings_of(client, directory, **variables),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def output_of(client: str, command: Sequence[str], directory: Path) -> str:
    """The output of a command. Raises `AssertionError` with that if it failed."""
    done = run(client, command, directory)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout
