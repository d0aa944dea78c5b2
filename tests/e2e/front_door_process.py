"""A front door before the frontend of a `Stack`."""

from __future__ import annotations

import sys
from typing import Any

import openai
from e2e_stack import MODEL, Process, Stack, http, wait_for
from ports import free_port


class Door(Process):
    """``python -m worker.frontdoor`` of a stack; on a free port unless one is given."""

    def __init__(
        self, stack: Stack, *arguments: str, upstream: str | None = None, port: int = 0, **environ: str
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "worker.frontdoor", "--port", str(self.port)]
        command += ["--upstream", upstream or stack.upstream, *stack.door_arguments(*arguments)]
        log = stack.directory / f"door{len(stack._processes)}.log"
        super().__init__(command, {**stack.environ, **environ}, log)
        stack._processes.append(self)
        wait_for(lambda: http(f"{self.url}/v1/logits_processors")[0] in (200, 401) or not self.running, "front door")
        assert self.running, self.log
        stack.wait_for_workers(self)

    def post(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and text of a request to ``/v1/path``."""
        return http(f"{self.url}/v1/{path}", {"model": MODEL, **body})

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
