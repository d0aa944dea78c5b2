"""One batch with every built-in processor and with none; whatever joins and leaves, a row is what
it is alone.

The model's logits are the same bit by bit in any batch, so tokens, log probabilities and receipts
must be, too.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_doubles import ScriptedModel

from adapters.catalog import Catalog, Entry, Requested, Selection
from adapters.contract import (
    Bias,
    Context,
    Edit,
    ProcessorArgs,
    Reads,
    Scope,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
)
from adapters.testing import kit_context, kit_vocabulary
from adapters.third_party import wrap_third_party
from worker.engines import EngineRequest
from worker.engines.embedded import EmbeddedConfig
from worker.engines.embedded.admission import admit
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.plan import Output
from worker.engines.embedded.step import Stepper, make_stepper
from worker.sampling import SamplingParams

NUM_TOKENS = 20
SEEDS = (0, 1, 2)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


class HouseModel(ScriptedModel):
    """The scripted model over the conformance kit's vocabulary, so that processors of text have
    text.
    """

    def __init__(self) -> None:
        vocabulary = kit_vocabulary()
        width = self.vocab_size = vocabulary.size
        self.eos_token_ids = tuple(sorted(vocabulary.eos_token_ids))  # type: ignore[assignment]
        self.undecodable_ids = tuple(range(vocabulary.num_tokens, width))
        generator = torch.Generator().manual_seed(1)
        self.by_token = torch.randn(width, width, generator=generator)
        self.by_position = torch.randn(self.context_length, width, generator=generator)
        self.by_position[:, list(self.eos_token_ids)] += 0.5  # so that answers end by themselves, too
        self.by_position[:, list(kit_context().think_end)] += 0.5
        self.hook, self.num_kv_tokens, self.plans = None, 0, []


@cache
def examples() -> dict[str, list[dict[str, Any]]]:
    """The conformance kit's arguments of every built-in."""
    path = Path(__file__).parents[2] / "adapters" / "conformance" / "builtin_examples.py"
    spec = importlib.util.spec_from_file_location("conformance_examples", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.EXAMPLES)


class Counts:
    """A third party's processor in Dynamo's shape, whose effect depends on how often it was
    called.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        self.calls += 1
        logits[40 + self.calls % 7] += 5 * (self.calls % 3)


class Raises(Counts):
    """Raises at its fourth call."""

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        super().__call__(input_ids, logits)
        if self.calls == 4:
            logits.fill_(float("nan"))
            raise RuntimeError


class Poisons(Counts):
    """Leaves NaN at its fourth call."""

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        super().__call__(input_ids, logits)
        if self.calls == 4:
            logits[5] = float("nan")


FOREIGN = {"counts": Counts, "raises": Raises, "poisons": Poisons}


def catalog(*more: Entry) -> Catalog:
    foreign = [Entry(name, wrap_third_party(target, name), "test") for name, target in FOREIGN.items()]
    return Catalog([*Catalog.default().entries, *foreign, *more])


@dataclass(frozen=True)
class Row:
    """One request: what it asks for, and its prompt."""

    name: str
    prompt: tuple[int, ...]
    processors: tuple[Requested, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {requested.name for requested in self.processors}


@dataclass
class Answer:
    """Everything that a row's client hears."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    receipts: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def take(self, output: Output) -> None:
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
        if output.logprobs is not None:
            self.logprobs.append([(one.token_id, one.logprob, one.rank) for one in output.logprobs])
        if output.engine_data is not None:
            self.receipts.append(output.engine_data)
        self.finish_reason, self.error = output.finish_reason, output.error

    def starts(self, whole: Answer) -> bool:
        """Whether this is what is left of ``whole`` when it is cut."""
        count = len(self.token_ids)
        return self.token_ids == whole.token_ids[:count] and self.logprobs == whole.logprobs[:count]


GREEDY: dict[str, Any] = {}
DRAWN: dict[str, Any] = {"temperature": 0.9}
LATE = frozenset(entry.name for entry in Catalog.default().entries if entry.processor.stage >= Stage.TEMPERATURE)


def prompt(source: random.Random, *, thinking: bool = False) -> tuple[int, ...]:
    vocabulary = kit_vocabulary()
    words = source.choices(("The", " quick", " brown", " fox", " Yes", " no", ".", " the", " 42", "é"), k=12)
    ids = vocabulary.encode("".join(words)) + [source.randrange(1, vocabulary.num_tokens - 2) for _ in range(4)]
    start = list(kit_context().think_start)
    return tuple([*ids, *start] if thinking else ids)


def rows_of_builtins(source: random.Random) -> Iterator[Row]:
    """Every example of every built-in, greedy and drawn; and every scope that it has."""
    for entry in Catalog.default().entries:
        for number, args in enumerate(examples()[entry.name]):
            name = f"{entry.name}[{number}]"
            yield Row(name, prompt(source), (Requested(entry.name, args),), {"logprobs": 2})
            drawn = {} if entry.name in LATE else DRAWN
            yield Row(f"{name} drawn", prompt(source), (Requested(entry.name, args),), {**drawn, "seed": number})
        for scope in entry.processor.scopes[1:]:
            requested = Requested(entry.name, examples()[entry.name][0], scope)
            yield Row(f"{entry.name} {scope}", prompt(source, thinking=True), (requested,), {"seed": 5})


