"""`Speculator`: proposer and draft length for each request, and counts of accepted tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from time import perf_counter

from adapters.chain import ProcessorChain
from worker.engines.embedded.plan import Output, Plan, Request
from worker.engines.embedded.speculation.acceptance import Acceptance, ProposerAcceptance
from worker.engines.embedded.speculation.chain_proposer import ChainProposer
from worker.engines.embedded.speculation.config import SpeculativeConfig
from worker.engines.embedded.speculation.draft_length import StepCosts, can_pay, draft_lengths
from worker.engines.embedded.speculation.ngram import NgramProposer
from worker.engines.embedded.speculation.prediction import PredictionProposer
from worker.engines.embedded.speculation.proposer import NO_DRAFT, Draft, Proposer
from worker.engines.embedded.speculation.suffix import Corpus, SuffixProposer

CHAIN_TOKENS = 64
"""Tokens that a chain drafts at most: a whole run of forced ones, but for very long ones."""

PREDICTION_TOKENS = 64
"""Tokens that are drafted from a prediction at most."""

FORCED_RATE = 0.8
"""Acceptance rate from which on a run that a chain forces is drafted whole."""

LATE_ENDS = 0.1
"""Part of forced runs whose last token is not forced after all, from which on its logits are
computed with the others: alone they take a pass over the head's weights.
"""

_LATE_WEIGHT, _LATE_MEMORY = 0.1, 0.98
"""Weight of a run in that part, and what is left of it per run whose end is read."""

MAX_CORPORA = 16
"""Cache salts whose earlier answers are kept, the ones used last."""

EXPECTED = {"chain": 0.95, "prediction": 0.7, "ngram": 0.6, "suffix": 0.6, "draft_model": 0.6}
"""Part of the drafted tokens that is expected to be accepted, by proposer, before any was tried."""

MakeProposer = Callable[[Request], Proposer]
"""Makes the proposer of one request."""


@dataclass(slots=True)
class Counts:
    """Drafted tokens of one proposer.

    Attributes:
        proposed: Tokens that the model computed.
        accepted: Tokens among them that are part of an answer.
    """

    proposed: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _Source:
    """A proposer of one request, its most tokens, and how its drafts do."""

    proposer: Proposer
    limit: int
    acceptance: Acceptance


@dataclass(slots=True)
class _Candidate:
    """A decode row that may draft: who does it, and what it drafts unless that takes a model."""

    row: int
    source: _Source
    draft: Draft = NO_DRAFT

    @property
    def limit(self) -> int:
        return self.source.limit if self.source.proposer.is_model else len(self.draft.tokens)

    @property
    def rate(self) -> float:
        return self.source.acceptance.rate(self.draft.matched)

    @property
    def is_forced(self) -> bool:
        """Whether the chain forces the draft, so that it pays in a step of any size: a token of it
        takes no longer than one of a step without drafts, and none is rejected.
        """
        return _is_forced(self.source.proposer) and self.rate >= FORCED_RATE

    def tokens(self, history: Sequence[int], count: int) -> Sequence[int]:
        """The first `count` tokens of the draft."""
        if self.source.proposer.is_model:
            self.draft = self.source.proposer.propose(history, count)
        return self.draft.tokens[:count]


class Speculator:
    """Drafts for the decode rows of a step. One thread.

    A request's chain is asked first, whose guess is nearly always right, where it has none the
    request's prediction, and then the method of the configuration.

    Args:
        config: Settings.
        draft_model: Makes proposers for the method ``draft_model``.
        clock: Seconds.

    Attributes:
        config: The settings.
        counts: Drafted tokens by the proposer's name.
        is_enabled: Whether anything is drafted.
    """

    def __init__(
        self,
        config: SpeculativeConfig | None = None,
        draft_model: MakeProposer | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.config = config or SpeculativeConfig()
        self.counts: dict[str, Counts] = {}
        self.is_enabled = True
        self._make = self._method(draft_model)
        self._clock = clock
        self._costs = StepCosts()
        self._corpora: OrderedDict[str | None, Corpus] = OrderedDict()
        self._acceptance = {name: ProposerAcceptance(rate) for name, rate in EXPECTED.items()}
        self._drafting: dict[int, _Candidate] = {}  # by decode row of the step
        self._began_s = 0.0
        self._late_ends = 0.0

    def _method(self, draft_model: MakeProposer | None) -> MakeProposer | None:
        config = self.config
        if config.method == "ngram":
            return lambda request: NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        if config.method == "suffix":
            return lambda request: SuffixProposer(config.prompt_lookup_min, self._corpus(request))
        return draft_model

    def draft(self, plan: Plan) -> list[Sequence[int]]:
        """A draft for each decode row, empty where none is likely to pay."""
        self._began_s = self._clock()
        self._drafting = {}
        drafts: list[Sequence[int]] = [()] * len(plan.decode)
        asked = [row for row, request in enumerate(plan.decode) if request.speculates and self._has_proposers(request)]
        if not (self.is_enabled and asked):
            return drafts
        if not can_pay(plan.num_tokens, self._costs):  # asking takes time, too
            asked = [row for row in asked if self._may_force(plan.decode[row])]
        candidates = [one for row in asked if (one := self._candidate(row, plan.decode[row]))]
        lengths = self._lengths(plan, candidates)
        for one, length in zip(candidates, lengths, strict=True):
            if length:
                drafts[one.row] = one.tokens(plan.decode[one.row].tokens, length)
                self._drafting[one.row] = one
        return drafts

    def leave_out(self, plan: Plan) -> Plan:
        """A plan with drafts, without the logits of positions at which chains are about to force a
        token.
        """
        if plan.num_companions:
            return plan
        unread: list[int] = []
        for row, first in enumerate(plan.first_rows()[: len(plan.decode)]):
            request, count = plan.decode[row], len(plan.drafts[row])
            if count and request.tap is None and request.params.logprobs is None and self._is_forced(row):
                unread += range(first, first + count - (self._late_ends > LATE_ENDS))
        return replace(plan, unread={row: row for row in unread}) if unread else plan

    def _is_forced(self, row: int) -> bool:
        proposer = self._drafting[row].source.proposer
        return _is_forced(proposer)

    def _lengths(self, plan: Plan, candidates: Sequence[_Candidate]) -> list[int]:
        """Tokens to draft for each candidate: all of a forced run, and of others as many as pay; a
        step tries one where nothing pays, at most.
        """
        forced = [one.limit if one.is_forced else 0 for one in candidates]
        rates = [0.0 if length else one.rate for one, length in zip(candidates, forced, strict=True)]
        limits = [one.limit for one in candidates]
        weights = [len(plan.decode[one.row].sequences) for one in candidates]
        num_tokens = plan.num_tokens + sum(map(mul, forced, weights))
        others = draft_lengths(rates, limits, num_tokens, self._costs, weights)
        lengths = [length or other for length, other in zip(forced, others, strict=True)]
        idle = {index: candidates[index].source.acceptance for index, length in enumerate(lengths) if not length}
        for acceptance in idle.values():
            acceptance.num_idle += 1
        due = {index: acceptance.num_idle for index, acceptance in idle.items() if acceptance.wants_probe}
        if due:
            lengths[max(due, key=due.__getitem__)] = 1
        return lengths

    def _candidate(self, row: int, request: Request) -> _Candidate | None:
        if len(request.tokens) + 1 >= request.limit:
            return None
        if request.draft_sources is None:
            request.draft_sources = tuple(self._sources_of(request))
        for source in request.draft_sources:
            if source.proposer.is_model:
                return _Candidate(row, source)
            draft = source.proposer.propose(request.tokens, source.limit)
            if draft.tokens:
                return _Candidate(row, source, draft)
        return None

    def _has_proposers(self, request: Request) -> bool:
        return self._make is not None or bool(request.prediction) or self._foreseeing(request) is not None

    def _may_force(self, request: Request) -> bool:
        """Whether a chain may force a run of the request's; before it was asked nobody knows."""
        sources = request.draft_sources
        return self._foreseeing(request) is not None and (sources is None or _is_forced(sources[0].proposer))

    def _foreseeing(self, request: Request) -> ProcessorChain | None:
        """The request's chain, if it may be asked for drafts and can find some."""
        chain = request.chain if self.config.chain else None
        return chain if chain is not None and chain.foresees else None

    def _sources_of(self, request: Request) -> Iterable[_Source]:
        chain = self._foreseeing(request)
        if chain is not None:
            yield self._source(ChainProposer(chain), CHAIN_TOKENS)
        if request.prediction:
            yield self._source(PredictionProposer(request.prediction, request.prompt_length), PREDICTION_TOKENS)
        if self._make is not None:
            yield self._source(self._make(request), self.config.num_speculative_tokens)

    def _source(self, proposer: Proposer, limit: int) -> _Source:
        return _Source(proposer, limit, Acceptance(self._acceptance[proposer.name]))

    def _corpus(self, request: Request) -> Corpus | None:
        if not self.config.suffix_cache_tokens:
            return None
        corpus = self._corpora.setdefault(request.cache_salt, Corpus(self.config.suffix_cache_tokens))
        self._corpora.move_to_end(request.cache_salt)
        if len(self._corpora) > MAX_CORPORA:
            self._corpora.popitem(last=False)
        return corpus

    def learn_cost(self, plan: Plan) -> None:
        """Take the time since `draft` began the step, once every row's first position is sampled.

        The sampling of drafted positions comes later: plain decoding would do it in later steps.
        Nothing is learnt where the draft model has computed companions meanwhile.
        """
        if not plan.chunks and plan.companions is None:
            self._costs.learn(plan.num_tokens, self._clock() - self._began_s)

    def learn(self, plan: Plan, accepted: Sequence[int]) -> None:
        """Take the result of a step with drafts.

        Args:
            plan: Plan of the step.
            accepted: Accepted tokens of each decode row's draft.
        """
        for row, number in enumerate(accepted):
            proposed = len(plan.drafts[row])
            if not proposed:
                continue
            one = self._drafting[row]
            one.source.acceptance.count(one.draft.matched, proposed, number)
            counts = self.counts.setdefault(one.source.proposer.name, Counts())
            counts.proposed += proposed
            counts.accepted += number

    def learn_late(self, plan: Plan, late: Collection[int]) -> None:
        """Take the positions whose logits were left out of a step, and then needed.

        Args:
            plan: Plan of the step.
            late: Indices of these positions in the step.
        """
        if plan.num_companions:
            return  # see `leave_out`
        for row, first in enumerate(plan.first_rows()[: len(plan.decode)]):
            if plan.drafts[row] and self._is_forced(row):
                last = first + len(plan.drafts[row]) - 1
                if last in plan.unread:
                    self._late_ends += _LATE_WEIGHT * ((last in late) - self._late_ends)
                else:
                    self._late_ends *= _LATE_MEMORY

    def remember(self, request: Request, output: Output) -> None:
        """Take the answer of a request that has ended, for later ones of its cache salt."""
        if output.finish_reason in ("stop", "length") and self.config.method == "suffix":
            corpus = self._corpus(request)
            if corpus is not None:
                corpus.add(request.tokens[request.prompt_length :])


def _is_forced(proposer: Proposer) -> bool:
    """Whether a proposer drafts what a chain mostly forces."""
    return isinstance(proposer, ChainProposer) and proposer.is_forced
