"""The gRPC endpoint: services, TLS, tokens, the standard health service and reflection."""

from __future__ import annotations

import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from worker.arguments import Arguments, KnownKeys, keys_in
from worker.errors import ServingError, StartupError
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.errors import refuse

OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_receive_message_length", 64 * 2**20),
)
"""Options of the server: a client whose machine is gone is noticed, and its requests end; clients
may notice the same of this machine; prompts and grammars may be as large as other runtimes take.
"""

OPEN_METHODS = "/grpc.health.v1.Health/"
"""Calls that need no token: probes of Kubernetes have none."""

Handlers = Mapping[str, object]


class Endpoint:
    """A gRPC server with the two services of OpenEngine.

    Args:
        implementations: Implementation of each service; its methods have the names of the calls,
            in lower case with underscores.
        arguments: Options of the worker.

    Attributes:
        port: Port that it listens on.
    """

    def __init__(self, implementations: Handlers, arguments: Arguments) -> None:
        tokens = keys_in(arguments.grpc_token_file, "--grpc-token-file")
        interceptors = (_Tokens(tokens),) if tokens else ()
        self._server = grpc.aio.server(interceptors=interceptors, options=OPTIONS)
        self._health = health.aio.HealthServicer()
        names = [f"{wire.DESCRIPTOR.package}.{name}" for name in implementations]
        self._names = ("", *names)
        for name, implementation in implementations.items():
            self._server.add_generic_rpc_handlers((_handler(name, implementation),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.port = self._bind(arguments)

    async def start(self) -> None:
        """Take calls; the health service says that requests are not served yet."""
        await self.tell(is_serving=False)
        await self._server.start()

    async def tell(self, *, is_serving: bool) -> None:
        """Set the state that the health service tells of every service."""
        states = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, states.SERVING if is_serving else states.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and end those that are left after ``grace_s`` seconds."""
        await self._server.stop(grace_s)

    def _bind(self, arguments: Arguments) -> int:
        host = f"[{arguments.grpc_host}]" if ":" in arguments.grpc_host else arguments.grpc_host
        address = f"{host}:{arguments.grpc_port}"
        credentials = _credentials(arguments)
        try:
            if credentials is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, credentials))
        except RuntimeError as error:
            raise StartupError(f"--grpc-port: cannot listen on {address}: {error}") from None


class _Tokens(grpc.aio.ServerInterceptor):
    """Refuses calls without one of the tokens as ``authorization: Bearer``."""

    def __init__(self, tokens: list[str]) -> None:
        self._expected = KnownKeys(f"Bearer {token}".encode() for token in tokens)

        async def refuse_call(requests: Any, context: ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "authorization: must be Bearer and a token")

        # as if it were a stream, of which nothing is read: a message may be large, and never end
        self._refusal = grpc.stream_unary_rpc_method_handler(refuse_call)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """The handler of a call, or one that refuses it."""
        if not handler_call_details.method.startswith(OPEN_METHODS):
            given = [value for key, value in handler_call_details.invocation_metadata if key == "authorization"]
            if len(given) != 1 or str(given[0]).encode() not in self._expected:
                return self._refusal
        return await continuation(handler_call_details)


def _credentials(arguments: Arguments) -> grpc.ServerCredentials | None:
    if arguments.grpc_tls_cert is None or arguments.grpc_tls_key is None:
        return None
    certificate, key = Path(arguments.grpc_tls_cert), Path(arguments.grpc_tls_key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)  # gRPC says only that it cannot bind
        return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    except OSError as error:
        problem = f"--grpc-tls-cert {certificate}, --grpc-tls-key {key}: {error.strerror or error}"
        raise StartupError(problem) from None


def _handler(service: str, implementation: object) -> grpc.GenericRpcHandler:
    """The calls of a service, all of which the implementation has."""
    handlers = {}
    for method in wire.DESCRIPTOR.services_by_name[service].methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        call = getattr(implementation, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())
        handlers[method.name] = make(
            _refusing(call),
            request_deserializer=getattr(wire, method.input_type.name).FromString,
            response_serializer=getattr(wire, method.output_type.name).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(f"{wire.DESCRIPTOR.package}.{service}", handlers)


def _refusing(call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """A call whose errors of serving are the statuses of refusals."""

    async def answer(request: Any, context: ServicerContext) -> Any:
        try:
            return await call(request, context)
        except ServingError as error:
            return await refuse(context, error)
        except grpc.aio.InternalError:  # the client is gone, which a write may learn before this task is cancelled
            return None

    return answer
