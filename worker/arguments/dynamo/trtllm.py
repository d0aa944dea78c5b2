"""Options of ``python -m dynamo.trtllm``."""

from __future__ import annotations

from worker.arguments.dynamo.row import NoEffect, Only, Row, ToOption, ToSetting, off, refused, rows
from worker.arguments.values import fraction, positive, text, truth

PREFIX = "DYN_TRTLLM_"

AFFINITY = "attention_dp_config.kv_cache_routing_conversation_affinity"
DIFFUSION = "diffusion models are not served"
ENCODER = "there is no encode worker: a worker computes pictures itself, with --modality multimodal"
READS = "this worker reads pictures itself"
GMS = "the GPU memory service is not driven here"
PLACES = (
    "TensorRT-LLM places a conversation's first request; without conversation affinity the router places each request"
)
OWN_ARGUMENT = "it is of diffusion models; TensorRT-LLM's own argument goes into --override-engine-args"

TRTLLM: tuple[Row, ...] = (
    Row(("--model", "--model-path"), (f"{PREFIX}MODEL",), ToOption("model_path")),
    *rows(
        PREFIX,
        {
            "--served-model-name": ToOption("served_model_name"),
            "--tensor-parallel-size": ToOption("tensor_parallel_size"),
            "--pipeline-parallel-size": ToOption("pipeline_parallel_size"),
            "--kv-block-size": ToOption("kv_block_size"),
            "--max-batch-size": ToOption("max_num_seqs"),
            "--max-num-tokens": ToOption("max_num_batched_tokens"),
            "--max-seq-len": ToOption("context_length"),
            "--extra-engine-args": ToOption("extra_engine_args"),
            "--override-engine-args": ToOption("override_engine_args"),
            "--disaggregation-mode": ToOption("disaggregation_mode", {"pd": "aggregated"}, {"encode": ENCODER}),
            "--revision": ToOption("revision"),
            "--expert-parallel-size": ToSetting("moe_expert_parallel_size", positive),
            "--gpus-per-node": ToSetting("gpus_per_node", positive),
            "--max-beam-width": ToSetting("max_beam_width", positive),
            "--free-gpu-memory-fraction": ToSetting("kv_cache_config.free_gpu_memory_fraction", fraction),
            "--load-format": ToSetting("load_format", text, {"gms": GMS}),
            "--guided-decoding-backend": ToSetting("guided_decoding_backend", text),
            "--modality": ToOption("modality", {}, dict.fromkeys(("image_diffusion", "video_diffusion"), DIFFUSION)),
            "--allowed-local-media-path": ToOption("allowed_local_media_path"),
            "--model-loader-extra-config": Only(("{}",), GMS),
        },
    ),
    Row(
        ("--publish-kv-events", "--publish-events-and-metrics"),
        (f"{PREFIX}PUBLISH_KV_EVENTS", f"{PREFIX}PUBLISH_EVENTS_AND_METRICS"),
        ToOption("enable_kv_routing"),
        "switch",
    ),
    *rows(PREFIX, {"--enable-attention-dp": ToSetting("enable_attention_dp", truth)}, "switch"),
    *rows(PREFIX, {"--publish-metrics": ToOption("publish_forward_pass_metrics")}, "switch"),
    Row(("--conversation-affinity",), ("DYN_ENGINE_CONV_AFFINITY",), ToSetting(AFFINITY, truth), "switch"),
    Row(
        ("--conversation-affinity-dp-rank-source",),
        ("DYN_ENGINE_CONV_AFFINITY_DP_RANK_SOURCE",),
        Only(("engine",), PLACES),
    ),
    *rows(PREFIX, {"--enable-multimodal": ToOption("modality", {"true": "multimodal", "false": "text"})}, "switch"),
    *off(PREFIX, READS, "--frontend-decoding"),
    *refused(PREFIX, ENCODER, "--encode-endpoint"),
    *refused(PREFIX, "a request's size bounds its pictures", "--max-file-size-mb"),
    *refused(
        PREFIX,
        DIFFUSION,
        *("--quant-algo", "--teacache-thresh", "--dit-ulysses-size", "--dit-ring-size", "--dit-cfg-size"),
        *("--default-height", "--default-width", "--default-num-inference-steps", "--default-guidance-scale"),
        *("--default-num-frames", "--default-num-images-per-prompt"),
    ),
    *rows(
        PREFIX,
        dict.fromkeys(
            (
                *("--quant-dynamic", "--enable-teacache", "--teacache-use-ret-steps", "--disable-torch-compile"),
                *("--enable-fullgraph", "--skip-warmup"),
            ),
            Only((), DIFFUSION),
        ),
        "switch",
    ),
    *refused(PREFIX, f"{OWN_ARGUMENT}, as attn_backend", "--attn-backend"),
    *refused(PREFIX, "it is of diffusion models; use --dtype", "--torch-dtype"),
    *off(PREFIX, f"{OWN_ARGUMENT}, as cuda_graph_config", "--enable-cuda-graph"),
    *off(PREFIX, f"{OWN_ARGUMENT}, as enable_layerwise_nvtx_marker", "--enable-layerwise-nvtx-marker"),
    Row((), (f"{PREFIX}SERVER_DISABLE_GC",), NoEffect("garbage collection is the worker's own affair")),
    Row((), (f"{PREFIX}KV_EVENT_HOSTS",), Only((), "KV events come from the executor of this process")),
)
"""Rows of its options, and of the variables that it reads besides."""
