"""`Speculator`: who drafts for a request, how much, and what became of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from weakref import WeakKeyDictionary

from worker.engines.embedded.plan import Output, Plan, Request
from worker.engines.embedded.speculation.chain_proposer import ChainProposer
from worker.engines.embedded.speculation.config import SpeculativeConfig
from worker.engines.embedded.speculation.draft_length import Acceptance, StepCosts, can_pay, draft_lengths, wants_probe
from worker.engines.embedded.speculation.ngram import NgramProposer
from worker.engines.embedded.speculation.proposer import Proposer
from worker.engines.embedded.speculation.suffix import Corpus, SuffixProposer

CHAIN_TOKENS = 16
"""Tokens that a chain drafts at most."""

MAX_CORPORA = 16
"""Cache salts whose earlier answers are kept, the ones used last."""

MakeProposer = Callable[[Request], Proposer]
"""Makes the proposer of one request."""


@dataclass(slots=True)
class Counts:
    """Drafted tokens of one proposer.

    Attributes:
        proposed: Tokens that the model computed.
        accepted: Those of them that are part of an answer.
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
    """A decode row that may draft: who is to do it, or what its chain has drafted already."""

    row: int
    source: _Source
    draft: Sequence[int] = ()

    @property
    def limit(self) -> int:
        return len(self.draft) or self.source.limit


class Speculator:
    """Drafts for the decode rows of a step. One thread.

    A request's chain is asked first, whose guess is nearly always right, and where it has none the
    method of the configuration.

    Args:
        config: Settings.
        draft_model: Makes proposers for the method ``draft_model``.
        clock: Seconds.

    Attributes:
        config: The settings.
        counts: By the proposer's name.
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
        self._sources: WeakKeyDictionary[Request, list[_Source]] = WeakKeyDictionary()
        self._corpora: OrderedDict[str | None, Corpus] = OrderedDict()
        self._drafting: dict[int, _Source] = {}  # by decode row of the step
        self._began_s = 0.0

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
        if not can_pay(plan.num_tokens, self._costs):
            return drafts  # asking takes time, too
        candidates = [one for row, request in enumerate(plan.decode) if (one := self._candidate(row, request))]
        rates = [one.source.acceptance.rate for one in candidates]
        lengths = draft_lengths(rates, [one.limit for one in candidates], plan.num_tokens, self._costs)
        for one, length in zip(candidates, lengths, strict=True):
            length = length or int(wants_probe(one.source.acceptance))
            if length:
                tokens = one.draft or one.source.proposer.propose(plan.decode[one.row].tokens, length)
                drafts[one.row] = tokens[:length]
                self._drafting[one.row] = one.source
        return drafts

    def _candidate(self, row: int, request: Request) -> _Candidate | None:
        if not (self.is_enabled and request.speculates and len(request.tokens) + 1 < request.limit):
            return None
        if self._make is None and request.chain is None:
            return None
        sources = self._sources.get(request)
        if sources is None:
            sources = self._sources[request] = list(self._sources_of(request))
        for source in sources:
            if source.proposer.name != ChainProposer.name:
                return _Candidate(row, source)
            draft = source.proposer.propose(request.tokens, source.limit)
            if draft:
                return _Candidate(row, source, draft)
        return None

    def _sources_of(self, request: Request) -> Iterable[_Source]:
        if self.config.chain and request.chain is not None and request.chain.foresees:
            yield _Source(ChainProposer(request.chain), CHAIN_TOKENS, Acceptance(4.75, 5.0))
        if self._make is not None:
            yield _Source(self._make(request), self.config.num_speculative_tokens, Acceptance(3.0, 5.0))

    def _corpus(self, request: Request) -> Corpus | None:
        if not self.config.suffix_cache_tokens:
            return None
        corpus = self._corpora.setdefault(request.cache_salt, Corpus(self.config.suffix_cache_tokens))
        self._corpora.move_to_end(request.cache_salt)
        if len(self._corpora) > MAX_CORPORA:
            self._corpora.popitem(last=False)
        return corpus

    def learn(self, plan: Plan, accepted: Sequence[int]) -> None:
        """Take the result of a step that `draft` began.

        Args:
            plan: Of the step, with its drafts.
            accepted: Accepted tokens of each decode row's draft; none for a step without drafts.
        """
        if not plan.chunks:
            self._costs.learn(plan.num_tokens, self._clock() - self._began_s)
        for row, number in enumerate(accepted):
            if not plan.drafts[row]:
                continue
            source = self._drafting[row]
            source.acceptance.count(len(plan.drafts[row]), number)
            counts = self.counts.setdefault(source.proposer.name, Counts())
            counts.proposed += len(plan.drafts[row])
            counts.accepted += number

    def remember(self, request: Request, output: Output) -> None:
        """Take the answer of a request that has ended, for later ones of its cache salt."""
        if output.finish_reason in ("stop", "length") and self.config.method == "suffix":
            corpus = self._corpus(request)
            if corpus is not None:
                corpus.add(request.tokens[request.prompt_length :])
