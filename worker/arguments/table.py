"""`Arguments`: every option of ``python -m worker`` in one typed table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from worker.arguments.dynamo.layer import Setting
from worker.arguments.option import Option, option, options_of
from worker.arguments.values import (
    comma_list,
    device,
    host,
    memory_size,
    named_directories,
    not_negative,
    packed_copy,
    positive,
    positive_seconds,
    reply_prefixes,
    seconds,
    store,
    subject_token,
    truth,
    url,
)

ENVIRONMENT_PREFIX = "WORKER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Every option of ``python -m worker``. This class is the table: flag, variable, type,
    default, choices, help.
    """

    model_path: str = option(
        None,
        "Directory of the Hugging Face checkpoint to serve, its id on the Hugging Face Hub, or a GGUF file "
        "(docs/models.md). Required.",
    )
    revision: str | None = option(None, "Branch, tag or commit of a model that is named by its id. Default: main.")
    served_model_name: str = option(
        None, "Name that clients ask for. Default: last part of the model path, or the model's id."
    )
    runtime: str = option(
        "dynamo",
        "What delivers requests: Dynamo's runtime, NATS (docs/nats.md), or clients of OpenEngine's gRPC services, as "
        "Dynamo's sidecar is one (docs/openengine.md).",
        choices=("dynamo", "nats", "openengine"),
    )
    engine: str = option(
        "embedded",
        "Engine that decodes; constant computes no model and says one token at a set pace, for tests and planning.",
        choices=("embedded", "trtllm", "vllm", "constant"),
    )
    constant_step_s: float = option(
        0.02, "With --engine constant: seconds between two tokens of a stream.", parse=seconds
    )
    constant_prompt_rate: int = option(
        10_000, "With --engine constant: tokens of prompts that are computed in a second.", parse=positive
    )
    device: str = option(
        "auto", "Where the embedded engine computes: auto (CUDA if there is any), cpu, cuda or cuda:N.", parse=device
    )
    dtype: str = option(
        "auto",
        "Data type of weights and activations; auto is the checkpoint's own. The embedded engine computes float16 as "
        "float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
        engine=True,
    )
    numerics: str = option(
        "auto",
        "exact computes the same tokens in any batch and on any path, bit by bit; auto is exact where it costs next to "
        "nothing.",
        choices=("auto", "exact", "fast"),
        engine=True,
    )
    kernels: str = option(
        "auto",
        "What computes: on CUDA Triton's kernels or torch's; on a CPU native kernels, with the fastest of AMX, "
        "AVX-512, AVX2, NEON and plain C (generic) that the processor has or with the one named, or torch's. auto: "
        "Triton's where they can; native where they were built and the processor has FMA.",
        choices=(
            "auto",
            "native",
            "native-amx",
            "native-avx512",
            "native-avx2",
            "native-neon",
            "native-generic",
            "triton",
            "torch",
        ),
        engine=True,
    )
    quantization: str = option(
        "auto",
        "What weights are held in on a CPU: int8 or int4 (docs/models.md), none (dequantised, if it is quantised), or "
        "auto: as the model has them.",
        choices=("auto", "none", "int8", "int4"),
        engine=True,
    )
    activation_dtype: str = option(
        "auto",
        "What rows are rounded to before they are multiplied by quantised weights: int8, as llama.cpp does it but for "
        "outliers, up to twice as fast (docs/models.md), bfloat16, with AMX, for many requests and long prompts, none: "
        "nothing, or auto: int8 where native kernels compute quantised weights.",
        choices=("auto", "none", "int8", "bfloat16"),
        engine=True,
    )
    kv_cache_dtype: str = option(
        "auto",
        "What the embedded engine holds keys and values in: int8 or, in float32, int16, with a scale for each token "
        "and head (docs/models.md), none: the data type of activations, or auto: int16 in float32 where rows are "
        "rounded to int8 and native kernels attend, else none.",
        choices=("auto", "none", "int8", "int16"),
        engine=True,
    )
    packed_copy: str = option(
        "auto",
        "auto keeps packed weights and the tokenizer beside the checkpoint, in .packed, where that can be written, so "
        "that the next start is fast (docs/models.md); an absolute path keeps them in that directory, for checkpoints "
        "on read-only volumes; off neither reads nor writes any.",
        parse=packed_copy,
        engine=True,
    )
    max_num_seqs: int = option(
        64,
        "Requests decoded in one step at most. TensorRT-LLM and vLLM have defaults of their own.",
        parse=positive,
        engine=True,
    )
    max_num_batched_tokens: int = option(
        1024,
        "Token budget of a step; at least max-num-seqs. TensorRT-LLM and vLLM have defaults of their own.",
        parse=positive,
        engine=True,
    )
    max_mixed_chunk: int | None = option(
        None,
        "Prompt tokens in a step that also decodes. Default: as many as make it take 2.5 times as long, as measured; "
        "more where many prompts wait.",
        parse=positive,
        engine=True,
    )
    context_length: int | None = option(
        None, "Longest prompt + answer, in tokens. Default: the model's.", parse=positive, engine=True
    )
    kv_block_size: int = option(16, "Tokens per KV block.", parse=positive, engine=True)
    kv_blocks: int | None = option(
        None,
        "KV blocks to own. Default: what --kv-cache-memory says.",
        parse=positive,
        engine=True,
    )
    kv_cache_memory: int | None = option(
        None,
        "Memory for the KV cache, the draft model's too, for example 2GiB; a CPU's is taken as it is used. Default: "
        "enough for max-num-seqs full contexts, but on a CPU at most a quarter of the available memory and 4GiB (or "
        "one context), on CUDA 0.9 of what is free.",
        parse=memory_size,
        engine=True,
    )
    local_workers: int = option(
        1,
        "Workers that share this machine or container: the embedded engine computes with its part of the cores, and "
        "plans with its part of the memory.",
        parse=positive,
    )
    default_sampling: str = option(
        "model",
        "Values of temperature, top_p, top_k, min_p and repetition_penalty that a request leaves unset: those of the "
        "checkpoint's generation_config.json, or greedy where it has none (model); or always greedy.",
        choices=("model", "greedy"),
    )
    max_queue: int = option(
        256, "Requests in the waiting queue at most; one more is refused.", parse=not_negative, engine=True
    )
    speculative_config: str | None = option(
        None,
        "How the embedded engine drafts tokens, JSON in vLLM's names (docs/speculation.md), for example "
        '{"method": "suffix", "num_speculative_tokens": 6}; by default n-grams, with exact numerics on a CPU. '
        "What a request's processors force is drafted anyway. "
        "Its model is also the amateur of contrastive decoding.",
        engine=True,
    )
    step_timeout_s: float = option(
        300.0,
        "Seconds after which a step that has not ended ends the process; above the longest prompt step of a slow CPU.",
        parse=positive_seconds,
        engine=True,
    )
    tensor_parallel_size: int = option(1, "GPUs that share each layer; TensorRT-LLM and vLLM only.", parse=positive)
    pipeline_parallel_size: int = option(
        1, "Groups of GPUs for the layers; TensorRT-LLM and vLLM only.", parse=positive
    )
    history: str = option(
        "exact",
        "What TensorRT-LLM shows logits processors: every sampled token, or lagged by one, which overlaps steps.",
        choices=("exact", "lagged"),
    )
    processor_errors: str = option(
        "closed",
        "With TensorRT-LLM: a logits processor that fails ends its request, or (open) the request continues without "
        "it.",
        choices=("closed", "open"),
    )
    extra_engine_args: str | None = option(
        None, "YAML file of engine options, keyed by option name; with TensorRT-LLM by the names of its LLM arguments."
    )
    override_engine_args: str | None = option(
        None, "With TensorRT-LLM: JSON object of LLM arguments that wins over the file of --extra-engine-args."
    )
    engine_args: str | None = option(
        None, "With vLLM: arguments of its AsyncEngineArgs, a JSON object or a YAML or JSON file (docs/vllm.md)."
    )
    drain_timeout_s: float = option(
        30.0, "Seconds that in-flight requests get to finish after SIGTERM; the rest are migrated.", parse=seconds
    )
    keepalive_s: float = option(
        0.0,
        "Seconds without a token after which the stream of a request gets an empty chunk, at most twice as many; 0 for "
        "never. A frontend with a stream time-out needs it: it would take a busy worker for a hung one.",
        parse=seconds,
    )
    logits_processor: tuple[str, ...] = option(
        (),
        "Third-party logits processors, NAME=module:Class, several separated by commas or given one by one.",
        parse=comma_list,
        many=True,
    )
    allow_logits_processors: tuple[str, ...] = option(
        (),
        "Names of installed third-party logits processors (entry points) that requests may name, separated by commas.",
        parse=comma_list,
        many=True,
    )
    lora_modules: tuple[tuple[str, str], ...] = option(
        (),
        "LoRA adapters in peft's form that requests choose as their model, NAME=DIRECTORY, several separated by commas "
        "or given one by one.",
        parse=named_directories,
        many=True,
    )
    lora_dtype: str = option(
        "auto",
        "What the embedded engine holds LoRA adapters in: auto, the data type of the model, as vLLM does; float32, as "
        "their files have them; or bfloat16, half the bytes (docs/models.md).",
        choices=("auto", "float32", "bfloat16"),
        engine=True,
    )
    modality: str = option(
        "text",
        "multimodal, with --engine vllm or trtllm: pictures are served beside text (docs/vllm.md, "
        "docs/tensorrt-llm.md).",
        choices=("text", "multimodal"),
    )
    allowed_local_media_path: str | None = option(
        None, "With --modality multimodal: directory whose files requests may name as pictures, by file: URLs."
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "With --modality multimodal and --engine vllm: hosts from which pictures are fetched, separated by commas; "
        "redirections are not followed. Default: none, so that pictures are data: URLs.",
        parse=comma_list,
        many=True,
    )
    thinking_start: str | None = option(
        None,
        "Text that opens a thinking section, of one token or several. Default: <think>, [THINK], or Cohere's or "
        "Seed's tags, if those are tokens.",
    )
    thinking_end: str | None = option(None, "Text that closes a thinking section; given with --thinking-start.")
    processor_policy: str | None = option(
        None, "YAML file of mandatory, default and forbidden logits processors, and of watermark keys."
    )
    processor_step_budget_s: float = option(
        0.1,
        "Most CPU time that a third-party logits processor may take for one step, seconds; over it, its request fails.",
        parse=positive_seconds,
    )
    grammar_timeout_s: float = option(
        2.0,
        "Processor time that compiling a grammar may take, seconds; over it, its request is refused.",
        parse=positive_seconds,
    )
    grammar_cache_mib: int = option(
        256, "Memory for compiled grammars that are kept for the next request, MiB.", parse=positive
    )
    log_requests: bool = option(
        False,
        "Write one line of JSON to standard output when a request has ended (docs/debugging.md); true, false, or the "
        "flag alone.",
        parse=truth,
    )
    migration: str = option(
        "off",
        "Whether requests that move here from another worker go on exactly (docs/migration.md); the frontend's "
        "--migration-limit moves them. on needs --boundary-store.",
        choices=("off", "on"),
    )
    boundary_store: str | None = option(
        None,
        "Store in which workers record where each answer begins: file:DIRECTORY, nats:URL or etcd:URL; one for all "
        "workers of a pool.",
        parse=store,
    )
    otlp_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector that takes spans of requests, over HTTP (docs/metrics.md).", parse=url
    )
    disaggregation_mode: str = option(
        "aggregated", "Role of this worker.", choices=("aggregated", "agg", "prefill", "decode")
    )
    kv_lease_s: float = option(
        30.0,
        "Seconds until a lease on a prompt's KV times out; after that a decode worker computes the prompt itself.",
        parse=positive_seconds,
    )
    max_local_prefills: int = option(
        16,
        "Prompts without a usable KV transfer that a decode worker computes itself at a time; one more is refused as "
        "overloaded, and 0 refuses all.",
        parse=not_negative,
    )
    kv_transfer_devices: str = option(
        "lo",
        "Network devices over which KV is read by other workers, as UCX names them; all for every one. TensorRT-LLM "
        "finds its own unless it is given.",
        env="UCX_NET_DEVICES",
    )
    namespace: str = option("dynamo", "Dynamo namespace.", env="DYN_NAMESPACE")
    component: str = option(
        "backend", "Dynamo component; of a prefill worker prefill, unless given.", env="DYN_COMPONENT"
    )
    endpoint: str = option(
        "generate", "Dynamo endpoint; dyn://namespace.component.endpoint names all three.", env="DYN_ENDPOINT"
    )
    endpoint_types: str = option(
        "chat,completions",
        "OpenAI endpoints to serve: chat, completions, both separated by a comma, or none.",
        env="DYN_ENDPOINT_TYPES",
    )
    discovery_backend: str = option(
        "etcd", "Where workers register.", env="DYN_DISCOVERY_BACKEND", choices=("kubernetes", "etcd", "file", "mem")
    )
    request_plane: str = option(
        "tcp", "How requests reach this worker.", env="DYN_REQUEST_PLANE", choices=("tcp", "nats")
    )
    response_plane: str = option(
        "tcp",
        "How answers leave this worker; quic needs a Dynamo that has it.",
        env="DYN_RESPONSE_PLANE",
        choices=("tcp", "quic"),
    )
    event_plane: str | None = option(
        None, "How events are published; Dynamo's default when unset.", env="DYN_EVENT_PLANE", choices=("nats", "zmq")
    )
    enable_kv_routing: bool = option(
        True,
        "Publish load and cached blocks for the KV-aware router: true or false. "
        "With the zmq event plane, true listens on 0.0.0.0.",
        parse=truth,
    )
    publish_forward_pass_metrics: bool = option(
        False,
        "Publish what each step computes on the event plane, for Dynamo's planner; not with --engine vllm or --runtime "
        "nats (docs/metrics.md).",
        parse=truth,
    )
    dyn_tool_call_parser: str | None = option(
        None,
        "Tool-call parser that the frontend applies, to every chat that is not streamed (docs/request.md).",
        env="DYN_TOOL_CALL_PARSER",
    )
    dyn_reasoning_parser: str | None = option(
        None, "Reasoning parser that the frontend applies.", env="DYN_REASONING_PARSER"
    )
    dyn_default_thinking_mode: str | None = option(
        None,
        "Whether chat templates think unless a request says so; the template's own default when unset.",
        env="DYN_DEFAULT_THINKING_MODE",
        choices=("enabled", "disabled"),
    )
    custom_jinja_template: str | None = option(
        None, "Chat template file that replaces the model's own.", env="DYN_CUSTOM_JINJA_TEMPLATE"
    )
    nats_url: str = option(
        "nats://127.0.0.1:4222", "NATS servers of --runtime nats, separated by commas; tls:// for TLS."
    )
    nats_credentials: str | None = option(None, "File with the JWT and the NKey seed of a NATS user.")
    nats_token: str | None = option(
        None, "Token for a NATS server that requires one; preferably in the variable, which no process list shows."
    )
    nats_nkey_seed: str | None = option(None, "File with the seed of an NKey that the NATS server accepts.")
    nats_tls_ca: str | None = option(
        None, "File of the certificates that sign the NATS server's. Default: the system's."
    )
    nats_tls_cert: str | None = option(None, "File of this worker's certificate for NATS; needs --nats-tls-key.")
    nats_tls_key: str | None = option(None, "File of the key of --nats-tls-cert.")
    nats_reply_prefixes: str = option(
        "_INBOX.",
        "What reply subjects of NATS clients begin with, separated by commas, each ending with a dot; messages with "
        "another one are dropped (docs/nats.md).",
        parse=reply_prefixes,
    )
    model_version: str = option(
        "1", "Version of the model in the NATS subjects: letters, digits, hyphens, underscores.", parse=subject_token
    )
    batch: bool = option(
        False,
        "With --runtime nats: also answer the durable batches of dlw-batch, behind the requests that clients wait for.",
        parse=truth,
    )
    batch_ack_wait_s: float = option(
        30.0,
        "Seconds after which a request of a batch whose worker has died is given to another one.",
        parse=positive_seconds,
    )
    batch_max_deliver: int = option(
        5,
        "Workers that a request of a batch may take with it before it is set aside as a dead letter.",
        parse=positive,
    )
    grpc_host: str = option("127.0.0.1", "Address that --runtime openengine listens on.", parse=host)
    grpc_port: int = option(
        50051, "Port that --runtime openengine listens on; 0 takes a free one, which the log names.", parse=not_negative
    )
    grpc_tls_cert: str | None = option(None, "File of the certificate chain of --grpc-port; needs --grpc-tls-key.")
    grpc_tls_key: str | None = option(None, "File of the key of --grpc-tls-cert.")
    grpc_token_file: str | None = option(
        None,
        "File of tokens, one per line; every call of --runtime openengine but those of the health service needs one as "
        "authorization: Bearer.",
    )
    metrics_port: int = option(
        0, "Without Dynamo's runtime: port of /metrics, /live and /health; 0 serves none.", parse=not_negative
    )
    metrics_host: str = option("127.0.0.1", "Address of --metrics-port.", parse=host)
    engine_port: int = option(
        0,
        "Port of the routes that change the weights while serving, pause, and sleep (docs/weights.md); 0 serves none. "
        "Needs --engine-key-file.",
        parse=not_negative,
    )
    engine_host: str = option("127.0.0.1", "Address of --engine-port.", parse=host)
    engine_key_file: str | None = option(
        None, "File of keys, one per line; every request to --engine-port needs one as Authorization: Bearer."
    )
    engine_settings: tuple[Setting, ...] = ()
    """Arguments of TensorRT-LLM's ``LLM`` from flags and variables of Dynamo's worker."""
    engine_flags: tuple[str, ...] = ()
    """Arguments of the command line that are left for vLLM's own parser."""
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    """Names of the options that were given somewhere: TensorRT-LLM has defaults of its own for
    the others.
    """

    @property
    def publishes_kv_events(self) -> bool:
        """Whether a router is told which blocks are cached; prompts are computed elsewhere than
        on a decode worker.
        """
        return self.enable_kv_routing and self.disaggregation_mode != "decode"


OPTIONS: tuple[Option, ...] = options_of(Arguments, ENVIRONMENT_PREFIX)
