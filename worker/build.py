"""Builds a worker's engine from its arguments; what is cheap is checked before loading."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from worker.arguments import Arguments, parse_arguments
from worker.disaggregation.seal import Seal, take_seal
from worker.errors import ConfigurationError, StartupError
from worker.installation import check_adapters_package, check_engine, check_ports, check_runtime
from worker.processors.smoke import smoke_enabled
from worker.standard_error import say
from worker.tracing import check_endpoint

if TYPE_CHECKING:
    from worker.engines import ServingEngine
    from worker.engines.embedded import EmbeddedConfig
    from worker.models.sealed_tensors import SealedTensors
    from worker.processors.sandbox_start import GrammarsAhead


@dataclass(frozen=True, slots=True)
class Built:
    """Parts of a `worker.server.RequestServer`.

    Attributes:
        engine: Engine, not started.
        arguments: Options of the worker.
        seal: Signs KV transfers, None for a worker that makes and takes none.
        smoke: Whether every answer is ``Hello world!``.
        grammars: The sandbox for grammars, where it has been started.
    """

    engine: ServingEngine
    arguments: Arguments
    seal: Seal | None
    smoke: bool
    grammars: GrammarsAhead | None = None


def build(argv: Sequence[str] | None = None) -> Built:
    """Check the arguments, the environment and the installation, and make the engine.

    Args:
        argv: The command line, ``sys.argv`` by default.

    Raises:
        ConfigurationError: an argument, a variable or an installed package is wrong.
        StartupError: there is no such model, or a port is taken.
    """
    arguments = parse_arguments(argv)
    seal = take_seal(arguments.disaggregation_mode, os.environ)
    smoke = smoke_enabled(os.environ)
    check_adapters_package()
    check_runtime(arguments, os.environ)
    check_engine(arguments)
    check_endpoint(arguments.otlp_endpoint)
    arguments = with_hub_model(arguments)
    check_model(arguments)
    if arguments.runtime == "dynamo":
        check_ports(os.environ)
    arguments = with_checkpoint(arguments)
    with contextlib.ExitStack() as on_failure:
        weights = weights_ahead(arguments)
        if weights is not None:
            on_failure.callback(weights.close)
        grammars = sandbox_ahead(arguments)
        if grammars is not None:
            on_failure.callback(grammars.starting.close)
        check_default_sampling(arguments)  # imports torch
        engine = make_engine(arguments, weights)
        on_failure.pop_all()
    return Built(engine, arguments, seal, smoke, grammars)


def with_hub_model(arguments: Arguments) -> Arguments:
    """The arguments with the directory of a model that is named by its id on the Hugging Face Hub.
    Clients ask for the id, unless there is a name.

    Raises:
        ConfigurationError: a revision is asked of what is no id.
        StartupError: the model is not in the cache and cannot be downloaded.
    """
    from worker.models import hub_checkpoint, is_hub_id

    name = arguments.model_path
    if not is_hub_id(name):
        if arguments.revision is not None:
            raise ConfigurationError(f"--revision is of an id on the Hugging Face Hub, but --model-path is {name}")
        return arguments
    path = hub_checkpoint(name, arguments.revision, _say)
    served = arguments.served_model_name if "served_model_name" in arguments.given else name
    return replace(arguments, model_path=str(path), served_model_name=served)


def _say(line: str) -> None:
    say(f"worker: {line}")


def check_model(arguments: Arguments) -> None:
    """Raises `StartupError` if the model is neither a checkpoint directory nor a GGUF file."""
    from worker.models import find_gguf
    from worker.models.named import DEFAULT, TINY

    path = Path(arguments.model_path)
    file = find_gguf(path)
    if not path.exists():
        scripts = {DEFAULT: "launch/agg.sh without MODEL_PATH", TINY: "MODEL_PATH=tiny launch/agg.sh"}
        script = scripts.get(arguments.model_path)
        made = "" if script is None else f"; {script} makes that model, and serves it"
        raise StartupError(f"--model-path {path}: no such directory{made}")
    if file is None and not (path / "config.json").is_file():
        raise StartupError(f"--model-path {path}: no config.json, so not a Hugging Face checkpoint")
    template = arguments.custom_jinja_template
    if template is not None and not os.path.isfile(template):  # pathlib raises where this user may not look
        raise StartupError(f"--custom-jinja-template {template}: no such file that can be read")


def with_checkpoint(arguments: Arguments) -> Arguments:
    """The arguments with the checkpoint that a GGUF file is converted into, once, as the model.

    Raises:
        StartupError: the file cannot be read or is not supported, or the cache cannot be written.
    """
    from worker.models import convert_gguf, find_gguf, model_cache

    file = find_gguf(Path(arguments.model_path))
    if file is None:
        return arguments

    keeps_blocks = arguments.engine == "embedded" and arguments.quantization == "auto"
    return replace(arguments, model_path=str(convert_gguf(file, model_cache(os.environ), _say, keeps_blocks)))


def weights_ahead(arguments: Arguments) -> SealedTensors | None:
    """The packed copy that the embedded engine likely loads, which threads begin to read."""
    from worker.models.beside import copies_of, last_used
    from worker.models.sealed_tensors import SealedTensors

    copies = copies_of(Path(arguments.model_path), arguments.packed_copy)
    if arguments.engine != "embedded" or copies is None or (path := last_used(copies)) is None:
        return None
    try:
        tensors = SealedTensors(path)
    except (OSError, OverflowError, ValueError):  # the engine reads it again, and says what is wrong
        return None
    tensors.begin()
    return tensors


def sandbox_ahead(arguments: Arguments) -> GrammarsAhead | None:
    """The sandbox for grammars of a worker behind Dynamo, which begins to start."""
    if arguments.runtime != "dynamo":
        return None
    from worker.processors.sandbox_start import grammars_ahead

    return grammars_ahead(arguments)


def check_default_sampling(arguments: Arguments) -> None:
    """Raises `StartupError` if the model's own sampling cannot be honoured."""
    from worker.requests.sampling_defaults import SamplingDefaults

    SamplingDefaults.load(arguments)


