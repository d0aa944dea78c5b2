"""``python -m worker``: check, load, serve, drain. Exit 0 after a clean drain, 2 for
configuration, 1 for the rest.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.arguments import Arguments, parse_arguments
from worker.disaggregation.seal import take_seal
from worker.errors import ConfigurationError, ServingError, StartupError
from worker.processors.smoke import smoke_enabled
from worker.runtimes import dynamo as runtime

if TYPE_CHECKING:
    from worker.engines import Engine
    from worker.runtimes.llm_engine import WorkerEngine

EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; every failure is one line on stderr."""
    try:
        engine, config = build(argv)
    except ConfigurationError as error:
        return _complain(error, EXIT_CONFIGURATION)
    except StartupError as error:
        return _complain(error, EXIT_FAILURE)
    try:
        runtime.run(engine, config)
    except Exception as error:  # the process boundary: one line, and a status that says so
        return _complain(engine.startup_error or error, EXIT_FAILURE)
    if engine.broken is not None:
        return _complain(f"engine broken: {engine.broken}", EXIT_FAILURE)
    return 0


def build(argv: Sequence[str] | None = None) -> tuple[WorkerEngine, Any]:
    """The engine, not started, and the runtime's settings. Everything cheap is checked before
    anything is loaded.
    """
    arguments = parse_arguments(argv)
    seal = take_seal(arguments.disaggregation_mode, os.environ)
    smoke = smoke_enabled(os.environ)
    check_adapters_package()
    runtime.check_installed()
    runtime.allow_drain(arguments.drain_timeout_s, os.environ)
    check_engine(arguments)
    check_model(arguments)
    runtime.check_ports(os.environ)
    engine = make_engine(arguments)

    from worker.runtimes.llm_engine import WorkerEngine

    config = runtime.worker_config(arguments)
    return WorkerEngine(engine, arguments, seal=seal, smoke=smoke), config


def check_adapters_package() -> None:
    """Raises `ConfigurationError` if another distribution's `adapters` package is installed in
    place of ours.
    """
    for name in ("adapters", "adapter-transformers"):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        raise ConfigurationError(
            f"the distribution {name!r} also installs a package called 'adapters'; remove it: pip uninstall {name}"
        )
    spec = importlib.util.find_spec("adapters")
    ours = Path(__file__).resolve().parents[1] / "adapters" / "__init__.py"
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != ours:
        found = "no package" if spec is None else spec.origin
        raise ConfigurationError(f"'adapters' must be the package at {ours.parent}, found {found}")


def check_engine(arguments: Arguments) -> None:
    """Raises `ConfigurationError` if the chosen engine cannot be driven here."""
    if arguments.engine != "trtllm":
        return
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise ConfigurationError("--engine trtllm: tensorrt_llm is not installed")


def check_model(arguments: Arguments) -> None:
    """Raises `StartupError` if the model is not a checkpoint directory."""
    path = Path(arguments.model_path)
    if not path.is_dir():
        raise StartupError(f"--model-path {path}: no such directory")
    if not (path / "config.json").is_file():
        raise StartupError(f"--model-path {path}: no config.json, so not a Hugging Face checkpoint")
    template = arguments.custom_jinja_template
    if template is not None and not Path(template).is_file():
        raise StartupError(f"--custom-jinja-template {template}: no such file")


def make_engine(arguments: Arguments) -> Engine:
    """The engine that the arguments choose, not started. Raises `ConfigurationError`."""
    if arguments.engine == "trtllm":
        from worker.engines.trtllm import TrtllmEngine, config_from

        return TrtllmEngine(config_from(arguments))

    from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine

    config = EmbeddedConfig(
        model_path=arguments.model_path,
        device=arguments.device,
        dtype=arguments.dtype,
        numerics=arguments.numerics,
        kernels=arguments.kernels,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_mixed_chunk=arguments.max_mixed_chunk,
        context_length=arguments.context_length,
        kv_block_size=arguments.kv_block_size,
        kv_blocks=arguments.kv_blocks,
        max_queue=arguments.max_queue,
        step_timeout_s=arguments.step_timeout_s,
        role=arguments.disaggregation_mode,
        kv_hold_s=arguments.kv_hold_s,
        kv_devices=arguments.kv_transfer_devices,
    )
    return EmbeddedEngine(config)


def _complain(reason: ServingError | Exception | str, status: int) -> int:
    print(f"worker: error: {' '.join(str(reason).split())}", file=sys.stderr)
    return status


def run() -> None:
    """Entry point of the console script: `main`, then an exit that the runtime's threads cannot
    spoil.
    """
    runtime.finish(main())


if __name__ == "__main__":
    run()
