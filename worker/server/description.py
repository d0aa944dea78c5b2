"""The description of a worker for operators."""

from __future__ import annotations

from typing import Any

from worker import __version__
from worker.server.server import RequestServer


def describe(server: RequestServer) -> dict[str, Any]:
    """Kind, settings and state of a worker that has loaded its model; JSON data."""
    info, arguments = server.info, server.arguments
    return {
        "worker_version": __version__,
        "engine": info.name,
        "engine_version": info.version,
        "model": arguments.served_model_name,
        "adapters": dict(info.adapters),
        "dtype": arguments.dtype,
        "history": arguments.history,
        "processor_errors": arguments.processor_errors,
        "context_length": info.context_length,
        "max_num_seqs": info.max_num_seqs,
        "num_dp_ranks": info.num_dp_ranks,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "total_kv_blocks": server.kv_load.total,
        "in_flight": len(server.in_flight),
        "draining": server.in_flight.closed,
        "smoke_test": server.smoke,
    }
