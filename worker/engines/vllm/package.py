"""The installed vLLM: what the worker uses of it, and which arguments it takes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import typing
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from worker.errors import StartupError, one_line

DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables of vLLM that the worker sets where the operator does not: standard output is the
request log's, the cores are shared with a frontend, a host that pictures may come from sends to no
other one, and no usage is reported to anybody.
"""

NEEDED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logprobs",
        "prompt_logprobs",
        "detokenize",
        "output_kind",
        "extra_args",
    }
)
"""Fields of ``SamplingParams`` that the worker sets."""

NEEDED_OF_PROMPT = frozenset({"prompt_token_ids", "cache_salt"})
"""Fields of ``TokensPrompt`` that the worker sets."""

NEEDED_OF_GENERATE = frozenset({"priority", "trace_headers", "lora_request"})
"""Arguments of ``AsyncLLM.generate`` that the worker gives."""

_BUSY = ("QueueOverflowError", "MaxQueuedTokensError")
"""Exceptions of ``--max-num-queued-reqs`` and ``--max-num-queued-tokens``, in newer versions."""


@dataclass(frozen=True, slots=True)
class Package:
    """The parts of vLLM that the worker uses.

    Attributes:
        version: Version of the distribution.
        async_llm: The class ``AsyncLLM``.
        engine_args: The class ``AsyncEngineArgs``.
        engine_fields: Arguments of ``AsyncEngineArgs``.
        sampling_params: The class ``SamplingParams``.
        tokens_prompt: The class ``TokensPrompt``.
        delta: The output kind of new tokens alone.
        dead_error: The exception of an engine that died.
        client_errors: Exceptions that one request is to blame for.
        busy_errors: Exceptions of a full queue, whose limits an operator can set.
        lora_request: The class ``LoRARequest``.
        kv_transfer_config: The class ``KVTransferConfig``.
        is_cpu: Whether it computes on a CPU.
    """

    version: str
    async_llm: Any
    engine_args: Any
    engine_fields: frozenset[str]
    sampling_params: Any
    tokens_prompt: Any
    delta: Any
    dead_error: type[Exception]
    client_errors: tuple[type[Exception], ...]
    busy_errors: tuple[type[Exception], ...]
    lora_request: Any
    kv_transfer_config: Any
    is_cpu: bool = False

    def load(self, arguments: Mapping[str, Any], loads: Any) -> Any:
        """An ``AsyncLLM`` with these arguments of ``AsyncEngineArgs``, whose statistics go to the
        logger `loads`. Raises vLLM's own errors.
        """
        return self.async_llm.from_engine_args(self.engine_args(**arguments), stat_loggers=[loads])


def read_package(environ: MutableMapping[str, str] = os.environ) -> Package:
    """Import vLLM and inspect it; its variables are set before.

    Raises:
        StartupError: it cannot be imported, or lacks a class or field that is needed.
    """
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
    try:
        root = importlib.import_module("vllm")
        sampling = importlib.import_module("vllm.sampling_params")
        engine_args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
        errors = importlib.import_module("vllm.v1.engine.exceptions")
        others = importlib.import_module("vllm.exceptions")
        package = Package(
            version=str(root.__version__),
            async_llm=importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM,
            engine_args=engine_args,
            engine_fields=frozenset(each.name for each in dataclasses.fields(engine_args) if each.init),
            sampling_params=sampling.SamplingParams,
            tokens_prompt=root.TokensPrompt,
            delta=sampling.RequestOutputKind.DELTA,
            dead_error=errors.EngineDeadError,
            client_errors=(ValueError, others.VLLMClientError),
            busy_errors=tuple(getattr(others, name) for name in _BUSY if hasattr(others, name)),
            lora_request=importlib.import_module("vllm.lora.request").LoRARequest,
            kv_transfer_config=importlib.import_module("vllm.config").KVTransferConfig,
            is_cpu=bool(importlib.import_module("vllm.platforms").current_platform.is_cpu()),
        )
        importlib.import_module("worker.engines.vllm.processors")
    except Exception as error:  # the library's import: whatever its kernels run into
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise StartupError(f"--engine vllm: vllm cannot be used: {problem}") from error
    for what, needed, known in (
        ("SamplingParams", NEEDED, package.sampling_params.__struct_fields__),
        ("TokensPrompt", NEEDED_OF_PROMPT, typing.get_type_hints(package.tokens_prompt)),
        ("AsyncLLM.generate", NEEDED_OF_GENERATE, inspect.signature(package.async_llm.generate).parameters),
    ):
        missing = needed - frozenset(known)
        if missing:
            names = ", ".join(sorted(missing))
            raise StartupError(f"--engine vllm: {what} of vLLM {package.version} has no {names}")
    return package
