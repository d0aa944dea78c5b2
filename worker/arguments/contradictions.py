"""Options that contradict each other, or that another engine or runtime honours."""

from __future__ import annotations

from worker.arguments.table import OPTIONS, Arguments
from worker.arguments.values import discovery_key
from worker.errors import ConfigurationError

_EMBEDDED, _TRTLLM, _VLLM, _CONSTANT = ("embedded",), ("trtllm",), ("vllm",), ("constant",)

_WHOLE = "pictures are served by aggregated workers alone"

_ONLY: dict[str, tuple[str, ...]] = {
    "tensor_parallel_size": (*_TRTLLM, *_VLLM),
    "pipeline_parallel_size": (*_TRTLLM, *_VLLM),
    "kv_cache_memory": (*_EMBEDDED, *_VLLM),
    "step_timeout_s": (*_EMBEDDED, *_VLLM),
    "publish_forward_pass_metrics": (*_EMBEDDED, *_TRTLLM),
    "engine_args": _VLLM,
    **dict.fromkeys(("constant_step_s", "constant_prompt_rate"), _CONSTANT),
    **dict.fromkeys(("modality", "allowed_local_media_path"), (*_TRTLLM, *_VLLM)),
    "allowed_media_domains": _VLLM,
    "lora_modules": (*_EMBEDDED, *_TRTLLM, *_VLLM),
    **dict.fromkeys(("history", "processor_errors", "override_engine_args"), _TRTLLM),
    **dict.fromkeys(
        (
            *("numerics", "kernels", "quantization", "activation_dtype", "kv_cache_dtype", "lora_dtype"),
            *("max_mixed_chunk", "speculative_config"),
        ),
        _EMBEDDED,
    ),
}
"""Engines that honour an option, for those that not every engine honours."""


def _refuse_adapters_of_one_key(a: Arguments) -> None:
    """Raises `ConfigurationError` of adapters that Dynamo's discovery would take for one."""
    names: dict[str, str] = {}
    for name, _ in a.lora_modules:
        key = discovery_key(name)
        if not key:
            raise ConfigurationError(f"--lora-modules: {name} has no ASCII letter, digit or - for Dynamo's discovery")
        if key in names:
            raise ConfigurationError(f"--lora-modules: {names[key]} and {name} are both {key} in Dynamo's discovery")
        names[key] = name


def _refuse_options_of_other_engines(a: Arguments) -> None:
    for option in OPTIONS:
        engines = _ONLY.get(option.name)
        value = getattr(a, option.name)
        if engines is not None and a.engine not in engines and value != option.default:
            raise ConfigurationError(f"{option.flag} {value} needs --engine {' or '.join(engines)}")


_MIN_LEASE_OF_VLLM_S = 10.0


def _refuse_vllm_contradictions(a: Arguments) -> None:
    if a.device != "auto":
        raise ConfigurationError(f"--engine vllm chooses its devices itself, but --device is {a.device}")
    if a.disaggregation_mode != "aggregated" and a.kv_lease_s < _MIN_LEASE_OF_VLLM_S:
        problem = (
            f"must be at least {_MIN_LEASE_OF_VLLM_S:g} with --engine vllm, which pulls no KV in a lease's last 5 s"
        )
        raise ConfigurationError(f"--kv-lease-s {problem}, got {a.kv_lease_s:g}")


def _refuse_constant_contradictions(a: Arguments) -> None:
    if a.disaggregation_mode != "aggregated":
        raise ConfigurationError(f"--engine constant has no KV: --disaggregation-mode {a.disaggregation_mode}")
    if a.engine_port:
        raise ConfigurationError("--engine constant has no weights that --engine-port could change")


_ONLY_DYNAMO = (
    "namespace",
    "component",
    "endpoint",
    "endpoint_types",
    "request_plane",
    "response_plane",
    "event_plane",
    "publish_forward_pass_metrics",
    "dyn_tool_call_parser",
    "dyn_reasoning_parser",
    "dyn_default_thinking_mode",
)
_ONLY_NATS = (
    "nats_url",
    "nats_credentials",
    "nats_token",
    "nats_nkey_seed",
    "nats_tls_ca",
    "nats_tls_cert",
    "nats_tls_key",
    "nats_reply_prefixes",
    "model_version",
    "batch",
    "batch_ack_wait_s",
    "batch_max_deliver",
)
_ONLY_OPENENGINE = ("grpc_host", "grpc_port", "grpc_tls_cert", "grpc_tls_key", "grpc_token_file")
_RUNTIMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ONLY_DYNAMO, ("dynamo",)),
    **dict.fromkeys(_ONLY_NATS, ("nats",)),
    **dict.fromkeys(_ONLY_OPENENGINE, ("openengine",)),
    **dict.fromkeys(("metrics_port", "metrics_host"), ("nats", "openengine")),
}
"""Runtimes that honour an option, for those that not every runtime honours."""


