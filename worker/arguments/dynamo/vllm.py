"""Options of ``python -m dynamo.vllm``, but for vLLM's own, which vLLM's parser reads."""

from __future__ import annotations

from worker.arguments.dynamo.row import NoEffect, Only, Row, ToOption, off, refused, rows
from worker.arguments.dynamo.trtllm import ENCODER, GMS

PREFIX = "DYN_VLLM_"

BENCHMARKS = "this worker does not measure itself at start; benchmarks/ measures one that serves"
GENERATES = "this worker generates answers"
RL = "this engine reports raw log probabilities; docs/recipes/rollouts.md has rollouts by token ids"
FRONTEND = "it is the frontend's"

VLLM: tuple[Row, ...] = (
    Row(("--model",), (), ToOption("model_path")),
    *rows(
        PREFIX,
        {"--disaggregation-mode": ToOption("disaggregation_mode", {"pd": "aggregated"}, {"encode": ENCODER})},
    ),
    Row(
        ("--use-vllm-tokenizer",),
        (f"{PREFIX}USE_TOKENIZER",),
        Only(("false",), "logits processors need the token ids that the frontend makes"),
        "switch",
    ),
    *rows(PREFIX, {"--enable-multimodal": ToOption("modality", {"true": "multimodal", "false": "text"})}, "switch"),
    *off(PREFIX, "this worker reads pictures itself", "--frontend-decoding"),
    *off(PREFIX, ENCODER, "--route-to-encoder"),
    *refused(PREFIX, ENCODER, "--mm-prompt-template", "--embedding-transfer-mode"),
    *refused("DYN_", ENCODER, "--custom-encoder-class"),
    *off("DYN_", RL, "--enable-rl"),
    *off(PREFIX, GENERATES, "--embedding-worker", "--classify-worker", "--embedding-frontend-tokenization"),
    *rows(PREFIX, {"--embedding-worker-processes": Only(("1",), GENERATES)}),
    *off(PREFIX, "answers are streams of one request, not sessions", "--realtime"),
    *off(PREFIX, "a worker drives one engine on one machine", "--headless"),
    *off(PREFIX, GMS, "--gms-shadow-mode"),
    Row(("--model-express-url",), ("MODEL_EXPRESS_URL",), NoEffect("Dynamo accepts it and does nothing, too")),
    *refused(
        "DYN_",
        BENCHMARKS,
        *("--benchmark-mode", "--benchmark-points-file", "--benchmark-output-path", "--benchmark-timeout"),
        *("--benchmark-warmup-iterations", "--benchmark-max-batch-size", "--benchmark-prefill-granularity"),
        *("--benchmark-prefill-kv-read-granularity", "--benchmark-prefill-batch-granularity"),
        *("--benchmark-decode-length-granularity", "--benchmark-decode-batch-granularity"),
        *("--prefill-max-new-token-samples", "--prefill-max-kv-read-token-samples"),
        *("--decode-max-kv-read-token-samples", "--decode-max-batch-size-samples", "--prefix-max-batch-size-samples"),
    ),
    *off(
        "DYN_",
        BENCHMARKS,
        *("--benchmark-randomize-kda-state", "--benchmark-hybrid-live-state", "--benchmark-collect-imbalanced"),
    ),
    *(Row((), (PREFIX + name,), NoEffect(FRONTEND)) for name in ("STREAM_INTERVAL", "SKIP_REQUEST_VALIDATION")),
    *(
        Row((), (PREFIX + name,), Only((), ENCODER))
        for name in (
            *("MULTIMODAL_WORKER", "MULTIMODAL_ENCODE_WORKER", "MULTIMODAL_DECODE_WORKER"),
            *("SKIP_ENCODER_ONLY_KERNEL_WARMUP", "ENCODER_MAX_NUM_SEQS", "ENCODER_KV_CACHE_MEMORY_BYTES"),
            "ENCODER_GPU_MEMORY_UTILIZATION",
        )
    ),
    *(
        Row((), (f"{PREFIX}EMBEDDING_{name}",), Only((), GENERATES))
        for name in ("PROCESS_ROLE", "PROCESS_INDEX", "PARENT_PID", "ENGINE_ADDRESSES")
    ),
)
"""Rows of its options, and of the variables that it reads besides."""
