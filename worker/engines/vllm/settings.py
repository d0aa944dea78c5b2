"""Arguments of vLLM's ``AsyncEngineArgs``: from the worker's options, vLLM's own flags and
``--engine-args``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from secrets import randbits
from typing import Any

from worker.arguments import OPTIONS, Arguments
from worker.arguments.json_text import json_object
from worker.arguments.yaml_file import load_yaml
from worker.engines.free_memory import free_host_memory
from worker.engines.images import ImageSources, image_sources
from worker.engines.lora_adapters import Adapter, read_adapters
from worker.engines.vllm.flags import read_flags
from worker.engines.vllm.lora import arguments_for, check_empty_place
from worker.errors import ConfigurationError, StartupError
from worker.models.json_files import has_code
from worker.sampling.params import MAX_LOGPROBS

FLAG = "--engine-args"

OWN = {
    "enable_log_requests": False,
    "logits_processors": ["worker.engines.vllm.processors:WorkerProcessors"],
    "logprobs_mode": "raw_logprobs",
    "max_logprobs": MAX_LOGPROBS,
    "scheduling_policy": "priority",
    "worker_extension_cls": "worker.engines.vllm.extension.WorkerExtension",
}
"""Arguments that the worker sets, whatever the options say."""

FROM_OPTIONS = {
    "block_size": "kv_block_size",
    "dtype": "dtype",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "max_model_len": "context_length",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "num_gpu_blocks_override": "kv_blocks",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "tensor_parallel_size": "tensor_parallel_size",
}
"""Arguments that options of the worker set where they are given; vLLM's default holds otherwise."""

SIZES_OF_CACHE = ("kv_cache_memory_bytes", "gpu_memory_utilization")
"""Arguments that say how much memory the KV cache may take. A number of blocks does not: on a CPU
vLLM then wants nearly all memory to be free, whatever it is.
"""

SPACE_ON_CPU = "VLLM_CPU_KVCACHE_SPACE"
"""Variable of vLLM that says it too."""

MAX_CACHE_ON_CPU = 4 * 2**30
"""Largest KV cache on a CPU unless one is asked for, bytes: vLLM would take most of the memory."""

SEED_BITS = 31
"""Bits of the seed of an engine's own generator."""

_PICTURE_CACHE = "mm_processor_cache_gb"
_TWO_COPIES = (
    "of a prompt that the model's processor refuses, one of vLLM's two copies keeps the pictures, and then other "
    "requests with them fail"
)
"""Reason for which processed pictures are not cached; features of the encoder and KV are."""

_SPECULATION = "vLLM does not call this interface of logits processors with drafts on every device"
_DISAGGREGATION = "the worker drives vLLM's NixlConnector itself (--disaggregation-mode)"
_ONE_ENGINE = "a worker drives one engine; start several workers behind the router"
_CONTROLS = "it changes tokens behind the request's own controls"
_TOKENIZER = "logits processors need the tokenizer"
_TRUST = "trust_remote_code"
_ANSWERS = "this worker generates answers from token ids"

