"""What vLLM's two model runners do with logits processors, in plain Python, with a model of hashes.

`tests/vllm/test_stand_in.py` compares the fields of the records with those of vLLM's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch

from adapters.catalog import Catalog, Entry, ModelPolicy
from adapters.chain import ProcessorChain, ProcessorFailed, apply_chain
from adapters.contract import Edit, Processor, Scale, ShapingProcessor, Stage, SteeringProcessor
from adapters.testing.kit_model import kit_context, kit_vocabulary
from adapters.vllm.indexed import Indexed
from adapters.vllm.model import ModelFacts, ServedModel
from adapters.vllm.requests import chain_of, read
from adapters.vllm.rows import Builder, RowEditor, end
from adapters.vllm.slots import Slots

MAX_LENGTH = 64


@dataclass
class Params:
    """``vllm.SamplingParams``: the fields that processors see, with vLLM's defaults.

    Instances have no annotations, as those of every class in Python 3.14.
    """

    __struct_fields__: ClassVar[tuple[str, ...]]

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    trace_decode_token_ids: list[int] | None = None

    def __getattribute__(self, name: str) -> Any:
        if name == "__annotations__":
            raise AttributeError(name)
        return super().__getattribute__(name)


Params.__struct_fields__ = tuple(each.name for each in fields(Params))


@dataclass(frozen=True)
class LogitsProcRequestState:
    """The fields of vLLM's record of this name."""

    device: torch.device
    max_num_reqs: int
    vocab_size: int
    all_token_ids: Any
    prompt_len: Any
    prefill_len: Any
    total_len: Any


@dataclass(frozen=True)
class LogitsContext:
    """The fields of vLLM's record of this name."""

    expanded_idx_mapping: torch.Tensor
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray[Any, Any]
    expanded_local_pos: torch.Tensor
    input_ids: torch.Tensor
    pos: torch.Tensor
    seq_lens_upper_bound_np: np.ndarray[Any, Any]


@dataclass
class Buffer:
    """A buffer of vLLM's: what the host reads, and what the device has."""

    np: np.ndarray[Any, Any]
    gpu: torch.Tensor


class Fatigue:
    """A third-party processor whose state is made of logits, in Dynamo's convention."""

    def __init__(self) -> None:
        self.likely: torch.Tensor | None = None

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        probabilities = logits.softmax(-1)
        if self.likely is None:
            self.likely = torch.zeros_like(probabilities)
        logits.sub_(8.0 * self.likely)
        self.likely = 0.75 * self.likely + probabilities


class Fills(ShapingProcessor):
    """Makes all logits equal, those of ids that are no token too."""

    name = "acme/fills"
    stage = Stage.SOFT

    def shape(self, logits: torch.Tensor) -> None:
        logits.fill_(1.0)


class Raises(ShapingProcessor):
    """Raises at the third token of every answer."""

    name = "acme/raises"
    stage = Stage.SOFT

    def shape(self, logits: torch.Tensor) -> None:
        if self.num_generated == 2:
            raise ArithmeticError


class Overflows(SteeringProcessor):
    """Divides by a number so small that rows become infinite, at the third token."""

    name = "acme/overflows"
    stage = Stage.PENALTY

    def edit(self) -> Edit | None:
        tokens = range(kit_vocabulary().num_tokens)
        return Scale.of(tokens, [1e-39] * len(tokens)) if self.num_generated == 2 else None


def served_model(*, penalises_first: bool, policy: ModelPolicy | None = None) -> ServedModel:
    """The kit's model, with the built-ins and four third parties."""
    vocabulary = kit_vocabulary()
    catalog = Catalog.load(options=["acme/fatigue=vllm_stand_in:Fatigue"])
    own: list[type[Processor]] = [Raises, Fills, Overflows]
    catalog = Catalog([*catalog.entries, *(Entry(kind.name, kind, "test") for kind in own)])
    facts = ModelFacts(
        vocabulary.path, vocabulary.size, vocabulary.eos_token_ids, "kit", penalises_first=penalises_first
    )
    return ServedModel(facts, kit_context(), catalog, policy or ModelPolicy())


