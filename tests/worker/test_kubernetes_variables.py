"""Variables of Kubernetes' Services beside the options: ignored, and misspelled options refused."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.arguments import OPTIONS, parse_arguments
from worker.arguments.kubernetes import without_services
from worker.errors import ConfigurationError
from worker.frontdoor.options import OPTIONS as FRONT_DOOR_OPTIONS
from worker.frontdoor.options import parse_options

ENGINES = ("embedded", "trtllm", "vllm")
ALL_OPTIONS = (*OPTIONS, *FRONT_DOOR_OPTIONS)
NAMES = st.sampled_from(
    ["worker", "worker-metrics", "worker-model-path", "front-door", "front-door-upstream", "dyn-trtllm-agg", "dyn-vllm"]
)
PROTOCOLS = st.sampled_from(["tcp", "udp", "sctp"])
PORTS = st.tuples(st.sampled_from(["", "_HTTP", "_HTTPS_2"]), st.integers(1, 65535), PROTOCOLS)


def variables(service: str, address: str, ports: list[tuple[str, int, str]]) -> dict[str, str]:
    """What Kubernetes describes a Service in, after the documentation's example."""
    name = service.upper().replace("-", "_")
    found = {f"{name}_SERVICE_HOST": address, f"{name}_SERVICE_PORT": str(ports[0][1])}
    host = f"[{address}]" if ":" in address else address
    found[f"{name}_PORT"] = f"{ports[0][2]}://{host}:{ports[0][1]}"
    for suffix, port, protocol in ports:
        found[f"{name}_SERVICE_PORT{suffix}"] = str(port)
        base = f"{name}_PORT_{port}_{protocol.upper()}"
        found[base] = f"{protocol}://{host}:{port}"
        found |= {f"{base}_PROTO": protocol, f"{base}_PORT": str(port), f"{base}_ADDR": address}
    return found


@settings(max_examples=examples(25))
@given(
    st.sampled_from(ENGINES),
    NAMES,
    st.sampled_from(["10.0.0.1", "fd00:10:96::a"]),
    st.lists(PORTS, min_size=1, max_size=3),
)
def test_services_of_any_name_change_nothing(
    engine: str, service: str, address: str, ports: list[tuple[str, int, str]]
) -> None:
    services = variables(service, address, ports)
    argv = ["--model-path", "m", "--engine", engine]
    assert parse_arguments(argv, services) == parse_arguments(argv, {})
    assert parse_options(["--upstream", "http://a"], services) == parse_options(["--upstream", "http://a"], {})


@pytest.mark.parametrize("value", ["1", "a", "10.0.0.1", "true", "http://127.0.0.1:80"])
def test_no_option_is_taken_for_a_service(value: str) -> None:
    environ = {option.env: value for option in ALL_OPTIONS}
    assert without_services(environ) == environ


@pytest.mark.parametrize(
    "variable", ["WORKER_METRIC_PORT", "WORKER_PORT", "WORKER_SERVICE_NAME", "WORKER_PORT_80", "WORKER_X_SERVICE_HOST"]
)
def test_misspelled_options_are_refused(variable: str) -> None:
    with pytest.raises(ConfigurationError, match=f"unknown environment variable {variable}"):
        parse_arguments(["--model-path", "m"], {variable: "9090 of mine"})
    if variable.endswith("PORT"):
        with pytest.raises(ConfigurationError, match=f"unknown environment variable {variable}"):
            parse_arguments(["--model-path", "m"], {variable: "9090"})
