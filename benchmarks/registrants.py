"""One process with many registered instances of a model, for `registrations.py`.

    python registrants.py COUNT WATCHERS MODEL_PATH NAME STEP_S

Five hundred workers with torch do not fit in the memory of a small machine. Each instance here has
what a fleet's discovery and frontends see of a worker: a runtime of its own with its lease, its
endpoint and its model, and for discovery by files the worker's own `FileEntries` and `Guard`. Its
answers have one token a step, by a timer. The first WATCHERS of them also watch the instances of
the endpoint, as a frontend does.

Reads lines of the standard input: ``count N`` is answered by a line with the time
(`time.monotonic`) at which the last of this process's watchers saw N instances.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime
from tokenizers import Tokenizer

from worker.runtimes.file_discovery import entries_of, keep_registered

ENDPOINT = "dynamo.backend.generate"
POLL_S = 0.005


def constant_answers(token: int, step_s: float) -> Any:
    """A handler of requests that says one token a step."""

    async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        prompt, max_tokens = len(request["token_ids"]), request["stop_conditions"]["max_tokens"]
        for number in range(max_tokens):
            await asyncio.sleep(step_s)
            if context.is_stopped():
                return
            last = number == max_tokens - 1
            usage = {"prompt_tokens": prompt, "completion_tokens": max_tokens, "total_tokens": prompt + max_tokens}
            ending = {"finish_reason": "length", "completion_usage": usage} if last else {}
            yield {"token_ids": [token], "index": 0, **ending}

    return generate


async def register(model_path: str, name: str, handler: Any) -> Any:
    """One more instance; returns its endpoint."""
    loop = asyncio.get_running_loop()
    backend = os.environ["DYN_DISCOVERY_BACKEND"]
    runtime = DistributedRuntime(loop, backend, os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    endpoint = runtime.endpoint(ENDPOINT)
    config = ModelRuntimeConfig()
    config.total_kv_blocks, config.max_num_seqs, config.max_num_batched_tokens = 1024, 64, 2048
    config.enable_local_indexer = False
    kinds = ModelType.Chat | ModelType.Completions
    await register_model(
        ModelInput.Tokens,
        kinds,
        endpoint,
        model_path,
        name,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=16,
        runtime_config=config,
    )
    _kept.append(asyncio.ensure_future(endpoint.serve_endpoint(handler, graceful_shutdown=False)))
    entries = entries_of(backend, os.environ, endpoint.connection_id())
    if entries is not None:
        _kept.append(asyncio.ensure_future(keep_registered(entries, lambda: False)))
    _kept.append(runtime)
    return endpoint


_kept: list[Any] = []


async def serve(count: int, watchers: int, model_path: str, name: str, step_s: float) -> None:
    tokenizer = Tokenizer.from_file(f"{model_path}/tokenizer.json")
    handler = constant_answers(tokenizer.encode("a", add_special_tokens=False).ids[0], step_s)
    endpoints = [await register(model_path, name, handler) for _ in range(count)]
    clients = [await endpoint.client() for endpoint in endpoints[:watchers]]
    print("registered", flush=True)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        wanted = int(line.split()[1])
        while not all(len(client.instance_ids()) == wanted for client in clients):  # noqa: ASYNC110 (they tell nobody)
            await asyncio.sleep(POLL_S)
        print(time.monotonic(), flush=True)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5])))