def make_engine(arguments: Arguments, ahead: SealedTensors | None = None) -> ServingEngine:
    """The engine that the arguments choose, not started. Raises `ConfigurationError`.

    Args:
        arguments: Options of the worker.
        ahead: Result of `weights_ahead`.
    """
    if arguments.engine == "trtllm":
        from worker.engines.trtllm import TrtllmEngine, config_from
        from worker.requests.receipts import digest_of_model

        return TrtllmEngine(config_from(arguments), digest=lambda: digest_of_model(arguments))

    if arguments.engine == "vllm":
        from worker.engines.vllm import VllmEngine
        from worker.engines.vllm import config_from as vllm_config_from
        from worker.requests.receipts import digest_of_model

        return VllmEngine(vllm_config_from(arguments), digest=lambda: digest_of_model(arguments))

    from worker.engines.embedded.serving import EmbeddedEngine, load_constant, load_for_serving

    config = embedded_config(arguments)
    if arguments.engine == "constant":
        return EmbeddedEngine(config, load=load_constant(arguments.constant_step_s, arguments.constant_prompt_rate))
    return EmbeddedEngine(config, load=partial(load_for_serving, ahead=ahead))


def embedded_config(arguments: Arguments) -> EmbeddedConfig:
    """Settings of the embedded engine."""
    from worker.engines.embedded import EmbeddedConfig

    return EmbeddedConfig(
        model_path=arguments.model_path,
        device=arguments.device,
        dtype=arguments.dtype,
        numerics=arguments.numerics,
        kernels=arguments.kernels,
        quantization=arguments.quantization,
        activation_dtype=arguments.activation_dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        packed_copy=arguments.packed_copy,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_mixed_chunk=arguments.max_mixed_chunk,
        context_length=arguments.context_length,
        kv_block_size=arguments.kv_block_size,
        kv_blocks=arguments.kv_blocks,
        kv_cache_memory=arguments.kv_cache_memory,
        local_workers=arguments.local_workers,
        max_queue=arguments.max_queue,
        speculative_config=arguments.speculative_config,
        step_timeout_s=arguments.step_timeout_s,
        role=arguments.disaggregation_mode,
        kv_lease_s=arguments.kv_lease_s,
        kv_devices=arguments.kv_transfer_devices,
        weight_updates=arguments.engine_port > 0,
        lora_modules=arguments.lora_modules,
        lora_dtype=arguments.lora_dtype,
    )
