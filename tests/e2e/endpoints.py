"""A worker's endpoint asked without a frontend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from e2e_stack import Stack

NUM_TOKENS = 12


class Endpoint:
    """A worker's, asked without a frontend."""

    def __init__(self, stack: Stack, component: str) -> None:
        program = str(Path(__file__).with_name("ask_worker.py"))
        with (stack.directory / f"ask-{component}.log").open("wb") as log:
            self.child = subprocess.Popen(
                [sys.executable, program, f"{component}.generate"],
                env=stack.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(self, prompt: list[int], max_tokens: int = NUM_TOKENS, **fields: Any) -> dict[str, Any]:
        request = {"model": "tiny", "token_ids": prompt, **fields}
        request["stop_conditions"] = {"max_tokens": max_tokens, "ignore_eos": True}
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(request) + "\n")
        self.child.stdin.flush()
        answer: dict[str, Any] = json.loads(self.child.stdout.readline())
        return answer

    def end(self) -> None:
        self.child.kill()
        self.child.communicate()


def tokens(answer: dict[str, Any]) -> list[int]:
    assert "chunks" in answer, answer
    return [token for chunk in answer["chunks"] for token in chunk["token_ids"]]


def transferred(prefill: Endpoint, prompt: list[int]) -> dict[str, Any]:
    """What a prefill worker says of a prompt."""
    answer = prefill.ask(prompt, max_tokens=1)
    assert "chunks" in answer, answer
    given: dict[str, Any] = answer["chunks"][0]["disaggregated_params"]
    return given