def _refuse_options_of_other_runtimes(a: Arguments) -> None:
    for option in OPTIONS:
        runtimes = _RUNTIMES.get(option.name)
        if runtimes is not None and a.runtime not in runtimes and getattr(a, option.name) != option.default:
            raise ConfigurationError(f"{option.flag} needs --runtime {' or '.join(runtimes)}")
    if a.runtime != "dynamo" and a.disaggregation_mode != "aggregated":
        raise ConfigurationError(f"--disaggregation-mode {a.disaggregation_mode} needs --runtime dynamo")
    if a.metrics_port > 65535:
        raise ConfigurationError(f"--metrics-port must be a port number, got {a.metrics_port}")


def _refuse_openengine_contradictions(a: Arguments) -> None:
    if (a.grpc_tls_cert is None) != (a.grpc_tls_key is None):
        raise ConfigurationError("--grpc-tls-cert and --grpc-tls-key belong together; give both")
    if a.grpc_port > 65535:
        raise ConfigurationError(f"--grpc-port must be a port number, got {a.grpc_port}")


def _refuse_engine_port_contradictions(a: Arguments) -> None:
    if a.engine_port > 65535:
        raise ConfigurationError(f"--engine-port must be a port number, got {a.engine_port}")
    if a.engine_port and a.engine_key_file is None:
        raise ConfigurationError("--engine-port needs --engine-key-file: whoever reaches it changes the model")


def _refuse_nats_contradictions(a: Arguments) -> None:
    ways = [name for name in ("nats_credentials", "nats_token", "nats_nkey_seed") if getattr(a, name) is not None]
    if len(ways) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in ways)
        raise ConfigurationError(f"{flags} both say who the worker is; give one of them")
    if (a.nats_tls_cert is None) != (a.nats_tls_key is None):
        raise ConfigurationError("--nats-tls-cert and --nats-tls-key belong together; give both")


def refuse_contradictions(a: Arguments) -> None:
    """Raises `ConfigurationError` for the first contradiction."""
    _refuse_options_of_other_runtimes(a)
    _refuse_engine_port_contradictions(a)
    if a.runtime == "nats":
        _refuse_nats_contradictions(a)
    elif a.runtime == "openengine":
        _refuse_openengine_contradictions(a)
    # the libraries have defaults of their own for what is not given
    sizes_count = a.engine in ("embedded", "constant") or {"max_num_seqs", "max_num_batched_tokens"} <= a.given
    if sizes_count and a.max_num_batched_tokens < a.max_num_seqs:
        raise ConfigurationError(
            f"--max-num-batched-tokens ({a.max_num_batched_tokens}) must be at least --max-num-seqs ({a.max_num_seqs})"
        )
    if a.context_length is not None and a.context_length < 2:
        raise ConfigurationError(f"--context-length must be at least 2, got {a.context_length}")
    if a.kv_blocks is not None and a.kv_cache_memory is not None:
        raise ConfigurationError("--kv-blocks and --kv-cache-memory both size the KV cache; give one of them")
    if a.migration == "on" and a.boundary_store is None:
        raise ConfigurationError("--migration on needs --boundary-store")
    if a.migration == "off" and a.boundary_store is not None:
        raise ConfigurationError("--boundary-store needs --migration on")
    if a.engine == "trtllm" and a.device not in ("auto", "cuda"):
        needs = "needs CUDA" if a.device == "cpu" else "chooses its devices itself"
        raise ConfigurationError(f"--engine trtllm {needs}, but --device is {a.device}")
    _refuse_options_of_other_engines(a)
    if a.engine == "vllm":
        _refuse_vllm_contradictions(a)
    elif a.engine == "constant":
        _refuse_constant_contradictions(a)
    if a.served_model_name in dict(a.lora_modules):
        raise ConfigurationError(f"--lora-modules: {a.served_model_name} is the name of the model itself")
    if a.runtime == "dynamo":
        _refuse_adapters_of_one_key(a)
    if a.lora_modules and a.engine != "embedded" and a.disaggregation_mode not in ("aggregated", "agg"):
        problem = "adapters are registered with aggregated workers alone"
        raise ConfigurationError(f"--lora-modules with --disaggregation-mode {a.disaggregation_mode}: {problem}")
    if a.modality != "text" and a.disaggregation_mode not in ("aggregated", "agg"):
        raise ConfigurationError(f"--modality multimodal with --disaggregation-mode {a.disaggregation_mode}: {_WHOLE}")
    if a.modality == "text" and (a.allowed_local_media_path is not None or a.allowed_media_domains):
        raise ConfigurationError("--allowed-local-media-path and --allowed-media-domains need --modality multimodal")
    if (a.thinking_start is None) != (a.thinking_end is None):
        raise ConfigurationError("--thinking-start and --thinking-end belong together; give both")
    if a.dtype == "float16" and a.engine == "embedded":
        raise ConfigurationError("--dtype float16 needs --engine trtllm or vllm")
    unknown = set(a.endpoint_types.split(",")) - {"chat", "completions", "none"}
    if unknown:
        raise ConfigurationError(f"--endpoint-types must be of chat, completions, none, got {a.endpoint_types!r}")
