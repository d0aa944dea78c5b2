"""Requests with a companion, decoded in every place where a step may put them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from engine_doubles import Drafting
from speculation_runs import Repeating

from adapters.catalog import Catalog, Requested, Selection, model_context
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.chain_builder import ChainBuilder
from worker.engines.embedded.admission import admit
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.model import HfModel
from worker.engines.embedded.plan import Request
from worker.engines.embedded.scheduler import Scheduler
from worker.engines.embedded.speculation import DraftModelProposer
from worker.engines.embedded.step import Stepper
from worker.sampling import SamplingParams

NEW_TOKENS = 24
PAGE = 32
CONTEXT = 256
PROMPT = [9, 30, 41, 77, 30, 41, 12, 9, 30, *range(100, 160)]
VOCABULARIES: list[Vocabulary] = []
"""That of the model under test, once it is loaded."""


SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.9, "top_p": 0.95}}
OTHERS = [[7, 8, 9] * 20, [30, 41, 12, 9], PROMPT[:40]]


Answer = list[tuple[int, float]]
"""Tokens with their log probability, of the distribution that each was sampled from."""


def stepper_of(
    model: HfModel,
    *,
    rows: int = 8,
    budget: int = 512,
    pages: int = 64,
    mixed: int = 64,
    method: str = "none",
    amateur: HfModel | None = None,
) -> Stepper:
    """A stepper; the amateur is its draft model, and drafts with the method ``draft_model``."""
    model.allocate_kv(pages, PAGE)
    cache = KvCache(pages, PAGE, 16, is_dense=model.wants_dense_kv)
    if amateur is None:
        return Stepper(model, Scheduler(cache, rows, budget, mixed), Repeating({"method": method}))
    sizes = {"num_companions": rows // 2, "context_length": CONTEXT, "page_size": PAGE, "block_size": 16}
    draft_model = DraftModel(amateur, num_drafted=rows if method == "draft_model" else 0, **sizes)
    scheduler = Scheduler(cache, rows, budget, mixed, draft_model=draft_model)
    if method != "draft_model":
        return Stepper(model, scheduler, Repeating({"method": method}))
    proposer = partial(DraftModelProposer, draft_model)
    return Stepper(model, scheduler, Repeating({"method": method, "model": "unused"}, proposer))


def drafting(stepper: Stepper, answers: Mapping[str, Answer], seed: int) -> Drafting:
    """Lets a stepper draft beginnings of answers, by the id of their request, and wrong tokens."""
    source = random.Random(seed)

    def draft(one: Request) -> list[int]:
        right = [token for token, _ in answers.get(one.id, ())][len(one.tokens) - one.prompt_length :]
        wrong = [source.randrange(300) for _ in range(source.randrange(3))]
        return right[: source.randrange(5)] + wrong

    stepper.speculator = found = Drafting(draft)
    return found


def request_of(
    model: HfModel,
    name: str,
    prompt: Sequence[int],
    *processors: dict[str, Any],
    generated: Sequence[int] = (),
    draft_model: DraftModel | None = None,
    ends: Sequence[int] = (),
    **changes: Any,
) -> Request:
    fixed = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": 3, "logprobs": 1, "logprobs_mode": "processed"}
    params = SamplingParams(**{**fixed, **changes})
    asked = EngineRequest(name, prompt, params, seed=3, generated_token_ids=list(generated))
    builder = ChainBuilder(Catalog.default(), model_context(VOCABULARIES[0]))
    selection = Selection(tuple(Requested(one["name"], one["args"]) for one in processors))
    if processors:
        asked = builder.prepare(asked, selection, builder.context(frozenset(ends), 3, params.max_tokens))
    return admit(asked, 0, model, CONTEXT, draft_model=draft_model)


def decode(stepper: Stepper, requests: Sequence[Request], *, preempts: bool = False) -> list[Answer]:
    """The answers to requests that arrive one after the other, a step apart.

    With `preempts` every third step preempts one of those that run, now this one, now that.
    """
    source = random.Random(5)
    answers: dict[str, Answer] = {request.id: [] for request in requests}
    waiting = list(requests)
    while waiting or not stepper.scheduler.is_idle:
        if waiting:
            stepper.check(waiting[0])
            stepper.add(waiting.pop(0))
        if preempts and (running := stepper.scheduler.queues.running) and source.randrange(3) == 0:
            stepper.scheduler.queues.preempt(source.choice(running))
            if source.randrange(4) == 0:
                stepper.drop_kv()  # as an update of the weights does
        for output in stepper.step():
            assert output.error is None
            if output.token_id is not None and output.logprobs is not None:
                answers[output.request_id].append((output.token_id, output.logprobs[0].logprob))
        stepper.scheduler.check_integrity()
    assert stepper.scheduler.cache.num_available == stepper.scheduler.cache.num_pages, "pages have leaked"
    if stepper.draft_model is not None:
        stepper.draft_model.check_integrity(())  # drafts may still have pages, no companion has
        stepper.draft_model.cache.check_blocks()
    return list(answers.values())