def rows_of_chains(source: random.Random, count: int) -> Iterator[Row]:
    """Several processors that may contradict each other: then both runs must say so."""
    known = Catalog.default()
    for number in range(count):
        names = source.sample(known.names, source.randrange(2, 6))
        if guides := {"cfg", "contrastive"} & set(names):  # which are refused beside another one, and mirostat
            names = [name for name in names if name not in {"mirostat", "cfg", "contrastive"} - {min(guides)}]
        scopes: list[Scope] = [source.choice(known[name].processor.scopes) for name in names]
        chosen = [
            Requested(name, source.choice(examples()[name]), scope) for name, scope in zip(names, scopes, strict=True)
        ]
        fields = {"seed": number, "logprobs": number % 3}
        if not LATE & set(names) and number % 2:
            fields |= DRAWN
        yield Row(f"chain {number}", prompt(source, thinking=number % 2 == 0), tuple(chosen), fields)


def rows_of_others(source: random.Random) -> Iterator[Row]:
    """No processors, request fields, and third parties."""
    for number in range(6):
        drawn = DRAWN if number % 2 else GREEDY
        yield Row(f"none {number}", prompt(source), fields={**drawn, "seed": number, "logprobs": 2})
    controls: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4, "min_tokens": 7},
        {"frequency_penalty": 0.9, "presence_penalty": -0.5, "temperature": 1.2, "top_k": 9},
        {"temperature": 0.8, "top_p": 0.7, "min_p": 0.02, "logprobs": 3, "logprobs_mode": "processed"},
        {"bad_token_ids": [40, 41], "no_repeat_ngram_size": 2},
    ]
    for number, fields in enumerate(controls):
        yield Row(f"fields {number}", prompt(source), fields={**fields, "seed": 100 + number})
    for name in FOREIGN:
        for number in range(2):
            drawn = DRAWN if number else GREEDY
            fields = {**drawn, "seed": number, "min_tokens": 8}
            yield Row(f"{name} {number}", prompt(source), (Requested(name),), fields)
    only_one = (Requested("allowed_tokens", {"token_ids": [60]}), Requested("loop_stop", examples()["loop_stop"][0]))
    yield Row("loop", prompt(source), only_one, {"min_tokens": 3})


def all_rows(seed: int) -> list[Row]:
    source = random.Random(seed)
    return [*rows_of_builtins(source), *rows_of_chains(source, 40), *rows_of_others(source)]


