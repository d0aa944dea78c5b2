"""`Preparation`: turns a request as a runtime brings it into an `EngineRequest`."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from adapters.catalog import Selection
from worker.arguments import Arguments
from worker.engines import EngineInfo, EngineRequest, ReadKv, RequestHints
from worker.engines.request import KvPart
from worker.errors import InvalidRequest, shown
from worker.processors.builder import ServedChainBuilder
from worker.processors.smoke import SmokeTest
from worker.requests.continuation import COMPUTED_WITH, ControlDigests
from worker.requests.control_digests import control_digests
from worker.requests.fields import SEED_BITS
from worker.requests.receipts import RequestReceipt, ServerRecord
from worker.requests.request import GenerationRequest, RequestLimits, parse_request
from worker.requests.sampling_defaults import SamplingDefaults
from worker.sampling.field_processors import for_engine

MakeChains = Callable[[Arguments, EngineInfo, CollectorRegistry], ServedChainBuilder]


class Preparation:
    """Prepares requests for one loaded model.

    Attributes:
        info: Description of the engine.
        chains: Builder of the model's chains.
    """

    def __init__(
        self,
        info: EngineInfo,
        chains: ServedChainBuilder,
        server: ServerRecord,
        role: str,
        smoke: SmokeTest | None,
        defaults: SamplingDefaults,
        *,
        has_records: bool = False,
    ) -> None:
        """``server`` is the record of the worker in receipts; ``role`` its disaggregation mode;
        ``has_records`` says whether there are boundary records.
        """
        self.info = info
        self.chains = chains
        self._server = server
        self._role = role
        self._smoke = smoke
        self._defaults = defaults
        self._has_records = has_records
        self._limits = RequestLimits(
            info.context_length,
            info.vocab_size,
            info.eos_token_ids,
            info.made_by,
            info.kv_dtype,
            info.takes_images,
            only_prefills=role == "prefill",
        )
        self._seeds = random.Random(secrets.randbits(128))  # SystemRandom would release the interpreter each time

    @classmethod
    async def load(
        cls,
        info: EngineInfo,
        arguments: Arguments,
        digest: Future[str],
        registry: CollectorRegistry,
        *,
        make_chains: MakeChains,
        smoke: bool,
    ) -> Preparation:
        """Load the tokenizer, the catalogue and the policy of an engine that has started.

        Args:
            info: Description of the engine.
            arguments: Options of the worker.
            digest: Digest of the checkpoint, for receipts.
            registry: Registry of the metrics.
            make_chains: Makes the chain builder, in a thread.
            smoke: Whether every answer is ``Hello world!``.

        Raises:
            StartupError: one of them cannot be loaded.
        """
        chains = await asyncio.to_thread(make_chains, arguments, info, registry)
        try:
            server = await asyncio.to_thread(ServerRecord.of, info, arguments, digest)
            eos = info.eos_token_ids[0] if info.eos_token_ids else None
            defaults = await asyncio.to_thread(SamplingDefaults.load, arguments)
            test = await asyncio.to_thread(SmokeTest, arguments.model_path, eos) if smoke else None
        except BaseException:
            await chains.close()
            raise
        has_records = arguments.migration == "on"
        return cls(info, chains, server, arguments.disaggregation_mode, test, defaults, has_records=has_records)

    @property
    def model_digest(self) -> str:
        """Digest of the checkpoint, empty if it cannot be read."""
        return self._server.model_digest or ""

    def parse(
        self, raw: Mapping[str, Any], metadata: Mapping[str, str], weights: str
    ) -> tuple[GenerationRequest, Selection]:
        """The typed request, and its processors.

        Args:
            raw: The request, as the runtime brings it.
            metadata: The runtime's metadata, where processors may be selected too.
            weights: `WeightVersion.updated_digest` of the engine's weights.

        Raises:
            InvalidRequest: a field is wrong, or another engine's answer would not go on here.
        """
        request = parse_request(raw, self._limits)
        if request.lora_name is not None:
            request = replace(request, lora_digest=self._digest(request.lora_name))
        selection = self.chains.select(request, metadata)
        if self.info.draft_model and self.chains.needs_draft_model(selection):
            request = replace(request, draft_model=self.info.draft_model)
        if self._has_records or request.continues is not None or COMPUTED_WITH in request.annotations:
            request = replace(request, controls=self._controls(request, selection))
        if request.continues is not None:
            request.continues.check_digests(weights, request.beside_model)
            request.continues.check_controls(request.controls)
        return request, selection

    def _controls(self, request: GenerationRequest, selection: Selection) -> ControlDigests:
        """The worker's part in the controls of a request."""
        builder = self.chains.builder
        is_whole = request.continues is not None or COMPUTED_WITH in request.annotations  # of OpenEngine
        return control_digests(
            request.params,
            selection,
            catalog=builder.catalog,
            model=builder.model,
            defaults=self._defaults,
            end_token_ids=self.info.eos_token_ids,
            max_tokens=request.params.max_tokens if is_whole else None,
        )

    def _digest(self, lora_name: str) -> str:
        """Digest of the adapter of this name. Raises `InvalidRequest` if there is none."""
        digest = self.info.adapters.get(lora_name)
        if digest is None:
            served = ", ".join(sorted(self.info.adapters)) or "none"
            problem = f"this worker has no LoRA adapter {shown(lora_name)}; it has {served}"
            raise InvalidRequest("routing.lora_name", problem)
        return digest

    def without_chain(
        self,
        request_id: str,
        request: GenerationRequest,
        selection: Selection,
        choice: int,
        kv: KvPart | None,
        hints: RequestHints,
    ) -> EngineRequest:
        """The request as the engine gets it, but without its chain."""
        seed = self._seed(request, kv)
        is_fixed = self.info.draws_by_seed or selection.receipt  # the seed in a receipt is that of its tokens
        callables = self._smoke.processors(len(request.prompt_token_ids)) if self._smoke else None
        own = seed if is_fixed else request.params.seed
        params, defaulted = self._defaults.fill(request.params, {one.name for one in selection.processors})
        if params.min_tokens is not None and params.max_tokens is not None:  # the answer's fewest, and a prefill's most
            params = params.with_values(min_tokens=min(params.min_tokens, params.max_tokens))
        return EngineRequest(
            request_id,
            request.prompt_token_ids,
            for_engine(params, seed=own, logits_processor=callables),
            generated_token_ids=request.generated_token_ids,
            seed=seed,
            choice=choice,
            hidden_end_ids=params.end_token_ids - request.shown_stop_token_ids,
            kv=kv,
            cache_salt=request.cache_salt,
            lora_name=request.lora_name,
            images=request.images,
            lora_digest=request.lora_digest,
            draft_model=request.draft_model,
            hints=hints,
            defaulted=defaulted,
        )

    async def with_chain(self, engine_request: EngineRequest, selection: Selection) -> EngineRequest:
        """The request with its chain; see `ServedChainBuilder.prepare`."""
        budget = engine_request.params.max_tokens
        if self._role == "prefill":  # it generates one token, but its chain is that of the answer
            budget = self.info.context_length - len(engine_request.prompt_token_ids)
        return await self.chains.prepare(engine_request, selection, budget)

    def receipt(self, engine_request: EngineRequest, selection: Selection) -> RequestReceipt | None:
        """The receipt of a request, None if it wants none."""
        if not selection.receipt:
            return None
        return RequestReceipt(self._server, engine_request, selection, smoke=self._smoke is not None)

    def _seed(self, request: GenerationRequest, kv: KvPart | None) -> int:
        """The client's seed, else the prefill worker's if it came with the KV, else a new one."""
        if request.params.seed is not None:
            return request.params.seed
        handed_over = kv.handle.get("seed") if isinstance(kv, ReadKv) else None
        return handed_over if isinstance(handed_over, int) else self._seeds.getrandbits(SEED_BITS)
