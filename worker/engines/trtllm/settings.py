"""Arguments of ``tensorrt_llm.LLM``: from the worker's options and a YAML file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from worker.arguments import OPTIONS, Arguments, load_yaml
from worker.errors import ConfigurationError, StartupError

Role = Literal["aggregated", "prefill", "decode"]

EVENT_BUFFER = 100_000
"""Size of TensorRT-LLM's KV event buffer, as in Dynamo's own worker; older events are lost."""

_PROCESSORS = "is not compatible with logits processors"

REFUSED: dict[str, str] = {
    "model": "is --model-path",
    "tokenizer": "is the checkpoint's own",
    "skip_tokenizer_init": "TensorRT-LLM's tokenizer sets up stop tokens",
    "trust_remote_code": "code in a checkpoint is never run",
    "disable_overlap_scheduler": "is --history",
    "speculative_config": _PROCESSORS,
    "lookahead_config": _PROCESSORS,
    "enable_attention_dp": _PROCESSORS,
    "max_beam_width": "beam search is not served",
    "guided_decoding_backend": "grammars run as logits processors",
    "reasoning_parser": "thinking budgets run as logits processors, and the frontend parses reasoning",
    "num_postprocess_workers": "the worker sends token ids",
    "stream_interval": "every token must be a delta",
    "batched_logits_processor": "only the TensorRT backend calls it",
}
"""Names that the YAML file may not set, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig:
    """Settings of one TensorRT-LLM engine.

    Attributes:
        model_path: Directory of the checkpoint.
        options: Arguments of ``LLM`` besides the model. Those in `optional` are omitted if a
            version lacks them.
        optional: Names in `options` that the worker sets by itself.
        max_num_seqs: Largest batch.
        max_queue: Length of the waiting queue.
        history: ``exact`` shows processors every sampled token; ``lagged`` uses overlapped
            scheduling, where they see it late.
        fails_open: As in Dynamo's own adapter, a request continues without a failing processor.
        role: ``prefill`` and ``decode`` transfer KV through TensorRT-LLM's cache transceiver.
        kv_lease_s: Seconds that a prefill worker stays after its last prompt, for decode workers to
            fetch the KV.
        canary_interval_s: Seconds without a response after which a canary is sent.
        canary_timeout_s: Timeout of the canary.
    """

    model_path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    max_num_seqs: int = 64
    max_queue: int = 256
    history: Literal["exact", "lagged"] = "exact"
    fails_open: bool = False
    role: Role = "aggregated"
    kv_lease_s: float = 30.0
    canary_interval_s: float = 10.0
    canary_timeout_s: float = 60.0

    def llm_arguments(self, known: Collection[str], version: str) -> dict[str, Any]:
        """Arguments for the installed version.

        Raises:
            StartupError: it lacks an argument that the operator gave, or one that exactness needs.
        """
        chosen = {}
        for name, value in self.options.items():
            if name in known:
                chosen[name] = value
            elif name not in self.optional:
                raise StartupError(f"TensorRT-LLM {version} has no argument {name!r}")
        return chosen


