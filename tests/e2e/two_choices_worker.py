"""A worker for Dynamo's unified backend that answers every request with two choices.

Choice 0 has one token, choice 1 goes on for three more; both end with a finish reason.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import uvloop
from dynamo.common.backend.engine import LLMEngine
from dynamo.common.backend.worker import Worker

from worker.arguments import Arguments, parse_arguments
from worker.engines import EngineInfo
from worker.runtimes import dynamo as runtime

INFO = EngineInfo("two choices", "0", 2048, 1024, (), 16, 1024, 64, 1024)


class TwoChoices(LLMEngine):
    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError

    async def start(self, worker_id: int) -> Any:
        return runtime.engine_config(INFO, self.arguments)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        usage = {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}
        yield {"token_ids": [300], "index": 1}
        yield {"token_ids": [300], "index": 0, "finish_reason": "length", "completion_usage": usage}
        yield {"token_ids": [301], "index": 1}
        yield {"token_ids": [302], "index": 1}
        yield {"token_ids": [303], "index": 1, "finish_reason": "length", "completion_usage": usage}

    async def cleanup(self) -> None:
        """Nothing is held."""


if __name__ == "__main__":
    arguments = parse_arguments()
    uvloop.run(Worker(TwoChoices(arguments), runtime.worker_config(arguments)).run())
    runtime.finish(0)
