"""Arguments of ``tensorrt_llm.LLM``: from the worker's options, and those that are given by their
own names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from worker.arguments import OPTIONS, Arguments
from worker.engines.images import ImageSources, image_sources
from worker.engines.lora_adapters import Adapter, read_adapters
from worker.engines.trtllm import llm_options
from worker.engines.trtllm.given import GivenArguments
from worker.engines.trtllm.lora import target_modules
from worker.engines.trtllm.placement import AFFINITY
from worker.engines.trtllm.speculation import BACKEND, asks_for_drafts, check_drafts
from worker.errors import ConfigurationError, StartupError
from worker.models.json_files import has_code, read_json_file

Role = Literal["aggregated", "prefill", "decode"]

EVENT_BUFFER = 100_000
"""Size of TensorRT-LLM's KV event buffer, as in Dynamo's own worker; older events are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig:
    """Settings of one TensorRT-LLM engine.

    Attributes:
        model_path: Directory of the checkpoint.
        options: Arguments of ``LLM`` besides the model. Those in `optional` are omitted if a
            version lacks them.
        optional: Names in `options` that the worker sets by itself.
        max_num_seqs: Largest batch; None is TensorRT-LLM's own default.
        max_queue: Length of the waiting queue.
        history: ``exact`` shows processors every sampled token; ``lagged`` uses overlapped
            scheduling, where they see it late.
        fails_open: Whether a request continues without a failing processor, as in Dynamo's own
            adapter.
        role: ``prefill`` and ``decode`` transfer KV through TensorRT-LLM's cache transceiver.
        kv_lease_s: Seconds that a prefill worker keeps the KV of a prompt, and stays after its last
            prompt, for decode workers to fetch it.
        kv_devices: Network devices over which KV goes, as in ``UCX_NET_DEVICES``; None leaves them
            to the library.
        canary_interval_s: Seconds without a response after which a canary is sent.
        canary_timeout_s: Timeout of the canary.
        notes: A line for each given argument that is not followed.
        served_model_name: Name that clients ask for, a label of TensorRT-LLM's own metrics.
        adapters: LoRA adapters that requests may choose.
        images: Places that pictures come from, None for none.
    """

    model_path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    max_num_seqs: int | None = None
    max_queue: int = 256
    history: Literal["exact", "lagged"] = "exact"
    fails_open: bool = False
    role: Role = "aggregated"
    kv_lease_s: float = 30.0
    kv_devices: str | None = None
    canary_interval_s: float = 10.0
    canary_timeout_s: float = 60.0
    notes: tuple[str, ...] = ()
    served_model_name: str = ""
    adapters: Sequence[Adapter] = ()
    images: ImageSources | None = None

    @property
    def drafts(self) -> bool:
        """Whether TensorRT-LLM decodes speculatively, and so calls no logits processors."""
        return asks_for_drafts(self.options)

    @property
    def num_copies(self) -> int:
        """Ranks that call a request's logits processors, each its own copy."""
        sizes = (self.options.get(name) or 1 for name in ("tensor_parallel_size", "context_parallel_size"))
        return math.prod(int(size) for size in sizes)

    @property
    def guided_backend(self) -> str | None:
        """Backend of the library's own guides, None where it has none."""
        return self.options.get(BACKEND)

    def llm_arguments(self, known: Collection[str], version: str, context_length: int | None = None) -> dict[str, Any]:
        """Arguments for the installed version.

        Args:
            known: Names that the version has.
            version: The installed version, for messages.
            context_length: The checkpoint's. It is given where the operator gives no length:
                TensorRT-LLM would deduce its own, and does not tell which.

        Raises:
            StartupError: it lacks an argument that the operator gave, or one that exactness needs.
        """
        chosen = {}
        options = dict(self.options)
        if options.get("max_seq_len") is None and context_length is not None:
            options["max_seq_len"] = context_length
        for name, value in options.items():
            if name in known:
                chosen[name] = value
            elif name not in self.optional:
                raise StartupError(f"TensorRT-LLM {version} has no argument {name!r}")
        return chosen


