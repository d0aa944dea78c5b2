"""A request that is alone in vLLM: its tokens, from logits that vLLM does not show."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from adapters.catalog import Selection
from worker.arguments import Arguments
from worker.build import check_model, make_engine, with_checkpoint
from worker.engines import EngineInfo, ServingEngine
from worker.errors import ConfigurationError, InvalidRequest
from worker.installation import check_engine
from worker.processors.builder import ServedChainBuilder, make_chain_builder
from worker.replay.run import Replayed, prepared
from worker.requests.receipts import ServerRecord, digest_of_model
from worker.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine that serves one request.

    Attributes:
        engine: The engine.
        info: Description of the engine.
        server: Record of the worker in receipts.
        chains: Builder of the request's chain.
    """

    engine: ServingEngine
    info: EngineInfo
    server: ServerRecord
    chains: ServedChainBuilder

    async def replay(
        self,
        prompt: list[int],
        params: SamplingParams,
        selection: Selection,
        choice: int,
        num_tokens: int,
        lora_name: str | None = None,
    ) -> Replayed:
        """Decode at most ``num_tokens`` tokens, an end token too, of the model or an adapter; see
        `LoadedModel.request`.
        """
        request = await prepared(self.chains, self.info, "replay", prompt, params, selection, choice)
        request = replace(request, lora_name=lora_name)
        tokens: list[int] = []
        async with contextlib.aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                tokens += delta.sampled_ids
                if len(tokens) >= num_tokens:
                    return Replayed(tokens[:num_tokens], None)
                if delta.error is not None:
                    return Replayed(tokens, delta.error)
        return Replayed(tokens, None)


@asynccontextmanager
async def started(arguments: Arguments) -> AsyncIterator[StartedEngine]:
    """The engine of the options, with its processes.

    Raises:
        ServingError: it cannot be started, or a request to it is refused.
    """
    try:
        check_engine(arguments)
    except ConfigurationError as error:
        hint = "run this in the environment that has it, or give --engine embedded for a replay on its kernels"
        raise ConfigurationError(f"{error}; {hint}") from None
    check_model(arguments)
    arguments = with_checkpoint(arguments)
    engine, digest = make_engine(arguments), digest_of_model(arguments)
    try:
        info = await engine.start()
        chains = make_chain_builder(arguments, info, CollectorRegistry(), renders_templates=True)
        try:
            yield StartedEngine(engine, info, ServerRecord.of(info, arguments, digest), chains)
        finally:
            await chains.close()
    except InvalidRequest as error:
        raise ConfigurationError(f"request: {error}") from None
    finally:
        await engine.stop()
