"""Waits until a worker with these arguments is registered at NATS; prints its served model name.

``python launch/await_nats.py WORKER_ARGUMENT...``, with the worker's environment, which has the
server and who it lets in.
"""

from __future__ import annotations

import asyncio
import json
import sys

from nats.errors import Error as NatsError

from worker.arguments import Arguments, parse_arguments
from worker.errors import ServingError
from worker.models import is_hub_id
from worker.runtimes.nats.connection import ConnectionOptions, connect
from worker.runtimes.nats.protocol import Subjects

POLL_S = 0.2


async def served_model(arguments: Arguments) -> str:
    """The name of the model, once a worker of it answers; others may be at the same server."""
    service = Subjects(_name(arguments), arguments.model_version).service
    inboxes = arguments.nats_reply_prefixes.partition(",")[0].strip().removesuffix(".")  # below which it answers
    client = await connect(ConnectionOptions.of(arguments, inboxes), "await_nats")
    try:
        while True:
            try:
                reply = await client.request(f"$SRV.PING.{service}", timeout=2)
                return str(json.loads(reply.data)["metadata"]["model"])
            except (TimeoutError, NatsError):
                await asyncio.sleep(POLL_S)
    finally:
        await client.close()


def _name(arguments: Arguments) -> str:
    """The name as the worker has it, whose model's id on the Hugging Face Hub may be its name."""
    is_given = "served_model_name" in arguments.given
    return arguments.model_path if is_hub_id(arguments.model_path) and not is_given else arguments.served_model_name


def main() -> int:
    try:
        sys.stdout.write(asyncio.run(served_model(parse_arguments())) + "\n")
    except ServingError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
