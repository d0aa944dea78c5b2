"""A request that is alone in its engine: the model, the request, and its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry

from adapters.catalog import Selection
from worker.arguments import Arguments
from worker.build import check_model, embedded_config, with_checkpoint, with_hub_model
from worker.engines import EngineInfo, EngineRequest
from worker.engines.embedded.admission import admit
from worker.engines.embedded.host import limit_threads
from worker.engines.embedded.model import HfModel
from worker.engines.embedded.plan import Output, Request
from worker.engines.embedded.serving import load, weights_digest
from worker.engines.embedded.step import Stepper
from worker.engines.weights import WeightsRefused
from worker.errors import ConfigurationError, InvalidRequest
from worker.models import named_model
from worker.models.checkpoint import Say
from worker.models.named import DEFAULT, DEFAULT_DTYPE
from worker.processors.builder import ServedChainBuilder, make_chain_builder
from worker.replay.position import PositionTap
from worker.requests.receipts import ServerRecord, digest_of_model
from worker.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model that serves one request after the other.

    Attributes:
        arguments: Options of the worker.
        stepper: Stepper of the engine.
        info: Description of the engine.
        server: Record of the worker in receipts.
        chains: Builder of the requests' chains.
        lora_name: LoRA adapter that computes them, None for the model itself.
    """

    arguments: Arguments
    stepper: Stepper
    info: EngineInfo
    server: ServerRecord
    chains: ServedChainBuilder
    lora_name: str | None = None

    def weights_digest(self) -> str:
        """See `worker.engines.embedded.serving.weights_digest`. Raises `ConfigurationError`."""
        model = self.stepper.model
        assert isinstance(model, HfModel)
        try:
            return weights_digest(embedded_config(self.arguments), model)
        except WeightsRefused as error:
            raise ConfigurationError(f"--model-path {self.arguments.model_path}: {error}") from None

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the checkpoint."""
        return self.chains.vocabulary.tokenizer

    async def request(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        selection: Selection,
        choice: int = 0,
        hidden_end_ids: Iterable[int] = (),
    ) -> Request:
        """A request that finds no other one's KV.

        Args:
            name: Id of the request.
            prompt: Token ids.
            params: Sampling parameters, with a seed.
            selection: Processors of the request.
            choice: Index of this answer among several to one prompt.
            hidden_end_ids: See `EngineRequest.hidden_end_ids`.

        Raises:
            InvalidRequest: it cannot be served.
        """
        asked = await prepared(self.chains, self.info, name, prompt, params, selection, choice)
        asked = replace(asked, hidden_end_ids=frozenset(hidden_end_ids))
        adapters = self.stepper.adapters
        adapter = None if adapters is None else adapters.of(replace(asked, lora_name=self.lora_name))
        model, draft_model = self.stepper.model, self.stepper.draft_model
        request = admit(asked, 0, model, self.info.context_length, adapter, draft_model=draft_model)
        self.stepper.check(request)
        return request

    def tap(self, request: Request, copy: Request, **options: Any) -> PositionTap:
        """A tap on the request; `options` as of `PositionTap`."""
        return PositionTap(request, copy, self.stepper.model.undecodable_ids, **options)


async def prepared(
    chains: ServedChainBuilder,
    info: EngineInfo,
    name: str,
    prompt: list[int],
    params: SamplingParams,
    selection: Selection,
    choice: int,
) -> EngineRequest:
    """The request for an engine, with its chain; see `LoadedModel.request`."""
    assert params.seed is not None
    budget = info.context_length - len(prompt) if params.max_tokens is None else params.max_tokens
    request = EngineRequest(name, prompt, params, seed=params.seed, choice=choice, cache_salt=name)
    return await chains.prepare(request, selection, budget)


def with_named_model(arguments: Arguments, say: Say) -> Arguments:
    """The arguments with the model that ``--model-path default`` or ``tiny`` means, the default one
    in the launch scripts' type unless another is given, or in the receipt.

    Args:
        arguments: Options of the worker, those of a receipt among them.
        say: Takes lines about the progress.

    Raises:
        StartupError: see `named_model`.
    """
    keeps_blocks = arguments.engine == "embedded" and arguments.quantization == "auto"
    path = named_model(arguments.model_path, say, keeps_blocks)
    if path is None:
        return arguments
    dtype, name = arguments.dtype, arguments.served_model_name
    if arguments.model_path == DEFAULT and "dtype" not in arguments.given:
        dtype = DEFAULT_DTYPE
    if "served_model_name" not in arguments.given:
        name = path.name
    return replace(arguments, model_path=str(path), dtype=dtype, served_model_name=name)


@asynccontextmanager
async def loaded(arguments: Arguments, lora_name: str | None = None) -> AsyncIterator[LoadedModel]:
    """The model of the options, in this process, or a LoRA adapter of it.

    Raises:
        ServingError: it cannot be loaded, or a request to it is refused.
    """
    if arguments.engine != "embedded":
        raise ConfigurationError(f"--engine {arguments.engine}: shows no logits; give --engine embedded")
    arguments = with_hub_model(arguments)
    check_model(arguments)
    arguments = with_checkpoint(arguments)
    config = embedded_config(arguments)
    limit_threads(config.model_path, config.local_workers)  # as a worker does: how torch computes depends on it
    digest = digest_of_model(arguments)
    stepper, info = load(config)
    chains = make_chain_builder(arguments, info, CollectorRegistry(), renders_templates=True)
    try:
        yield LoadedModel(arguments, stepper, info, ServerRecord.of(info, arguments, digest), chains, lora_name)
    except InvalidRequest as error:
        raise ConfigurationError(f"request: {error}") from None
    finally:
        await chains.close()


@dataclass(slots=True)
class Replayed:
    """One answer, made again.

    Attributes:
        token_ids: Tokens of the answer, with the end token.
        error: Reason why there are fewer than wanted, if a processor failed.
    """

    token_ids: list[int]
    error: str | None


def replay(stepper: Stepper, request: Request, num_tokens: int, tap: PositionTap | None = None) -> Replayed:
    """Decode at most ``num_tokens`` tokens, an end token too, of the engine's only request.

    The last step may give more than that, of a forced text for one; the rest is dropped.
    """
    request.tap = tap or request.tap
    stepper.add(request)
    tokens: list[int] = []
    last = Output(request.id)
    while len(tokens) < num_tokens and last.finish_reason is None:
        for last in stepper.step():  # nothing where the step computed a chunk of the prompt
            tokens += _sampled(last)
    if last.finish_reason is None:
        stepper.abort(request.id)
    if tap is not None:
        tap.take(tokens)
        tap.forget_from(request.prompt_length + num_tokens)
    return Replayed(tokens[:num_tokens], last.error if len(tokens) < num_tokens else None)


def _sampled(output: Output) -> list[int]:
    """The token that was sampled, the end token too where the answer does not show it."""
    token_id = output.stop_reason if output.token_id is None else output.token_id
    return [] if token_id is None else [token_id]
