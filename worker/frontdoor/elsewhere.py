"""Paths that other servers have and this one has not, and what takes their place here.

Sources: the routers of vLLM's and SGLang's OpenAI servers, llama.cpp's server, Dynamo's frontend,
Text Generation Inference, Ollama and OpenAI's API reference.
"""

from __future__ import annotations

_CHAT = "POST /v1/chat/completions"
_COMPLETIONS = "POST /v1/completions"
_NO_VECTORS = "the models served generate text, and none makes embeddings"
_NO_SCORES = "the models served generate text; echo with logprobs of POST /v1/completions scores a text"
_NO_SOUND = "the models served write text, and read no sound"
_NO_CONTROL = "it would change the server for all clients; an operator sets options at start (docs/operations.md)"
_WITH_ENGINES = "served by a front door with --engine-url, and at a worker's --engine-port (docs/recipes/rollouts.md)"
_AT_WORKERS = "weights change, pause and sleep at a worker's --engine-port (docs/weights.md)"
_ADAPTERS = "adapters are loaded at a worker's --engine-port (docs/models.md)"

ELSEWHERE: dict[str, str] = {
    # OpenAI
    "/v1/embeddings": _NO_VECTORS,
    "/v1/moderations": "there is no moderation model",
    "/v1/images/generations": _NO_SOUND,
    "/v1/images/edits": _NO_SOUND,
    "/v1/images/variations": _NO_SOUND,
    "/v1/audio/speech": _NO_SOUND,
    "/v1/audio/transcriptions": _NO_SOUND,
    "/v1/audio/translations": _NO_SOUND,
    "/v1/audio": _NO_SOUND,
    "/v1/videos": _NO_SOUND,
    "/v1/videos/stream": _NO_SOUND,
    "/v1/realtime": f"there are no realtime sessions; use {_CHAT} with stream: true",
    "/v1/assistants": "there are no assistants; use POST /v1/responses",
    "/v1/threads": "there are no threads; use POST /v1/responses with previous_response_id",
    "/v1/conversations": "there are no conversations; use POST /v1/responses with previous_response_id",
    "/v1/responses/compact": "contexts are not compacted here",
    "/v1/vector_stores": "there are no vector stores",
    "/v1/fine_tuning/jobs": "models are not tuned here",
    "/v1/uploads": "files are uploaded in one part: POST /v1/files",
    "/v1/engines": "use GET /v1/models",
    # Anthropic
    "/v1/complete": "use POST /v1/messages",
    "/v1/messages/batches": "use POST /v1/batches",
    # Dynamo's frontend
    "/v1/generate": f"it drops fields that it does not know; use {_CHAT} or {_COMPLETIONS}",
    "/v1/classify": _NO_SCORES,
    "/v1/pooling": _NO_VECTORS,
    "/busy_threshold": _NO_CONTROL,
    "/clear_kv_blocks": _NO_CONTROL,
    # vLLM
    "/pooling": _NO_VECTORS,
    "/embeddings": _NO_VECTORS,
    "/classify": _NO_SCORES,
    "/score": _NO_SCORES,
    "/v1/score": _NO_SCORES,
    "/rerank": _NO_SCORES,
    "/v1/rerank": _NO_SCORES,
    "/v2/rerank": _NO_SCORES,
    "/invocations": f"use {_CHAT} or {_COMPLETIONS}",
    "/load": "the workers' load is in GET /metrics",
    "/server_info": "use GET /version and GET /openapi.json",
    "/reset_prefix_cache": _AT_WORKERS,
    "/reset_mm_cache": _NO_CONTROL,
    "/reset_encoder_cache": _NO_CONTROL,
    "/sleep": _AT_WORKERS,
    "/wake_up": _AT_WORKERS,
    "/is_sleeping": _AT_WORKERS,
    "/release_kv_cache_memory": _AT_WORKERS,
    "/collective_rpc": _NO_CONTROL,
    "/pause": _AT_WORKERS,
    "/resume": _AT_WORKERS,
    "/is_paused": _AT_WORKERS,
    "/abort_requests": _AT_WORKERS,
    "/update_weights": _AT_WORKERS,
    "/init_weight_transfer_engine": _AT_WORKERS,
    "/shutdown_weight_transfer_engine": _AT_WORKERS,
    "/start_weight_update": _AT_WORKERS,
    "/start_draft_weight_update": _AT_WORKERS,
    "/finish_weight_update": _AT_WORKERS,
    "/update_weight_version": _AT_WORKERS,
    "/weight_info": _AT_WORKERS,
    "/weight_checker": _AT_WORKERS,
    "/get_world_size": _AT_WORKERS,
    "/start_profile": _NO_CONTROL,
    "/stop_profile": _NO_CONTROL,
    "/scale_elastic_ep": _NO_CONTROL,
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/tokenizer_info": "use POST /tokenize",
    # SGLang
    "/health_generate": "use GET /health, or /v1/models/{model}/ready",
    "/get_model_info": "use GET /v1/models",
    "/model_info": "use GET /v1/models",
    "/get_server_info": "use GET /version and GET /openapi.json",
    "/get_weight_version": _WITH_ENGINES,
    "/v1/loads": _WITH_ENGINES,
    "/get_load": "the workers' load is in GET /metrics",
    "/flush_cache": _WITH_ENGINES,
    "/abort_request": f"one ends when its client closes the connection; for all of them it is {_WITH_ENGINES}",
    "/update_weights_from_disk": _WITH_ENGINES,
    "/update_weights_from_tensor": _AT_WORKERS,
    "/update_weights_from_distributed": _AT_WORKERS,
    "/pause_generation": _WITH_ENGINES,
    "/continue_generation": _WITH_ENGINES,
    "/release_memory_occupation": _WITH_ENGINES,
    "/resume_memory_occupation": _WITH_ENGINES,
    "/load_lora_adapter": _ADAPTERS,
    "/unload_lora_adapter": _ADAPTERS,
    "/encode": _NO_VECTORS,
    "/parse_function_call": f"calls are parsed where they are generated: {_CHAT} with tools",
    "/separate_reasoning": f"thinking is separated where it is generated: {_CHAT}",
    # llama.cpp
    "/completion": f"use {_COMPLETIONS}",
    "/completions": f"use {_COMPLETIONS}",
    "/chat/completions": f"use {_CHAT}",
    "/infill": "there is no infilling; write the model's own tokens for it in a prompt of POST /v1/completions",
    "/embedding": _NO_VECTORS,
    "/reranking": _NO_SCORES,
    "/v1/reranking": _NO_SCORES,
    "/apply-template": "POST /tokenize with messages has the token ids, POST /detokenize their text",
    "/props": "use GET /v1/models and GET /openapi.json",
    "/slots": "the workers' load is in GET /metrics",
    "/lora-adapters": _ADAPTERS,
    "/models": "use GET /v1/models",
    # Text Generation Inference
    "/generate_stream": f"use {_COMPLETIONS} with stream: true",
    "/info": "use GET /v1/models and GET /version",
    "/chat_tokenize": "use POST /tokenize with messages",
    # Ollama
    "/api/generate": f"use {_COMPLETIONS}",
    "/api/chat": f"use {_CHAT}",
    "/api/tags": "use GET /v1/models",
    "/api/show": "use GET /v1/models/{model}",
    "/api/ps": "use GET /v1/models",
    "/api/version": "use GET /version",
    "/api/embed": _NO_VECTORS,
    "/api/embeddings": _NO_VECTORS,
    "/api/pull": _NO_CONTROL,
}


def instead_of(path: str) -> str | None:
    """Replacement for a path, or for one below it; None if nobody is known to serve it."""
    while path.count("/") > 1 and path not in ELSEWHERE:
        path = path.rpartition("/")[0]
    return ELSEWHERE.get(path)
