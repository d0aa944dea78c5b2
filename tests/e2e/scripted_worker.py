"""``python -m worker`` with a scripted engine, so that a test decides how long a request lasts and
how it ends.

The prompt's first token says what to do; after it the answer is one letter every ``SCRIPT_STEP_S``
seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import worker.__main__
import worker.build
from worker.arguments import Arguments
from worker.engines import EngineInfo, EngineRequest, TokenDelta
from worker.errors import Draining, EngineBroken, Overloaded

BREAKS = os.environ.get("SCRIPT_BREAKS") == "true"
STEP_S = float(os.environ.get("SCRIPT_STEP_S", "0.02"))
ADAPTERS = dict.fromkeys(os.environ.get("SCRIPT_ADAPTERS", "").split(), "0" * 32)


class ScriptedEngine:
    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        tokenizer = json.loads((Path(arguments.model_path) / "tokenizer.json").read_text())
        self.vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
        self.vocab_size = int(json.loads((Path(arguments.model_path) / "config.json").read_text())["vocab_size"])
        self.letters = {self.vocabulary[letter]: letter for letter in "abcdefghijklmnopqrstuvwxyz"}
        self.running: dict[str, asyncio.Event] = {}
        self.given_away = False
        self.deaf = False

    async def start(self) -> EngineInfo:
        return EngineInfo(
            name="scripted",
            version="0",
            context_length=2048,
            vocab_size=self.vocab_size,
            eos_token_ids=(0,),
            kv_block_size=16,
            total_kv_blocks=1024,
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            adapters=ADAPTERS,
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        script = self.letters.get(request.prompt_token_ids[0], "")
        if script == "o":
            raise Overloaded("queue full")
        if self.given_away:
            raise Draining("given away")
        if self.deaf:
            await asyncio.Event().wait()
        self.deaf = script == "d"
        max_tokens = request.params.max_tokens
        assert max_tokens is not None
        stopped = self.running[request.id] = asyncio.Event()
        for i in range(max_tokens):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopped.wait(), STEP_S)
            if self.given_away:
                raise Draining("given away")
            if stopped.is_set():
                yield TokenDelta(finish_reason="cancelled")
                return
            if i == 3:
                if script == "p":
                    self.running.pop(request.id)
                    yield TokenDelta(finish_reason="error", error="logits processor Bad: raised ValueError")
                    return
                if script == "u":
                    self.running.pop(request.id)
                    raise RuntimeError("nobody foresaw this")
                if script == "b" and BREAKS:
                    raise EngineBroken("the device is gone")
            last = i == max_tokens - 1
            if last:
                self.running.pop(request.id)
            yield TokenDelta([self.vocabulary["x"]], finish_reason="length" if last else None)

    def abort(self, request_id: str) -> None:
        stopped = self.running.pop(request_id, None)
        if stopped is not None:
            stopped.set()

    def num_unfinished(self) -> int:
        return len(self.running)

    def migrate_all(self) -> int:
        self.given_away = True
        for stopped in self.running.values():
            stopped.set()
        return len(self.running)

    async def stop(self) -> None:
        self.running.clear()


if __name__ == "__main__":
    worker.build.make_engine = lambda arguments, ahead=None: ScriptedEngine(arguments)  # type: ignore[assignment, return-value]
    worker.__main__.run()
