"""The description of a worker: its identity, capacity and load, and what its model can be asked."""

from __future__ import annotations

import time
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from adapters.catalog import MAX_CHOICES
from adapters.contract import BacktrackingProcessor, CompanionProcessor, Processor
from worker import __version__
from worker.engines import EngineInfo, Measured
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.identity import ENGINE_NAME, SCHEMA_RELEASE, SCHEMA_REVISION
from worker.sampling.params import MAX_LOGPROBS
from worker.server import RequestServer
from worker.server.description import describe

RANK = 0
"""The only data-parallel rank."""


def server_info(server: RequestServer, instance_id: str) -> wire.ServerInfo:
    """The answer of ``GetServerInfo``."""
    info, arguments = server.info, server.arguments
    return wire.ServerInfo(
        engine_name=ENGINE_NAME,
        engine_version=__version__,
        engine_role=wire.ENGINE_ROLE_AGGREGATED,
        instance_id=instance_id,
        supported_models=[arguments.served_model_name],
        parallelism=wire.ParallelismInfo(
            tensor_parallel_size=arguments.tensor_parallel_size,
            pipeline_parallel_size=arguments.pipeline_parallel_size,
            data_parallel_size=1,
            data_parallel_rank=RANK,
            data_parallel_start_rank=RANK,
        ),
        kv_connector=wire.KvConnectorInfo(enabled=False),
        schema_revision=SCHEMA_REVISION,
        minimum_client_revision=SCHEMA_REVISION,
        schema_release=SCHEMA_RELEASE,
        capacity=wire.DeploymentCapacity(
            kv_block_size=info.kv_block_size,
            total_kv_blocks=server.kv_load.total,
            max_running_requests=info.max_num_seqs,
            max_batched_tokens=info.max_num_batched_tokens,
            max_loras=None if _serves_adapters(server) else 0,
        ),
        extra=_struct({**describe(server), **_computed_with(server)}),
    )


def _computed_with(server: RequestServer) -> dict[str, str]:
    """All that answers of a worker depend on: one goes on only where it is the same. And the tokens
    that its clients' tokenizer must have.
    """
    assert server.preparation is not None
    info, digest = server.info, server.preparation.model_digest
    tokens = server.chains.vocabulary.digest
    return {"numerics": info.made_by, "kv_dtype": info.kv_dtype, "model_digest": digest, "tokens_digest": tokens}


def model_info(server: RequestServer) -> wire.ModelInfo:
    """The answer of ``GetModelInfo``: the fields of a request that are honoured."""
    info, arguments = server.info, server.arguments
    has_text = server.chains.vocabulary.tokenizer is not None
    processors = _processors(server)
    guides = [mode for mode, name in _GUIDES.items() if has_text and name in processors]
    return wire.ModelInfo(
        model_id=arguments.model_path,
        served_model_name=arguments.served_model_name,
        served_model_aliases=[arguments.model_path],
        max_context_length=info.context_length,
        max_output_tokens=info.context_length - 1,
        supports_text_input=has_text,
        supports_token_ids_input=True,
        generation=wire.GenerationCapabilities(
            prompt_logprobs=_scores(MAX_LOGPROBS if info.scores_prompts else None),
            output_logprobs=_scores(info.max_logprobs),
            guided_decoding=wire.GuidedDecodingCapabilities(supported=bool(guides), modes=guides),
            max_num_sequences=MAX_CHOICES,
            supports_priority=info.honours_priority,
            supports_stop_in_output=True,
            supports_cache_salt=info.honours_cache_salt,
            supports_prefix_cache_bypass=info.honours_cache_salt,
        ),
        supports_lora=_serves_adapters(server),
        supports_multimodal=info.takes_images,
        extra=_struct({"logits_processors": processors}),
    )


def load_info(server: RequestServer, instance_id: str, *, per_rank: bool) -> wire.LoadInfo:
    """The answer of ``GetLoad``; an engine that does not know its queues leaves them out."""
    load: dict[str, Any] = {"used_kv_blocks": server.kv_load.used, "total_kv_blocks": server.kv_load.total}
    attributes: dict[str, Any] = {"in_flight": len(server.in_flight)}
    if isinstance(server.engine, Measured):
        measured = server.engine.load()
        load |= {"running_requests": measured.num_running, "queued_requests": measured.num_waiting}
        attributes["preemptions"] = measured.num_preemptions
    return wire.LoadInfo(
        instance_id=instance_id,
        timestamp_unix_nanos=time.time_ns(),
        active_kv_sessions=0,
        ranks=[wire.RankLoadInfo(data_parallel_rank=RANK, **load)] if per_rank else (),
        attributes=_struct(attributes),
        **load,
    )


_GUIDES = {
    wire.GUIDED_DECODING_MODE_JSON_SCHEMA: "json_schema",
    wire.GUIDED_DECODING_MODE_REGEX: "regex",
    wire.GUIDED_DECODING_MODE_EBNF_GRAMMAR: "grammar",
    wire.GUIDED_DECODING_MODE_STRUCTURAL_TAG: "structural_tag",
    wire.GUIDED_DECODING_MODE_CHOICE: "choice",
    wire.GUIDED_DECODING_MODE_JSON_OBJECT: "json_schema",
}
"""Guides, and the processors that they are."""


def _processors(server: RequestServer) -> list[str]:
    """Names of the processors that a request may have."""
    forbidden = server.chains.builder.policy.forbidden
    entries = [entry for entry in server.chains.catalog.entries if entry.name not in forbidden]
    return [entry.name for entry in entries if _runs(entry.processor, server.info)]


def _runs(processor: type[Processor], info: EngineInfo) -> bool:
    """Whether an engine runs a processor."""
    if info.native_guides is not None:
        return processor.name in info.native_guides
    if issubclass(processor, CompanionProcessor) and processor.companion_model == "draft":
        return info.runs_all_processors and bool(info.draft_model)
    return info.runs_all_processors or not issubclass(processor, BacktrackingProcessor | CompanionProcessor)


def _scores(most: int | None) -> wire.LogprobCapabilities:
    """Log probabilities with as many candidates; None for no log probabilities."""
    if most is None:
        return wire.LogprobCapabilities(supported=False)
    modes = [wire.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N]
    return wire.LogprobCapabilities(supported=True, candidate_selection_modes=modes, max_top_n=most)


def _serves_adapters(server: RequestServer) -> bool:
    return server.adapters is not None and server.adapters.are_served


def _struct(data: dict[str, Any]) -> Struct:
    return ParseDict(data, Struct())
