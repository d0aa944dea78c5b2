"""A frontend and workers of which a test takes some away and starts others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checker import check_settled
from e2e_stack import Process, Stack, Worker, running_stack, wait_for

PACED = Path(__file__).with_name("paced_worker.py")
ENGINE = ("--device", "cpu", "--dtype", "float32", "--numerics", "exact", "--speculative-config", '{"method": "none"}')
"""A paced step is to give one token of each stream, so that the streams are long enough."""

EXITS = ("--logits-processor", "faults/exits=exits:Exits")

REQUEST_TIMEOUT_S = 2
"""How long the frontend waits until a worker has taken a request in, which needs no computing."""

STREAM_TIMEOUT_S = 3
"""Longest silence of a worker's stream; an empty chunk breaks it (``--keepalive-s``)."""

PATIENCE = 5
"""How many times as long a frontend waits in tests that must hold however busy the machine is."""


def frontend_settings(patience: int) -> dict[str, str]:
    """The frontend's environment, as docs/reliability.md has it with a patience of 1."""
    return {
        "DYN_TCP_REQUEST_TIMEOUT": str(patience * REQUEST_TIMEOUT_S),
        "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": str(patience * STREAM_TIMEOUT_S),
        "DYN_RUNTIME_INHIBITED_DURATION_SECS": "60",
    }


class Cluster:
    """Workers behind a frontend, all alike.

    Args:
        stack: Runs them.
        arguments: Of every worker.
        migrates: Whether the frontend moves the requests of a worker that is gone to another one.
        pace_s: Least time of a worker's step.
        max_num_seqs: Requests that a worker computes at a time.
        router_mode: How the frontend chooses a worker.

    Attributes:
        boundaries: Directory of the boundary store, which the workers use if requests migrate.
        spared: A worker that no fault is given to.
    """

    def __init__(
        self, stack: Stack, *arguments: str, migrates: bool, pace_s: float, max_num_seqs: int, router_mode: str
    ) -> None:
        self.stack = stack
        self.boundaries = stack.directory / "boundaries"
        exact = ("--migration", "on", "--boundary-store", f"file:{self.boundaries}") if migrates else ()
        engine = (*ENGINE, "--max-num-seqs", str(max_num_seqs))
        self.arguments = (*engine, "--keepalive-s", "1", *EXITS, *exact, *arguments)
        self.pace_s = pace_s
        self.spared: Worker | None = None
        migration = ["--migration-limit", "3"] if migrates else []
        self.frontend: Process = stack.start_frontend("--router-mode", router_mode, *migration)

    @property
    def url(self) -> str:
        """Of the frontend."""
        return self.stack.url

    @property
    def living(self) -> list[Worker]:
        """The workers that run, the oldest first."""
        return [worker for worker in self.stack.workers if worker.running]

    @property
    def at_risk(self) -> list[Worker]:
        """Those that a fault may be given to."""
        return [worker for worker in self.living if worker is not self.spared]

    def start(self, number: int) -> None:
        """Start workers until so many run, and wait until the frontend has them all."""
        new = [self._begin() for _ in range(number - len(self.living))]
        for worker in new:
            self.stack.wait_registered(worker)

    async def start_one(self) -> Worker:
        """Start one more worker, without holding up the event loop."""
        worker = self._begin()
        await asyncio.to_thread(self.stack.wait_registered, worker)
        return worker

    def _begin(self) -> Worker:
        return self.stack.start_worker(*self.arguments, script=PACED, wait=False, PACE_S=str(self.pace_s))

    def forget_dead(self) -> None:
        """Wait until no dead worker is registered: discovery's own lease on it takes 10 s."""
        wait_for(lambda: len(self.stack.registered()) == len(self.living), "that only the living are registered", 30)

    def check_settled(self) -> None:
        """Nothing is left of any request."""
        check_settled(self.living)


@contextmanager
def running_cluster(
    directory: Path,
    model_path: Path,
    *arguments: str,
    migrates: bool = True,
    pace_s: float = 0.005,
    max_num_seqs: int = 64,
    patience: int = PATIENCE,
    router_mode: str = "round-robin",
) -> Iterator[Cluster]:
    """A cluster without workers; all that it starts is killed afterwards."""
    with running_stack(directory, model_path) as stack:
        stack.environ.update(frontend_settings(patience))
        stack.environ["PYTHONPATH"] += f":{Path(__file__).parent}"
        yield Cluster(
            stack,
            *arguments,
            migrates=migrates,
            pace_s=pace_s,
            max_num_seqs=max_num_seqs,
            router_mode=router_mode,
        )
