"""`ChainBuilder`: gives a request the chain of its logits processors, served or offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from adapters.catalog import Catalog, ModelPolicy, Selection
from adapters.contract import Context, Scope
from worker.engines.request import EngineRequest
from worker.sampling import SamplingParams
from worker.sampling.field_processors import field_values, refuse_twice


@dataclass(frozen=True, slots=True)
class ChainBuilder:
    """Builds the logits processor chains of requests to one model.

    Attributes:
        catalog: Every processor that may be named.
        model: Context that all requests to the model share; see `model_context`.
        policy: Operator's policy for this model.
        step_budget_s: Most CPU time that a third-party processor may take for one step, seconds.
    """

    catalog: Catalog
    model: Context = field(repr=False)  # it may hold the operator's watermark keys
    policy: ModelPolicy = field(default_factory=ModelPolicy)
    step_budget_s: float | None = None

    def select(
        self, named: Selection, params: SamplingParams, *, served: bool = False, after_thinking: bool = False
    ) -> Selection:
        """The processors that a request asks for by name and by field, and the operator's.

        Fields that an engine serves itself are compared with the policy and are not part of it.

        Args:
            named: Processors that the request names.
            params: Fields of the request.
            served: Errors name the field of the request, not that of `SamplingParams`.
            after_thinking: A grammar begins after the thinking, if the model has thinking tags.

        Raises:
            SelectionError: a control is given twice, or the policy forbids it.
        """
        scope: Scope = "answer" if after_thinking and self.model.think_start else "all"
        fields = field_values(params, served=served, guide_scope=scope)
        refuse_twice({requested.name for requested in named.processors}, fields)
        selection = self.policy.apply(named, self.catalog, [value for _, value in fields])
        return selection.with_processors(
            *(value.requested for control, value in fields if control.refused is not None and not value.is_neutral)
        )

    def context(self, end_token_ids: frozenset[int], seed: int, max_tokens: int | None, choice: int = 0) -> Context:
        """The context of the processors of one choice of a request."""
        return replace(self.model, end_token_ids=end_token_ids, seed=seed, choice=choice, max_tokens=max_tokens)

    def prepare(self, request: EngineRequest, selection: Selection, context: Context) -> EngineRequest:
        """The request with the chain of a selection, not started yet, and the tokens of its
        prediction.

        Raises:
            SelectionError: a processor is unknown, or its arguments cannot be honoured.
        """
        chain = self.catalog.build_chain(selection, context, step_budget_s=self.step_budget_s)
        chain.wants_receipt = bool(selection.receipt)
        chain.masks_alone = True  # what else masks tokens in a request is a processor of its chain
        hints = replace(request.hints, prediction=self.predicted(selection.prediction))
        return replace(request, chain=chain, hints=hints)

    def predicted(self, text: str) -> Sequence[int]:
        """Token ids of a prediction; none if the model has no tokenizer, or cannot write it."""
        try:
            return self.model.vocabulary.encode(text) if text else ()
        except ValueError:
            return ()
