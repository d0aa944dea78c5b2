"""`LLM`: checks what it is given as the real one does, and talks to an executor in another
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import RequestOutput
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.inputs.processors import PreprocessedInputs, input_processor_of
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.standin_switches import SWITCHES

DEFAULT_REQUEST_PRIORITY = 0.5
_AFFINITY = "kv_cache_routing_conversation_affinity"


class _NewLLM:
    def __init__(self, model: str, **kwargs: Any) -> None:
        self.args = TorchLlmArgs(model=str(model), **kwargs)
        self._eos = _end_ids(Path(model))
        self._tokenizer_end = _tokenizer_end(Path(model))
        self.input_processor = input_processor_of(Path(model))
        self._ids = itertools.count(1)
        self._results: dict[int, RequestOutput] = {}
        self._lock = threading.Lock()
        self._fatal: BaseException | None = None
        self._down = False
        self._stats: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._start()

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = DEFAULT_REQUEST_PRIORITY,
    ) -> RequestOutput:
        if self._down:
            raise RuntimeError("LLM is shutting down")
        if not isinstance(inputs, PreprocessedInputs):
            inputs = self.preprocess(inputs, sampling_params, disaggregated_params)
        prompt = inputs.prompt_token_ids
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams, got {type(params).__name__}")
        if not 0 <= priority <= 1:
            raise ValueError(f"priority must be in [0, 1], got {priority}")
        if getattr(self.args, "generation_config", "trtllm") == "auto":
            params._apply_generation_config_defaults(_generation_config(Path(self.args.model)))
        kind = self._kind(disaggregated_params)
        if kind == "context_only":
            params.max_tokens = 1
        self._setup(params)
        self._check(prompt, params, kind)
        client_id = next(self._ids)
        payload = pickle.dumps(
            (
                "submit",
                client_id,
                {
                    "prompt": prompt,
                    "params": params,
                    "streaming": streaming,
                    "disaggregated_params": disaggregated_params,
                    "cache_salt": cache_salt,
                    "lora": None if self.args.lora_config is None else lora_request,
                    "rank": None if scheduling_params is None else scheduling_params.attention_dp_rank,
                    "conversation": None if conversation_params is None else conversation_params.conversation_id,
                },
            )
        )
        result = RequestOutput(client_id, prompt, params.n, self._abort, disaggregated_params)
        result.is_measured = self.args.return_perf_metrics
        with self._lock:
            self._results[client_id] = result
        self._send(payload)
        return result

    def _kind(self, disaggregated_params: Any) -> str:
        if disaggregated_params is None:
            return "context_and_generation"
        if not isinstance(disaggregated_params, DisaggregatedParams):
            raise TypeError("disaggregated_params must be DisaggregatedParams")
        kind = disaggregated_params.request_type
        if kind != "context_and_generation":
            assert self.args.cache_transceiver_config is not None, "disaggregated serving needs a cache transceiver"
        return str(kind)

    def _setup(self, params: Any) -> None:
        """Stop words and end token, only where ``end_id`` is not set: the tokenizer's, and beside
        it the generation config's.
        """
        if params.end_id is None:
            if self.args.skip_tokenizer_init or self._tokenizer_end is None:
                raise ValueError("end_id must be set or a tokenizer given")
            params.end_id = self._tokenizer_end
            params.pad_id = params.end_id if params.pad_id is None else params.pad_id
            known = (params.end_id, *(params.stop_token_ids or ()))
            extra = [token for token in self._eos if token not in known]
            params.stop_token_ids = [*(params.stop_token_ids or ()), *extra] or None
        elif params.stop or params.bad:
            raise RequestError("stop words are not tokenized; please call the setup method")

    def _check(self, prompt: list[int], params: Any, kind: str) -> None:
        too_long = len(prompt) > self.args.max_num_tokens and not self.args.enable_chunked_prefill
        if kind != "generation_only" and too_long:
            raise RequestError(f"prompt length {len(prompt)} exceeds max_num_tokens {self.args.max_num_tokens}")
        if params.max_tokens is not None and params.max_tokens <= 0:
            raise RequestError("max_tokens must be positive")
        if params.seed is not None and not 0 <= params.seed < 2**64:
            raise RequestError("seed is out of range")
        if params.repetition_penalty is not None and params.repetition_penalty <= 0:
            raise RequestError("repetition penalty must be positive")
        if params.guided_decoding is not None and self.args.guided_decoding_backend is None:
            raise RequestError("guided decoding needs a guided_decoding_backend")
        if self.args.speculative_config is not None and params.logprobs is not None:
            raise ValueError("log probabilities are not supported with speculative decoding")
        unsupported = params.use_beam_search or params.stop or params.bad
        if unsupported or params.prompt_logprobs is not None:
            raise RequestError("the stand-in has no beams, strings, or log probabilities of the prompt")

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        assert self.args.enable_iter_perf_stats, "enable_iter_perf_stats is off"
        return self._drain(self._stats, timeout)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        assert self.args.kv_cache_config.event_buffer_max_size > 0, "events are off"
        assert next(self._ids) > 1, "not before the first request"
        return self._drain(self._events, timeout)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        taken, self._stats[:] = list(self._stats), []
        return taken

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        taken, self._events[:] = list(self._events), []
        return taken

    def get_kv_cache_capacity(self) -> dict[str, int]:
        if not SWITCHES.tells_capacity:
            return {}
        block = self.args.kv_cache_config.tokens_per_block
        tokens = self._capacity_tokens()
        return {"maxNumBlocks": tokens // block, "tokensPerBlock": block, "maxNumTokens": tokens}

    def preprocess(self, inputs: Any, sampling_params: Any = None, disaggregated_params: Any = None) -> Any:
        """Token ids as they are; with pictures they become text, and the processor makes others."""
        if isinstance(inputs, dict) and inputs.get("multi_modal_data"):
            if sampling_params is not None:
                sampling_params.add_special_tokens = False
            return PreprocessedInputs(self.input_processor(inputs["prompt_token_ids"], inputs["multi_modal_data"]))
        return PreprocessedInputs(_prompt(inputs))

    def _check_health(self) -> bool:
        time.sleep(SWITCHES.health_blocks_s)
        return self._fatal is None and not self._down

    def shutdown(self) -> None:
        """Ends the executor. Idempotent."""
        time.sleep(SWITCHES.shutdown_blocks_s)
        if self._down and self._process.poll() is not None:
            return
        self._down = True
        with contextlib.suppress(OSError):
            self._socket.send_bytes(pickle.dumps(("stop", 0, None)))
        self._process.wait(30)
        self._thread.join()
        self._socket.close()

    def __reduce__(self) -> Any:
        raise TypeError("LLM cannot be pickled")

    def _capacity_tokens(self) -> int:
        if self.args.kv_cache_config.max_tokens is not None:
            return int(self.args.kv_cache_config.max_tokens)
        return int(self.args.max_batch_size * self._seq_len())

    def _seq_len(self) -> int:
        if self.args.max_seq_len is not None:
            return int(self.args.max_seq_len)
        config = json.loads((Path(self.args.model) / "config.json").read_text())
        return int(config["max_position_embeddings"])

    def _start(self) -> None:
        args = self.args
        dtype = args.dtype if args.dtype != "auto" else "float32"
        self._events_wanted = args.kv_cache_config.event_buffer_max_size > 0
        settings = {
            "model": args.model,
            "dp_size": args.tensor_parallel_size if args.enable_attention_dp else 1,
            "affinity": getattr(getattr(args, "attention_dp_config", None), _AFFINITY, False),
            "lora": None if args.lora_config is None else vars(args.lora_config),
            "guides": args.guided_decoding_backend,
            "drafts": _num_drafts(args.speculative_config),
            "dtype": dtype,
            "max_batch_size": min(args.max_batch_size, 64),
            "max_num_tokens": args.max_num_tokens,
            "max_seq_len": self._seq_len(),
            "tokens_per_block": args.kv_cache_config.tokens_per_block,
            "overlap": not args.disable_overlap_scheduler,
            "chunked": args.enable_chunked_prefill,
            "events": self._events_wanted,
            "hash_algo": getattr(args.kv_cache_config, "kv_cache_event_hash_algo", "auto"),
            "manager_v2": getattr(args.kv_cache_config, "use_kv_cache_manager_v2", "auto") is True,
            "stats": args.enable_iter_perf_stats,
            "total_blocks": self._capacity_tokens() // args.kv_cache_config.tokens_per_block,
        }
        ours, theirs = socket.socketpair()
        self._process = _start_executor(settings, theirs.fileno())
        theirs.close()
        self._socket = Connection(ours.detach())
        try:
            ready = self._socket.recv()
        except EOFError:
            self._process.wait(30)
            raise RuntimeError("the executor did not start") from None
        if ready != "ready":
            raise RuntimeError(ready)
        self._thread = threading.Thread(target=self._read, name="standin-reader", daemon=True)
        self._thread.start()

    def _send(self, payload: bytes) -> None:
        try:
            self._socket.send_bytes(payload)
        except OSError:
            self._die()

    def _abort(self, client_id: int) -> None:
        self._send(pickle.dumps(("abort", client_id, None)))

    def _read(self) -> None:
        while True:
            try:
                kind, client_id, body = self._socket.recv()
            except (EOFError, OSError):
                self._die()
                return
            if kind == "stats":
                self._stats.append(body)
            elif kind == "event":
                self._events.append(body)
            else:
                self._deliver(client_id, body)

    def _deliver(self, client_id: int, body: dict[str, Any]) -> None:
        with self._lock:
            result = self._results.get(client_id)
            if result is not None and body.get("last"):
                del self._results[client_id]
        if result is not None:
            result.push(body)

    def _die(self) -> None:
        """The executor is gone: what waits hears of it as of any background error that is not a
        request's.
        """
        if self._down:
            return
        self._fatal = RuntimeError("the executor process ended")
        self._down = True
        with self._lock:
            waiting, self._results = list(self._results.values()), {}
        for result in waiting:
            result.push(self._fatal)

    async def _drain(self, queue: list[dict[str, Any]], timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        deadline = time.monotonic() + (timeout or 0)
        while time.monotonic() < deadline:
            while queue:
                yield queue.pop(0)
            await asyncio.sleep(0.01)


class _OldLLM(_NewLLM):
    get_kv_cache_capacity = None  # type: ignore[assignment]
    _check_health = None  # type: ignore[assignment]

    def generate_async(  # type: ignore[override]
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        return super().generate_async(
            inputs,
            sampling_params,
            lora_request,
            streaming=streaming,
            disaggregated_params=disaggregated_params,
            scheduling_params=scheduling_params,
            cache_salt=cache_salt,
        )


LLM: Any = _OldLLM if SWITCHES.is_old else _NewLLM
if SWITCHES.is_old:
    for _name in ("get_kv_cache_capacity", "_check_health"):
        delattr(_OldLLM, _name)
        delattr(_NewLLM, _name)
LLM.__name__ = LLM.__qualname__ = "LLM"


def _prompt(inputs: Any) -> list[int]:
    if isinstance(inputs, dict):
        inputs = inputs.get("prompt_token_ids")
    if not isinstance(inputs, list) or not inputs or not all(type(token) is int for token in inputs):
        raise TypeError("the stand-in takes token ids")
    return inputs


def _num_drafts(config: Any) -> int:
    """Tokens that are drafted for a step, 0 without speculative decoding."""
    return 0 if config is None else config.max_draft_len or getattr(config, "num_nextn_predict_layers", None) or 1


def _generation_config(model: Path) -> dict[str, Any]:
    path = model / "generation_config.json"
    return json.loads(path.read_text()) if path.is_file() else {}  # type: ignore[no-any-return]


def _end_ids(model: Path) -> list[int]:
    found = _generation_config(model).get("eos_token_id")
    return [] if found is None else found if isinstance(found, list) else [found]


def _tokenizer_end(model: Path) -> int | None:
    """The tokenizer's end token, None without a tokenizer."""
    if not (model / "tokenizer_config.json").is_file():
        return None
    name = json.loads((model / "tokenizer_config.json").read_text()).get("eos_token")
    added = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    return next((token["id"] for token in added if token["content"] == name), None)


def _start_executor(settings: dict[str, Any], fileno: int) -> Any:
    """A `subprocess.Popen`, or what stands for one where processes are forked (`warm_start`)."""
    arguments = ["-m", "tensorrt_llm.standin_executor", json.dumps(settings)]
    if "TRTLLM_STANDIN_FORKS" in os.environ:
        from warm_start import WarmProcess

        return WarmProcess(arguments, _environment(), fds=[fileno])
    return subprocess.Popen([sys.executable, *arguments, str(fileno)], pass_fds=[fileno], env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
