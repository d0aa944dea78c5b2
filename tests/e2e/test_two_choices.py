"""Why ``n`` above 1 is refused behind Dynamo, on every version that is tested here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from e2e_stack import MODEL, Stack, Worker, wait_for
from ports import free_port


def test_the_unified_backend_ends_streams_at_a_finish_reason(stack: Stack) -> None:
    """Everything after it is lost. If this fails, Dynamo serves several choices: lift the refusal
    of ``sampling_options.n`` in `worker.requests.fields`.
    """
    stack.start_frontend()
    program = str(Path(__file__).with_name("two_choices_worker.py"))
    command = [sys.executable, program, "--model-path", str(stack.model_path), "--served-model-name", MODEL]
    port = free_port()
    environ = {**stack.environ, "DYN_SYSTEM_PORT": str(port)}
    worker = Worker(command, environ, stack.directory / "worker.log", port)
    try:
        stack.wait_registered(worker)
        ask = {"prompt": "a", "n": 2, "max_tokens": 4}
        wait_for(lambda: stack.post("completions", **ask)[0] == 200, "an answer")
        choices = {choice["index"]: choice for choice in json.loads(stack.post("completions", **ask)[1])["choices"]}
        assert choices[0]["finish_reason"] == "length"
        assert choices[1].get("finish_reason") is None
    finally:
        worker.end()
