"""What the documents ask of a worker, asked of ``launch/agg.sh`` with the tiny model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from document_pages import BLOCKS, ROOT
from documented_commands import Command, commands_of
from documented_programs import PROGRAMS, RUN_ELSEWHERE, files_in, run_programs, taken_for_granted
from launched_script import LaunchedScript, launched
from served_tiny_model import MAX_TOKENS, sent_to_the_worker

from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

CLIENTS = [page for page in PROGRAMS if any(one.page == page and "client" in one.text for one in BLOCKS)]
ASKED = [
    pytest.param(command, id=f"{block}-{number}")
    for block in BLOCKS
    if block.language in ("sh", "console") and not block.page.startswith("k8s/") and block.page not in RUN_ELSEWHERE
    for number, command in enumerate(commands_of(block))
    if command.arguments[0] == "curl"
]


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedScript]:
    options = ["--logits-processor", "acme/digit_limit=acme_processors:DigitLimit", "--context-length", "1024"]
    variables = {"MODEL_PATH": str(tiny_model), "PYTHONPATH": str(ROOT / "examples" / "custom_processor")}
    with launched(tmp_path_factory.mktemp("agg"), *options, variables=variables) as script:
        script.wait_until_ready()
        yield script


@pytest.mark.parametrize("command", ASKED)
def test_commands_are_answered(command: Command, served: LaunchedScript) -> None:
    """With 200, but for what the front door refuses."""
    body = dict(zip(command.arguments, command.arguments[1:], strict=False)).get("-d", "{}")
    asked = [
        json.dumps({**json.loads(one), "model": served.model, "max_tokens": MAX_TOKENS})
        if one == body
        else _there(one, served)
        for one in command.arguments
    ]
    ran = subprocess.run([*asked, "-s", "-w", "\n%{http_code}"], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == ("400" if is_refused(body) else "200"), ran.stdout


def is_refused(body: str) -> bool:
    try:
        sent_to_the_worker(CHAT, body.encode())
    except Refused:
        return True
    return False


def _there(argument: str, served: LaunchedScript) -> str:
    address = served.url.removesuffix("/v1")
    return argument.replace("http://127.0.0.1:8000", address).replace("http://localhost:8000", address)


FRAGMENTS = [
    block
    for block in BLOCKS
    if block.page in ("docs/batches.md", "docs/client-package.md", "docs/responses.md")
    and block.language in ("py", "python")
    and "picture" not in block.text
]
"""Programs of pages whose clients are not, or not only, those that `Redirected` redirects."""


@pytest.mark.parametrize("page", sorted({block.page for block in FRAGMENTS}))
def test_fragments_are_answered(
    page: str, served: LaunchedScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the page, as a reader types them."""
    with httpx.Client(timeout=60) as http, files_in(tmp_path, monkeypatch):
        monkeypatch.setattr(openai, "OpenAI", partial(openai.OpenAI, http_client=http, max_retries=0))  # type: ignore[arg-type]
        names = taken_for_granted() | {"client": openai.OpenAI(base_url=served.url, api_key="unused")}
        for block in (one for one in FRAGMENTS if one.page == page):
            source = _there(block.text, served).replace('"my-model"', f'"{served.model}"')
            exec(compile("\n" * (block.line - 1) + source, page, "exec"), names)


class Redirected(httpx.BaseTransport):
    """Sends what goes to the documents' address and model to those of the script."""

    def __init__(self, served: LaunchedScript) -> None:
        self.served = served
        self.transport = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url.copy_with(port=httpx.URL(self.served.url).port)
        body = {"max_tokens": MAX_TOKENS, **json.loads(request.read()), "model": self.served.model}
        return self.transport.handle_request(httpx.Request(request.method, url, json=body))

    def close(self) -> None:
        self.transport.close()


@pytest.mark.parametrize("page", CLIENTS)
def test_programs_are_answered(
    page: str, served: LaunchedScript, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.Client(transport=Redirected(served), timeout=60) as http, files_in(tmp_path, monkeypatch):
        monkeypatch.setattr(openai, "OpenAI", partial(openai.OpenAI, http_client=http, max_retries=0))  # type: ignore[arg-type]
        run_programs(page, taken_for_granted(), tiny_model, tmp_path)
