"""The ports that the launch scripts and the worker would listen on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from worker.doctor.finding import Finding
from worker.errors import ServingError
from worker.installation import check_port, check_ports

HTTP_PORT = "8000"
"""Default of the launch scripts."""


def ports(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about the ports that the environment names, or the defaults."""
    text = environ.get("HTTP_PORT") or HTTP_PORT
    host = environ.get("HTTP_HOST") or environ.get("DYN_HTTP_HOST") or "127.0.0.1"
    yield _checked("HTTP port", f"{host}:{text} is free", lambda: _check_http(host, text))
    yield _checked("runtime's ports", "free, or chosen by the system", lambda: check_ports(environ))


def _check_http(host: str, text: str) -> None:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ServingError(f"HTTP_PORT must be a port number from 1 to 65535, got {text!r}")
    check_port(host, int(text), "HTTP_PORT")


def _checked(name: str, found: str, check: Callable[[], None]) -> Finding:
    """Found to be so, unless `check` raises."""
    try:
        check()
    except ServingError as error:
        return Finding(name, "lacks", str(error), "another value of that variable, or end what listens there")
    return Finding(name, "ok", found)
