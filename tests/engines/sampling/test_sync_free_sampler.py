"""The path of the sampler that looks at no value before it has tokens: what it finds, and that it
does not look.

There is no GPU here. What the path computes is tested on CPU tensors, against the other path; that
it never waits is tested on tensors that say they are on CUDA and have no values, so that whoever
reads one fails.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from effort import examples
from engine_doubles import WIDTH, ScriptedModel, request, stepper
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from adapters.chain import ProcessorChain
from adapters.contract import (
    Allow,
    Ban,
    Context,
    Edit,
    Force,
    Reads,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    bitmask_of,
)
from adapters.sampling.prefixes import select_by_sorting
from adapters.sampling.weights import (
    exponential_,
    logarithms,
    point_in_one,
    points_in,
    share_of,
    share_of_one,
    weight_bits,
)
from adapters.vocabulary import Vocabulary
from worker.engines import TokenLogprob
from worker.engines.embedded.plan import Edits, Output, Plan, Request, Samples
from worker.engines.embedded.sampling.device_sampler import DeviceStep
from worker.engines.embedded.sampling.device_truncation import (
    SamplingColumns,
    padded,
    truncate_and_sample_rows,
)
from worker.engines.embedded.sampling.sampler import Sampler
from worker.engines.embedded.sampling.truncation import Controls, group_rows, truncate_and_sample
from worker.engines.embedded.step import plan_edits
from worker.sampling import SamplingParams

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")
PROMPT = [5, 6, 7]


def params_of(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 20, "ignore_eos": True, "seed": 11} | changes))


def request_of(number: int, params: SamplingParams) -> Request:
    tokens = [1] * (number + 3)
    return Request(str(number), number, params, tokens, len(tokens), 1000, frozenset(), seed=params.seed or 0)


asked = st.builds(
    params_of,
    temperature=st.sampled_from([None, 0.0, 1e-6, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([None, None, 1, 2, 20, 300, 5000, 10_000]),
    top_p=st.sampled_from([None, None, 0.0, 1e-9, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([None, None, 0.0001, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, None, 0, 3]),
    logprobs_mode=st.sampled_from(["raw", "processed"]),
)


def logits_of(seed: int, count: int, width: int, grain: float, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, width, generator=generator) * scale
    rows = (rows / grain).round() * grain if grain else rows
    rows[torch.rand(count, width, generator=generator) < 0.05] = -torch.inf
    rows[:, width // 2] = 0.5
    return rows


def both(logits: torch.Tensor, requests: tuple[Request, ...], bitmask: torch.Tensor | None) -> tuple[Samples, Samples]:
    width = logits.shape[1]
    looking, sync_free = (Sampler(width, (3, width - 1), CPU, sync_free=sync_free) for sync_free in (False, True))
    plan = Plan(requests, (), requests)
    return (
        looking.sample(logits.clone(), Edits(), plan, bitmask=bitmask),
        sync_free.sample(logits.clone(), Edits(), plan, bitmask=bitmask),
    )


@settings(max_examples=examples(150), deadline=None)
@given(
    wanted=st.lists(asked, min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    width=st.sampled_from([17, 700, 5003, 9000]),
    grain=st.sampled_from([0.0, 0.25, 2.0]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    spoilt=st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
    masked=st.booleans(),
)
def test_both_paths_find_the_same(
    wanted: list[SamplingParams],
    seed: int,
    width: int,
    grain: float,
    scale: float,
    spoilt: float | None,
    masked: bool,
) -> None:
    logits = logits_of(seed, len(wanted), width, grain, scale)
    if spoilt is not None:
        logits[0] = spoilt if spoilt == -math.inf else torch.where(torch.arange(width) == width // 3, spoilt, logits[0])
    bitmask = bitmask_of(range(0, width, 2), width).repeat(len(wanted), 1) if masked else None
    looking, sync_free = both(logits, tuple(request_of(i, one) for i, one in enumerate(wanted)), bitmask)
    assert sync_free.errors == looking.errors
    assert (spoilt is not None) == bool(sync_free.errors)
    for row in range(len(wanted)):
        if row not in looking.errors:
            assert sync_free.token_ids[row] == looking.token_ids[row]
            assert sync_free.logprobs.get(row) == looking.logprobs.get(row)


def drawn_both_ways(
    logits: torch.Tensor, controls: list[Controls], numbers: list[float]
) -> tuple[list[tuple[int, list[float]]], list[tuple[int, list[float]]]]:
    """Of each row: its token, and the logarithms of the weights that it was drawn from."""
    width, rows = logits.shape[1], range(len(controls))
    groups = group_rows(dict(enumerate(controls)), width, CPU)
    ids, spread = truncate_and_sample(logits, groups, dict(enumerate(numbers)), wanted=set(rows))
    columns, highest = SamplingColumns.of(controls, width, CPU), logits.amax(-1, keepdim=True)
    column = torch.tensor(numbers, dtype=torch.float64)[:, None]
    tokens, weights = truncate_and_sample_rows(logits, highest, columns, column, select_by_sorting)
    sync_free = logarithms(weights, weight_bits(width)).tolist()
    return [(ids[row], spread[row].tolist()) for row in rows], list(zip(tokens.tolist(), sync_free, strict=True))


@given(power=st.integers(0, 9), part=st.data())
def test_both_paths_agree_at_exact_boundaries(power: int, part: st.DataObject) -> None:
    """Equal weights, whose shares are exact: where a prefix ends exactly, and where a number is
    exactly between two.
    """
    size = 2**power
    count, place = part.draw(st.integers(1, size)), part.draw(st.integers(0, size - 1))
    logits = torch.full((3, size), 1.5)
    logits[2, size // 2] = 1.25
    controls = [Controls(top_p=count / size), Controls(top_k=count, min_p=1.0), Controls(min_p=1.0, top_p=count / size)]
    looking, sync_free = drawn_both_ways(logits, controls, [place / size] * 3)
    assert looking == sync_free
    assert sync_free[0][1] == [0.0] * count + [-math.inf] * (size - count)
    assert drawn_both_ways(logits, [Controls()] * 3, [place / size] * 3)[1][0][0] == place


@pytest.mark.parametrize("count", [1, 3, 9, 40])
def test_a_row_is_the_same_however_many_there_are(count: int) -> None:
    logits = logits_of(1, count, 3000, 0.0, 3.0)
    requests = tuple(request_of(i, params_of(temperature=1.0, top_p=0.95, seed=i)) for i in range(count))
    _, together = both(logits, requests, None)
    for row, one in enumerate(requests):
        assert both(logits[row : row + 1], (one,), None)[1].token_ids == together.token_ids[row : row + 1]


def test_rows_are_padded_to_few_sizes() -> None:
    assert [padded(count) for count in (1, 2, 3, 4, 5, 8, 9, 32, 33, 255)] == [1, 2, 4, 4, 8, 8, 16, 32, 40, 256]


@given(
    keys=st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.5, 3e38]), min_size=1, max_size=30),
    part=st.data(),
)
def test_ends_of_prefixes(keys: list[float], part: st.DataObject) -> None:
    masses = part.draw(st.lists(st.integers(0, 2**40), min_size=len(keys), max_size=len(keys)).filter(any))
    target = part.draw(st.integers(1, sum(masses)))
    last, before = select_by_sorting(torch.tensor([keys]), torch.tensor([masses]), torch.tensor([[target]]))
    above = sum(mass for key, mass in zip(keys, masses, strict=True) if key > last)
    reached = above + sum(mass for key, mass in zip(keys, masses, strict=True) if key == last)
    assert int(before) == above < target <= reached


@given(total=st.integers(1, 2**62), part=st.floats(0, 1))
def test_one_row_is_rounded_as_many_are(total: int, part: float) -> None:
    totals, parts = torch.tensor([total]), torch.tensor([part], dtype=torch.float64)
    assert share_of(totals, parts).tolist() == [share_of_one(total, part)]
    assert points_in(totals, parts).tolist() == [point_in_one(total, part)]
    assert 0 <= point_in_one(total, part) < total
    assert 0 <= share_of_one(total, part) <= total


@given(seed=st.integers(0, 2**32), size=st.integers(1, 700), start=st.integers(0, 9))
def test_an_exponential_depends_on_its_own_value_alone(seed: int, size: int, start: int) -> None:
    """Not on its place, nor on how many are computed at once: a weight is the same among
    candidates and in a row.
    """
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 10 - 20
    part = values[start : start + size].clone()
    assert torch.equal(exponential_(part), exponential_(values)[start : start + size])


@pytest.mark.parametrize("vocab_size", [1, 32_000, 262_143, 262_144, 10**6])
def test_a_row_of_equal_weights_does_not_overflow(vocab_size: int) -> None:
    assert vocab_size << weight_bits(vocab_size) < 2**62


# -- with processors


class Steers(SteeringProcessor):
    name, stage, reads = "steers", Stage.MASK, Reads.NOTHING

    def __init__(self, edit: Edit) -> None:
        self.own = edit
        self.stage = Stage.FORCE if isinstance(edit, Force) else Stage.MASK  # type: ignore[misc]

    def edit(self) -> Edit:
        return self.own


class Halves(ShapingProcessor):
    """One that is batched."""

    name, stage, reads = "halves", Stage.TEMPERATURE, Reads.NOTHING

    def __init__(self) -> None:
        pass

    def shape(self, logits: torch.Tensor) -> None:
        logits.div_(2)

    @classmethod
    def shape_rows(cls, processors: Sequence[Any], logits: torch.Tensor) -> None:
        logits.div_(2)


def processed_requests() -> tuple[Request, ...]:
    """New ones, for a chain accepts a position once. In the order: forced, forced to what is never
    sampled, masked to three tokens, masked to what is never sampled, shaped."""
    chains: list[list[Any]] = [
        [Steers(Force(9))],
        [Steers(Force(3))],
        [Steers(Allow.of([3, 40, 41], WIDTH)), Steers(Ban.of([41]))],
        [Steers(Allow.of([3, 95], WIDTH))],
        [Halves()],
    ]
    params = params_of(temperature=1.0, top_p=0.9, logprobs=1, logprobs_mode="processed")
    requests = tuple(request_of(row, params) for row in range(len(chains)))
    for one, processors in zip(requests, chains, strict=True):
        one.chain = ProcessorChain(processors, Context(Vocabulary(WIDTH), frozenset({0})))
        one.chain.start(one.tokens)
    return requests


def test_processors_have_the_same_say() -> None:
    logits = logits_of(8, 5, WIDTH, 0.0, 2.0)
    logits[2, 40] = 0.5
    found = []
    for sync_free in (False, True):
        requests = processed_requests()
        plan = Plan(requests, (), requests)
        sampler = Sampler(WIDTH, (3, 95), CPU, sync_free=sync_free)
        samples = sampler.sample(logits.clone(), plan_edits(plan), plan)
        tokens = {row: token for row, token in enumerate(samples.token_ids) if row not in samples.errors}
        shown = {row: samples.logprobs[row] for row in tokens}
        found.append((tokens, samples.errors, shown, [one.chain and str(one.chain.failure) for one in requests]))
    assert found[0] == found[1]
    tokens, errors, shown, _ = found[1]
    assert (tokens[0], tokens[2]) == (9, 40)
    assert "forces token 3, which this model never samples" in errors[1]
    assert "no token is left" in errors[3]
    assert sorted(tokens) == [0, 2, 4]
    assert shown[0] == [TokenLogprob(9, 0.0, 1)] * 2


# -- in the engine


def answers(model: ScriptedModel, wanted: dict[str, SamplingParams], sync_free: bool) -> dict[str, list[Output]]:
    driver = stepper(model, max_num_seqs=8)
    driver.sampler = Sampler(model.vocab_size, model.undecodable_ids, model.device, sync_free=sync_free)
    for name, params in wanted.items():
        driver.add(request(model, name, PROMPT, params))
    found: dict[str, list[Output]] = {name: [] for name in wanted}
    while not driver.scheduler.is_idle:
        for output in driver.step():
            output.chain = None
            found[output.request_id].append(output)
    return found


def test_answers_are_the_same() -> None:
    wanted = {
        "greedy": params_of(temperature=0.0, logprobs=2),
        "drawn": params_of(temperature=1.5, top_p=0.9, logprobs=2, logprobs_mode="processed"),
        "penalised": params_of(temperature=0.8, top_k=20, repetition_penalty=1.3, presence_penalty=0.5),
        "short": params_of(temperature=1.0, max_tokens=3, min_p=0.1),
        "bad": params_of(temperature=1.0, bad_token_ids=[7, 8, 9], min_tokens=4),
    }
    model = ScriptedModel()
    assert answers(model, wanted, sync_free=True) == answers(model, wanted, sync_free=False)


def test_the_next_step_uses_the_prepared_random_numbers() -> None:
    one = request_of(0, params_of(temperature=1.0))
    sampler, plan = Sampler(50, (), CPU, sync_free=True), Plan((one,), (), (one,))
    logits = logits_of(2, 1, 50, 0.0, 1.0)
    sampler.sample(logits.clone(), Edits(), plan)
    sampler.prepare_next()
    random_rows = sampler._table.random_rows
    prepared = random_rows._next
    assert prepared is not None
    one.tokens.append(1)
    assert random_rows.uniforms() is prepared[1]
    assert random_rows.uniforms().item() == pytest.approx(random_rows._table.uniforms()[0], abs=0)
    one.tokens.append(1)  # two at once: what was prepared does not fit
    assert random_rows.uniforms() is not prepared[1]
    assert random_rows.uniforms().item() == random_rows._table.uniforms()[0]


def test_a_step_prepares_the_next_before_its_tokens_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = request(ScriptedModel(), "one", PROMPT, params_of(temperature=1.0, max_tokens=3))
    driver = stepper(ScriptedModel())
    driver.sampler = Sampler(WIDTH, (), CPU, sync_free=True)
    seen = []

    def collect(step: DeviceStep) -> Samples:
        seen.append(
            (
                one.num_computed == len(one.tokens),
                one in driver.scheduler.queues.decoding,
                step._table.random_rows._next,
            )
        )
        return own_collect(step)

    own_collect = DeviceStep.collect
    monkeypatch.setattr(DeviceStep, "collect", collect)
    driver.add(one)
    while not driver.scheduler.is_idle:
        driver.step()
    assert len(seen) == 3
    for place, (is_computed, is_decoding, prepared) in enumerate(seen):
        assert is_computed
        assert is_decoding
        assert prepared is not None
        assert prepared[0] == [len(PROMPT) + place + 1]


# -- without a value


class Waiting(TorchDispatchMode):
    """Fails when the host would wait for a device: at a copy that blocks, or out of memory that
    is not pinned.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            self.check(args[0], result, kwargs.get("non_blocking", False))
        elif func is torch.ops.aten.copy_.default:
            self.check(args[1], args[0], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return result

    @staticmethod
    def check(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        if source.device.type == target.device.type:
            return
        host = source if source.device.type == "cpu" else target
        assert non_blocking, f"a copy of {tuple(source.shape)} blocks"
        assert getattr(host, "is_pinned_here", False), f"a copy of {tuple(source.shape)} with memory that is not pinned"


class Moment:
    """Stands for an event of CUDA."""

    made = 0

    def record(self) -> None:
        Moment.made += 1

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


def part_of(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """``tensor[index]`` by slices, numbers and None: torch's own needs CUDA itself. Indices that
    are values wait.
    """
    dim = 0
    for item in index if isinstance(index, tuple) else (index,):
        assert item is None or isinstance(item, int | slice), f"{type(item).__name__} as an index waits"
        if item is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(item, int):
            tensor = tensor.select(dim, item)
            continue
        else:
            start, stop, step = item.indices(tensor.shape[dim])
            assert step == 1
            tensor = tensor.narrow(dim, start, max(0, stop - start))
        dim += 1
    return tensor


class Indexing(TorchFunctionMode):
    """Indexes of tensors on CUDA go through `part_of`. To patch the class would stay: torch then
    takes a tensor of no dimensions for a sequence, in every test that follows."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            return part_of(*args)
        if function is torch.Tensor.__setitem__ and args[0].device.type == "cuda":
            return part_of(*args[:2]).fill_(args[2])
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors have no values, and there seems to be CUDA."""
    empty = torch.empty

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu"
        copy = tensor.clone()
        copy.is_pinned_here = True  # type: ignore[attr-defined]
        return copy

    def empty_here(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        made.is_pinned_here = bool(kwargs.get("pin_memory"))  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch, "empty", empty_here)
    monkeypatch.setattr(Moment, "made", 0)
    monkeypatch.setattr("adapters.contract.edits._ADDENDS", {})
    with FakeTensorMode(allow_non_fake_inputs=True), Waiting(), Indexing():
        yield


@pytest.fixture
def valueless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with without_values(monkeypatch):
        yield


def test_reading_a_value_would_be_noticed(valueless: None) -> None:
    logits = torch.empty(2, 5, device=CUDA)
    with pytest.raises(Exception, match=r"aten\._local_scalar_dense"):
        logits.amax(-1).tolist()
    with pytest.raises(AssertionError, match="blocks"):
        logits.cpu()
    with pytest.raises(AssertionError, match="blocks"):
        torch.tensor([1, 2], device=CUDA)
    with pytest.raises(AssertionError, match="list as an index waits"):
        logits[[0, 1]]
    with pytest.raises(AssertionError, match="not pinned"):
        torch.tensor([1, 2]).to(CUDA, non_blocking=True)


def test_nothing_waits_between_logits_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.embedded.sampling.sampler.choose_select", lambda device: select_by_sorting)
    model = ScriptedModel()
    wanted = {
        "greedy": params_of(temperature=0.0, logprobs=2),
        "plain": params_of(temperature=1.0),
        "all": params_of(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, logprobs=3, logprobs_mode="processed"),
        "penalised": params_of(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5),
        "bad": params_of(temperature=1.0, bad_token_ids=[7, 8, 9], min_tokens=4),
    }
    requests = tuple(request(model, name, PROMPT, params) for name, params in wanted.items()) + processed_requests()
    plan = Plan(requests, (), requests)
    edits, bitmask = plan_edits(plan), torch.full((len(requests), 3), -1).int()
    assert len(edits.planned) == 7
    with without_values(monkeypatch):
        sampler = Sampler(WIDTH, (3, 95), CUDA)
        launched = sampler.launch(torch.empty(len(requests), WIDTH, device=CUDA), edits, plan, bitmask=bitmask)
        sampler.prepare_next()
        assert Moment.made == 3  # tokens, raw and processed log probabilities
        with pytest.raises(AssertionError, match="the host waits"):
            launched.collect()
