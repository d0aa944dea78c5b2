"""A double of vLLM's ``AsyncLLM`` that applies the chains that it is given, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from adapters.vllm.extension import Extension
from adapters.vllm.indexed import Indexed
from adapters.vllm.model import ModelFacts
from adapters.vllm.rows import RowEditor
from worker.engines import EngineRequest, TokenDelta
from worker.engines.vllm import VllmConfig, VllmEngine
from worker.engines.vllm.chain_receiver import ChainReceiver
from worker.engines.vllm.package import Package

VOCAB_SIZE = 64
EOS = 1
PICTURE, PICTURE_TOKENS = 7, 20
"""Id of a picture's tokens, and how many it becomes beside its place."""
CONTEXT = 96
CONFIG = SimpleNamespace(
    use_v2_model_runner=False,
    model_config=SimpleNamespace(
        skip_tokenizer_init=True,
        served_model_name="fake",
        model="fake",
        tokenizer=None,
        logprobs_mode="raw_logprobs",
        dtype=torch.float32,
        quantization=None,
        max_model_len=CONTEXT,
        get_vocab_size=lambda: VOCAB_SIZE,
        try_get_generation_config=lambda: {"eos_token_id": EOS},
    ),
    cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=100, cache_dtype="auto"),
    scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64, policy="priority"),
    kv_events_config=None,
    device_config=SimpleNamespace(device_type="cpu"),
)


class Died(Exception):
    """vLLM's engine died."""


class Busy(Exception):
    """A queue of vLLM's own is full."""


@dataclass
class FakeParams:
    """The fields of ``SamplingParams`` that the engine sets."""

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    output_kind: Any = None
    extra_args: dict[str, Any] | None = None


def raw_logits(tokens: list[int]) -> torch.Tensor:
    """The model: logits of the next token, float32 ``[1, V]``; the end token is unlikely."""
    generator = torch.Generator().manual_seed(sum((i + 1) * token for i, token in enumerate(tokens)))
    logits = torch.randn(1, VOCAB_SIZE, generator=generator)
    logits[0, EOS] -= 5.0
    return logits


class FakeLlm:
    """Decodes one request at a time.

    Attributes:
        prompts: Prompts that `generate` was given, in order.
        params: Parameters of each call.
        hints: Other arguments of each call.
        aborted: Names of requests whose stream was closed early.
        errored: Whether the engine is dead.
        gate: Steps wait for it.
        answers: Calls of the engine's processes wait for it.
        failure: Raised at the first step, if set.
        loggers: Loggers of statistics.
        adapters: LoRA adapters that were loaded.
        kept: Names of requests whose KV is kept for another engine.
        unreachable: Whether KV of other engines cannot be pulled.
        cannot_check: The problem with the check of leases, if it has one.
        output_handler: Task that reads outputs, from the first request on.
        reads_at_end: Whether it was reading when the processes ended, which vLLM logs as an error.
    """

    vllm_config = CONFIG
    tokenizer = SimpleNamespace(eos_token_id=EOS)

    def __init__(self) -> None:
        self.prompts: list[Mapping[str, Any]] = []
        self.params: list[FakeParams] = []
        self.hints: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.errored = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.failure: Exception | None = None
        self.is_shut_down = False
        self.loggers: list[Any] = []
        self.adapters: list[Any] = []
        self.kept: list[str] = []
        self.unreachable = False
        self.cannot_check: str | None = None
        self.output_handler: asyncio.Task[Any] | None = None
        self.reads_at_end = False
        self._generator = torch.Generator().manual_seed(0)
        self._receiver = ChainReceiver(ModelFacts.of(CONFIG))
        self._extension = Extension()

    @classmethod
    def from_engine_args(cls, arguments: Any, stat_loggers: list[Any]) -> FakeLlm:
        made = cls()
        made.loggers = [factory(CONFIG, 0) for factory in stat_loggers]
        return made

    async def generate(
        self, prompt: Mapping[str, Any], params: FakeParams, request_id: str, **hints: Any
    ) -> AsyncIterator[Any]:
        self.prompts.append(prompt)
        self.params.append(params)
        self.hints.append(hints)
        self.output_handler = self.output_handler or asyncio.create_task(asyncio.sleep(3600))
        pictures = prompt.get("multi_modal_data", {}).get("image", ())
        given, output = [*[PICTURE] * PICTURE_TOKENS * len(pictures), *prompt["prompt_token_ids"]], list[int]()
        batch = Indexed(self._receiver, RowEditor([]))
        request = batch.new(params, given, output)  # type: ignore[arg-type]
        batch.requests = {} if request is None else {0: request}
        reason = None
        transfer = (params.extra_args or {}).get("kv_transfer_params") or {}
        try:
            while reason is None:
                await self.gate.wait()
                if transfer.get("do_remote_prefill") and self.unreachable:
                    yield self._failed()
                    return
                if self.failure is not None:
                    raise self.failure
                raw = raw_logits([*given, *output])
                logits = self._controlled(params, raw, given, output)
                batch.apply(logits)
                output.append(self._chosen(params, logits))
                reason = self._reason(params, output)
                if transfer.get("do_remote_decode"):
                    self.kept.append(request_id)
                made = self._output(params, raw, given, output, reason)
                made.kv_transfer_params = _params_of(request_id, len(given)) if request_id in self.kept else None
                yield made
                if reason is None:
                    await asyncio.sleep(0)
        except GeneratorExit:  # vLLM sends an abort, also for one that has ended
            self.aborted.append(request_id)
            raise
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise

    def _controlled(self, params: FakeParams, raw: torch.Tensor, given: list[int], output: list[int]) -> torch.Tensor:
        """Logits with the controls that the engine's probes try."""
        logits = raw.clone()
        seen = sorted({*given, *output})
        penalty = params.repetition_penalty
        logits[0, seen] = torch.where(logits[0, seen] > 0, logits[0, seen] / penalty, logits[0, seen] * penalty)
        if len(output) < params.min_tokens:
            logits[0, params.stop_token_ids] = -torch.inf
        return logits

    def _chosen(self, params: FakeParams, logits: torch.Tensor) -> int:
        """The most likely token if it is the only one left, else a sampled one."""
        if params.temperature == 0 or params.top_k == 1 or params.top_p < 1e-3 or params.min_p == 1:
            return int(logits.argmax())
        shares = (logits[0] / params.temperature).softmax(-1)
        return int(torch.multinomial(shares, 1, generator=self._generator))

    def _reason(self, params: FakeParams, output: list[int]) -> str | None:
        if output[-1] in params.stop_token_ids:
            return "stop"
        return "length" if len(output) == params.max_tokens else None

    def _output(
        self, params: FakeParams, raw: torch.Tensor, given: list[int], output: list[int], reason: str | None
    ) -> Any:
        choice = SimpleNamespace(
            token_ids=output[-1:],
            finish_reason=reason,
            stop_reason=output[-1] if reason == "stop" else None,
            logprobs=None if params.logprobs is None else [logprobs_of(raw, output[-1], params.logprobs)],
        )
        scores = None
        if params.prompt_logprobs is not None:
            scores = [None] + [
                logprobs_of(raw_logits(given[:i]), given[i], params.prompt_logprobs) for i in range(1, len(given))
            ]
        times = SimpleNamespace(num_preemptions=0, scheduled_ts=1.5, last_token_ts=time.perf_counter())
        return SimpleNamespace(
            outputs=[choice],
            finished=reason is not None,
            prompt_token_ids=given,
            prompt_logprobs=scores,
            num_cached_tokens=3,
            metrics=times,
        )

    def _failed(self) -> Any:
        choice = SimpleNamespace(token_ids=[], finish_reason="error", stop_reason=None, logprobs=None)
        return SimpleNamespace(outputs=[choice], finished=True, prompt_logprobs=None, num_cached_tokens=0, metrics=None)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        await asyncio.sleep(0)
        await self.answers.wait()
        if method == "arm_lease_check":
            return [self.cannot_check]
        return [getattr(self._extension, method)(*args)]

    async def add_lora(self, adapter: Any) -> None:
        self.adapters.append(adapter)

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.reads_at_end = self.output_handler is not None and not self.output_handler.done()


