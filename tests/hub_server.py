"""A Hugging Face Hub on loopback: the part of one that huggingface_hub asks to download a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A running hub.

    Attributes:
        url: Address of the server, for ``HF_ENDPOINT``.
        requests: Paths that were asked for.
    """

    def __init__(self, models: dict[str, Path], gated: frozenset[str]) -> None:
        self.models = models
        self.gated = gated
        self.requests: list[str] = []
        self.url = ""


@contextmanager
def hub(models: dict[str, Path], gated: frozenset[str] = frozenset()) -> Iterator[Hub]:
    """A hub with the files of these directories, by id; those that are `gated` have none for
    strangers.
    """
    state = Hub(models, gated)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _answer(state, self, has_body=True)

        def do_HEAD(self) -> None:
            _answer(state, self, has_body=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(state: Hub, handler: BaseHTTPRequestHandler, *, has_body: bool) -> None:
    path = unquote(handler.path.partition("?")[0])
    state.requests.append(path)
    parts = path.strip("/").split("/")
    is_api = parts[:2] == ["api", "models"]
    name = "/".join(parts[2:4] if is_api else parts[:2])
    directory = state.models.get(name)
    if directory is None:
        return _send(handler, 404, b"", {"X-Error-Code": "RepoNotFound"}, has_body)
    revision = parts[-1] if is_api else parts[3]
    if revision not in ("main", COMMIT) and len(parts) > 4:
        return _send(handler, 404, b"", {"X-Error-Code": "RevisionNotFound"}, has_body)
    if is_api:
        return _send(handler, 200, json.dumps(_description(name, directory, parts[4:])).encode(), {}, has_body)
    if name in state.gated:
        return _send(handler, 403, b"", {"X-Error-Code": "GatedRepo"}, has_body)
    file = directory.joinpath(*parts[4:])
    if not file.is_file():
        return _send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"}, has_body)
    content = file.read_bytes()
    headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
    return _send(handler, 200, content, headers, has_body)


def _description(name: str, directory: Path, parts: list[str]) -> object:
    files = sorted(each for each in directory.rglob("*") if each.is_file())
    if parts[:1] == ["tree"]:
        return [
            {"type": "file", "path": str(each.relative_to(directory)), "size": each.stat().st_size, "oid": "0" * 40}
            for each in files
        ]
    siblings = [{"rfilename": str(each.relative_to(directory))} for each in files]
    return {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False}


def _send(
    handler: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str], has_body: bool
) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(content)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if has_body:
        handler.wfile.write(content)
