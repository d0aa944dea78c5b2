"""Waits until a worker is registered at NATS; prints its served model name.

python launch/await_nats.py URL
"""

from __future__ import annotations

import asyncio
import json
import sys

from nats.errors import Error as NatsError

from worker.errors import StartupError
from worker.runtimes.nats.connection import ConnectionOptions, connect

POLL_S = 0.2


async def served_model(url: str) -> str:
    """The name of the model that the first worker to answer serves."""
    client = await connect(ConnectionOptions(url=url), "await_nats")
    try:
        while True:
            try:
                reply = await client.request("$SRV.PING", timeout=2)
                model = json.loads(reply.data)["metadata"].get("model")
                if model is not None:
                    return str(model)
            except (TimeoutError, NatsError):
                pass
            await asyncio.sleep(POLL_S)
    finally:
        await client.close()


def main() -> int:
    try:
        sys.stdout.write(asyncio.run(served_model(sys.argv[1])) + "\n")
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
