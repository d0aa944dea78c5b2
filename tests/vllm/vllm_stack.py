"""A frontend, and a worker with vLLM in the environment that has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from e2e_stack import REPOSITORY, Stack, Worker, running_stack, wait_for

from worker.models.default_model import prepare_default_model

START_S = 500.0
"""Time for vLLM to load, seconds: its kernels warm up, and other processes are busy."""

OPTIONS = (
    *("--engine", "vllm", "--dtype", "float32", "--kv-cache-memory", "1GiB", "--context-length", "1024"),
    *("--default-sampling", "greedy", "--engine-args", '{"enforce_eager": true}'),
)


def default_model() -> Path:
    """SmolLM2-135M-Instruct, where the launch scripts keep it."""
    return prepare_default_model(Path.home() / ".cache" / "dynamo-logits-worker" / "models", lambda line: None)


@contextlib.contextmanager
def vllm_workers(
    directory: Path, count: int, *arguments: str, frontend: Sequence[str] = (), warm: bool = True, **environ: str
) -> Iterator[tuple[Stack, list[Worker]]]:
    """One frontend and workers that have loaded the model, one after the other; ``warm``: see
    `Process`.
    """
    with running_stack(directory, default_model(), warm=warm) as stack:
        ours = {key: value for key, value in stack.environ.items() if not key.startswith(("VLLM_", "DLW_PROCESSOR"))}
        stack.environ = {**ours, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'e2e'}"}
        stack.start_frontend(*frontend)
        yield stack, [start_vllm_worker(stack, *arguments, **environ) for _ in range(count)]


def start_vllm_worker(stack: Stack, *arguments: str, **environ: str) -> Worker:
    """A worker that has loaded the model, behind the stack's frontend."""
    worker = stack.start_worker(*OPTIONS, *arguments, wait=False, **environ)  # type: ignore[arg-type]
    wait_for(lambda: "Registered endpoint" in worker.log or not worker.running, "vLLM to load", START_S)
    stack.wait_registered(worker)
    return worker
