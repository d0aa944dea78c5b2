"""The description of a worker: its identity, capacity and load, and what its model can be asked."""

from __future__ import annotations

import time
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from adapters.catalog import MAX_CHOICES
from worker import __version__
from worker.engines import Measured
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
        extra=_struct({**describe(server), "numerics": info.made_by, "kv_dtype": info.kv_dtype}),
    )


def model_info(server: RequestServer) -> wire.ModelInfo:
    """The answer of ``GetModelInfo``: the fields of a request that are honoured."""
    info, arguments = server.info, server.arguments
    has_text = server.chains.vocabulary.tokenizer is not None
    scores = wire.LogprobCapabilities(
        supported=True,
        candidate_selection_modes=[wire.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
        max_top_n=MAX_LOGPROBS,
    )
    guides = [
        wire.GUIDED_DECODING_MODE_JSON_SCHEMA,
        wire.GUIDED_DECODING_MODE_REGEX,
        wire.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
        wire.GUIDED_DECODING_MODE_STRUCTURAL_TAG,
        wire.GUIDED_DECODING_MODE_CHOICE,
        wire.GUIDED_DECODING_MODE_JSON_OBJECT,
    ]
    return wire.ModelInfo(
        model_id=arguments.model_path,
        served_model_name=arguments.served_model_name,
        served_model_aliases=[arguments.model_path],
        max_context_length=info.context_length,
        max_output_tokens=info.context_length - 1,
        supports_text_input=has_text,
        supports_token_ids_input=True,
        generation=wire.GenerationCapabilities(
            prompt_logprobs=scores,
            output_logprobs=scores,
            guided_decoding=wire.GuidedDecodingCapabilities(supported=has_text, modes=guides if has_text else ()),
            max_num_sequences=MAX_CHOICES if info.honours_choice else 1,
            supports_priority=info.honours_priority,
            supports_stop_in_output=True,
            supports_cache_salt=True,
            supports_prefix_cache_bypass=True,
        ),
        supports_lora=_serves_adapters(server),
        supports_multimodal=info.takes_images,
        extra=_struct({"logits_processors": [entry.name for entry in server.chains.catalog.entries]}),
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


def _serves_adapters(server: RequestServer) -> bool:
    return server.adapters is not None and server.adapters.are_served


def _struct(data: dict[str, Any]) -> Struct:
    return ParseDict(data, Struct())
