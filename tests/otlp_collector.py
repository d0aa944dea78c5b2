"""An OTLP collector in the test's own process, over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """Requests with spans, in order.

    Attributes:
        url: Address that spans are sent to.
        received: Each request.
    """

    url: str
    received: list[ExportTraceServiceRequest] = field(default_factory=list)

    def spans(self, service: str | None = None) -> list[Span]:
        """All spans, or those of one ``service.name``."""
        return [
            span
            for request in list(self.received)
            for resource in request.resource_spans
            if service in (None, attributes_of(resource.resource).get("service.name"))
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def attributes_of(item: object) -> dict[str, object]:
    """Attributes of a span or a resource: texts, numbers, and lists of texts."""
    found: dict[str, object] = {}
    for one in item.attributes:  # type: ignore[attr-defined]
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                collector.received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
