"""Workers of the golden matrix, in this process: the product's own `WorkerEngine` on an engine,
with nothing but the runtime left out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.llm.exceptions import InvalidArgument
from golden_cases import THIRD_PARTIES, Case
from prometheus_client import CollectorRegistry

from adapters.testing.kit_model import KEY_ID
from worker.arguments import Arguments, parse_arguments
from worker.build import make_engine
from worker.disaggregation.seal import Seal
from worker.engines import EngineInfo, ServingEngine
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.engines.embedded.plan import Model, Output, Plan
from worker.engines.embedded.serving.engine import load_for_serving
from worker.engines.embedded.speculation.speculator import Speculator
from worker.engines.embedded.step import Stepper
from worker.processors.builder import ServedChainBuilder, make_chain_builder
from worker.requests.request import GenerationRequest, RequestLimits
from worker.runtimes.dynamo_engine import WorkerEngine

EXACT = ("--numerics", "exact")
"""Options of every embedded engine, beside its device."""

NGRAMS: Mapping[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
"""Settings of ``--speculative-config`` of workers that draft."""

DTYPE = "float32"

KEY = bytes(range(32))
SEAL = Seal("the secret of the golden matrix, and of no other pool")

_numbers = itertools.count()


def new_id() -> str:
    """A request id that nobody has had."""
    return f"golden-{next(_numbers)}"


class Refused(Exception):
    """A worker refuses the request before its first token; the message is what the client gets."""


class Failed(Exception):
    """A request failed after it was accepted."""


class Context:
    """The runtime's part of one request."""

    def __init__(self, request_id: str | None = None) -> None:
        self._id = request_id or new_id()
        self.metadata: dict[str, str] = {}

    def id(self) -> str:
        return self._id

    def trace_headers(self) -> None:
        return None


class LocalWorker:
    """One worker without a runtime around it.

    Attributes:
        engine: What it serves.
    """

    def __init__(self, served: WorkerEngine) -> None:
        self._served = served
        self.engine: Any = served.server.engine

    async def chunks(self, raw: Mapping[str, Any], request_id: str | None = None) -> list[dict[str, Any]]:
        """Everything that the worker streams.

        Raises:
            Refused: before the first chunk.
            Failed: after it.
        """
        found: list[dict[str, Any]] = []
        try:
            async for chunk in self._served.generate(raw, Context(request_id)):
                found.append(chunk)
        except InvalidArgument as error:
            if not found:
                raise Refused(str(error)) from error
            raise Failed(f"{error} (after {len(found)} chunks)") from error
        return found

    async def tokens(self, raw: Mapping[str, Any], request_id: str | None = None) -> list[int]:
        """The token ids of an answer."""
        return [token_id for chunk in await self.chunks(raw, request_id) for token_id in chunk["token_ids"]]

    def parsed(self, raw: Mapping[str, Any]) -> GenerationRequest:
        """The request as this worker takes it."""
        preparation = self._served.server.preparation
        assert preparation is not None
        return preparation.parse(raw, {}, "")[0]

    @property
    def info(self) -> EngineInfo:
        """What its engine is."""
        return self._served.server.info

    @property
    def num_continued(self) -> int:
        """Requests that went on here after another worker."""
        return int(self._served.server.metrics.registry.get_sample_value("dlw_continued_requests_total") or 0)

    async def stop(self) -> None:
        await self.engine.stop()


