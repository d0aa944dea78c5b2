"""The worker's options: one typed table, read from the command line, the environment and a YAML
file.

Nothing heavy is imported here, so that a wrong argument is answered before torch or the runtime is
loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from worker import __version__
from worker.errors import ConfigurationError

ENVIRONMENT_PREFIX = "WORKER_"

# Kubernetes describes a Service named "worker" to every pod in these variables; they are not
# options.
_KUBERNETES_SERVICE = re.compile(r"WORKER_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_\w+)?)")


@dataclass(frozen=True, slots=True)
class Option:
    """How one field of `Arguments` is given.

    Attributes:
        name: Field name; ``--`` and hyphens make the command-line flag, underscores the key of the
            YAML file.
        env: Environment variable.
        parse: Turns the given text into the value; raises `ValueError` with what was expected.
        default: Value when it is given nowhere.
        choices: The accepted values, empty when any parsed value is.
        help: One sentence; also the row of `docs/configuration.md`.
        engine: Whether ``--extra-engine-args`` may set it.
        many: Whether the flag may be given several times; the value is a tuple.
    """

    name: str
    env: str
    parse: Callable[[str], Any]
    default: Any
    choices: tuple[str, ...]
    help: str
    engine: bool
    many: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def read(self, text: str, source: str) -> Any:
        """The value of ``text``, which came from ``source``. Raises `ConfigurationError`."""
        if self.choices and text not in self.choices:
            raise ConfigurationError(f"{source} must be one of {', '.join(self.choices)}, got {text!r}")
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigurationError(f"{source} must be {error}, got {text!r}") from None


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("a non-empty text")
    return text


def _url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text):
        raise ValueError("an http:// or https:// URL")
    return text


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise ValueError("an integer of at least 1")
    return int(text)


def _not_negative(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError("an integer of at least 0")
    return int(text)


SUBJECT_PART = r"[!-)+,\-/-=?-~]+"
"""A part of a subject of NATS: printable ASCII without dots and wildcards."""

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _memory(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?(KiB|MiB|GiB)", text)
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not size:
        raise ValueError("a size above 0 with its unit, KiB, MiB or GiB, for example 2GiB")
    return size


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise ValueError("auto, cpu, cuda or cuda:N")
    return text


def _packed_copy(text: str) -> str:
    if text not in ("auto", "off") and not Path(text).is_absolute():
        raise ValueError("auto, off or an absolute path")
    return text


def _positive_seconds(text: str) -> float:
    seconds = _seconds(text)
    if seconds == 0:
        raise ValueError("a number of seconds above 0")
    return seconds


def _store(text: str) -> str:
    if not re.fullmatch(r"(file|nats|etcd):\S.*", text):
        raise ValueError("file:DIRECTORY, nats:URL or etcd:URL")
    return text


def _subject_token(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise ValueError("1 to 64 letters, digits, hyphens and underscores")
    return text


def _reply_prefixes(text: str) -> str:
    for one in _list(text):
        if not re.fullmatch(rf"({SUBJECT_PART}\.)+", one) or one.startswith(("$", "dlw.", "dlw-")):
            raise ValueError(
                "beginnings of subjects that end with a dot, neither NATS's own ($) nor the worker's (dlw)"
            )
    return text


def _list(text: str) -> tuple[str, ...]:
    entries = tuple(entry.strip() for entry in text.split(","))
    if not all(entries):
        raise ValueError("a list separated by commas")
    return entries


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        raise ValueError("a number of seconds of at least 0")
    return float(text)


def _option(
    default: Any,
    help: str,
    *,
    env: str | None = None,
    parse: Callable[[str], Any] = _text,
    choices: tuple[str, ...] = (),
    engine: bool = False,
    many: bool = False,
) -> Any:
    metadata = {"env": env, "parse": parse, "choices": choices, "help": help, "engine": engine, "many": many}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Every option of ``python -m worker``. This class is the table: flag, variable, type,
    default, choices, help.
    """

    model_path: str = _option(
        None, "Directory of the Hugging Face checkpoint to serve, or a GGUF file (docs/models.md). Required."
    )
    served_model_name: str = _option(None, "Name that clients ask for. Default: last part of the model path.")
    runtime: str = _option("dynamo", "What brings the requests (docs/nats.md).", choices=("dynamo", "nats"))
    engine: str = _option("embedded", "Engine that decodes.", choices=("embedded", "trtllm"))
    device: str = _option(
        "auto", "Where the embedded engine computes: auto (CUDA if there is any), cpu, cuda or cuda:N.", parse=_device
    )
    dtype: str = _option(
        "auto",
        "Data type of weights and activations; auto is the checkpoint's own, on a CPU float32 in place of float16.",
        choices=("auto", "float32", "bfloat16", "float16"),
        engine=True,
    )
    numerics: str = _option(
        "auto",
        "exact computes the same tokens in any batch and on any path, bit by bit; auto is exact where it costs next to "
        "nothing.",
        choices=("auto", "exact", "fast"),
        engine=True,
    )
    kernels: str = _option(
        "auto",
        "What computes on a CPU: native kernels, with the fastest of AMX, AVX-512, AVX2 and plain C (generic) that the "
        "processor has or with the one named, torch's, or auto: native where they were built and the processor has "
        "FMA.",
        choices=("auto", "native", "native-amx", "native-avx512", "native-avx2", "native-generic", "torch"),
        engine=True,
    )
    quantization: str = _option(
        "auto",
        "What weights are held in on a CPU: int8 or int4 (docs/models.md), none (dequantised, if it is quantised), or "
        "auto: as the model has them.",
        choices=("auto", "none", "int8", "int4"),
        engine=True,
    )
    activation_dtype: str = _option(
        "auto",
        "What rows are rounded to before they are multiplied by quantised weights: int8, as llama.cpp does it, two to "
        "three times as fast (docs/models.md), or auto: nothing.",
        choices=("auto", "int8"),
        engine=True,
    )
    kv_cache_dtype: str = _option(
        "auto",
        "What the embedded engine holds keys and values in: int8, with a scale for each token and head "
        "(docs/models.md), or auto: the data type of activations.",
        choices=("auto", "int8"),
        engine=True,
    )
    packed_copy: str = _option(
        "auto",
        "auto keeps packed weights and the tokenizer beside the checkpoint, in .packed, where that can be written, so "
        "that the next start is fast (docs/models.md); an absolute path keeps them in that directory, for checkpoints "
        "on read-only volumes; off neither reads nor writes any.",
        parse=_packed_copy,
        engine=True,
    )
    max_num_seqs: int = _option(
        64,
        "Requests decoded in one step at most. TensorRT-LLM has a default of its own.",
        parse=_positive,
        engine=True,
    )
    max_num_batched_tokens: int = _option(
        1024,
        "Token budget of a step; at least max-num-seqs. TensorRT-LLM has a default of its own.",
        parse=_positive,
        engine=True,
    )
    max_mixed_chunk: int | None = _option(
        None,
        "Prompt tokens per prompt in a step that also decodes, to whole tiles of 32; less beside few rows and behind "
        "its first 1024 tokens. Default: 64 on a CPU, 512 on CUDA.",
        parse=_positive,
        engine=True,
    )
    context_length: int | None = _option(
        None, "Longest prompt + answer, in tokens. Default: the model's.", parse=_positive, engine=True
    )
    kv_block_size: int = _option(16, "Tokens per KV block.", parse=_positive, engine=True)
    kv_blocks: int | None = _option(
        None,
        "KV blocks to own. Default: what --kv-cache-memory says.",
        parse=_positive,
        engine=True,
    )
    kv_cache_memory: int | None = _option(
        None,
        "Memory for the KV cache, for example 2GiB; a CPU's is taken as it is used. Default: enough for max-num-seqs "
        "full contexts, but on a CPU at most a quarter of the available memory and 4GiB (or one context), on CUDA 0.9 "
        "of what is free.",
        parse=_memory,
        engine=True,
    )
    local_workers: int = _option(
        1,
        "Workers that share this machine or container: the embedded engine computes with its part of the cores, and "
        "plans with its part of the memory.",
        parse=_positive,
    )
    max_queue: int = _option(
        256, "Requests in the waiting queue at most; one more is refused.", parse=_not_negative, engine=True
    )
    speculative_config: str | None = _option(
        None,
        "How the embedded engine drafts tokens, JSON in vLLM's names (docs/speculation.md), for example "
        '{"method": "ngram", "num_speculative_tokens": 6}. What a request\'s processors force is drafted anyway.',
        engine=True,
    )
    step_timeout_s: float = _option(
        300.0,
        "Seconds after which a step that has not ended ends the process; above the longest prompt step of a slow CPU.",
        parse=_positive_seconds,
        engine=True,
    )
    tensor_parallel_size: int = _option(1, "GPUs that share each layer; TensorRT-LLM only.", parse=_positive)
    pipeline_parallel_size: int = _option(
        1, "Groups of GPUs that share the layers; TensorRT-LLM only.", parse=_positive
    )
    history: str = _option(
        "exact",
        "What TensorRT-LLM shows logits processors: every sampled token, or lagged by one, which overlaps steps.",
        choices=("exact", "lagged"),
    )
    processor_errors: str = _option(
        "closed",
        "With TensorRT-LLM: a logits processor that fails ends its request, or (open) the request goes on without it.",
        choices=("closed", "open"),
    )
    extra_engine_args: str | None = _option(
        None, "YAML file of engine options, keyed by option name; with TensorRT-LLM by the names of its LLM arguments."
    )
    drain_timeout_s: float = _option(
        30.0, "Seconds that in-flight requests get to finish after SIGTERM; the rest are migrated.", parse=_seconds
    )
    keepalive_s: float = _option(
        0.0,
        "Seconds without a token after which the stream of a request gets an empty chunk, at most twice as many; 0 for "
        "never. A frontend with a stream time-out needs it: it would take a busy worker for a hung one.",
        parse=_seconds,
    )
    logits_processor: tuple[str, ...] = _option(
        (),
        "Third-party logits processors, NAME=module:Class, several separated by commas or given one by one.",
        parse=_list,
        many=True,
    )
    allow_logits_processors: tuple[str, ...] = _option(
        (),
        "Names of installed third-party logits processors (entry points) that requests may name, separated by commas.",
        parse=_list,
        many=True,
    )
    thinking_start: str | None = _option(
        None,
        "Text that opens a thinking section, of one token or several. Default: <think> or [THINK], if that is a token.",
    )
    thinking_end: str | None = _option(None, "Text that closes a thinking section; given with --thinking-start.")
    processor_policy: str | None = _option(
        None, "YAML file of mandatory, default and forbidden logits processors, and of watermark keys."
    )
    processor_step_budget_s: float = _option(
        0.1,
        "Most CPU time that a third-party logits processor may take for one step, seconds; over it, its request fails.",
        parse=_positive_seconds,
    )
    grammar_timeout_s: float = _option(
        2.0,
        "Processor time that compiling a grammar may take, seconds; over it, its request is refused.",
        parse=_positive_seconds,
    )
    grammar_cache_mib: int = _option(
        256, "Memory for compiled grammars that are kept for the next request, MiB.", parse=_positive
    )
    log_requests: bool = _option(
        False,
        "Write one line of JSON to standard output when a request has ended (docs/debugging.md); true, false, or the "
        "flag alone.",
        parse=_truth,
    )
    migration: str = _option(
        "off",
        "Whether requests that move here from another worker go on exactly (docs/migration.md); the frontend's "
        "--migration-limit moves them. on needs --boundary-store.",
        choices=("off", "on"),
    )
    boundary_store: str | None = _option(
        None,
        "Where workers keep how requests began: file:DIRECTORY, nats:URL or etcd:URL; one for all workers of a pool.",
        parse=_store,
    )
    otlp_endpoint: str | None = _option(
        None, "URL of an OpenTelemetry collector that takes spans of requests, over HTTP (docs/metrics.md).", parse=_url
    )
    disaggregation_mode: str = _option(
        "aggregated", "Role of this worker.", choices=("aggregated", "agg", "prefill", "decode")
    )
    kv_lease_s: float = _option(
        30.0,
        "Seconds until a lease on a prompt's KV times out; a decode worker that comes later computes the prompt.",
        parse=_positive_seconds,
    )
    max_local_prefills: int = _option(
        16,
        "Prompts without a usable KV transfer that a decode worker computes itself at a time; one more is refused as "
        "overloaded, and 0 refuses all.",
        parse=_not_negative,
    )
    kv_transfer_devices: str = _option(
        "lo",
        "Network devices over which KV is read by other workers, as UCX names them; all for every one.",
        env="UCX_NET_DEVICES",
    )
    namespace: str = _option("dynamo", "Dynamo namespace.", env="DYN_NAMESPACE")
    component: str = _option(
        "backend", "Dynamo component; of a prefill worker prefill, unless given.", env="DYN_COMPONENT"
    )
    endpoint: str = _option(
        "generate", "Dynamo endpoint; dyn://namespace.component.endpoint names all three.", env="DYN_ENDPOINT"
    )
    endpoint_types: str = _option("chat,completions", "OpenAI endpoints to serve.", env="DYN_ENDPOINT_TYPES")
    discovery_backend: str = _option(
        "etcd", "Where workers register.", env="DYN_DISCOVERY_BACKEND", choices=("kubernetes", "etcd", "file", "mem")
    )
    request_plane: str = _option(
        "tcp", "How requests reach this worker.", env="DYN_REQUEST_PLANE", choices=("tcp", "nats")
    )
    response_plane: str = _option(
        "tcp",
        "How answers leave this worker; quic needs a Dynamo that has it.",
        env="DYN_RESPONSE_PLANE",
        choices=("tcp", "quic"),
    )
    event_plane: str | None = _option(
        None, "How events are published; Dynamo's default when unset.", env="DYN_EVENT_PLANE", choices=("nats", "zmq")
    )
    enable_kv_routing: bool = _option(
        True,
        "Publish load and cached blocks for the KV-aware router: true or false. "
        "With the zmq event plane, true listens on 0.0.0.0.",
        parse=_truth,
    )
    dyn_tool_call_parser: str | None = _option(
        None,
        "Tool-call parser that the frontend applies, to every chat that is not streamed (docs/request.md).",
        env="DYN_TOOL_CALL_PARSER",
    )
    dyn_reasoning_parser: str | None = _option(
        None, "Reasoning parser that the frontend applies.", env="DYN_REASONING_PARSER"
    )
    custom_jinja_template: str | None = _option(
        None, "Chat template file that replaces the model's own.", env="DYN_CUSTOM_JINJA_TEMPLATE"
    )
    nats_url: str = _option(
        "nats://127.0.0.1:4222", "NATS servers of --runtime nats, separated by commas; tls:// for TLS."
    )
    nats_credentials: str | None = _option(None, "File with the JWT and the NKey seed of a NATS user.")
    nats_token: str | None = _option(
        None, "Token of a NATS server that wants one; better in the variable, which no process list shows."
    )
    nats_nkey_seed: str | None = _option(None, "File with the seed of an NKey that the NATS server knows.")
    nats_tls_ca: str | None = _option(
        None, "File of the certificates that sign the NATS server's. Default: the system's."
    )
    nats_tls_cert: str | None = _option(None, "File of this worker's certificate for NATS; needs --nats-tls-key.")
    nats_tls_key: str | None = _option(None, "File of the key of --nats-tls-cert.")
    nats_reply_prefixes: str = _option(
        "_INBOX.",
        "What reply subjects of NATS clients begin with, separated by commas, each ending with a dot; messages with "
        "another one are dropped (docs/nats.md).",
        parse=_reply_prefixes,
    )
    model_version: str = _option(
        "1", "Version of the model in the NATS subjects: letters, digits, hyphens, underscores.", parse=_subject_token
    )
    batch: bool = _option(
        False,
        "With --runtime nats: also answer the durable batches of dlw-batch, behind the requests that clients wait for.",
        parse=_truth,
    )
    batch_ack_wait_s: float = _option(
        30.0,
        "Seconds after which a request of a batch whose worker has died is given to another one.",
        parse=_positive_seconds,
    )
    batch_max_deliver: int = _option(
        5,
        "Workers that a request of a batch may take with it before it is set aside as a dead letter.",
        parse=_positive,
    )
    metrics_port: int = _option(
        0, "With --runtime nats: port of /metrics, /live and /health; 0 serves none.", parse=_not_negative
    )
    metrics_host: str = _option("127.0.0.1", "Address of --metrics-port.")
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    """Names of the options that were given somewhere: TensorRT-LLM has defaults of its own for
    the others.
    """

    @property
    def publishes_kv_events(self) -> bool:
        """Whether a router is told which blocks are cached; prompts are computed elsewhere than
        on a decode worker.
        """
        return self.enable_kv_routing and self.disaggregation_mode != "decode"