@dataclass
class Request:
    """One answer.

    Attributes:
        number: Chooses the logits, beside the tokens.
        params: The parameters of the request, which several may share.
        prompt: Token ids.
        tokens: Prompt and answer.
        rows: Logits of which the tokens of the answer were taken.
        is_aborted: Whether the client has left.
        num_behind: Steps behind its end, which vLLM had begun by then.
    """

    number: int
    params: Params
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    is_aborted: bool = False
    num_behind: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 ``[V]``: a function of the request and its last tokens."""
        seed = hash((self.number, len(tokens), *tokens[-3:])) % 2**31
        return torch.randn(kit_vocabulary().size, generator=torch.Generator().manual_seed(seed)) * 3

    def take(self, token_id: int, row: torch.Tensor) -> bool:
        """Append a token; whether the answer goes on."""
        self.tokens.append(token_id)
        self.rows.append(row.clone())
        return not self.has_ended

    @property
    def is_full(self) -> bool:
        """Whether it has as many tokens as it may, which vLLM foresees."""
        return len(self.tokens) - len(self.prompt) == self.params.max_tokens

    @property
    def has_ended(self) -> bool:
        length = len(self.tokens) - len(self.prompt)
        return self.is_full or (
            length > 0 and self.tokens[-1] in kit_vocabulary().eos_token_ids and not self.params.ignore_eos
        )

    @property
    def has_left(self) -> bool:
        """Whether it is over, and no step behind its end is under way."""
        return self.is_aborted or (self.has_ended and (self.is_full or self.num_behind > 0))


def sampled(row: torch.Tensor) -> int:
    """The token that vLLM takes of a row: all requests of the stand-in are greedy or drawn."""
    return int(row.argmax())


def alone(number: int, params: Params, prompt: list[int], model: ServedModel) -> Request:
    """The answer with a fresh chain, a row at a time and a token at a time."""
    request = Request(number, params, prompt)
    asked = read(params, model)
    assert asked is not None
    chain, _ = chain_of(asked, params, model)
    end_id = asked.context.end_token_id
    has_failed = False
    row_of_failed = _Ended(min(kit_vocabulary().eos_token_ids) if end_id is None else end_id)
    chain.start(prompt)
    goes_on = True
    while goes_on:
        row = request.logits(request.tokens)
        row[model.never_ids] = -torch.inf
        try:
            if not has_failed:
                _apply(chain, row)
        except ProcessorFailed:
            has_failed = True
        if has_failed:
            end(row[None], 0, row_of_failed)  # type: ignore[arg-type]
        token_id = sampled(row)
        goes_on = request.take(token_id, row)
        if not has_failed:
            chain.accept(token_id, chain.position)
    return request


@dataclass
class _Ended:
    end_id: int


def _apply(chain: ProcessorChain, row: torch.Tensor) -> None:
    if apply_chain(chain, row) and not torch.isfinite(row.max()):
        raise chain.fail("chain", "empty", "no token is left")


class SecondRunner:
    """Model runner V2: slots, rows in any order, chunks, drafts, preemption, aborts, by a dice.

    With asynchronous scheduling a request has one more step behind its end.

    Args:
        model: The served model.
        dice: Decides what happens.
        num_slots: Requests at a time.
        drafts: The answer that a request gets alone, of which drafts are made.
    """

    def __init__(
        self,
        model: ServedModel,
        dice: random.Random,
        num_slots: int,
        drafts: Callable[[Request], Sequence[int]],
    ) -> None:
        self._dice, self._num_slots, self._drafts = dice, num_slots, drafts
        self._vocab_size = model.facts.vocab_size

        def buffer(*shape: int) -> Buffer:
            return Buffer(np.zeros(shape, np.int32), torch.zeros(shape, dtype=torch.int32))

        self.states = LogitsProcRequestState(
            torch.device("cpu"),
            num_slots,
            self._vocab_size,
            buffer(num_slots, MAX_LENGTH),
            buffer(num_slots),
            buffer(num_slots),
            buffer(num_slots),
        )
        self.slots = Slots(self.states, Builder(model), RowEditor(model.never_ids))
        self._is_async = dice.random() < 0.5
        self._running: dict[int, Request] = {}
        self._computed: dict[int, int] = {}
        self._free = list(range(num_slots))
        self.num_preempted = self.num_accepted = self.num_rejected = self.num_chunks = self.num_aborted = 0

    def run(self, requests: Sequence[Request]) -> None:
        """Answer all requests, but for those that are aborted."""
        waiting = list(requests)
        while waiting or self._running:
            for slot in list(self._running):
                fate = self._dice.random()
                if self._running[slot].has_ended:
                    continue
                if fate < 0.03:
                    self._leave(slot).is_aborted = True
                    self.num_aborted += 1
                elif fate < 0.13:
                    waiting.insert(0, self._leave(slot))
                    self.num_preempted += 1
            while waiting and self._free and (not self._running or self._dice.random() < 0.7):
                self._join(waiting.pop(0))
            if self._running:
                self._step()

    def _leave(self, slot: int) -> Request:
        self._free.append(slot)
        del self._computed[slot]
        return self._running.pop(slot)

    def _join(self, request: Request) -> None:
        slot = self._free.pop()
        self._running[slot] = request
        length = len(request.tokens)
        self._computed[slot] = self._dice.choice([0, 0, length // 2])  # a prefix that is cached
        self.states.prompt_len.np[slot] = len(request.prompt)
        self.states.prefill_len.np[slot] = length
        self.slots.add(slot, request.params)
        self.states.all_token_ids.gpu[slot, :length] = torch.tensor(
            request.tokens, dtype=torch.int32
        )  # staged till now

    def _step(self) -> None:
        chosen = [slot for slot in self._running if self._dice.random() < 0.85] or list(self._running)
        self._dice.shuffle(chosen)
        cut = self._dice.randrange(len(chosen) + 1) if self._dice.random() < 0.3 else 0  # rows are verified in parts
        for part in (chosen[:cut], chosen[cut:]):
            if part:
                self._part(part)

    def _part(self, part: list[int]) -> None:
        columns: list[tuple[int, int, int, int]] = []
        rows: list[torch.Tensor] = []
        drafts: dict[int, list[int]] = {}
        for slot in part:
            request, done = self._running[slot], self._computed[slot]
            prefilled = int(self.states.prefill_len.np[slot])
            if done < prefilled:
                self._computed[slot] = position = self._dice.randint(done + 1, prefilled)
                tokens, drafts[slot] = request.tokens[:position], []
            else:
                tokens, drafts[slot] = request.tokens, self._draft(request)
            fed = [tokens[-1], *drafts[slot]]
            for number, token_id in enumerate(fed):
                columns.append((slot, number, token_id, len(tokens) - 1 + number))
                rows.append(request.logits([*tokens, *drafts[slot][:number]]))
        order = list(range(len(rows)))
        self._dice.shuffle(order)
        slots, numbers, fed_ids, positions = (list(each) for each in zip(*(columns[i] for i in order), strict=True))
        logits = torch.stack([rows[i] for i in order])
        context = LogitsContext(
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor(part, dtype=torch.int32),
            np.array(part, np.int32),
            torch.tensor(numbers, dtype=torch.int32),
            torch.tensor(fed_ids),
            torch.tensor(positions),
            np.array([MAX_LENGTH] * len(part), np.int32),
        )
        self.slots.apply(logits, context)
        where = {(slot, number): index for index, (slot, number) in enumerate(zip(slots, numbers, strict=True))}
        for slot in part:
            self._verify(slot, drafts[slot], [logits[where[slot, number]] for number in range(len(drafts[slot]) + 1)])

    def _draft(self, request: Request) -> list[int]:
        """Drafts: tokens of the answer, and others, also beyond its end."""
        known, count = self._drafts(request), self._dice.randrange(4)
        guess = list(known[len(request.tokens) : len(request.tokens) + count])
        guess += [self._dice.randrange(100) for _ in range(count - len(guess))]
        return [token_id if self._dice.random() < 0.8 else self._dice.randrange(100) for token_id in guess]

    def _verify(self, slot: int, drafts: list[int], rows: list[torch.Tensor]) -> None:
        request, prefilled = self._running[slot], int(self.states.prefill_len.np[slot])
        if self._computed[slot] < prefilled:
            self.num_chunks += 1
            return
        if request.has_ended:
            request.num_behind += 1
            self._leave(slot)
            return
        for number, row in enumerate(rows):
            token_id = sampled(row)
            self.states.all_token_ids.gpu[slot, len(request.tokens)] = token_id
            if not request.take(token_id, row):
                if request.is_full or not self._is_async:
                    self._leave(slot)
                return
            if number < len(drafts) and drafts[number] != token_id:
                self.num_rejected += 1
                return
            self.num_accepted += number < len(drafts)


class FirstRunner:
    """Model runner V1: a persistent batch that is condensed and reordered, by a dice.

    With asynchronous scheduling the newest token is -1 until the logits are there, and for ever in
    the list of a request that is preempted before; and a request has one more step behind its end.

    Args:
        model: The served model.
        dice: Decides what happens.
        num_rows: Requests at a time.
    """

    def __init__(self, model: ServedModel, dice: random.Random, num_rows: int) -> None:
        self._dice, self._num_rows = dice, num_rows
        self.indexed = Indexed(Builder(model), RowEditor(model.never_ids))
        self._batch: list[tuple[Request, list[int]]] = []
        self._is_async = dice.random() < 0.5
        self._unshown: list[tuple[list[int], int]] = []
        self.num_preempted = self.num_moved = self.num_aborted = 0

    def run(self, requests: Sequence[Request]) -> None:
        """Answer all requests, but for those that are aborted."""
        waiting: list[tuple[Request, list[int]]] = [(request, []) for request in requests]
        while waiting or self._batch:
            self._update(waiting)
            if self._batch:
                self._step()

    def _update(self, waiting: list[tuple[Request, list[int]]]) -> None:
        """As vLLM's ``BatchUpdateBuilder``, ``condense`` and a reordering do."""
        rows: list[tuple[Request, list[int]] | None] = []
        removed, preempted = [], []
        is_reset = self._dice.random() < 0.05  # of the prefix cache: all are preempted, and resumed at once
        for index, (request, output) in enumerate(self._batch):
            is_preempted = not request.has_ended and (self._dice.random() < 0.1 or is_reset)
            has_left = request.has_left if self._is_async else request.has_ended
            if not is_preempted and self._dice.random() < 0.03:
                request.is_aborted = True
                self.num_aborted += 1
            if is_preempted:  # resumed with the same list, with an equal one, or with the token that was not shown
                is_same = not self._is_async and self._dice.random() < 0.5
                preempted.append((request, output if is_same else request.tokens[len(request.prompt) :]))
                self._unshown = [each for each in self._unshown if each[0] is not output]
            if is_preempted or has_left or request.is_aborted:
                removed.append(index)
                rows.append(None)
            else:
                rows.append((request, output))
        removed.sort(reverse=True)
        self.num_preempted += len(preempted)
        if is_reset:
            waiting[:0], preempted = preempted, []
        added, moved = [], []
        while waiting and sum(row is not None for row in rows) < self._num_rows and self._dice.random() < 0.8:
            request, output = waiting.pop(0)
            if removed:
                index = removed.pop()
                rows[index] = (request, output)
            else:
                index = len(rows)
                rows.append((request, output))
            added.append((index, request.params, request.prompt, output))
        waiting[:0] = preempted
        last = len(rows) - 1
        while removed:
            while last in removed:
                last -= 1
            if removed[-1] >= last:
                break
            empty = removed.pop()
            rows[empty], rows[last] = rows[last], None
            moved.append((last, empty, False))
            last -= 1
        self._batch = [row for row in rows if row is not None]
        if len(self._batch) > 1 and self._dice.random() < 0.3:
            a, b = self._dice.sample(range(len(self._batch)), 2)
            self._batch[a], self._batch[b] = self._batch[b], self._batch[a]
            moved.append((a, b, True))
        self.num_moved += len(moved)
        self._process(added, removed, moved)

    def _process(self, added: list[Any], removed: list[int], moved: list[tuple[int, int, bool]]) -> None:
        """As `Processors.update_state` with vLLM's ``process_dict_updates``."""
        entries = self.indexed.requests
        self.indexed.leave([*removed, *(index for index, *_ in added)])
        for index, params, prompt, output in added:
            if (new := self.indexed.new(params, prompt, output)) is not None:
                entries[index] = new
            else:
                entries.pop(index, None)
        for index in removed:
            entries.pop(index, None)
        for a, b, is_swap in moved:
            a_entry, b_entry = entries.pop(a, None), entries.pop(b, None)
            if a_entry is not None:
                entries[b] = a_entry
            if b_entry is not None and is_swap:
                entries[a] = b_entry

    def _step(self) -> None:
        is_chunk = [not output and self._dice.random() < 0.3 for _, output in self._batch]
        logits = torch.stack(
            [
                request.logits(request.prompt[:1] if chunk else request.tokens)
                for (request, _), chunk in zip(self._batch, is_chunk, strict=True)
            ]
        )
        self._show()
        self.indexed.apply(logits)
        for (request, output), chunk, row in zip(self._batch, is_chunk, logits, strict=True):
            if request.has_ended:
                request.num_behind += 1
            elif not chunk:
                token_id = sampled(row)
                output.append(-1 if self._is_async else token_id)
                self._unshown.append((output, token_id))
                request.take(token_id, row)

    def _show(self) -> None:
        """As vLLM's ``update_async_output_token_ids``, in place."""
        for output, token_id in self._unshown:
            output[-1] = token_id
        self._unshown.clear()
