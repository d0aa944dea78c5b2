"""Differences between ai-dynamo 1.4.2 and 1.6.1: settings, exceptions, start and exit.

`tests/worker/test_dynamo_contract.py` pins every fact of the SDK that is relied on here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from worker.arguments import Arguments
from worker.errors import (
    BoundaryStoreUnavailable,
    ConfigurationError,
    Draining,
    EngineBroken,
    GrammarsUnavailable,
    InvalidRequest,
    Overloaded,
    ProcessorUnavailable,
    RequestFailed,
    ServingError,
)

if TYPE_CHECKING:
    from dynamo.common.backend.engine import EngineConfig, LLMEngine
    from dynamo.common.backend.worker import WorkerConfig

    from worker.engines import EngineInfo
    from worker.engines.forward_pass import ForwardPass


def worker_config(arguments: Arguments) -> WorkerConfig:
    """The SDK's settings. Fields that only one version has are set where they exist.

    Raises:
        ConfigurationError: an argument needs a field that the installed version lacks, or names a
            parser that it lacks.
    """
    from dynamo._core import get_reasoning_parser_names, get_tool_parser_names
    from dynamo.common.backend.worker import WorkerConfig
    from dynamo.common.constants import DisaggregationMode
    from dynamo.llm import ModelInput

    known = {field.name for field in dataclasses.fields(WorkerConfig)}
    if "response_plane" not in known and arguments.response_plane != "tcp":
        raise ConfigurationError(f"--response-plane {arguments.response_plane} needs a newer ai-dynamo")
    _check_parser("--dyn-tool-call-parser", arguments.dyn_tool_call_parser, get_tool_parser_names())
    _check_parser("--dyn-reasoning-parser", arguments.dyn_reasoning_parser, get_reasoning_parser_names())
    return WorkerConfig.from_runtime_config(
        arguments,
        model_name=arguments.model_path,
        served_model_name=arguments.served_model_name,
        model_input=ModelInput.Tokens,
        disaggregation_mode=DisaggregationMode[arguments.disaggregation_mode.upper()],
        enable_local_indexer=arguments.publishes_kv_events,  # a router that starts later asks the worker
        # The front door parses calls itself, and says none so that the frontend does not.
        exclude_tools_when_tool_choice_none=False,
    )


def _check_parser(flag: str, name: str | None, known: Sequence[str]) -> None:
    """Raises `ConfigurationError` unless the frontend has the parser of that name, or none is asked
    for.
    """
    if name is not None and name not in known:
        raise ConfigurationError(f"{flag} must be one of {', '.join(sorted(known))}, got {name!r}")


def engine_config(info: EngineInfo, arguments: Arguments) -> EngineConfig:
    """Registration of the model. Uses only fields that both versions have."""
    from dynamo.common.backend.engine import EngineConfig, LlmRegistration

    return EngineConfig(
        model=arguments.model_path,
        served_model_name=arguments.served_model_name,
        llm=LlmRegistration(
            context_length=info.context_length,
            kv_cache_block_size=info.kv_block_size,
            total_kv_blocks=info.total_kv_blocks,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            data_parallel_size=info.num_dp_ranks,
        ),
    )


class RouterEvents:
    """Passes an engine's KV events on to the router.

    Args:
        publisher: The runtime's.
        block_size: Tokens per block.
    """

    def __init__(self, publisher: Any, block_size: int) -> None:
        self._publisher = publisher
        self._block_size = block_size

    def stored(
        self,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> None:
        parent = None if parent_hash is None else _signed(parent_hash)
        sizes = [self._block_size] * len(block_hashes)
        hashes = [_signed(each) for each in block_hashes]
        names = {"lora_name": lora_name, "cache_salt": cache_salt}
        self._publisher.publish_stored(list(token_ids), sizes, hashes, parent, **names)

    def removed(self, block_hashes: Sequence[int]) -> None:
        self._publisher.publish_removed([_signed(each) for each in block_hashes])


class PlannerReports:
    """Publishes an engine's forward passes as Dynamo's ``ForwardPassMetrics``, for its planner.

    Args:
        endpoint: Endpoint of the runtime that the worker serves.
        num_dp_ranks: Data parallel ranks of the engine.
    """

    def __init__(self, endpoint: Any, num_dp_ranks: int) -> None:
        from dynamo.llm import FpmDirectPublisher

        self._publisher = FpmDirectPublisher(endpoint, str(endpoint.connection_id()), dp_size=num_dp_ranks)

    def publish(self, computed: ForwardPass) -> None:
        """Publish one forward pass; it is left to the runtime's own threads."""
        self._publisher.publish(
            dp_rank=computed.dp_rank,
            scheduled_num_prefill_requests=computed.num_prefill,
            scheduled_sum_prefill_tokens=computed.prefill_tokens,
            scheduled_sum_prefill_kv_tokens=computed.prefill_kv_tokens,
            scheduled_num_decode_requests=computed.num_decode,
            scheduled_sum_decode_kv_tokens=computed.decode_kv_tokens,
            queued_num_prefill_requests=computed.num_waiting_prefill,
            queued_sum_prefill_tokens=computed.waiting_prefill_tokens,
            queued_num_decode_requests=computed.num_waiting_decode,
            queued_sum_decode_kv_tokens=computed.waiting_decode_tokens,
            wall_time_secs=computed.seconds,
        )

    def close(self) -> None:
        """End publishing."""
        self._publisher.shutdown()


