"""Asks an endpoint without a frontend, as whoever reaches a worker's port can: ``ask_worker.py
ENDPOINT``.

Requests come as lines of JSON on standard input, as a frontend would send them. For each a line of
JSON goes to standard output: its chunks, or the error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from dynamo.runtime import DistributedRuntime


async def ask(client: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"chunks": [chunk.data() async for chunk in await client.random(request)]}
    except Exception as error:  # what the worker raised, as the runtime tells it
        return {"error": f"{type(error).__name__}: {error}"}


async def main(endpoint: str) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    client = await runtime.endpoint(endpoint).client()
    await client.wait_for_instances()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(await ask(client, json.loads(line))) + "\n")
        sys.stdout.flush()
    os._exit(0)  # the runtime's threads have no end of their own


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
