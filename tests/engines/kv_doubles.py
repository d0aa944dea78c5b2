"""A model whose KV can be read: it finds out when a row is given KV that is not its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.engines import EngineRequest
from worker.engines.embedded import Plan, Request
from worker.engines.embedded.admission import admit
from worker.engines.embedded.blocks import ROOT, Block, hash_block, root_of
from worker.engines.embedded.kv_cache import BlocksStored, KvCache
from worker.engines.embedded.plan import Samples
from worker.sampling import SamplingParams

WIDTH = 96
UNWRITTEN = -1
END = 5
FIRST = 1
"""What stands before the KV of the first token: another number is another model."""


def mix(before: int, token: int) -> int:
    """The KV of `token` after tokens whose last KV is `before`: as in a real model, it depends
    on all of them.
    """
    return (before * 1_000_003 ^ (token + 7)) % (2**61 - 1)


def next_token(kv: int) -> int:
    """The greedy token after KV."""
    return 3 + kv % (WIDTH - 3)


def answer(prompt: Sequence[int], count: int, first: int = FIRST) -> list[int]:
    """What an answer of `count` tokens at most is, computed without a store; `END` ends it."""
    kv = first
    for token in prompt:
        kv = mix(kv, token)
    tokens: list[int] = []
    while len(tokens) < count and END not in tokens:
        tokens.append(next_token(kv))
        kv = mix(kv, tokens[-1])
    return tokens


class RecallModel:
    """Implements `Model`. A position's KV is one number, made of the number before it in the store
    and the token.

    Every step checks all that its rows read against what their own tokens make, that nothing is
    written twice, and that nothing is written into a page that another row of the step has.
    """

    vocab_size = WIDTH
    eos_token_ids = (END,)
    undecodable_ids: tuple[int, ...] = ()
    device = torch.device("cpu")
    kv_bytes_per_token = 0
    wants_dense_kv = True
    numerics = "exact"

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self.size = 0
        self.store: list[list[int]] = []
        self.first = FIRST
        self.num_computed = 0
        self.computed: list[int] = []  # KV of the newest step's tokens
        self.logits = torch.empty(0, WIDTH)

    def allocate_kv(self, num_pages: int, page_size: int) -> None:
        self.size = page_size
        self.store = [[UNWRITTEN] * page_size for _ in range(num_pages)]

    def choose(self, plan: Plan) -> Samples:
        """Compute a step; returns the greedy tokens of all its rows, drafted positions too."""
        for copy in plan.copies:
            self.store[copy.target][: copy.num_tokens] = self.store[copy.source][: copy.num_tokens]
        spans = [(one, len(one.tokens) - 1, one.tokens[:-1] + tokens) for one, tokens in plan.decode_tokens()]
        spans += [(chunk.request, chunk.start, chunk.request.tokens[: chunk.stop]) for chunk in plan.chunks]
        written: set[tuple[int, int]] = set()
        for one, start, tokens in spans:
            self._check_sole_writer(one, start, len(tokens), [other for other, _, _ in spans])
            for position in range(start, len(tokens)):
                page, slot = one.pages[position // self.size], position % self.size
                assert (page, slot) not in written, f"{one.id}: position {position} is another row's too"
                written.add((page, slot))
                before = self._read(one, position - 1) if position else self.first
                self.store[page][slot] = mix(before, tokens[position])
        read = [self._check_reads(one, tokens)[start:] for one, start, tokens in spans]
        self.num_computed += len(written)
        self.computed = [kv for part in read for kv in part]
        num_decoded = len(plan.decode)
        last = {id(one): kv[-1] for (one, _, _), kv in zip(spans[num_decoded:], read[num_decoded:], strict=True)}
        rows = [kv for decoded in read[:num_decoded] for kv in decoded]
        return Samples([next_token(kv) for kv in (*rows, *(last[id(one)] for one in plan.sampled[num_decoded:]))])

    def forward(self, plan: Plan) -> torch.Tensor:
        tokens = self.choose(plan).token_ids
        self.logits = torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.long), WIDTH).float()
        return self.logits[[*plan.places()]]

    def late_logits(self, rows: Sequence[int]) -> torch.Tensor:
        return self.logits[list(rows)]

    def spoiled(self, plan: Plan) -> tuple[()]:
        return ()

    def _read(self, one: Request, position: int) -> int:
        return self.store[one.pages[position // self.size]][position % self.size]

    def _check_sole_writer(self, one: Request, start: int, stop: int, others: Sequence[Request]) -> None:
        mine = set(one.pages[start // self.size : -(-stop // self.size)])
        for other in others:
            assert other is one or not mine & set(other.pages), f"{one.id} writes into a page of {other.id}"

    def _check_reads(self, one: Request, tokens: Sequence[int]) -> list[int]:
        """The KV of each position, which must be that of `tokens`."""
        found = [self.first]
        for position, token in enumerate(tokens):
            found.append(mix(found[-1], token))
            assert self._read(one, position) == found[-1], f"{one.id} was given wrong KV at position {position}"
        return found[1:]


def recall_request(model: RecallModel, name: str, prompt: Sequence[int], max_tokens: int) -> Request:
    return admit(EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens)), 0, model, model.context_length)  # type: ignore[arg-type]


class Listener:
    """A router: it hears the events of a cache, and knows which blocks are cached."""

    def __init__(self, cache: KvCache) -> None:
        cache.record_events()
        self._cache = cache
        self.known: set[int] = set()

    def check(self) -> None:
        """What it knows by now is what is cached."""
        for event in self._cache.drain_events():
            hashes = set(event.block_hashes)
            if isinstance(event, BlocksStored):
                assert event.parent_hash == ROOT or event.parent_hash in self.known
                assert not hashes & self.known
                self.known |= hashes
            else:
                assert hashes <= self.known
                self.known -= hashes
        assert self.known == {told_hash(block) for block in self._cache._index.blocks.values()}


def told_hash(block: Block) -> int:
    """The hash by which a router hears of a block."""
    if block.parent is None:
        return hash_block(root_of(block.cache_salt or None, adapter=block.lora_name), block.tokens)
    return hash_block(told_hash(block.parent), block.tokens)
