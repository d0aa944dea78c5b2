"""Waits until a Dynamo frontend serves a model that answers, then prints the model's name.

``python await_model.py FRONTEND DOOR``, such as http://127.0.0.1:8000; the front door, which may be
the frontend itself, need not let a client without a key ask for more than its health. Only the
standard library; there is no timeout, the caller has one.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

POLL_INTERVAL_S = 0.2


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON answer. Raises `OSError` when there is none, `ValueError` when it is not JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        return json.load(response)


def answering_model(base_url: str) -> str:
    """The name of the first listed model, once it has answered. Raises `OSError` or `ValueError`
    until then.
    """
    models = call(f"{base_url}/v1/models")["data"]
    if not models:
        raise ValueError("no model yet")
    name = str(models[0]["id"])
    try:
        call(f"{base_url}/v1/completions", {"model": name, "prompt": "Hello", "max_tokens": 1})
    except urllib.error.HTTPError:  # a worker may serve chat alone
        messages = [{"role": "user", "content": "Hello"}]
        call(f"{base_url}/v1/chat/completions", {"model": name, "messages": messages, "max_tokens": 1})
    return name


def main(frontend: str, door: str) -> None:
    while True:
        try:
            name = answering_model(frontend)
            call(f"{door}/health")
        except (OSError, ValueError):
            time.sleep(POLL_INTERVAL_S)
        else:
            sys.stdout.write(name + "\n")
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