REFUSED = {
    "logits_processors": "the worker names its own; third-party processors are --logits-processor NAME=module:Class",
    "worker_extension_cls": "failures and receipts of logits processors come through the worker's own",
    "model": "it is --model-path",
    "model_weights": "it is --model-path",
    "revision": "it is the worker's --revision",
    "served_model_name": "it is --served-model-name",
    "tokenizer": "the tokenizer is the checkpoint's own",
    "tokenizer_mode": "the tokenizer is the checkpoint's own",
    "tokenizer_revision": "the tokenizer is the checkpoint's own",
    "skip_tokenizer_init": _TOKENIZER,
    "tokens_only": _TOKENIZER,
    "logprobs_mode": "the worker reports raw log probabilities",
    "max_logprobs": f"the worker serves up to {MAX_LOGPROBS}",
    "scheduling_policy": "requests have priorities",
    "disable_log_stats": "preemptions and queue times of requests come from them",
    "enable_log_requests": "the worker's own is --log-requests",
    "stream_interval": "every token is a delta",
    "speculative_config": _SPECULATION,
    "spec_method": _SPECULATION,
    "spec_model": _SPECULATION,
    "spec_tokens": _SPECULATION,
    "kv_transfer_config": _DISAGGREGATION,
    "ec_transfer_config": "no engine of this worker takes the output of an encoder from another worker",
    "kv_events_config": "the worker forwards KV events itself (--enable-kv-routing)",
    "data_parallel_size": _ONE_ENGINE,
    "data_parallel_rank": _ONE_ENGINE,
    "generation_config": "the worker reads generation_config.json itself (--default-sampling)",
    "override_generation_config": "the worker reads generation_config.json itself (--default-sampling)",
    "enable_lora": "adapters are --lora-modules NAME=DIRECTORY",
    "enable_batch_sharded_sampling": "each rank applies the processors of all requests, as receipts tell",
    "watermark_config": _CONTROLS,
    "enable_trace_replay": _CONTROLS,
    "return_sampling_mask": "vLLM then takes no greedy requests",
    "diffusion_config": _ANSWERS,
    "runner": _ANSWERS,
    "convert": _ANSWERS,
    "pooler_config": _ANSWERS,
    "enable_prompt_embeds": _ANSWERS,
    _TRUST: "code in a checkpoint is never run",
}
"""Arguments that neither flags of vLLM nor ``--engine-args`` may give, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """Settings of one vLLM engine.

    Attributes:
        model_path: Directory of the checkpoint.
        options: Arguments of ``AsyncEngineArgs`` from the worker's options and ``--engine-args``.
        max_queue: Length of the waiting queue.
        step_timeout_s: Seconds without an output, while requests run, after which vLLM is taken for
            broken.
        has_events: Whether vLLM publishes KV events.
        adapters: LoRA adapters that requests may choose.
        images: Places that pictures come from, None for none.
        role: Disaggregation mode.
        kv_lease_s: Seconds until a prefill worker's lease on KV times out, unless it is renewed.
        kv_devices: Network devices over which KV goes, as in ``UCX_NET_DEVICES``.
        weight_updates: Whether weights may change while it serves; answers then name their version.
    """

    model_path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    max_queue: int = 256
    step_timeout_s: float = 300.0
    has_events: bool = False
    adapters: Sequence[Adapter] = ()
    images: ImageSources | None = None
    role: str = "aggregated"
    kv_lease_s: float = 30.0
    kv_devices: str = "lo"
    weight_updates: bool = False

    @property
    def tensor_parallel_size(self) -> int:
        """Processes that each apply the logits processors."""
        return int(self.options.get("tensor_parallel_size") or 1)

    def engine_arguments(self, known: Collection[str], version: str, *, is_cpu: bool = False) -> dict[str, Any]:
        """Arguments for the installed version.

        Args:
            known: Names that it has.
            version: The installed version, for messages.
            is_cpu: Whether it computes on a CPU.

        Raises:
            StartupError: it lacks one, or adapters need more places.
        """
        of_adapters = arguments_for(self.adapters, is_cpu=is_cpu)
        seed = randbits(SEED_BITS)  # vLLM's own is 0: the n-th requests of two workers would draw the same
        ours = {"model": self.model_path, "generation_config": "vllm", "seed": seed, **of_adapters}
        arguments = {**ours, **self.options, **OWN}
        if is_cpu:
            check_empty_place(arguments, self.adapters)
        if is_cpu and not os.environ.get(SPACE_ON_CPU) and not any(name in arguments for name in SIZES_OF_CACHE):
            free = free_host_memory()
            arguments["kv_cache_memory_bytes"] = MAX_CACHE_ON_CPU if free is None else min(MAX_CACHE_ON_CPU, free // 4)
        for name in arguments:
            if name not in known:
                close = get_close_matches(name, known, n=3)
                hint = f"; close to it are {', '.join(close)}" if close else ""
                raise StartupError(f"{FLAG}: vLLM {version} has no argument {name!r}{hint}")
        return arguments


def config_from(arguments: Arguments) -> VllmConfig:
    """Settings from the worker's options.

    Raises:
        ConfigurationError: they contradict each other, or an argument may not be given.
    """
    flags = read_flags(arguments.engine_flags)
    options = _given(arguments.engine_args)
    for given in (flags, options):
        if not given.get(_TRUST) or not has_code(arguments.model_path):
            given.pop(_TRUST, None)  # a checkpoint without code needs no trust
    for name, reason in REFUSED.items():
        if name in options or name in flags:
            shown = f"{FLAG}: {name}" if name in options else f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{shown}: cannot be given: {reason}")
    for name, value in flags.items():
        if options.setdefault(name, value) != value:
            flag = f"--{name.replace('_', '-')}"
            problem = f"{flag} says {value}, but {FLAG} says {name}: {options[name]}; give it in one place"
            raise ConfigurationError(problem)
    for name, option in FROM_OPTIONS.items():
        if option not in arguments.given or (name == "dtype" and arguments.dtype == "auto"):
            continue
        value = getattr(arguments, option)
        if options.setdefault(name, value) != value:
            flag = next(each.flag for each in OPTIONS if each.name == option)
            other = f"--{name.replace('_', '-')}" if name in flags else FLAG
            problem = f"{flag} asks for {name}: {value}, but {other} says {options[name]}; give it in one place"
            raise ConfigurationError(problem)
    images = image_sources(arguments)
    if images is not None and options.setdefault(_PICTURE_CACHE, 0):
        shown = f"--{_PICTURE_CACHE.replace('_', '-')}" if _PICTURE_CACHE in flags else f"{FLAG}: {_PICTURE_CACHE}"
        raise ConfigurationError(f"{shown}: must be 0 with --modality multimodal: {_TWO_COPIES}")
    return VllmConfig(
        model_path=arguments.model_path,
        options=options,
        max_queue=arguments.max_queue,
        step_timeout_s=arguments.step_timeout_s,
        has_events=arguments.publishes_kv_events and arguments.runtime != "nats",
        adapters=read_adapters(arguments.lora_modules, arguments.model_path),
        images=images,
        role=arguments.disaggregation_mode,
        kv_lease_s=arguments.kv_lease_s,
        kv_devices=arguments.kv_transfer_devices,
        weight_updates=can_update(arguments),
    )


def can_update(arguments: Arguments) -> bool:
    """Whether weights may change while a worker with these options serves."""
    is_alone = arguments.disaggregation_mode == "aggregated" and not arguments.lora_modules
    return arguments.engine_port > 0 and is_alone


def _given(text: str | None) -> dict[str, Any]:
    """Arguments in ``--engine-args``: a JSON object, or the name of a YAML or JSON file."""
    if text is None:
        return {}
    if not text.lstrip().startswith("{"):
        return load_yaml(text, FLAG)
    return json_object(text, FLAG)
