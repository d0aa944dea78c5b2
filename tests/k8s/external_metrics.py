"""A server of Kubernetes' external metrics, which autoscalers ask through the API server."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"


class ExternalMetrics(ThreadingHTTPServer):
    """Answers that every metric has the same value.

    Attributes:
        value: Value of the metrics.
        asked: Name of the metric and its selector, of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.value = 0
        self.asked: list[tuple[str, str]] = []

    def answer(self, path: str, selector: str) -> dict[str, Any]:
        """The group's resources, or the value of a metric."""
        version, _, rest = path.removeprefix(f"/apis/{GROUP}/").partition("/")
        if version != VERSION or not rest:
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/{VERSION}",
                "resources": [],
            }
        name = rest.rpartition("/")[2]
        self.asked.append((name, selector))
        item = {"metricName": name, "metricLabels": {}, "timestamp": "2026-01-01T00:00:00Z", "value": str(self.value)}
        return {
            "kind": "ExternalMetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": [item],
        }


class _Handler(BaseHTTPRequestHandler):
    server: ExternalMetrics

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        selector = "".join(parse_qs(asked.query).get("labelSelector", []))
        body = json.dumps(self.server.answer(asked.path, selector)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: the test's output is its own."""


@contextmanager
def external_metrics(certificate: Path, key: Path) -> Iterator[ExternalMetrics]:
    """A server on loopback, which ends with the block."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ExternalMetrics() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def api_service(port: int) -> list[tuple[str, dict[str, Any]]]:
    """Resources that lead the API server to a port of this machine, with the paths to make them."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "metrics"},
        "spec": {"type": "ExternalName", "externalName": "localhost"},
    }
    registered = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{VERSION}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "version": VERSION,
            "service": {"namespace": "dlw", "name": "metrics", "port": port},
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }
    return [
        ("/api/v1/namespaces/dlw/services", service),
        ("/apis/apiregistration.k8s.io/v1/apiservices", registered),
    ]
