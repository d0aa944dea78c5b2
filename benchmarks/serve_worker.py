"""Workers for `serve.py` and `runtimes.py`: ``python serve_worker.py {ours|constant|nats} ...``.

``ours`` is the worker with the embedded engine and a model whose forward pass costs nothing.
``constant`` is the smallest engine for Dynamo's unified backend: constant ids, one per chunk, as
fast as the event loop allows. ``nats`` is ``ours`` on the NATS runtime.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
import uvloop
from dynamo.common.backend.engine import LLMEngine
from dynamo.common.backend.worker import Worker
from tokenizers import Tokenizer

from worker.arguments import Arguments, parse_arguments
from worker.build import Built
from worker.engines import EngineInfo
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine, Plan
from worker.engines.embedded.serving.constant import ConstantModel
from worker.runtimes import dynamo as runtime
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.runtimes.nats.runtime import NatsWorker

CONTEXT_LENGTH = 2048


def constant_token(model_path: str) -> tuple[int, int]:
    """The id that both engines repeat, and the size of the vocabulary."""
    tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    return tokenizer.encode("a", add_special_tokens=False).ids[0], tokenizer.get_vocab_size()


class NullModel(ConstantModel):
    """A `ConstantModel` without a pace, whose rows of logits are made before."""

    context_length = CONTEXT_LENGTH

    def __init__(self, model_path: str, max_num_seqs: int) -> None:
        super().__init__(model_path, step_s=0.0, prompt_rate=math.inf)
        rows = self._rows(range(max_num_seqs))
        self._logits = [rows[:count] for count in range(max_num_seqs + 1)]

    def forward(self, plan: Plan) -> torch.Tensor:
        return self._logits[len(plan.sampled)]  # nobody writes into them or drafts: no request here has a chain


class ConstantEngine(LLMEngine):
    """``max_tokens`` times the same id, awaiting the loop before each."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.token, self.vocab_size = constant_token(arguments.model_path)

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        arguments = parse_arguments(argv)
        return cls(arguments), runtime.worker_config(arguments)

    async def start(self, worker_id: int) -> Any:
        arguments = self.arguments
        info = EngineInfo(
            name="constant",
            version="0",
            context_length=CONTEXT_LENGTH,
            vocab_size=self.vocab_size,
            eos_token_ids=(),
            kv_block_size=arguments.kv_block_size,
            total_kv_blocks=CONTEXT_LENGTH,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
        )
        return runtime.engine_config(info, arguments)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        num_prompt, max_tokens = len(request["token_ids"]), request["stop_conditions"]["max_tokens"]
        for _ in range(max_tokens - 1):
            await asyncio.sleep(0)
            if context.is_stopped():
                return
            yield {"token_ids": [self.token], "index": 0}
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": max_tokens,
            "total_tokens": num_prompt + max_tokens,
        }
        yield {"token_ids": [self.token], "index": 0, "finish_reason": "length", "completion_usage": usage}

    async def cleanup(self) -> None:
        """Nothing is held."""


def free_engine(arguments: Arguments) -> EmbeddedEngine:
    """The embedded engine with a forward pass that costs nothing."""
    config = EmbeddedConfig(model_path=arguments.model_path, max_num_seqs=arguments.max_num_seqs)
    return EmbeddedEngine(config, model=NullModel(arguments.model_path, arguments.max_num_seqs))


def main(kind: str, argv: list[str]) -> None:
    if kind == "nats":
        arguments = parse_arguments(["--runtime", "nats", *argv])
        uvloop.run(NatsWorker(Built(free_engine(arguments), arguments, None, smoke=False)).run())
        return
    arguments = parse_arguments(argv)
    runtime_config = runtime.worker_config(arguments)
    if kind == "ours":
        served = WorkerEngine(free_engine(arguments), arguments)
        runtime.run(served, runtime_config, served.server.signalled)
    elif kind == "constant":
        uvloop.run(Worker(ConstantEngine(arguments), runtime_config).run())
    else:
        raise SystemExit(f"unknown worker {kind!r}")
    runtime.finish(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
