"""Every model type x built-in x proposer x draft length, greedy and seeded: as plain decoding.

With ``--numerics exact`` a row does not depend on its batch, so that all built-ins share one: a
run is one model type, proposer and length.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import random_checkpoints
from engine_doubles import Draft, Drafting
from random_checkpoints import EVERY_TYPE
from speculation_runs import EXAMPLES, PLAIN, TEXTS, Repeating, outcome, params_of

from adapters.testing.kit_model import KEY_ID
from worker.engines.embedded import Engine, Plan, Request
from worker.engines.embedded.kv_cache import budget
from worker.engines.embedded.speculation import DraftModelProposer, SpeculativeConfig, Speculator
from worker.sampling import SamplingParams

pytestmark = [pytest.mark.campaign, pytest.mark.usefixtures("one_thread")]

PROPOSERS = ("chain", "ngram", "suffix", "draft_model", "often right")
PAGE = 16
"""Tokens of a page: answers have several, so that rollbacks free some."""


class Grid:
    """The requests of all built-ins, on one model type, and their plain answers."""

    def __init__(self, checkpoint: Path) -> None:
        rows = [
            (TEXTS[row % len(TEXTS)], params, {"name": name, "args": args})
            for row, (name, args) in enumerate((name, args) for name, many in EXAMPLES.items() for args in many)
            for params in params_of(name)
        ]
        self.prompts = [text for text, _, _ in rows]
        self.params: list[SamplingParams] = [params for _, params, _ in rows]
        self.processors = [[named] for _, _, named in rows]
        self.engine = Engine(
            checkpoint,
            device="cpu",
            dtype="float32",
            numerics="exact",
            max_num_seqs=len(rows),
            max_num_batched_tokens=16 * len(rows),
            context_length=128,
            kv_blocks=8 * len(rows),
            # the model itself: right wherever the chain and the sampler leave the most likely token
            speculative_config={"method": "draft_model", "model": str(checkpoint)},
        )
        builder = self.engine.session.builder
        keyed = replace(builder._chains.model, watermark_keys={KEY_ID: bytes(range(32))})
        builder._chains = replace(builder._chains, model=keyed)
        self.stepper = self.engine.session.stepper
        self.num_rolled_back = 0
        roll_back, scheduler = self.stepper.scheduler.roll_back, self.stepper.scheduler

        def checked(plan: Plan) -> None:
            roll_back(plan)
            scheduler.check_integrity()
            scheduler.cache.check_blocks()
            for one in (each for owner in plan.decode for each in owner.sequences if not each.by_draft_model):
                assert not one.pages or len(one.pages) == scheduler.cache.count_pages(one.num_computed)
            self.num_rolled_back += 1

        scheduler.roll_back = checked  # type: ignore[method-assign]
        self.plain = self.run(Speculator(SpeculativeConfig.parse(PLAIN)))

    def run(self, speculator: Speculator) -> list[Any]:
        """All answers, with their logprobs and receipts."""
        found = outcome(self.engine, speculator, self.prompts, self.params, self.processors)
        assert self.stepper.scheduler.cache.num_available == self.stepper.scheduler.cache.num_pages
        return found

    def speculator(self, proposer: str, length: int) -> Speculator:
        """Drafts of `length` tokens at most."""
        if proposer == "often right":
            return Drafting(self._often_right(length))
        settings: dict[str, Any] = {"num_speculative_tokens": length}
        if proposer == "chain":
            return Repeating(settings, chain_tokens=length)
        if proposer == "draft_model":
            settings |= {"method": proposer, "model": str(self.engine.config.model_path)}
            assert self.stepper.draft_model is not None
            return Repeating(settings, partial(DraftModelProposer, self.stepper.draft_model), chain_tokens=length)
        return Repeating(settings | {"method": proposer, "prompt_lookup_min": 1}, chain_tokens=length)

    def _often_right(self, length: int) -> Draft:
        """Drafts with the plain answer up to a random place."""
        source, size = random.Random(length), self.engine.info.vocab_size

        def draft(one: Request) -> Sequence[int]:
            answer = self.plain[one.number % len(self.plain)][0]
            right = answer[len(one.tokens) - one.prompt_length :][: source.randrange(length + 1)]
            return (right + [source.randrange(size) for _ in range(length)])[:length]

        return draft


@pytest.fixture(scope="module")
def tokenized(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every model type, all with the tiny model's tokenizer."""
    root = tmp_path_factory.mktemp("tokenized")
    source = checkpoints["llama"]
    ids = random_checkpoints.ids_of(source)
    for name, settings in random_checkpoints.TYPES.items():
        random_checkpoints.write(root / name, name, settings | ids)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(source / file, root / name / file)
    return checkpoints | {name: root / name for name in random_checkpoints.TYPES}


@pytest.fixture(scope="module", params=EVERY_TYPE)
def grid(request: pytest.FixtureRequest, tokenized: dict[str, Path]) -> Iterator[Grid]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "PAGE_TOKENS", PAGE)
        yield Grid(tokenized[request.param])


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_every_builtin(grid: Grid, proposer: str, length: int) -> None:
    rolled_back, speculator = grid.num_rolled_back, grid.speculator(proposer, length)
    assert grid.run(speculator) == grid.plain
    assert grid.num_rolled_back > rolled_back
    accepted = (
        speculator.accepted
        if isinstance(speculator, Drafting)
        else [one.accepted for one in speculator.counts.values()]
    )
    assert sum(accepted) > 0