def config_from(arguments: Arguments) -> TrtllmConfig:
    """Settings from the worker's options and the arguments of `GivenArguments`.

    Raises:
        ConfigurationError: they contradict each other, or a name may not be set.
    """
    role: Role = arguments.disaggregation_mode  # type: ignore[assignment]  # one of its choices
    # a context-only request takes one step, so there is nothing to overlap; versions of 2025 refuse
    # overlap
    overlaps = arguments.history == "lagged" and role != "prefill"
    needs_trust = has_code(arguments.model_path)
    given = GivenArguments.of(arguments)
    drafts = asks_for_drafts(given.values)
    rows = llm_options.needed(model_path=arguments.model_path, overlaps=overlaps, has_code=needs_trust, drafts=drafts)
    sorted_ = llm_options.split(given.values, rows)
    if sorted_.refused is not None:
        name, problem = sorted_.refused
        raise ConfigurationError(f"{given.source(name)}: {name}: {problem}")
    if drafts:
        check_drafts(given, role=role, has_adapters=bool(arguments.lora_modules))
    options = _Options(sorted_.kept, given)
    _add_sizes(options, arguments)
    _add_cache(options, arguments)
    if role != "aggregated":
        _add_transceiver(options, arguments)
    if not drafts:  # no logits processor runs beside drafts, whose history a step could lag behind
        options.default("disable_overlap_scheduler", not overlaps, needed=True)
    options.default("generation_config", "trtllm")
    options.default("enable_chunked_prefill", arguments.history == "exact")
    if arguments.history == "lagged" and options.values["enable_chunked_prefill"]:
        problem = "with --history lagged a prompt must be prefilled at once"
        raise ConfigurationError(f"{given.source('enable_chunked_prefill')}: enable_chunked_prefill: {problem}")
    options.default("scheduler_config", {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"})
    if arguments.history == "lagged" and not drafts:
        _check_eviction(options)
    options.default("enable_iter_perf_stats", True)
    if drafts and (options.values.get("pipeline_parallel_size") or 1) != 1:
        problem = "speculative_config: NVIDIA does not support drafts with pipeline_parallel_size above 1"
        raise ConfigurationError(f"{given.source('speculative_config')}: {problem}")
    _check_attention_dp(options, arguments)
    adapters = read_adapters(arguments.lora_modules, arguments.model_path)
    target_modules(adapters)  # each layer that they change has to have a name there
    batch = options.values.get("max_batch_size")
    return TrtllmConfig(
        model_path=arguments.model_path,
        options=options.values,
        optional=frozenset(options.optional),
        max_num_seqs=None if batch is None else _count(batch, "max_batch_size", given),
        max_queue=arguments.max_queue,
        history="exact" if arguments.history == "exact" else "lagged",
        fails_open=arguments.processor_errors == "open",
        role=role,
        kv_lease_s=arguments.kv_lease_s,
        kv_devices=arguments.kv_transfer_devices if "kv_transfer_devices" in arguments.given else None,
        notes=sorted_.notes,
        served_model_name=arguments.served_model_name,
        adapters=adapters,
        images=_images(arguments, drafts=drafts),
    )


def _images(arguments: Arguments, *, drafts: bool) -> ImageSources | None:
    """Places that pictures come from, None where the worker serves text alone.

    Raises:
        ConfigurationError: pictures are not served with another option.
    """
    sources = image_sources(arguments)
    if sources is None:
        return None
    others = {
        "--disaggregation-mode": arguments.disaggregation_mode != "aggregated",
        "speculative_config": drafts,
        "--lora-modules": bool(arguments.lora_modules),
    }
    for name, is_given in others.items():
        if is_given:
            raise ConfigurationError(f"--modality multimodal: pictures are not served with --engine trtllm and {name}")
    return sources


def _add_sizes(options: _Options, arguments: Arguments) -> None:
    options.flag("tensor_parallel_size", arguments, "tensor_parallel_size")
    options.flag("pipeline_parallel_size", arguments, "pipeline_parallel_size")
    options.flag("max_batch_size", arguments, "max_num_seqs")
    options.flag("max_num_tokens", arguments, "max_num_batched_tokens")
    options.flag("max_seq_len", arguments, "context_length")
    if arguments.dtype != "auto":
        options.flag("dtype", arguments, "dtype")


def _count(value: Any, name: str, given: GivenArguments) -> int:
    """A number of at least one, in one of the forms that TensorRT-LLM reads."""
    try:
        number = int(value)
        if number == float(value) and number >= 1 and not isinstance(value, bool):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    path = ("kv_cache_config", name) if name == "tokens_per_block" else (name,)
    raise ConfigurationError(f"{given.source(*path)}: {name}: must be an integer of at least 1, got {value!r}")


def _add_cache(options: _Options, arguments: Arguments) -> None:
    cache = options.values.get("kv_cache_config") or {}
    if not isinstance(cache, Mapping):
        source = options.given.source("kv_cache_config")
        raise ConfigurationError(f"{source}: kv_cache_config: must be a mapping, got {cache!r}")
    inner = _Options(dict(cache), options.given, ("kv_cache_config",))
    inner.flag("tokens_per_block", arguments, "kv_block_size")
    if arguments.kv_blocks is not None:
        block = inner.values.get("tokens_per_block")
        if block is None:
            raise ConfigurationError("--kv-blocks needs --kv-block-size with --engine trtllm")
        inner.same("max_tokens", arguments.kv_blocks * _count(block, "tokens_per_block", options.given), "--kv-blocks")
    if arguments.enable_kv_routing:
        inner.default("event_buffer_max_size", EVENT_BUFFER)
    if inner.values:
        options.values["kv_cache_config"] = inner.values


def _check_eviction(options: _Options) -> None:
    """Refuse a policy that preempts requests: TensorRT-LLM then computes a step without their
    processors, and an old history does not show it.
    """
    scheduler = options.values["scheduler_config"]
    policy = scheduler.get("capacity_scheduler_policy") if isinstance(scheduler, Mapping) else None
    if policy == "MAX_UTILIZATION":
        source = options.given.source("scheduler_config", "capacity_scheduler_policy")
        problem = "with --history lagged a request must not be preempted"
        raise ConfigurationError(f"{source}: scheduler_config.capacity_scheduler_policy: {policy}: {problem}")


def _check_attention_dp(options: _Options, arguments: Arguments) -> None:
    """Attention data parallelism, which a conversation's rank needs.

    A flag that keeps no conversations gives no argument, which older versions do not have.
    """
    section = "attention_dp_config"
    config = options.values.get(section)
    if not isinstance(config, dict):
        config = {}
    if config.get(AFFINITY) is False:
        config = {name: value for name, value in config.items() if name != AFFINITY}
        options.values[section] = config or None
    is_parallel = options.values.get("enable_attention_dp") is True
    if config.get(AFFINITY) is True and not is_parallel:
        source = options.given.source(section, AFFINITY)
        raise ConfigurationError(f"{source}: conversations are kept on a rank: it needs enable_attention_dp: true")
    if arguments.lora_modules:
        experts = options.values.get("moe_expert_parallel_size") or 1
        for name, is_given in (("enable_attention_dp", is_parallel), ("moe_expert_parallel_size", experts != 1)):
            if is_given:
                problem = f"adapters are not served with {name}: NVIDIA's feature matrix calls it untested"
                raise ConfigurationError(f"--lora-modules: {problem}")
    if is_parallel and arguments.runtime == "openengine":
        raise ConfigurationError("enable_attention_dp needs --runtime dynamo or nats")


def _add_transceiver(options: _Options, arguments: Arguments) -> None:
    """The transceiver, with a time-out: without one TensorRT-LLM keeps the KV of a prompt whose
    decode worker never comes for good, and its transceiver in Python does not start.

    A transfer may begin until the lease ends, so it gets as long again.
    """
    section = "cache_transceiver_config"
    transceiver = _Options(options.values.get(section) or {}, options.given, (section,))
    lease_ms = math.ceil(arguments.kv_lease_s * 1000)
    if transceiver.values.get("backend") is None:
        transceiver.values["backend"] = "DEFAULT"
    timeout = transceiver.values.setdefault("kv_transfer_timeout_ms", 2 * lease_ms)
    if type(timeout) is not int or timeout < lease_ms:
        problem = f"must be at least the {lease_ms} ms of --kv-lease-s, got {timeout!r}"
        raise ConfigurationError(f"{options.given.source(section)}: {section}.kv_transfer_timeout_ms: {problem}")
    options.values[section] = transceiver.values


class _Options:
    """Values by name; those that were given have priority, and a flag must not contradict them.

    Args:
        values: The values.
        given: The arguments that they come from.
        section: Names of the arguments that they are in.
    """

    def __init__(self, values: Mapping[str, Any], given: GivenArguments, section: tuple[str, ...] = ()) -> None:
        self.values = dict(values)
        self.given = given
        self.section = section
        self.optional: set[str] = set()

    def flag(self, name: str, arguments: Arguments, option: str) -> None:
        """Take an option of the worker if it was given; else the library's default holds."""
        if option in arguments.given:
            value = getattr(arguments, option)
            self.same(name, value, next(each.flag for each in OPTIONS if each.name == option))

    def same(self, name: str, value: Any, flag: str) -> None:
        """Set a value that may be repeated elsewhere but not contradicted."""
        if self.values.setdefault(name, value) != value:
            other = self.given.source(*self.section, name)
            problem = f"{flag} asks for {name}: {value}, but {other} says {self.values[name]}; give it in one place"
            raise ConfigurationError(problem)

    def default(self, name: str, value: Any, *, needed: bool = False) -> None:
        """Set a value that the file lacks; versions without it are refused only if ``needed``."""
        if name not in self.values:
            self.values[name] = value
            if not needed:
                self.optional.add(name)


def vocabulary_size(model_path: str) -> int:
    """Width of a row of logits, as the checkpoint says it.

    Raises:
        StartupError: it does not say, or the file cannot be read.
    """
    config = read_json_file(Path(model_path) / "config.json")
    size = config.get("text_config", config).get("vocab_size")
    if type(size) is not int or size < 1:
        raise StartupError(f"config.json of {model_path}: vocab_size: must be a number of tokens, got {size!r}")
    return size


def checkpoint_facts(model_path: str) -> tuple[int | None, tuple[int, ...]]:
    """Context length, None if the checkpoint does not say, and the end token ids.

    Raises:
        StartupError: a file cannot be read.
    """
    config = read_json_file(Path(model_path) / "config.json")
    text = config.get("text_config", config)
    length = text.get("max_position_embeddings")
    generation = read_json_file(Path(model_path) / "generation_config.json")
    found = generation.get("eos_token_id", text.get("eos_token_id"))
    ends = [] if found is None else found if isinstance(found, list) else [found]
    return length, tuple(int(token) for token in ends)