def _signed(number: int) -> int:
    """The 64 bits of `number` as the signed integer that the runtime takes."""
    return number - 2**64 if number >= 2**63 else number


def trace_headers(context: Any) -> Mapping[str, str] | None:
    """The W3C trace context of a request; None where Dynamo passes none on."""
    headers: Mapping[str, str] | None = context.trace_headers()
    return headers


def to_dynamo(error: ServingError) -> Exception:
    """The Dynamo exception for an error; `docs/failures.md` has what clients see of each.

    `EngineShutdown` is the one error that 1.4.2 migrates, and it takes the instance out of rotation
    for seconds, so it is only for a worker that leaves. An overloaded worker stays in rotation with
    `HttpError` 529. A failed request is an `InvalidArgument` because only that carries its message
    to the client.
    """
    from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument, Unknown

    if isinstance(error, (InvalidRequest, RequestFailed)):
        return InvalidArgument(str(error))
    if isinstance(error, Overloaded):
        return HttpError(529, str(error))
    if isinstance(error, (ProcessorUnavailable, GrammarsUnavailable, BoundaryStoreUnavailable)):
        return HttpError(503, str(error))
    if isinstance(error, (Draining, EngineBroken)):
        return EngineShutdown(str(error))
    return Unknown(str(error))


def shut_down() -> None:
    """Make the runtime shut down: unregister, grace period, `cleanup`, return from `run`."""
    os.kill(os.getpid(), signal.SIGTERM)


def run(engine: LLMEngine, config: WorkerConfig, signalled: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; ``signalled`` is called at each. Raises whatever kept the
    runtime from starting.
    """
    import uvloop

    uvloop.run(_serve(engine, config, signalled))


async def _serve(engine: LLMEngine, config: WorkerConfig, signalled: Callable[[], None]) -> None:
    """Run the SDK's worker.

    Its own signal handlers start the shutdown and then call those that were there before. Python's
    handler for SIGINT would cancel the event loop under the drain, so ours takes its place; it
    hears every signal after the SDK did.
    """
    from dynamo.common.backend.worker import Worker

    loop = asyncio.get_running_loop()

    def handler(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(signalled)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    await Worker(engine, config).run()


def finish(status: int) -> None:
    """End the process with ``status``, now.

    Python's own exit would stop the interpreter under the runtime's native threads; on 1.4.2 they
    then abort the process (SIGABRT), which looks like a crash. Everything of ours has been released
    by `WorkerEngine.cleanup`.
    """
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a process may be started without one
        with contextlib.suppress(OSError):  # its disk is full
            stream.flush()
    os._exit(status)
