"""Arguments that the installed TensorRT-LLM accepts, by inspection of its classes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from adapters.trtllm import join_library
from worker.errors import StartupError, one_line

NEEDED = frozenset(
    {
        "end_id",
        "max_tokens",
        "stop_token_ids",
        "include_stop_str_in_output",
        "logits_processor",
        "n",
        "best_of",
        "temperature",
        "top_k",
        "top_p",
        "logprobs",
        "ignore_eos",
        "detokenize",
    }
)
"""Fields of ``SamplingParams`` without which nothing can be served."""


@dataclass(frozen=True, slots=True)
class Package:
    """The parts of TensorRT-LLM that the worker uses.

    Attributes:
        version: Version of the distribution.
        llm: The class ``LLM``.
        sampling_params: The class ``SamplingParams``.
        disaggregated_params: The class ``DisaggregatedParams``, None if absent.
        request_error: The exception that ends one request.
        sampling_fields: Fields of ``SamplingParams``.
        llm_fields: Arguments of ``LLM``.
        generate_arguments: Arguments of ``LLM.generate_async``.
        guided_decoding_params: The class ``GuidedDecodingParams``, None if absent.
    """

    version: str
    llm: Any
    sampling_params: Any
    disaggregated_params: Any
    request_error: type[Exception]
    sampling_fields: frozenset[str]
    llm_fields: frozenset[str]
    generate_arguments: frozenset[str]
    guided_decoding_params: Any = None


def read_package() -> Package:
    """Import TensorRT-LLM and inspect it.

    Raises:
        StartupError: it cannot be imported, or lacks an attribute of every supported version. An
            import needs the driver of a GPU: libcuda, NVML.
    """
    try:
        root = importlib.import_module("tensorrt_llm")
        llm_args = importlib.import_module("tensorrt_llm.llmapi.llm_args")
        errors = importlib.import_module("tensorrt_llm.executor.utils")
        package = Package(
            version=str(root.__version__),
            llm=root.LLM,
            sampling_params=root.SamplingParams,
            disaggregated_params=_class_of_api("DisaggregatedParams"),
            guided_decoding_params=_class_of_api("GuidedDecodingParams"),
            request_error=errors.RequestError,
            sampling_fields=_init_fields(root.SamplingParams),
            llm_fields=frozenset(llm_args.TorchLlmArgs.model_fields),
            generate_arguments=frozenset(inspect.signature(root.LLM.generate_async).parameters) - {"self"},
        )
        join_library()
    except Exception as error:  # the library's import: whatever CUDA, NVML or MPI run into
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise StartupError(f"--engine trtllm: tensorrt_llm cannot be used: {problem}") from error
    missing = NEEDED - package.sampling_fields
    if missing:
        names = ", ".join(sorted(missing))
        raise StartupError(f"--engine trtllm: SamplingParams of TensorRT-LLM {package.version} has no {names}")
    return package


def most_logprobs(package: Package, wanted: int) -> int | None:
    """The most tokens, up to ``wanted``, of which log probabilities may be asked for; None for
    none. Versions of 2026 differ, and say so where their ``SamplingParams`` is made.
    """
    least, most = -1, wanted
    while least < most:
        middle = (least + most + 1) // 2
        try:
            package.sampling_params(logprobs=middle)
            least = middle
        except Exception:  # the library's own check, of whatever class
            most = middle - 1
    return None if least < 0 else least


def _class_of_api(name: str) -> Any:
    return getattr(importlib.import_module("tensorrt_llm.llmapi"), name, None)


def _init_fields(cls: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls) if field.init)
