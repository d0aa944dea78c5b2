"""Errors of serving → what a client of OpenEngine gets: a gRPC status, or the event that ends its
stream; both name the class of the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2
from google.rpc import status_pb2
from grpc.aio import ServicerContext

from worker.engines.lora_adapters import UnknownAdapter
from worker.errors import (
    BoundaryStoreUnavailable,
    Draining,
    EngineBroken,
    GrammarsUnavailable,
    InvalidRequest,
    Overloaded,
    ProcessorUnavailable,
    RequestFailed,
    ServingError,
)
from worker.runtimes.openengine import wire

DETAILS = "grpc-status-details-bin"
"""Trailing metadata of a status: a ``google.rpc.Status`` that has the `EngineError`."""


class Unsupported(InvalidRequest):
    """The protocol has it, and this worker does not."""


class WrongRole(InvalidRequest):
    """Another role in disaggregated serving has it."""


class UnknownModel(InvalidRequest):
    """This worker serves another model."""


class UnknownRequest(InvalidRequest):
    """No request in flight has this id."""


class UnknownSession(InvalidRequest):
    """There is no such KV session."""


class DuplicateRequest(InvalidRequest):
    """A request in flight has this id."""


class LostEvents(InvalidRequest):
    """The events that are asked for are no longer kept."""


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of errors: its code in the protocol and in gRPC, and whether another try may help."""

    code: wire.ErrorCode
    status: grpc.StatusCode
    retryable: bool = False


_INTERNAL = _Class(wire.ERROR_CODE_INTERNAL, grpc.StatusCode.INTERNAL)
_UNAVAILABLE = _Class(wire.ERROR_CODE_INTERNAL, grpc.StatusCode.UNAVAILABLE, retryable=True)

_CLASSES: dict[type[ServingError], _Class] = {
    Unsupported: _Class(wire.ERROR_CODE_UNSUPPORTED_FEATURE, grpc.StatusCode.FAILED_PRECONDITION),
    WrongRole: _Class(wire.ERROR_CODE_ROLE_MISMATCH, grpc.StatusCode.FAILED_PRECONDITION),
    UnknownModel: _Class(wire.ERROR_CODE_MODEL_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    UnknownRequest: _Class(wire.ERROR_CODE_REQUEST_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    UnknownSession: _Class(wire.ERROR_CODE_KV_SESSION_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    DuplicateRequest: _Class(wire.ERROR_CODE_DUPLICATE_REQUEST, grpc.StatusCode.ALREADY_EXISTS),
    LostEvents: _Class(wire.ERROR_CODE_INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE),
    UnknownAdapter: _Class(wire.ERROR_CODE_MODEL_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    InvalidRequest: _Class(wire.ERROR_CODE_INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
    RequestFailed: _Class(wire.ERROR_CODE_INVALID_ARGUMENT, grpc.StatusCode.INTERNAL),
    Overloaded: _Class(wire.ERROR_CODE_OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED, retryable=True),
    Draining: _Class(wire.ERROR_CODE_DRAINING, grpc.StatusCode.UNAVAILABLE, retryable=True),
    EngineBroken: _UNAVAILABLE,
    ProcessorUnavailable: _UNAVAILABLE,
    GrammarsUnavailable: _UNAVAILABLE,
    BoundaryStoreUnavailable: _UNAVAILABLE,
}
"""The classes, those derived from another one before it."""


def engine_error(error: ServingError) -> wire.EngineError:
    """The event that ends the stream of an accepted request."""
    found = _class_of(error)
    return wire.EngineError(code=found.code, message=str(error), retryable=found.retryable)


async def refuse(context: ServicerContext, error: ServingError) -> None:
    """End a call with the status of ``error``, whose details have the `EngineError`."""
    found, message = _class_of(error).status, str(error)
    detail = any_pb2.Any()
    detail.Pack(engine_error(error))
    status = status_pb2.Status(code=found.value[0], message=message, details=[detail])
    await context.abort(found, message, ((DETAILS, status.SerializeToString()),))


def _class_of(error: ServingError) -> _Class:
    return next((found for kind, found in _CLASSES.items() if isinstance(error, kind)), _INTERNAL)
