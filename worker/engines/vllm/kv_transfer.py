"""KV transfers between vLLM engines by their ``NixlConnector``: a prefill worker's engine keeps a
prompt's blocks under a lease, and a decode worker's engine pulls them.

vLLM renews a lease by heartbeats of the engine that waits to pull, and frees the blocks when the
lease is over. Its pull does not look whether the blocks are still the prompt's; so each hand-off
says when its lease ends by the clock of the prefill worker, which vLLM's engines compare when they
connect, and a pull that would begin later fails (`WorkerExtension.arm_lease_check`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from typing import Any

from worker.engines import EngineRequest, KeepKv, ReadKv
from worker.engines.vllm.loads import LoadReports
from worker.engines.vllm.requests import RunningRequest
from worker.engines.vllm.settings import VllmConfig
from worker.errors import KV_TRANSFER_FIELD, InvalidRequest, RequestFailed, StartupError, one_line, shown

logger = logging.getLogger(__name__)

PARAMS = "kv_transfer_params"
"""Key in ``extra_args`` and attribute of outputs: vLLM's own parameters of a transfer."""

KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
"""Parameters of a request whose KV another engine will pull."""

_ENDS = "remote_blocks_expiry_time"
_NEEDED = (
    *("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"),
    *("remote_num_tokens", "tp_size"),
)


@dataclass(frozen=True, slots=True)
class KvFacts:
    """Facts that must be the same on both sides of a transfer.

    Attributes:
        vllm: Version of vLLM.
        model: Digest of the checkpoint.
        model_path: Directory of the checkpoint, which vLLM compares too.
        dtype: Data type of the model.
        kv_cache_dtype: vLLM's ``cache_dtype``.
        block_size: Tokens of a block.
    """

    vllm: str
    model: str
    model_path: str
    dtype: str
    kv_cache_dtype: str
    block_size: int

    @classmethod
    def of(cls, config: Any, version: str, model: str) -> KvFacts:
        """The facts of an engine with this ``VllmConfig``."""
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        cache = config.cache_config
        return cls(version, model, str(config.model_config.model), dtype, str(cache.cache_dtype), int(cache.block_size))


