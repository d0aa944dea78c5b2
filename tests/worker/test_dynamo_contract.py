"""Every fact of ai-dynamo that the worker relies on, checked against the version that is
installed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import socket
from collections.abc import Sequence
from importlib.metadata import version

import pytest
from dynamo.common.backend import engine as sdk_engine
from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import HEALTH_CHECK_KEY, build_health_check_payload, is_probe
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot
from dynamo.common.backend.worker import Worker, WorkerConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.llm import exceptions
from ports import free_port

from worker import installation
from worker.arguments import parse_arguments
from worker.engines import EngineInfo
from worker.errors import (
    ConfigurationError,
    Draining,
    EngineBroken,
    InvalidRequest,
    Overloaded,
    ProcessorUnavailable,
    RequestFailed,
    ServingError,
    StartupError,
)
from worker.runtimes import dynamo as runtime
from worker.runtimes.dynamo_rl import reachable

DYNAMO = tuple(int(part) for part in version("ai-dynamo").split(".")[:2])
ARGUMENTS = parse_arguments(["--model-path", "/models/tiny", "--discovery-backend", "file"], {})
INFO = EngineInfo(
    name="fake",
    version="0",
    context_length=100,
    vocab_size=50,
    eos_token_ids=(2,),
    kv_block_size=16,
    total_kv_blocks=10,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)


def names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_snapshots_are_refused_by_name() -> None:
    installation.check_snapshot({"DYN_SNAPSHOT_CONTROL_DIR": ""})
    with pytest.raises(
        ConfigurationError, match=r"^DYN_SNAPSHOT_CONTROL_DIR is set, but this worker takes no snapshots"
    ):
        installation.check_runtime(ARGUMENTS, {"DYN_SNAPSHOT_CONTROL_DIR": "/snapshot-control"})


def test_the_version_is_one_that_is_tested() -> None:
    installation.check_dynamo()
    assert DYNAMO in ((1, 4), (1, 6))


def test_differences_between_the_versions() -> None:
    newer = DYNAMO >= (1, 6)
    assert ("response_plane" in names(WorkerConfig)) == newer
    assert ("structural_tag" in names(WorkerConfig)) == newer
    assert ("structural_tag_mode" in names(WorkerConfig)) == (not newer)
    assert ("model_aliases" in names(EngineConfig)) == newer
    assert ("enable_eagle" in names(LlmRegistration)) == newer
    assert hasattr(exceptions, "WorkerUnavailable") == newer


def test_worker_config() -> None:
    config = runtime.worker_config(ARGUMENTS)
    assert config.default_thinking_mode is None
    thinking = parse_arguments(["--model-path", "/m", "--dyn-default-thinking-mode", "disabled"], {})
    assert runtime.worker_config(thinking).default_thinking_mode == "disabled"
    assert config.exclude_tools_when_tool_choice_none is False
    assert (config.namespace, config.component, config.endpoint) == ("dynamo", "backend", "generate")
    assert (config.model_name, config.served_model_name) == ("/models/tiny", "tiny")
    assert (config.discovery_backend, config.request_plane, config.event_plane) == ("file", "tcp", None)
    assert (config.endpoint_types, config.enable_kv_routing) == ("chat,completions", True)
    assert config.disaggregation_mode is DisaggregationMode.AGGREGATED
    for role in ("prefill", "decode"):
        arguments = parse_arguments(["--model-path", "/m", "--disaggregation-mode", role], {})
        assert runtime.worker_config(arguments).disaggregation_mode is DisaggregationMode[role.upper()]


@pytest.mark.parametrize(("argv", "is_told"), [((), True), (("--disaggregation-mode", "decode"), False)])
def test_a_router_that_starts_later_can_ask(argv: Sequence[str], is_told: bool) -> None:
    config = runtime.worker_config(parse_arguments(["--model-path", "/m", "--enable-kv-routing", "true", *argv], {}))
    assert config.enable_local_indexer == is_told
    config = runtime.worker_config(parse_arguments(["--model-path", "/m", "--enable-kv-routing", "false", *argv], {}))
    assert not config.enable_local_indexer


def test_options_reach_the_worker_config() -> None:
    argv = ["--model-path", "/m", "--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3"]
    argv += ["--custom-jinja-template", "/t.jinja", "--enable-kv-routing", "false", "--event-plane", "zmq"]
    config = runtime.worker_config(parse_arguments(argv, {}))
    assert (config.tool_call_parser, config.reasoning_parser) == ("hermes", "qwen3")
    assert (config.custom_jinja_template, config.enable_kv_routing, config.event_plane) == ("/t.jinja", False, "zmq")


@pytest.mark.parametrize("flag", ["--dyn-tool-call-parser", "--dyn-reasoning-parser"])
def test_a_parser_that_the_frontend_lacks(flag: str) -> None:
    """The frontend itself says nothing."""
    arguments = parse_arguments(["--model-path", "/m", flag, "qwen33"], {})
    with pytest.raises(ConfigurationError, match=rf"^{flag} must be one of .*\bmistral\b.*, got 'qwen33'$"):
        runtime.worker_config(arguments)


def test_response_plane() -> None:
    arguments = parse_arguments(["--model-path", "/m", "--response-plane", "quic"], {})
    if DYNAMO < (1, 6):
        with pytest.raises(ConfigurationError, match="--response-plane quic needs a newer ai-dynamo"):
            runtime.worker_config(arguments)
    else:
        assert runtime.worker_config(arguments).response_plane == "quic"  # type: ignore[attr-defined]


def test_engine_config() -> None:
    config = runtime.engine_config(INFO, ARGUMENTS)
    assert (config.model, config.served_model_name) == ("/models/tiny", "tiny")
    assert config.llm is not None
    assert (config.llm.context_length, config.llm.kv_cache_block_size, config.llm.total_kv_blocks) == (100, 16, 10)
    assert (config.llm.max_num_seqs, config.llm.max_num_batched_tokens) == (4, 64)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("top_p", "is wrong"), exceptions.InvalidArgument),
        (RequestFailed("processor Bad raised"), exceptions.InvalidArgument),
        (Draining("leaving"), exceptions.EngineShutdown),
        (EngineBroken("dead"), exceptions.EngineShutdown),
        (ServingError("internal error"), exceptions.Unknown),
    ],
)
def test_errors(error: ServingError, expected: type[Exception]) -> None:
    raised = runtime.to_dynamo(error)
    assert type(raised) is expected
    assert issubclass(expected, exceptions.DynamoException)
    assert str(raised) == str(error)


@pytest.mark.parametrize(
    ("error", "status"), [(Overloaded("queue full"), 529), (ProcessorUnavailable("acme", 3.0), 503)]
)
def test_errors_with_a_status(error: ServingError, status: int) -> None:
    raised = runtime.to_dynamo(error)
    assert isinstance(raised, exceptions.HttpError)
    assert (raised.code, raised.message) == (status, str(error))


@pytest.mark.parametrize(
    ("hook", "parameters"),
    [
        ("from_args", ["argv"]),
        ("start", ["self", "worker_id"]),
        ("generate", ["self", "request", "context"]),
        ("abort", ["self", "context"]),
        ("cleanup", ["self"]),
        ("register_prometheus", ["self", "metrics"]),
        ("component_metrics_dp_ranks", ["self"]),
        ("attach_snapshot_publisher", ["self", "publisher"]),
        ("health_check_payload", ["self"]),
        ("supported_controls", ["self"]),
        ("engine_control", ["self", "control", "body"]),
        ("on_endpoint_ready", ["self", "endpoint"]),
    ],
)
def test_hooks(hook: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(LLMEngine, hook)).parameters) == parameters


def test_chunk_keys() -> None:
    ours = {"token_ids", "index", "finish_reason", "completion_usage", "log_probs", "top_logprobs", "engine_data"}
    assert ours <= set(sdk_engine.GenerateChunk.__annotations__)


def test_health_probe() -> None:
    payload = build_health_check_payload(3)
    assert payload["token_ids"] == [3]
    assert is_probe(payload)
    assert HEALTH_CHECK_KEY == "_HEALTH_CHECK"


def test_snapshot_and_metrics_helpers() -> None:
    assert names(ComponentSnapshot) >= {"kv_used_blocks", "kv_total_blocks", "gpu_cache_usage", "dp_rank"}
    assert list(inspect.signature(register_engine_registry).parameters)[:2] == ["metrics", "registry"]


def test_worker_runs_on_an_event_loop() -> None:
    assert list(inspect.signature(Worker.__init__).parameters) == ["self", "engine", "config"]
    assert asyncio.iscoroutinefunction(Worker.run)


def test_the_runtime_lets_the_drain_end() -> None:
    environ: dict[str, str] = {}
    installation.allow_drain(100.5, environ)
    assert int(environ[installation.SHUTDOWN_LIMIT]) > 105
    environ = {installation.SHUTDOWN_LIMIT: "60"}
    installation.allow_drain(30, environ)
    assert environ == {installation.SHUTDOWN_LIMIT: "60"}


@pytest.mark.parametrize("limit", ["32", "x", "-1"])
def test_a_limit_that_would_cut_the_drain(limit: str) -> None:
    with pytest.raises(ConfigurationError, match=installation.SHUTDOWN_LIMIT):
        installation.allow_drain(30, {installation.SHUTDOWN_LIMIT: limit})


def test_a_taken_port_is_found_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        port = str(server.getsockname()[1])
        with pytest.raises(StartupError, match=f"DYN_SYSTEM_PORT: cannot listen on 127.0.0.1:{port}: "):
            installation.check_ports({"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": port})
        with pytest.raises(StartupError, match="DYN_TCP_RPC_PORT"):
            installation.check_ports({"DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_TCP_RPC_PORT": port})
    installation.check_ports({"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": port})


@pytest.mark.parametrize("text", ["-1", "0", ""])
def test_ports_that_are_off(text: str) -> None:
    installation.check_ports({"DYN_SYSTEM_PORT": text})


def test_older_versions_refuse_a_system_port_above_32767() -> None:
    if DYNAMO < (1, 6):
        with pytest.raises(ConfigurationError, match="DYN_SYSTEM_PORT must be a port number up to 32767, got '40000'"):
            installation.check_ports({"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": "40000"})
    else:
        installation.check_ports({"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": "40000"})


@pytest.mark.parametrize("text", ["http", "70000", "-2", "8.1"])
def test_ports_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="DYN_SYSTEM_PORT must be a port number"):
        installation.check_ports({"DYN_SYSTEM_PORT": text})


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("::", socket.gethostname())]
)
def test_the_engine_port_s_url_has_a_host(host: str, expected: str) -> None:
    assert reachable(host) == expected
