"""Models, health and metrics of workers behind OpenEngine, as the front door tells them."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from worker.frontdoor.encoding import encoded
from worker.frontdoor.errors import MODEL_NOT_FOUND, Refused
from worker.frontdoor.openengine.workers import Workers
from worker.frontdoor.summaries import METRICS_TYPE
from worker.runtimes.openengine import wire

_JSON = b"application/json"
_MODELS = "/v1/models"


def state_of(workers: Workers, path: str, started: int) -> tuple[int, bytes, bytes]:
    """Status, content type and body of the answer to a path.

    Args:
        workers: The workers.
        path: The path, not decoded.
        started: Time at which the front door was started, seconds since 1970.

    Raises:
        Refused: 404, there is no such path, or no such model.
    """
    if path == "/live":
        return 200, _JSON, encoded({"status": "live"})
    if path == "/health":
        ready = [str(each.address) for each in workers.ready]
        content = {"status": "healthy" if ready else "unhealthy", "instances": ready}
        return 200 if ready else 503, _JSON, encoded(content)
    if path == "/metrics":
        return 200, METRICS_TYPE, metrics(workers).encode()
    models = {name: _entry(name, model, started) for name, model in workers.models.items()}
    if path == _MODELS:
        return 200, _JSON, encoded({"object": "list", "data": [models[name] for name in sorted(models)]})
    name = unquote(path.removeprefix(f"{_MODELS}/"))
    if path.startswith(f"{_MODELS}/"):
        if name in models:
            return 200, _JSON, encoded(models[name])
        name = name.removesuffix("/ready")
        if name in models:
            number = sum(each.serves(name) for each in workers.ready)
            return 200, _JSON, encoded({"model": name, "ready": True, "workers": number})
        raise Refused(404, MODEL_NOT_FOUND, "model", code="model_not_found")
    raise Refused(404, f"{path} is not served without Dynamo's frontend", code="unsupported_endpoint")


def metrics(workers: Workers) -> str:
    """The state of the workers, in Prometheus' text format."""
    families: list[tuple[str, str, str, Any]] = [
        ("dlw_upstream_ready", "gauge", "Whether the worker is given requests.", lambda each: int(each.is_ready)),
        ("dlw_upstream_requests", "gauge", "Requests of this front door in flight.", lambda each: each.num_asked),
        ("dlw_upstream_load", "gauge", "Requests of all clients that it has.", lambda each: each.load),
        ("dlw_upstream_moves_total", "counter", "Answers that it could not end.", lambda each: each.num_left),
    ]
    lines = []
    for name, kind, summary, value in families:
        lines += [f"# HELP {name} {summary}\n", f"# TYPE {name} {kind}\n"]
        lines += [f'{name}{{worker="{each.address}"}} {value(each)}\n' for each in workers]
    return "".join(lines)


def _entry(name: str, model: wire.ModelInfo, started: int) -> dict[str, Any]:
    base = model.served_model_name
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "dynamo-logits-worker",
        "context_window": model.max_context_length,
        **({} if name == base else {"parent": base}),
    }