def _table() -> tuple[Option, ...]:
    return tuple(
        Option(
            name=f.name,
            env=f.metadata["env"] or ENVIRONMENT_PREFIX + f.name.upper(),
            parse=f.metadata["parse"],
            default=f.default,
            choices=f.metadata["choices"],
            help=f.metadata["help"],
            engine=f.metadata["engine"],
            many=f.metadata["many"],
        )
        for f in dataclasses.fields(Arguments)
        if f.metadata
    )


OPTIONS: tuple[Option, ...] = _table()


def parse_arguments(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Arguments:
    """Read the options: the command line wins over the environment, both over the defaults.

    A YAML file given with ``--extra-engine-args`` may not contradict either of them.

    Raises:
        ConfigurationError: an option is unknown, malformed, contradictory or missing.
        SystemExit: ``--help`` or ``--version`` was given.
    """
    environ = os.environ if environ is None else environ
    given = _from_environment(environ) | _from_command_line(argv)
    # With --engine trtllm the file has TensorRT-LLM's own names: worker/engines/trtllm/settings.py
    # reads it.
    if given.get("extra_engine_args") is not None and given.get("engine") != "trtllm":
        given = _with_file(given, str(given["extra_engine_args"]))
    return _checked(_with_full_endpoint(given), environ)


class StrictParser(argparse.ArgumentParser):
    """A command line whose errors are `ConfigurationError`."""

    def error(self, message: str) -> Any:
        raise ConfigurationError(message)


def _from_command_line(argv: Sequence[str] | None) -> dict[str, Any]:
    parser = StrictParser(
        prog="python -m worker", description="Serve a model through NVIDIA Dynamo, or over NATS.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dynamo-logits-worker {__version__}")
    for option in OPTIONS:
        shown = f" ({' | '.join(option.choices)})" if option.choices else ""
        default = "" if option.default in (None, ()) else f" Default: {option.default}."
        text = f"{option.help}{shown}{default} [{option.env}]".replace("%", "%%")
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if isinstance(option.default, bool) else {}
        parser.add_argument(option.flag, dest=option.name, action="append", metavar="VALUE", help=text, **switch)
    texts = vars(parser.parse_args(argv))
    values = {}
    for option in OPTIONS:
        if texts[option.name] is not None:
            if len(texts[option.name]) > 1 and not option.many:
                raise ConfigurationError(f"{option.flag} is given {len(texts[option.name])} times")
            values[option.name] = option.read(",".join(texts[option.name]), option.flag)
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {option.env: option for option in OPTIONS}
    for name in sorted(environ):
        ours = name.startswith(ENVIRONMENT_PREFIX) and not _KUBERNETES_SERVICE.fullmatch(name)
        if ours and name not in known:
            raise ConfigurationError(f"unknown environment variable {name}")
    # An empty variable is how a shell or a manifest leaves an option unset.
    return {option.name: option.read(environ[name], name) for name, option in known.items() if environ.get(name)}


class _UniqueKeys(yaml.SafeLoader):
    """YAML keeps the last of two equal keys in silence; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} is given twice")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _with_file(given: dict[str, Any], path: str) -> dict[str, Any]:
    engine_options = {option.name: option for option in OPTIONS if option.engine}
    merged = dict(given)
    for key, raw in load_yaml(path).items():
        option = engine_options.get(key)
        if option is None:
            known = ", ".join(sorted(engine_options))
            raise ConfigurationError(f"--extra-engine-args {path}: unknown engine option {key!r}; known: {known}")
        if isinstance(raw, (bool, list, dict)) or raw is None:
            raise ConfigurationError(f"--extra-engine-args {path}: {key} must be one value, got {raw!r}")
        value = option.read(str(raw), f"--extra-engine-args {path}: {key}")
        if merged.setdefault(key, value) != value:
            raise ConfigurationError(
                f"{option.flag} is {merged[key]} but {path} says {key}: {value}; give it in one place"
            )
    return merged


def load_yaml(path: str) -> dict[str, Any]:
    """The mapping in the file of ``--extra-engine-args``. Raises `ConfigurationError`."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--extra-engine-args {path}: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"--extra-engine-args {path}: must be a mapping of option names to values")
    return {str(key): value for key, value in content.items()}


def _with_full_endpoint(given: dict[str, Any]) -> dict[str, Any]:
    """Split ``dyn://namespace.component.endpoint``, Dynamo's long form, into the three names."""
    endpoint = given.get("endpoint")
    if endpoint is None or not endpoint.startswith("dyn://"):
        return given
    parts = endpoint.removeprefix("dyn://").split(".")
    if len(parts) != 3 or not all(parts):
        raise ConfigurationError(f"--endpoint must be a name or dyn://namespace.component.endpoint, got {endpoint!r}")
    merged = dict(given)
    del merged["endpoint"]
    for name, part in zip(("namespace", "component", "endpoint"), parts, strict=True):
        if merged.setdefault(name, part) != part:
            raise ConfigurationError(f"--endpoint {endpoint} contradicts --{name} {merged[name]}")
    return merged


def _checked(given: dict[str, Any], environ: Mapping[str, str]) -> Arguments:
    if given.get("model_path") is None:
        raise ConfigurationError("--model-path is required")
    names = frozenset(given)
    given.setdefault("served_model_name", Path(os.path.abspath(given["model_path"])).name.removesuffix(".gguf"))
    if given.get("disaggregation_mode") == "agg":
        given["disaggregation_mode"] = "aggregated"
    if given.get("disaggregation_mode") == "prefill":
        given.setdefault("component", "prefill")
    suffix = environ.get("DYN_NAMESPACE_WORKER_SUFFIX")
    if suffix:  # Dynamo's rule for several pools of workers of one model
        given["namespace"] = f"{given.get('namespace', 'dynamo')}-{suffix}"
    arguments = Arguments(**given, given=names)
    _refuse_contradictions(arguments)
    return arguments


_ONLY = {
    "trtllm": ("tensor_parallel_size", "pipeline_parallel_size", "history", "processor_errors"),
    "embedded": (
        *("numerics", "kernels", "quantization", "activation_dtype", "kv_cache_dtype", "kv_cache_memory"),
        *("max_mixed_chunk", "speculative_config", "step_timeout_s"),
    ),
}
"""Options that one engine alone honours."""


def _refuse_options_of_other_engines(a: Arguments) -> None:
    for engine, names in _ONLY.items():
        for option in OPTIONS:
            value = getattr(a, option.name)
            if a.engine != engine and option.name in names and value != option.default:
                raise ConfigurationError(f"{option.flag} {value} needs --engine {engine}")


_ONLY_DYNAMO = (
    "namespace",
    "component",
    "endpoint",
    "endpoint_types",
    "request_plane",
    "response_plane",
    "event_plane",
    "dyn_tool_call_parser",
    "dyn_reasoning_parser",
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
    "metrics_port",
    "metrics_host",
)


def _refuse_options_of_other_runtimes(a: Arguments) -> None:
    others = _ONLY_NATS if a.runtime == "dynamo" else _ONLY_DYNAMO
    needed = "nats" if a.runtime == "dynamo" else "dynamo"
    for option in OPTIONS:
        if option.name in others and getattr(a, option.name) != option.default:
            raise ConfigurationError(f"{option.flag} needs --runtime {needed}")


def _refuse_nats_contradictions(a: Arguments) -> None:
    if a.disaggregation_mode != "aggregated":
        raise ConfigurationError(f"--disaggregation-mode {a.disaggregation_mode} needs --runtime dynamo")
    ways = [name for name in ("nats_credentials", "nats_token", "nats_nkey_seed") if getattr(a, name) is not None]
    if len(ways) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in ways)
        raise ConfigurationError(f"{flags} both say who the worker is; give one of them")
    if (a.nats_tls_cert is None) != (a.nats_tls_key is None):
        raise ConfigurationError("--nats-tls-cert and --nats-tls-key belong together; give both")
    if a.metrics_port > 65535:
        raise ConfigurationError(f"--metrics-port must be a port number, got {a.metrics_port}")


def _refuse_contradictions(a: Arguments) -> None:
    _refuse_options_of_other_runtimes(a)
    if a.runtime == "nats":
        _refuse_nats_contradictions(a)
    # TensorRT-LLM has defaults of its own for what is not given
    sizes_count = a.engine == "embedded" or {"max_num_seqs", "max_num_batched_tokens"} <= a.given
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
    if a.dtype == "float16" and a.device == "cpu":
        raise ConfigurationError("--dtype float16 needs CUDA, but --device is cpu")
    unknown = set(a.endpoint_types.split(",")) - {"chat", "completions", "none"}
    if unknown:
        raise ConfigurationError(f"--endpoint-types must be of chat, completions, none, got {a.endpoint_types!r}")
