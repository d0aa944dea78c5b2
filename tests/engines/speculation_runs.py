"""Answers with and without drafts, and what must be equal in them."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.catalog import Catalog
from adapters.contract import Stage
from worker.engines.embedded import Engine, Plan
from worker.engines.embedded.speculation import Proposer, SpeculativeConfig, Speculator
from worker.engines.embedded.speculation.speculator import CHAIN_TOKENS
from worker.sampling import SamplingParams

PLAIN: dict[str, Any] = {"chain": False}
TEXTS = ["the quick brown fox the quick brown", "a b a b a c a b a b a"]
NEW_TOKENS = 24


def _examples() -> dict[str, list[dict[str, Any]]]:
    """The conformance kit's arguments of every built-in."""
    return dict(
        runpy.run_path(str(Path(__file__).parents[1] / "adapters" / "conformance" / "builtin_examples.py"))["EXAMPLES"]
    )


EXAMPLES = _examples()


class Repeating(Speculator):
    """Drafts at full length with the real proposers, however often they are wrong.

    Args:
        settings: Of ``--speculative-config``.
        draft_model: As `Speculator`.
        chain_tokens: Tokens that a chain drafts at most.
    """

    def __init__(self, settings: dict[str, Any], draft_model: Any = None, chain_tokens: int = CHAIN_TOKENS) -> None:
        super().__init__(SpeculativeConfig.parse(settings), draft_model)
        self._chain_tokens = chain_tokens

    def _source(self, proposer: Proposer, limit: int) -> Any:
        return super()._source(proposer, self._chain_tokens if proposer.name == "chain" else limit)

    def _lengths(self, plan: Plan, candidates: Sequence[Any]) -> list[int]:
        return [one.limit for one in candidates]


def outcome(
    engine: Engine, speculator: Speculator, prompts: Any, params: Any, processors: Any = (), predictions: Any = None
) -> list[Any]:
    """All of the answers that must not depend on drafts."""
    engine.session.stepper.speculator = speculator
    results = engine.generate(prompts, params, processors=processors, predictions=predictions)
    engine.session.stepper.scheduler.check_integrity()
    outputs = [output for result in results for output in result.outputs]
    return [
        (
            output.token_ids,
            output.text,
            output.logprobs,
            output.finish_reason,
            output.stop_reason,
            output.error,
            None if output.receipt is None else output.receipt.as_json(),
        )
        for output in outputs
    ]


def params_of(name: str) -> list[SamplingParams]:
    """Greedy and seeded, or two seeds where the built-in says itself how to sample."""
    if Catalog.default()[name].processor.stage >= Stage.TEMPERATURE:
        return [SamplingParams(max_tokens=NEW_TOKENS, logprobs=0, seed=seed) for seed in (7, 8)]
    return [SamplingParams(max_tokens=NEW_TOKENS, logprobs=0, seed=7, temperature=heat) for heat in (0.0, 0.6)]
