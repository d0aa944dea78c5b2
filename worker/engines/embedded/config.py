"""Settings of the embedded engine, in the worker's own argument names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from worker.errors import StartupError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUMERICS = ("auto", "exact", "fast")
KERNELS = (
    "auto",
    "native",
    "native-amx",
    "native-avx512",
    "native-avx2",
    "native-neon",
    "native-generic",
    "triton",
    "torch",
)
QUANTIZATIONS = ("auto", "none", "int8", "int4")
ACTIVATION_DTYPES = ("auto", "none", "int8", "bfloat16")
KV_CACHE_DTYPES = ("auto", "none", "int8", "int16")
LORA_DTYPES = ("auto", "float32", "bfloat16")
ROLES = ("aggregated", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """Settings of one embedded engine.

    Attributes:
        model_path: Directory of a Hugging Face causal language model, with safetensors weights.
        device: ``auto`` (CUDA if there is any), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``auto``, ``float32`` or ``bfloat16``. ``auto`` is the checkpoint's own if it is one
            of these, else float32.
        numerics: ``exact`` (the same tokens in any batch, bit by bit), ``fast``, or ``auto``: exact
            where it costs next to nothing; see `numerics.py`.
        kernels: ``native`` (our own, for a CPU; see `native`), with the fastest instructions that
            the processor has or, after a hyphen, with those of a path of `native.PATHS`; ``triton``
            (for CUDA); ``torch``; or ``auto``: native where they were built and are the fastest
            that the processor can do, on CUDA triton where it can compute.
        quantization: Format of the weights of linear layers: ``int8`` or ``int4`` (rounded when
            they are loaded), ``none`` (in `dtype`, dequantised if need be), or ``auto``: the
            checkpoint's.
        activation_dtype: Format to which rows are rounded before they are multiplied by quantised
            weights: ``int8``, with one scale for up to 128 elements; ``bfloat16``, as the
            weights then are too, on processors with AMX; ``none``: they stay in `dtype`; or
            ``auto``: int8 where weights are quantised and native kernels compute.
        kv_cache_dtype: Format of keys and values: ``int8`` or ``int16``, with one scale for each
            token and head, the latter for a `dtype` of float32 alone; ``none``: `dtype`; or
            ``auto``: int16 where rows are rounded to int8, `dtype` is float32 and native kernels
            attend, else `dtype`.
        packed_copy: ``auto``: where native kernels compute the model, what they read is kept in a
            file beside the checkpoint, so that the next start is fast (see `packed_copy.py`), if
            one can be written there; an absolute path: in a directory of the checkpoint's below it;
            ``off``: no such file is read or written.
        max_num_seqs: Requests decoded in one step at most.
        max_num_batched_tokens: Token budget of a step; longer prompts are prefilled in chunks.
        max_mixed_chunk: Prompt tokens in a mixed batch, one that decodes too. None means as many as
            make it take 2.5 times as long as without, as measured, and more where many prompts
            wait; see `prompt_budget`.
        context_length: Longest prompt + answer in tokens; None means the model's own limit.
        kv_block_size: Tokens per KV block.
        kv_blocks: KV blocks to own; None means as many as `kv_cache_memory` holds.
        kv_cache_memory: Bytes of the KV cache; None means what `kv_cache.budget` chooses.
        local_workers: Workers that share the cores and the memory of this machine or container.
        max_queue: Length of the waiting queue; more requests are refused with `Overloaded`.
        speculative_config: Settings of speculative decoding, JSON text or its data; see
            `speculation.SpeculativeConfig`.
        role: ``aggregated``, or ``prefill`` or ``decode`` of disaggregated serving.
        kv_lease_s: Seconds until a prefill worker's lease on a prompt's KV times out.
        kv_devices: Network devices over which KV is transferred, as in ``UCX_NET_DEVICES``.
        weight_updates: Whether weights may change while it serves; answers then name their version.
        lora_modules: Names and directories of LoRA adapters that requests may choose.
        lora_dtype: Data type that adapters are rounded to, ``float32`` or ``bfloat16``; ``auto`` is
            the one to compute in.
        step_timeout_s: Seconds after which a step that has not ended counts as hung and ends the
            process.
    """

    model_path: str | Path
    device: str = "auto"
    dtype: str = "auto"
    numerics: str = "auto"
    kernels: str = "auto"
    quantization: str = "auto"
    activation_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    packed_copy: str = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_mixed_chunk: int | None = None
    context_length: int | None = None
    kv_block_size: int = 16
    kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    local_workers: int = 1
    max_queue: int = 256
    speculative_config: Mapping[str, Any] | str | None = None
    role: str = "aggregated"
    kv_lease_s: float = 30.0
    kv_devices: str = "lo"
    weight_updates: bool = False
    lora_modules: tuple[tuple[str, str], ...] = ()
    lora_dtype: str = "auto"
    step_timeout_s: float = 300.0

    def check(self) -> None:
        """Raises `StartupError` naming the flag if a value cannot be served, whatever the model."""
        self._check_types()
        for flag, value, minimum in (
            ("--max-num-seqs", self.max_num_seqs, 1),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, 1),
            ("--max-mixed-chunk", self.max_mixed_chunk, 1),
            ("--context-length", self.context_length, 2),
            ("--kv-block-size", self.kv_block_size, 1),
            ("--kv-blocks", self.kv_blocks, 1),
            ("--kv-cache-memory", self.kv_cache_memory, 1),
            ("--local-workers", self.local_workers, 1),
            ("--max-queue", self.max_queue, 0),
        ):
            if value is not None and value < minimum:
                raise StartupError(f"{flag} must be at least {minimum}, got {value}")
        if self.kv_blocks is not None and self.kv_cache_memory is not None:
            raise StartupError("--kv-blocks and --kv-cache-memory both size the KV cache; give one of them")
        if not 0 < self.step_timeout_s < float("inf"):
            raise StartupError(f"--step-timeout-s must be above 0 and finite, got {self.step_timeout_s}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}: "
                "every running request needs one token of each step"
            )
        if self.role not in ROLES:
            raise StartupError(f"--disaggregation-mode must be one of {', '.join(ROLES)}, got {self.role!r}")
        if not 0 < self.kv_lease_s < float("inf"):
            raise StartupError(f"--kv-lease-s must be above 0 and finite, got {self.kv_lease_s}")
        if self.numerics not in NUMERICS:
            raise StartupError(f"--numerics must be one of {', '.join(NUMERICS)}, got {self.numerics!r}")
        if self.kernels not in KERNELS:
            raise StartupError(f"--kernels must be one of {', '.join(KERNELS)}, got {self.kernels!r}")
        if self.quantization not in QUANTIZATIONS:
            raise StartupError(f"--quantization must be one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}")
        if self.activation_dtype not in ACTIVATION_DTYPES:
            choices = ", ".join(ACTIVATION_DTYPES)
            raise StartupError(f"--activation-dtype must be one of {choices}, got {self.activation_dtype!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            choices = ", ".join(KV_CACHE_DTYPES)
            raise StartupError(f"--kv-cache-dtype must be one of {choices}, got {self.kv_cache_dtype!r}")
        if self.lora_dtype not in LORA_DTYPES:
            raise StartupError(f"--lora-dtype must be one of {', '.join(LORA_DTYPES)}, got {self.lora_dtype!r}")
        if self.packed_copy not in ("auto", "off") and not Path(self.packed_copy).is_absolute():
            raise StartupError(f"--packed-copy must be auto, off or an absolute path, got {self.packed_copy!r}")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise StartupError(f"--dtype must be auto, {', '.join(DTYPES)}, got {self.dtype!r}")

    def _check_types(self) -> None:
        for one in fields(self):
            value, flag = getattr(self, one.name), _FLAGS.get(one.name, f"--{one.name.replace('_', '-')}")
            expected, is_right = _OF_TYPE.get(str(one.type), ("", lambda value: True))
            if not is_right(value):
                raise StartupError(f"{flag} must be {expected}, got {value!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are_modules(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(each, tuple | list) and len(each) == 2 and all(isinstance(part, str | Path) for part in each)
        for each in value
    )


_FLAGS = {"role": "--disaggregation-mode"}

_OF_TYPE: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", _is_integer),
    "int | None": ("an integer", lambda value: value is None or _is_integer(value)),
    "float": ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "str | Path": ("a path", lambda value: isinstance(value, str | Path)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "tuple[tuple[str, str], ...]": ("pairs of a name and a directory", _are_modules),
}
"""Kinds of values that fields may have, by their annotation."""


def resolve_device(device: str) -> torch.device:
    """The torch device that `device` names. Raises `StartupError` if it is unknown or absent."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch("cpu|cuda(:(0|[1-9][0-9]*))?", device) is None:
        raise StartupError(f"--device must be auto, cpu, cuda or cuda:N, got {device!r}")
    kind, _, index = device.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise StartupError(f"--device {device}: torch sees {count} CUDA devices")
    return torch.device(device)


def resolve_dtype(dtype: str, checkpoint: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    if dtype != "auto":
        return DTYPES[dtype]
    return checkpoint if checkpoint in DTYPES.values() else torch.float32
