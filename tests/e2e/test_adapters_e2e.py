"""LoRA adapters are models of Dynamo's frontend as long as their worker lives."""

from __future__ import annotations

import json
import signal

from e2e_stack import MODEL, Stack, http, wait_for

NAMES = {MODEL, "mine", "other"}


def models(stack: Stack) -> set[str]:
    return {each["id"] for each in json.loads(http(f"{stack.url}/v1/models")[1])["data"]}


def entries(stack: Stack) -> list[str]:
    return sorted(path.name for path in (stack.directory / "discovery" / "v1" / "mdc").iterdir())


def test_adapters_come_and_go_with_their_worker(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker(scripted=True, SCRIPT_ADAPTERS="mine other")
    wait_for(lambda: models(stack) == NAMES, "the adapters in the frontend")
    for name in sorted(NAMES):
        wait_for(lambda name=name: stack.post("completions", model=name, prompt="a", max_tokens=2)[0] == 200, name)
    assert stack.post("completions", model="nobody", prompt="a", max_tokens=2)[0] == 404
    assert len(entries(stack)) == len(NAMES)
    wait_for(lambda: "4 entries of discovery are removed" in worker.log, "a guard of all entries")
    stack.start_frontend()  # one that hears of the model and its adapters at once
    wait_for(lambda: models(stack) == NAMES, "the adapters in a second frontend")
    worker.signal(signal.SIGKILL)
    wait_for(lambda: not entries(stack), "no entry of a worker that was killed")
