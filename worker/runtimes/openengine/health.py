"""The state of a worker and of its parts."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from worker.errors import Overloaded, ServingError
from worker.runtimes.openengine import wire
from worker.server import RequestServer

PROBE_S = 30.0
"""Seconds in which an inference probe must be answered."""

_WORSE = (
    wire.HEALTH_STATE_READY,
    wire.HEALTH_STATE_DEGRADED,
    wire.HEALTH_STATE_DRAINING,
    wire.HEALTH_STATE_STARTING,
    wire.HEALTH_STATE_NOT_READY,
)
"""The states, from good to bad."""


async def health(server: RequestServer, request: wire.HealthRequest) -> wire.HealthResponse:
    """The answer of ``Health``: the worst state of its checks."""
    checks = [_model(server)]
    if request.role not in (wire.ENGINE_ROLE_UNSPECIFIED, wire.ENGINE_ROLE_AGGREGATED):
        checks.append(_check("role", wire.HEALTH_STATE_NOT_READY, "this worker is aggregated"))
    if request.include_inference_probe and checks[0].state == wire.HEALTH_STATE_READY:
        checks.append(await _probe(server))
    return wire.HealthResponse(state=max((check.state for check in checks), key=_WORSE.index), checks=checks)


def _model(server: RequestServer) -> wire.HealthCheck:
    if server.broken is not None:
        return _check("model", wire.HEALTH_STATE_NOT_READY, server.broken)
    if server.preparation is None:
        return _check("model", wire.HEALTH_STATE_STARTING, "the model is being loaded")
    if server.is_leaving:
        return _check("model", wire.HEALTH_STATE_DRAINING, "this worker is shutting down")
    return _check("model", wire.HEALTH_STATE_READY, "")


async def _probe(server: RequestServer) -> wire.HealthCheck:
    """One token through the real path."""
    end_ids = server.info.eos_token_ids
    fields = {
        "token_ids": [end_ids[0] if end_ids else 0],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "_HEALTH_CHECK": True,
    }
    try:
        async with asyncio.timeout(PROBE_S):
            async with contextlib.aclosing(server.serve(f"health-{uuid.uuid4().hex}", fields, {})) as chunks:
                async for _ in chunks:
                    pass
    except TimeoutError:
        return _check("inference_probe", wire.HEALTH_STATE_NOT_READY, f"no token within {PROBE_S:g} s")
    except Overloaded as error:
        return _check("inference_probe", wire.HEALTH_STATE_DEGRADED, str(error))
    except ServingError as error:
        return _check("inference_probe", wire.HEALTH_STATE_NOT_READY, str(error))
    return _check("inference_probe", wire.HEALTH_STATE_READY, "")


def _check(name: str, state: wire.HealthState, message: str) -> wire.HealthCheck:
    return wire.HealthCheck(name=name, state=state, message=message)
