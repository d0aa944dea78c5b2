"""The programs of docs/clients.md: a section is a client, named as in requirements.txt."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmark_reports import CHECKS
from client_environments import REPOSITORY, command_of, run, settings_of
from ports import free_port

PAGE = REPOSITORY / "docs" / "clients.md"
_SECTION = re.compile(r"^## ([\w-]+)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SUFFIXES = {"python": ".py", "js": ".mjs", "sh": ".sh"}
_ADDRESS = "http://127.0.0.1:8000"
_PROXY_PORT = "4000"


@dataclass(frozen=True)
class Program:
    """A program of the page.

    Attributes:
        client: Name of the client.
        suffix: Suffix of the program's file.
        text: Source of the program.
        output: Text that the page says it prints; None if the page does not say.
        server: Commands that start what it asks, if that is not the worker.
    """

    client: str
    suffix: str
    text: str
    output: str | None
    server: str | None = None


def programs() -> list[Program]:
    """All of the page, in its order; the first of a section's two shell blocks starts a server."""
    found = []
    for client, body in _SECTION.findall(PAGE.read_text(encoding="utf-8")):
        fences = _FENCE.findall(body)
        server = None
        for index, (language, text) in enumerate(fences):
            following = fences[index + 1] if index + 1 < len(fences) else ("", "")
            if language == "sh" and following[0] == "sh":
                server = text
            elif language in _SUFFIXES:
                output = following[1] if following[0] == "text" else None
                found.append(Program(client, _SUFFIXES[language], text, output, server))
    return found


def run_program(program: Program, url: str, checkpoint: Path, directory: Path) -> str:
    """The output of a program when the worker is at ``url`` and serves the model in ``checkpoint``.

    Raises:
        AssertionError: it fails, with what it printed; or its output or report is not as it should.
    """
    port = str(free_port())
    path = directory / f"program{program.suffix}"
    path.write_text(_asking(program.text, url, port), encoding="utf-8")
    with _serving(program, _asking(program.server or "", url, port), port, directory):
        command = command_of(program.client, path)
        done = run(program.client, command, directory, timeout_s=300, MODEL_PATH=str(checkpoint))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert program.output in (None, done.stdout), done.stdout
    if program.client in CHECKS:
        CHECKS[program.client](directory)
    return done.stdout


def _asking(text: str, url: str, port: str) -> str:
    """The text with the address of the worker, and of a proxy in front of it."""
    return text.replace(_PROXY_PORT, port).replace(_ADDRESS, url.removesuffix("/v1"))


@contextmanager
def _serving(program: Program, text: str, port: str, directory: Path) -> Iterator[None]:
    if not text:
        yield
        return
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-euc", text],
            env=settings_of(program.client, directory),
            cwd=directory,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not _answers(f"http://127.0.0.1:{port}/v1/models"):
                assert process.poll() is None, (directory / "server.log").read_text()[-4000:]
                time.sleep(0.2)
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