class Batch:
    """A driver, and what each of its rows has said."""

    def __init__(self, known: Catalog, **settings: int) -> None:
        self.catalog = known
        self.model = HouseModel()
        config = EmbeddedConfig(model_path="unused", device="cpu", max_mixed_chunk=64, **settings)  # type: ignore[arg-type]
        blocks = config.max_num_seqs * -(-self.model.context_length // config.kv_block_size)
        self.driver: Stepper = make_stepper(config, self.model, blocks)  # type: ignore[arg-type]
        sizes = {"context_length": self.model.context_length, "page_size": 64, "block_size": 16}
        amateur: Any = HouseModel()
        draft_model = DraftModel(amateur, num_companions=config.max_num_seqs // 2, **sizes)
        self.driver.scheduler.queues.draft_model = draft_model
        self.answers: dict[str, Answer] = {}

    def add(self, row: Row) -> None:
        self.answers[row.name] = Answer()
        length, draft_model = self.model.context_length, self.driver.draft_model
        self.driver.add(admit(self.asked(row), 0, self.model, length, draft_model=draft_model))  # type: ignore[arg-type]

    def asked(self, row: Row) -> EngineRequest:
        context = kit_context()
        fields = {"max_tokens": NUM_TOKENS, "end_id": self.model.eos_token_ids[0], "seed": 0, **row.fields}
        chain = None
        if row.processors:
            own = Context(
                context.vocabulary,
                context.end_token_ids,
                fields["seed"],
                max_tokens=NUM_TOKENS,
                watermark_keys=context.watermark_keys,
                think_start=context.think_start,
                think_end=context.think_end,
            )
            # a slow machine must not decide what is equal
            chain = self.catalog.build_chain(Selection(row.processors, "debug"), own, step_budget_s=600)
            chain.wants_receipt = True
            chain.start(row.prompt)
        return EngineRequest(row.name, row.prompt, SamplingParams(**fields), chain)

    def step(self) -> None:
        for output in self.driver.step():
            self.answers[output.request_id].take(output)
        self.driver.scheduler.check_integrity()

    def leave(self, name: str) -> None:
        output = self.driver.abort(name)
        if output is not None:
            self.answers[name].take(output)

    @property
    def is_idle(self) -> bool:
        return self.driver.scheduler.is_idle


def alone(row: Row, known: Catalog) -> Answer:
    batch = Batch(known, max_num_seqs=2, max_num_batched_tokens=256)
    batch.add(row)
    while not batch.is_idle:
        batch.step()
    return batch.answers[row.name]


def shuffled(
    rows: Sequence[Row],
    known: Catalog,
    seed: int,
    *,
    together: int,
    leaving: float = 0.1,
    watch: Callable[[Batch], None] = lambda batch: None,
    **settings: int,
) -> dict[str, Answer]:
    """The rows in random order: the first ``together`` at once, the others at random steps; some
    leave early.
    """
    source = random.Random(seed)
    order = list(rows)
    source.shuffle(order)
    joins = sorted((0 if place < together else source.randrange(1, 120), place) for place in range(len(order)))
    leaves = sorted((source.randrange(1, 160), row.name) for row in order if source.random() < leaving)
    batch = Batch(known, **settings)
    step = 0
    while joins or not batch.is_idle:
        while joins and joins[0][0] <= step:
            batch.add(order[joins.pop(0)[1]])
        while leaves and leaves[0][0] <= step:
            batch.leave(leaves.pop(0)[1])
        if not batch.is_idle:
            batch.step()
            watch(batch)
        step += 1
    return batch.answers


def differing(rows: Sequence[Row], answers: dict[str, Answer], known: Catalog) -> list[str]:
    """Names of the rows that are not what they are alone; one that was aborted must be the
    beginning of it.
    """
    found = []
    for row in rows:
        answer, solo = answers[row.name], alone(row, known)
        same = answer.starts(solo) if answer.finish_reason == "cancelled" else answer == solo
        if not same:
            found.append(row.name)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_that_join_and_leave_a_busy_batch_are_as_if_alone(seed: int) -> None:
    rows, known = all_rows(seed), catalog()
    answers = shuffled(rows, known, seed, together=8, max_num_seqs=24, max_num_batched_tokens=64)
    assert differing(rows, answers, known) == []
    assert {answer.finish_reason for answer in answers.values()} == {"stop", "length", "error", "cancelled"}


def test_every_builtin_and_none_in_one_step() -> None:
    rows, known = all_rows(7), catalog()
    seen: set[str | None] = set()

    def watch(batch: Batch) -> None:
        if len(batch.model.plans) == 1:
            for request in batch.model.plans[0].sampled:
                seen.update({member.name for member in request.chain.members} if request.chain else {None})

    answers = shuffled(
        rows,
        known,
        7,
        together=len(rows),
        leaving=0.0,
        watch=watch,
        max_num_seqs=2 * len(rows),
        max_num_batched_tokens=64 * len(rows),
    )
    assert seen >= {*Catalog.default().names, *FOREIGN, None}
    assert differing(rows, answers, known) == []


def test_every_builtin_acted() -> None:
    """Equality says nothing about a processor that never asked for anything."""
    rows, known = all_rows(0), catalog()
    active: set[str] = set()
    for row in rows:
        for receipt in alone(row, known).receipts[-1:]:
            active |= {one["name"] for one in receipt["logits_processors"]["processors"] if one["steps_active"]}
    assert active >= set(Catalog.default().names)


def test_failures_are_their_own_rows_and_named() -> None:
    rows = [row for row in all_rows(3) if row.name.split()[0] in FOREIGN]
    for row in rows:
        answer = alone(row, catalog())
        if row.names == {"counts"}:
            assert answer.error is None
            continue
        assert answer.finish_reason == "error"
        assert answer.error is not None
        assert answer.error.startswith(f"logits processor {row.name.split()[0]}: ")
        assert len(answer.token_ids) == 3


# What the comparison is worth: two processors that break the rule are found


class LooksAside(ShapingProcessor):
    """Shapes a row by the rows beside it."""

    name = "looks_aside"
    stage = Stage.SOFT
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def shape(self, logits: torch.Tensor) -> None:
        raise AssertionError("it is batched")

    @classmethod
    def shape_rows(cls, processors: Any, logits: torch.Tensor) -> None:
        logits.sub_(5 * logits.clamp(min=-100).mean(0, keepdim=True))


class SharesState(SteeringProcessor):
    """Counts the calls of all its instances together."""

    name = "shares_state"
    stage = Stage.BIAS
    reads = Reads.NOTHING
    Args = ProcessorArgs
    calls = 0

    def edit(self) -> Edit:
        type(self).calls += 1
        return Bias.of([30 + self.calls % 40], [50.0])


@pytest.mark.parametrize("broken", [LooksAside, SharesState])
def test_a_processor_that_knows_of_other_rows_is_found(broken: Any) -> None:
    source, known = random.Random(0), catalog(Entry(broken.name, broken, "test"))
    rows = [Row(f"broken {number}", prompt(source), (Requested(broken.name),)) for number in range(4)]
    answers = shuffled(rows, known, 0, together=4, leaving=0.0, max_num_seqs=4, max_num_batched_tokens=256)
    assert differing(rows, answers, known) != []


def test_an_aborted_row_shows_only_its_beginning() -> None:
    whole = Answer([1, 2, 3], [["a"], ["b"], ["c"]], finish_reason="stop")
    assert Answer([1, 2], [["a"], ["b"]]).starts(whole)
    assert not Answer([1, 3], [["a"], ["b"]]).starts(whole)
