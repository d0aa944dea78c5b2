"""Streams one chat answer from a running ``launch/nats.sh``, over NATS.

    .venv/bin/python examples/nats_client.py "Hello" --temperature 0.8 --seed 7 --choices 2

Needs nats-py alone, and this package; ``BlockingWorkerClient`` is the same without asyncio.
"""

from __future__ import annotations

import argparse
import asyncio

from worker.errors import StartupError
from worker.runtimes.nats.client import RequestError, WorkerClient
from worker.runtimes.nats.connection import ConnectionOptions


async def chat(options: argparse.Namespace) -> None:
    connection = ConnectionOptions(url=options.url, token=options.token)
    async with await WorkerClient.connect(options.model, options.model_version, connection) as client:
        shown = None
        async for chunk in client.stream(
            messages=[{"role": "user", "content": options.message}],
            sampling_options={"temperature": options.temperature, "seed": options.seed, "n": options.choices},
            stop_conditions={"max_tokens": options.max_tokens},
            logits_processors=[{"name": "no_repeat_ngram", "args": {"n": 4}}],
        ):
            if options.choices > 1 and chunk["index"] != shown:
                shown = chunk["index"]
                print(f"\n[{shown}] ", end="")
            print(chunk["text"], end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream one chat answer over NATS.")
    parser.add_argument("message")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--model-version", default="1")
    parser.add_argument("--url", default="nats://127.0.0.1:4222")
    parser.add_argument("--token")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--choices", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=64)
    try:
        asyncio.run(chat(parser.parse_args()))
    except RequestError as error:
        raise SystemExit(f"error {error.code}: {error}") from None
    except StartupError as error:  # no server
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
