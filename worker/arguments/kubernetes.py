"""Environment variables in which Kubernetes describes the Services of a namespace to its pods."""

from __future__ import annotations

import re
from collections.abc import Mapping

_URL = r"(tcp|udp|sctp)://[^/]+:\d+"
_ADDRESS = r"[0-9a-fA-F.:]+"
_OF_A_SERVICE = re.compile(
    rf"\w+_SERVICE_HOST={_ADDRESS}"
    r"|\w+_SERVICE_PORT(_\w+)?=\d+"
    rf"|\w+_PORT={_URL}"
    rf"|\w+_PORT_\d+_(TCP|UDP|SCTP)(={_URL}|_PROTO=(tcp|udp|sctp)|_PORT=\d+|_ADDR={_ADDRESS})"
)


def without_services(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that Kubernetes has not made: a Service may have a name like the worker's own.

    It describes a Service ``worker-metrics``, for example, in ``WORKER_METRICS_SERVICE_HOST``,
    ``WORKER_METRICS_SERVICE_PORT``, ``WORKER_METRICS_PORT`` and
    ``WORKER_METRICS_PORT_80_TCP_ADDR``. Their values tell them from options and from misspelled
    ones: ``WORKER_METRICS_PORT`` is an option unless it is a URL.
    """
    return {name: value for name, value in environ.items() if not _OF_A_SERVICE.fullmatch(f"{name}={value}")}