class KvTransfers:
    """This engine's side of KV transfers.

    Args:
        role: ``prefill`` or ``decode``.
        facts: Facts that the other side must share.
        lease_s: Length of a lease, seconds.
        loads: Load of the engine, with its connector's statistics.

    Attributes:
        counts: Transfers by outcome, and local prefills by reason; see `worker.disaggregation`.
    """

    def __init__(self, role: str, facts: KvFacts, lease_s: float, loads: LoadReports) -> None:
        self.role = role
        self.counts: Counter[str] = Counter()
        self._facts, self._lease_s, self._loads = facts, lease_s, loads
        self._leases: deque[float] = deque()  # times of hand-offs whose first lease is not over

    @classmethod
    async def of(
        cls, llm: Any, config: VllmConfig, version: str, digest: Future[str], loads: LoadReports
    ) -> KvTransfers:
        """The transfers of a loaded engine whose connector looks when leases end.

        Args:
            llm: The library's ``AsyncLLM``.
            config: Settings of a prefill or decode worker.
            version: Version of vLLM.
            digest: Digest of the checkpoint, to come.
            loads: Load of the engine.

        Raises:
            StartupError: the connector does not look, or the checkpoint cannot be read.
        """
        for problem in await llm.collective_rpc("arm_lease_check"):
            if problem is not None:
                reason = f"its NixlConnector does not look whether a lease is over: {problem}"
                raise StartupError(f"--disaggregation-mode {config.role}: vLLM {version}: {reason}")
        try:
            model = await asyncio.wrap_future(digest)
        except (OSError, ValueError) as error:
            raise StartupError(f"--model-path: the checkpoint cannot be read: {one_line(error)}") from error
        return cls(config.role, KvFacts.of(llm.vllm_config, version, model), config.kv_lease_s, loads)

    def take_part(self, running: RunningRequest, request: EngineRequest, adapter: str | None) -> None:
        """Note what a request's part in a transfer asks of its stream.

        Args:
            running: The stream.
            request: The request.
            adapter: Digest of its LoRA adapter, None for the model itself.

        Raises:
            InvalidRequest: the transfer is not for this engine, or cannot be made.
        """
        kv = request.kv
        if isinstance(kv, KeepKv | ReadKv) and isinstance(kv, KeepKv) != (self.role == "prefill"):
            raise InvalidRequest(KV_TRANSFER_FIELD, f"this is a {self.role} worker")
        if isinstance(kv, KeepKv) and request.params.prompt_logprobs is not None:
            problem = "vLLM reports none of a prompt whose KV another worker computed; ask an aggregated worker"
            raise InvalidRequest("output_options.prompt_logprobs", problem)
        if isinstance(kv, ReadKv):
            running.pulls = self.read(kv.handle, len(request.token_ids), adapter)
            running.mode = "disaggregated"
        elif self.role == "decode":
            running.mode = "local prefill"

    def note_received(self, running: RunningRequest) -> None:
        """The request's KV is here. Idempotent."""
        if running.pulls is not None:
            running.pulls = None
            self.counts["received"] += 1

    def note_lost(self, running: RunningRequest) -> None:
        """The request's KV does not come: its prompt is computed here."""
        logger.warning("request %s: its KV cannot be pulled, its prompt is computed here", running.request_id)
        running.pulls, running.mode = None, "local prefill"
        self.counts["lost"] += 1

    def note_cancelled(self, running: RunningRequest) -> None:
        """The request has ended; nothing if it did not wait for its KV any more."""
        if running.pulls is not None:
            self.counts["cancelled"] += 1

    def hand_off(self, output: Any, adapter: str | None) -> dict[str, Any]:
        """The handle of a prompt's KV, JSON data.

        Args:
            output: The last ``RequestOutput`` of a request with `KEEP`.
            adapter: Digest of its LoRA adapter, None for the model itself.

        Raises:
            RequestFailed: vLLM keeps no KV for it.
        """
        params = dict(getattr(output, PARAMS, None) or {})
        if not params.get("do_remote_prefill") or any(params.get(name) is None for name in _NEEDED):
            raise RequestFailed("vLLM keeps no KV of the prompt")
        now = time.perf_counter()
        sampled = getattr(output.metrics, "last_token_ts", 0.0)  # the same clock, in the engine's process
        params[_ENDS] = (min(now, sampled) if sampled else now) + self._lease_s
        self._leases.append(time.monotonic())
        self.counts["leased"] += 1
        return {"engine": "vllm", "facts": asdict(self._facts), "adapter": adapter, "params": params}

    def read(self, handle: Mapping[str, Any], num_tokens: int, adapter: str | None) -> dict[str, Any]:
        """vLLM's parameters for pulling the KV of a handle.

        Args:
            handle: The result of another worker's `hand_off`.
            num_tokens: Length of the prompt.
            adapter: Digest of the request's LoRA adapter, None for the model itself.

        Raises:
            InvalidRequest: the other engine is not like this one; the field is named.
        """
        where = f"{KV_TRANSFER_FIELD}.kv"
        if handle.get("engine") != "vllm":
            raise InvalidRequest(f"{where}.engine", f"must be vllm, got {shown(handle.get('engine'))}")
        theirs, params = handle.get("facts"), handle.get("params")
        for name, value in (("facts", theirs), ("params", params)):
            if not isinstance(value, Mapping):
                raise InvalidRequest(f"{where}.{name}", f"must be a mapping, got {shown(value)}")
        assert isinstance(theirs, Mapping)
        assert isinstance(params, Mapping)
        for field in fields(KvFacts):
            ours = getattr(self._facts, field.name)
            if theirs.get(field.name) != ours:
                problem = f"the prefill worker has {shown(theirs.get(field.name))}, and this decode worker {ours!r}"
                raise InvalidRequest(f"{where}.facts.{field.name}", problem)
        if handle.get("adapter") != adapter:
            problem = f"the prefill worker has {shown(handle.get('adapter'))}, and this decode worker {adapter!r}"
            raise InvalidRequest(f"{where}.adapter", problem)
        for name in (*_NEEDED, _ENDS):
            if params.get(name) is None:
                raise InvalidRequest(f"{where}.params.{name}", "is missing")
        if params["remote_num_tokens"] != num_tokens:
            problem = f"must be {num_tokens}, the length of the prompt, got {shown(params['remote_num_tokens'])}"
            raise InvalidRequest(f"{where}.params.remote_num_tokens", problem)
        return dict(params)

    def measured(self) -> dict[str, float]:
        """The counts, with bytes, seconds and ended leases from vLLM's own statistics."""
        return {**self.counts, **self._loads.transfers}

    def num_leased(self) -> int:
        """Prompts whose KV is kept, at most; 0 exactly if none is.

        vLLM reports blocks, not leases: a lease that ended early counts on while others last.
        """
        while self._leases and time.monotonic() - self._leases[0] > self._lease_s:
            self._leases.popleft()
        load = self._loads.load()
        if not load.num_used_blocks and not load.num_running and not load.num_waiting:
            return 0
        return max(len(self._leases), int(load.num_used_blocks > 0 and not load.num_running and not load.num_waiting))
