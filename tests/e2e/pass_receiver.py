"""Prints the forward passes of an endpoint as JSON lines, read as Dynamo's planner reads them."""

from __future__ import annotations

import asyncio
import sys

import msgspec
from dynamo.common.forward_pass_metrics import decode
from dynamo.llm import FpmEventSubscriber
from dynamo.runtime import DistributedRuntime


async def main(endpoint: str) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    subscriber = FpmEventSubscriber(runtime.endpoint(endpoint))
    while (message := await asyncio.to_thread(subscriber.recv)) is not None:
        sys.stdout.buffer.write(msgspec.json.encode(decode(message)) + b"\n")
        sys.stdout.flush()


asyncio.run(main(sys.argv[1]))