def config_from(arguments: Arguments) -> TrtllmConfig:
    """Settings from the worker's options and the YAML file.

    Raises:
        ConfigurationError: they contradict each other, or a name may not be set.
    """
    path = arguments.extra_engine_args
    given = {} if path is None else load_yaml(path)
    for name in given:
        if name in REFUSED:
            raise ConfigurationError(f"--extra-engine-args {path}: {name}: {REFUSED[name]}")
    options = _Options(given, path)
    _add_sizes(options, arguments)
    _add_cache(options, arguments)
    role: Role = arguments.disaggregation_mode  # type: ignore[assignment]  # one of its choices
    if role != "aggregated":
        options.default("cache_transceiver_config", {"backend": "DEFAULT"})
    # a context-only request takes one step, so there is nothing to overlap; versions of 2025 refuse
    # overlap
    overlaps = arguments.history == "lagged" and role != "prefill"
    options.default("disable_overlap_scheduler", not overlaps, needed=True)
    options.default("enable_chunked_prefill", arguments.history == "exact")
    if arguments.history == "lagged" and options.values["enable_chunked_prefill"]:
        problem = "with --history lagged a prompt must be prefilled at once"
        raise ConfigurationError(f"--extra-engine-args {path}: enable_chunked_prefill: {problem}")
    options.default("scheduler_config", {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"})
    options.default("enable_iter_perf_stats", True)
    return TrtllmConfig(
        model_path=arguments.model_path,
        options=options.values,
        optional=frozenset(options.optional),
        max_num_seqs=int(options.values["max_batch_size"]),
        max_queue=arguments.max_queue,
        history="exact" if arguments.history == "exact" else "lagged",
        fails_open=arguments.processor_errors == "open",
        role=role,
        kv_lease_s=arguments.kv_lease_s,
    )


def _add_sizes(options: _Options, arguments: Arguments) -> None:
    options.flag("tensor_parallel_size", arguments, "tensor_parallel_size", always=True)
    options.flag("pipeline_parallel_size", arguments, "pipeline_parallel_size", always=True)
    options.flag("max_batch_size", arguments, "max_num_seqs", always=True)
    options.flag("max_num_tokens", arguments, "max_num_batched_tokens")
    options.flag("max_seq_len", arguments, "context_length")
    if arguments.dtype != "auto":
        options.flag("dtype", arguments, "dtype")


def _add_cache(options: _Options, arguments: Arguments) -> None:
    cache = dict(options.values.get("kv_cache_config") or {})
    inner = _Options(cache, options.path)
    inner.flag("tokens_per_block", arguments, "kv_block_size")
    if arguments.kv_blocks is not None:
        block = inner.values.get("tokens_per_block")
        if block is None:
            raise ConfigurationError("--kv-blocks needs --kv-block-size with --engine trtllm")
        inner.same("max_tokens", arguments.kv_blocks * int(block), "--kv-blocks")
    if arguments.enable_kv_routing:
        inner.default("event_buffer_max_size", EVENT_BUFFER)
    if inner.values:
        options.values["kv_cache_config"] = inner.values


class _Options:
    """Values by name; those of the YAML file have priority, and a flag must not contradict them."""

    def __init__(self, given: Mapping[str, Any], path: str | None) -> None:
        self.values = dict(given)
        self.path = path
        self.optional: set[str] = set()

    def flag(self, name: str, arguments: Arguments, option: str, *, always: bool = False) -> None:
        """Take an option of the worker if it was given, or ``always``."""
        value = getattr(arguments, option)
        if option in arguments.given:
            self.same(name, value, next(each.flag for each in OPTIONS if each.name == option))
        elif always:
            self.values.setdefault(name, value)

    def same(self, name: str, value: Any, flag: str) -> None:
        """Set a value that the file may repeat but not contradict."""
        if self.values.setdefault(name, value) != value:
            problem = f"{flag} asks for {name}: {value}, but {self.path} says {self.values[name]}; give it in one place"
            raise ConfigurationError(problem)

    def default(self, name: str, value: Any, *, needed: bool = False) -> None:
        """Set a value that the file lacks; versions without it are refused only if ``needed``."""
        if name not in self.values:
            self.values[name] = value
            if not needed:
                self.optional.add(name)


def checkpoint_facts(model_path: str) -> tuple[int | None, tuple[int, ...]]:
    """Context length, None if the checkpoint does not say, and the end token ids.

    Raises:
        StartupError: a file cannot be read.
    """
    config = _read_json(Path(model_path) / "config.json")
    text = config.get("text_config", config)
    length = text.get("max_position_embeddings")
    generation = _read_json(Path(model_path) / "generation_config.json")
    found = generation.get("eos_token_id", text.get("eos_token_id"))
    ends = [] if found is None else found if isinstance(found, list) else [found]
    return length, tuple(int(token) for token in ends)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"--model-path: cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise StartupError(f"--model-path: {path} does not hold a JSON object")
    return content