def _params_of(name: str, num_tokens: int) -> dict[str, Any]:
    """vLLM's own, for a prompt whose KV is kept."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "prefill-engine",
        "remote_request_id": name,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
    }


def logprobs_of(raw: torch.Tensor, token_id: int, count: int) -> dict[int, Any]:
    """The token and the top ``count``, as vLLM's ``Logprob`` by token id."""
    values = raw[0].log_softmax(-1)
    order = values.argsort(descending=True, stable=True).tolist()
    wanted = dict.fromkeys([token_id, *order[:count]])
    return {each: SimpleNamespace(logprob=float(values[each]), rank=order.index(each) + 1) for each in wanted}


def package() -> Package:
    """What `read_package` would find."""
    return Package(
        version="0.0",
        async_llm=FakeLlm,
        engine_args=lambda **arguments: arguments,
        engine_fields=frozenset(
            {
                *("model", "generation_config", "logits_processors", "logprobs_mode", "max_logprobs", "dtype"),
                *("scheduling_policy", "worker_extension_cls", "enable_log_requests", "max_num_seqs"),
                *("kv_transfer_config", "seed", "kv_cache_memory_bytes"),
            }
        ),
        sampling_params=FakeParams,
        tokens_prompt=dict,
        delta="delta",
        dead_error=Died,
        client_errors=(ValueError,),
        busy_errors=(Busy,),
        lora_request=SimpleNamespace,
        kv_transfer_config=SimpleNamespace,
        is_cpu=True,
    )


@contextlib.asynccontextmanager
async def running(
    config: VllmConfig | None = None, found: Package | None = None, digest: str = "digest of the checkpoint"
) -> AsyncIterator[tuple[VllmEngine, FakeLlm]]:
    """The engine on the double, started; ``digest`` is that of its checkpoint."""
    read = package if found is None else lambda: found
    known = Future[str]()
    known.set_result(digest)
    engine = VllmEngine(config or VllmConfig(model_path="fake"), read, lambda: known)
    try:
        await engine.start()
        llm: FakeLlm = engine._llm
        llm.params.clear()
        llm.prompts.clear()
        llm.hints.clear()
        llm.aborted.clear()
        yield engine, llm
    finally:
        await engine.stop()


async def collect(engine: VllmEngine, request: EngineRequest) -> TokenDelta:
    """The whole answer, with what its last delta has."""
    whole = TokenDelta()
    async with contextlib.aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            delta.prepend(whole)
            whole = delta
    return whole