class Bench:
    """Starts the workers of a run, all with the same model and the same operator.

    Args:
        model: Directory of the checkpoint.
        directory: For the operator's files; empty.
        is_large: Whether the model takes so long that texts and prompts are short, and answers are
            not cut after every token. It computes in float32, as the tiny model does.

        kv_cache_dtype: Option of every embedded engine.
        device: Option of every embedded engine.

    Attributes:
        info: Of the first engine that was started.
        chains: The chain builder that all workers share: one sandbox, one tokenizer.
    """

    def __init__(
        self, model: Path, directory: Path, *, is_large: bool = False, kv_cache_dtype: str = "auto", device: str = "cpu"
    ) -> None:
        self.model = model
        self.device = device
        self.kv_cache_dtype = kv_cache_dtype
        self.directory = directory
        self.is_large = is_large
        self.info: EngineInfo | None = None
        self.chains: ServedChainBuilder | None = None
        (directory / "key").write_text(KEY.hex())
        self.policy = directory / "policy.yaml"
        self.policy.write_text(f"keys:\n  {KEY_ID}: {{file: {directory / 'key'}}}\n")

    @property
    def limits(self) -> RequestLimits:
        """What the engines allow, once one of them has been started."""
        assert self.info is not None
        return RequestLimits(self.info.context_length, self.info.vocab_size, self.info.eos_token_ids)

    @property
    def argv(self) -> list[str]:
        """Options of every worker."""
        third_parties = ",".join(f"{name}={target}" for name, target in THIRD_PARTIES.items())
        # whether a processor is over its budget must not depend on how busy the machine is
        patient = ["--processor-step-budget-s", "60", "--grammar-timeout-s", "60"]
        operator = ["--processor-policy", str(self.policy), "--logits-processor", third_parties]
        return ["--model-path", str(self.model), "--dtype", DTYPE, *patient, *operator]

    def drafting(self, **settings: Any) -> list[str]:
        """Options of an embedded engine whose draft model is the model itself, with which
        `contrastive` contrasts it at another temperature. Without settings it drafts from chains
        alone.
        """
        return ["--speculative-config", json.dumps({"model": str(self.model), "method": "none", **settings})]

    def arguments(self, *argv: str) -> Arguments:
        """Options of a worker."""
        drafts = [] if "--speculative-config" in argv else self.drafting()
        embedded = ["--device", self.device, *EXACT, *drafts, "--kv-cache-dtype", self.kv_cache_dtype]
        return parse_arguments([*self.argv, *([] if "--engine" in argv else embedded), *argv], {})

    async def worker(self, *argv: str, engine: ServingEngine | None = None) -> LocalWorker:
        """A worker that serves; ``engine`` takes the place of the one that its options choose."""
        arguments = self.arguments(*argv)
        served = WorkerEngine(
            engine or make_engine(arguments), arguments, seal=SEAL, shut_down=_never, make_chains=self._chains
        )
        await served.start(1)
        return LocalWorker(served)

    def _chains(self, arguments: Arguments, info: EngineInfo, registry: CollectorRegistry) -> ServedChainBuilder:
        if self.chains is None:
            self.info = info
            self.chains = make_chain_builder(arguments, info, registry)
        return self.chains

    async def close(self) -> None:
        """End the sandbox; the workers have been stopped."""
        if self.chains is not None:
            await self.chains.close()


def _never() -> None:
    raise AssertionError("a worker of the golden matrix broke")


class PreemptedEngine(EmbeddedEngine):
    """Preempts every decoding request after every step, and forgets its KV at every other one.

    Attributes:
        num_preemptions: So far.
    """

    num_preemptions = 0

    def __init__(self, config: EmbeddedConfig) -> None:
        super().__init__(config, load=self._loaded)

    def _loaded(self, config: EmbeddedConfig, model: Model | None) -> tuple[Stepper, EngineInfo]:
        stepper, info = load_for_serving(config, model)
        step, scheduler = stepper.step, stepper.scheduler

        def step_and_preempt(prompts_first: bool = False) -> list[Output]:
            outputs = step(prompts_first)
            for request in scheduler.queues.decoding:
                scheduler.queues.preempt(request)
                self.num_preemptions += 1
            if self.num_preemptions % 2:
                scheduler.cache.clear()
            return outputs

        stepper.step = step_and_preempt  # type: ignore[method-assign]
        return stepper, info


class DraftingEngine(EmbeddedEngine):
    """Drafts wherever there is something to look up, whatever steps take here.

    Attributes:
        num_accompanied: Tokens drafted for requests with a companion.
    """

    def __init__(self, config: EmbeddedConfig) -> None:
        super().__init__(config, load=self._loaded)
        self.num_accompanied = 0

    def _loaded(self, config: EmbeddedConfig, model: Model | None) -> tuple[Stepper, EngineInfo]:
        stepper, info = load_for_serving(config, model)
        stepper.speculator = speculator = Speculator(stepper.speculator.config, clock=lambda: 0.0)
        learn = speculator.learn

        def learn_and_count(plan: Plan, accepted: Sequence[int]) -> None:
            learn(plan, accepted)
            drafts = zip(plan.decode, plan.drafts, strict=True)
            self.num_accompanied += sum(len(draft) for one, draft in drafts if one.companion is not None)

        speculator.learn = learn_and_count  # type: ignore[method-assign]
        return stepper, info


def cold(case: Case) -> dict[str, Any]:
    """The request as one that finds no cached KV."""
    return case.raw(cache_salt=new_id())
