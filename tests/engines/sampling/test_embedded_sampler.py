"""What a request asks of its tokens, on a model whose logits are known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import examples
from engine_doubles import END, PADDING, WIDTH, ScriptedModel, request, run_alone, run_together, stepper
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain
from adapters.contract import Bias, Context, Edit, Reads, Scale, Stage, SteeringProcessor, bitmask_of
from adapters.processors.forcing import ForcedSequence
from adapters.processors.truncation import TopK, TopP
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest, TokenLogprob
from worker.engines.embedded.admission import admit
from worker.engines.embedded.plan import Edits, Output, Plan
from worker.engines.embedded.sampling.sampler import Sampler
from worker.engines.embedded.step import plan_edits
from worker.engines.weights import WeightVersion
from worker.sampling import SamplingParams

PROMPT = [5, 6, 7]
USABLE = WIDTH - PADDING
CONTEXT = Context(Vocabulary(WIDTH))


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 20, "ignore_eos": True} | changes))


def sampled(**changes: Any) -> SamplingParams:
    return greedy(**({"temperature": 1.0, "seed": 11} | changes))


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


def edit(change: Callable[[torch.Tensor], object]) -> Callable[..., None]:
    def processor(req_id: int, logits: torch.Tensor, token_ids: list[list[int]], stream: None, client: None) -> None:
        change(logits[0, 0])

    return processor


# -- choosing


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 1, "temperature": 2.0}, {"top_p": 0.0}])
def test_greedy(model: ScriptedModel, changes: dict[str, Any]) -> None:
    assert run_alone(model, PROMPT, greedy(**changes)).token_ids == model.greedy(PROMPT, 20)


def test_greedy_ties_go_to_the_lowest_id(model: ScriptedModel) -> None:
    level = greedy(logits_processor=edit(lambda row: row.fill_(0.25)))
    assert run_alone(model, PROMPT, level).token_ids == [0] * 20


@given(seed=st.integers(0, 2**32), ties=st.sets(st.integers(0, 149), min_size=1))
def test_greedy_ties_in_a_wide_row(seed: int, ties: set[int]) -> None:
    row = torch.rand(150, generator=torch.Generator().manual_seed(seed))
    row[list(ties)] = 2.0
    one = request(ScriptedModel(), "one", PROMPT, greedy())
    sampler = Sampler(150, ())
    assert sampler.sample(row[None].clone(), Edits(), Plan((one,), (), (one,))).token_ids == [min(ties)]


def test_equal_seeds_give_equal_answers_and_others_do_not(model: ScriptedModel) -> None:
    first = run_alone(model, PROMPT, sampled()).token_ids
    assert run_alone(model, PROMPT, sampled()).token_ids == first
    assert run_alone(model, PROMPT, sampled(seed=12)).token_ids != first
    assert run_alone(model, PROMPT, sampled(seed=2**64 - 1)).token_ids != first


def test_without_a_seed_answers_differ(model: ScriptedModel) -> None:
    params = sampled(seed=None, temperature=5.0)
    assert run_alone(model, PROMPT, params).token_ids != run_alone(model, PROMPT, params).token_ids


def test_random_numbers_follow_positions_so_continuations_match(model: ScriptedModel) -> None:
    whole = run_alone(model, PROMPT, sampled()).token_ids
    rest = run_alone(model, PROMPT + whole[:8], sampled(max_tokens=12)).token_ids
    assert rest == whole[8:]


@pytest.mark.parametrize("top_k", [WIDTH, 2**31, 2**70])
def test_any_top_k_beyond_the_vocabulary_keeps_all(model: ScriptedModel, top_k: int) -> None:
    answer = run_alone(model, PROMPT, sampled(top_k=top_k))
    assert (answer.token_ids, answer.error) == (run_alone(model, PROMPT, sampled()).token_ids, None)


def test_frequencies_follow_the_softmax() -> None:
    model = ScriptedModel()
    model.by_token.zero_()
    model.by_position.copy_(torch.arange(WIDTH).remainder(4).float() / 2)
    tokens = Counter[int]()
    for seed in range(40):
        tokens.update(run_alone(model, PROMPT, sampled(seed=seed, max_tokens=200)).token_ids)
    total = sum(tokens.values())
    mass = [math.exp(token % 4) for token in range(USABLE)]
    expected = [total * value / sum(mass) for value in mass]
    statistic = sum((tokens[token] - expected[token]) ** 2 / expected[token] for token in range(USABLE))
    assert statistic < 135.8  # chi-square with 89 degrees of freedom, at 0.001


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    ignore_eos=st.booleans(),
    temperature=st.sampled_from([None, 0.0, 0.5, 1.5]),
    top_k=st.sampled_from([None, 1, 5, 40]),
    top_p=st.sampled_from([None, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([None, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([None, 6]),
    repetition_penalty=st.sampled_from([None, 1.3]),
    frequency_penalty=st.sampled_from([None, 0.4]),
    logprobs=st.sampled_from([None, 0, 3]),
    logprobs_mode=st.sampled_from(["raw", "processed", "train"]),
)
PROMPTS = st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=8)


@settings(max_examples=examples(40), deadline=None)
@given(wanted=st.lists(st.tuples(PROMPTS, PARAMS), min_size=2, max_size=6))
def test_an_answer_is_the_same_alone_and_in_company(wanted: list[tuple[list[int], SamplingParams]]) -> None:
    model = ScriptedModel()
    named = {str(index): one for index, one in enumerate(wanted)}
    together = run_together(model, dict(named))
    for name, (prompt, params) in named.items():
        assert together[name] == run_alone(model, prompt, params)


# -- masks


@pytest.mark.parametrize("params", [greedy(), sampled(temperature=50.0, max_tokens=200)])
def test_padding_is_never_sampled(params: SamplingParams) -> None:
    model = ScriptedModel()
    model.by_position[:, USABLE:] = 100.0
    assert max(run_alone(model, PROMPT, params).token_ids) < USABLE


def test_a_processor_cannot_bring_padding_back(model: ScriptedModel) -> None:
    def allow_padding_alone(row: torch.Tensor) -> None:
        assert row[USABLE:].eq(-torch.inf).all()
        row[:USABLE] = -torch.inf
        row[USABLE:] = 0.0

    answer = run_alone(model, PROMPT, greedy(logits_processor=edit(allow_padding_alone)))
    assert (answer.token_ids, answer.finish_reason) == ([], "error")
    assert answer.error is not None
    assert "processor: no token is left at position 3" in answer.error


@pytest.mark.parametrize("processor", [TopK(TopK.Args(k=5), CONTEXT), TopP(TopP.Args(p=0.6), CONTEXT)])
def test_padding_that_is_written_takes_no_place(model: ScriptedModel, processor: TopK | TopP) -> None:
    """Truncation by a processor counts no more of it than truncation by a field."""
    writes = edit(lambda row: row[USABLE:].fill_(9.0))
    field = {"top_k": 5} if isinstance(processor, TopK) else {"top_p": 0.6}
    chain = ProcessorChain([processor], CONTEXT)
    asked = EngineRequest("alone", PROMPT, sampled(logits_processor=writes), chain)
    driver = stepper(model, max_num_seqs=4)
    driver.add(admit(asked, 0, model, model.context_length))  # type: ignore[arg-type]
    tokens: list[int] = []
    while not driver.scheduler.is_idle:
        tokens += [output.token_id for output in driver.step() if output.token_id is not None]
    assert tokens == run_alone(model, PROMPT, sampled(logits_processor=writes, **field)).token_ids


def test_ids_that_the_tokenizer_lacks_amid_the_vocabulary() -> None:
    row = torch.tensor([[1.0, 5.0, 2.0, 4.0, 3.0]])
    one = request(ScriptedModel(), "one", PROMPT, greedy())
    sampler = Sampler(5, (1, 3))
    assert sampler.sample(row, Edits(), Plan((one,), (), (one,))).token_ids == [4]


def likes_to_end() -> ScriptedModel:
    model = ScriptedModel()
    model.by_position[:, [END, 9]] = 50.0
    return model


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(end_id=END), SamplingParams(stop_token_ids=[9])])
def test_end_ids_end_the_answer_and_are_hidden(params: SamplingParams) -> None:
    model = likes_to_end()
    model.by_position[:, 9 if 9 not in params.end_token_ids else END] = 0
    answer = run_alone(model, PROMPT, params)
    stop = 9 if params.stop_token_ids else END
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([], "stop", stop)


def test_a_hidden_end_id_has_its_log_probabilities_apart() -> None:
    driver = stepper(likes_to_end())
    params = SamplingParams(stop_token_ids=[9], ignore_eos=True, bad_token_ids=[END], logprobs=0)
    driver.add(request(driver.model, "one", PROMPT, params))  # type: ignore[arg-type]
    (output,) = driver.step()
    assert (output.token_id, output.logprobs, output.stop_reason) == (None, None, 9)
    assert output.end_logprobs is not None
    assert [entry.token_id for entry in output.end_logprobs] == [9]


def test_weights_are_named_once(model: ScriptedModel) -> None:
    driver, outputs = stepper(model), list[Output]()
    driver.weights = first = WeightVersion(number=1, digest="first")
    driver.add(request(model, "one", PROMPT, greedy(max_tokens=5)))
    while not driver.scheduler.is_idle:
        outputs += driver.step()
    assert [output.weights for output in outputs] == [(0, first), None, None, None, None]


def test_end_ids_can_be_shown() -> None:
    params = SamplingParams(stop_token_ids=[9, END], include_stop_str_in_output=True, logprobs=0)
    answer = run_alone(likes_to_end(), PROMPT, params)
    assert answer.finish_reason == "stop"
    assert answer.token_ids == [answer.stop_reason]
    assert answer.logprobs is not None
    assert [entries[0].token_id for entries in answer.logprobs] == answer.token_ids


def test_an_own_end_id_replaces_the_models() -> None:
    answer = run_alone(likes_to_end(), PROMPT, SamplingParams(end_id=9, max_tokens=5, bad_token_ids=[9]))
    assert answer.token_ids == [END] * 5


def test_ignore_eos_goes_through_the_end_id() -> None:
    answer = run_alone(likes_to_end(), PROMPT, SamplingParams(ignore_eos=True, max_tokens=5, bad_token_ids=[9]))
    assert (answer.token_ids, answer.finish_reason) == ([END] * 5, "length")


@pytest.mark.parametrize("change", [{}, {"temperature": 1.0, "seed": 1}])
def test_min_tokens_hold_back_every_end_id(change: dict[str, Any]) -> None:
    params = SamplingParams(min_tokens=7, max_tokens=30, end_id=END, stop_token_ids=[9], **change)
    answer = run_alone(likes_to_end(), PROMPT, params)
    assert len(answer.token_ids) == 7
    assert not {END, 9} & set(answer.token_ids)
    assert answer.finish_reason == "stop"


def test_min_tokens_come_after_processors(model: ScriptedModel) -> None:
    def force_end(row: torch.Tensor) -> None:
        row.fill_(-torch.inf)
        row[END] = 0.0

    answer = run_alone(model, PROMPT, SamplingParams(min_tokens=3, logits_processor=edit(force_end)))
    assert answer.finish_reason == "error"
    assert "processor, min_tokens: no token is left at position 3" in str(answer.error)


def test_bad_token_ids(model: ScriptedModel) -> None:
    banned = sorted(set(model.greedy(PROMPT, 20)))
    assert not set(banned) & set(run_alone(model, PROMPT, greedy(bad_token_ids=banned)).token_ids)


# -- bias and penalties


def test_embedding_bias(model: ScriptedModel) -> None:
    bias = torch.zeros(WIDTH)
    bias[33] = 1000.0
    assert run_alone(model, PROMPT, greedy(embedding_bias=bias)).token_ids == [33] * 20
    assert run_alone(model, PROMPT, greedy(embedding_bias=bias.tolist())).token_ids == [33] * 20


def penalised(row: list[float], prompt: list[int], generated: list[int], params: SamplingParams) -> list[float]:
    counts = Counter(generated)
    repetition = params.repetition_penalty or 1.0
    result = []
    for token, logit in enumerate(row):
        if token in counts or token in prompt:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= (params.frequency_penalty or 0.0) * counts[token]
        logit -= (params.presence_penalty or 0.0) * (token in counts)
        result.append(logit)
    return result


@settings(max_examples=examples(50), deadline=None)
@given(
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    repetition=st.sampled_from([None, 1.0, 0.5, 1.7]),
    frequency=st.sampled_from([None, -0.5, 0.9]),
    presence=st.sampled_from([None, -0.4, 1.1]),
)
def test_penalties(
    prompt: list[int], repetition: float | None, frequency: float | None, presence: float | None
) -> None:
    model = ScriptedModel()
    model.by_position[:, 13:] = -100.0  # few tokens, so that they repeat
    seen: list[torch.Tensor] = []
    params = greedy(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        max_tokens=12,
        logits_processor=edit(lambda row: seen.append(row.clone())),
    )
    tokens = run_alone(model, prompt, params).token_ids
    for count, row in enumerate(seen):
        plain = model.row(prompt + tokens[:count])[:USABLE].tolist()
        expected = penalised(plain, prompt, tokens[:count], params)
        torch.testing.assert_close(row[:USABLE], torch.tensor(expected))
        assert tokens[count] == int(row.argmax())


# -- log probabilities


def normalised(logits: list[float]) -> list[float]:
    highest = max(logits)
    total = math.fsum(math.exp(value - highest) for value in logits)
    return [value - highest - math.log(total) for value in logits]


def check_logprobs(entries: list[TokenLogprob], token: int, expected: list[float], count: int) -> None:
    order = sorted((id_ for id_, value in enumerate(expected) if value > -math.inf), key=lambda id_: -expected[id_])
    assert entries[0].token_id == token
    assert entries[0].rank == order.index(token) + 1
    assert [entry.token_id for entry in entries[1:]] == order[:count]
    assert [entry.rank for entry in entries[1:]] == list(range(1, len(order[:count]) + 1))
    for entry in entries:
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-6)


@pytest.mark.parametrize("count", [0, 1, 5, 100])
@pytest.mark.parametrize("make", [greedy, sampled])
def test_raw_logprobs_are_the_models_own(model: ScriptedModel, make: Callable[..., SamplingParams], count: int) -> None:
    halve = edit(lambda row: row.mul_(0.5))
    params = make(logprobs=count, bad_token_ids=[1], logits_processor=halve, frequency_penalty=1.0)
    answer = run_alone(model, PROMPT, params)
    assert answer.logprobs is not None
    for place, (token, entries) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        row = model.row(PROMPT + answer.token_ids[:place]).double().tolist()
        check_logprobs(entries, token, normalised(row)[:USABLE], count)


def test_greedy_processed_logprobs_include_processors_and_masks(model: ScriptedModel) -> None:
    halve = edit(lambda row: row.mul_(0.5))
    params = greedy(logprobs=4, logprobs_mode="processed", bad_token_ids=[1], logits_processor=halve)
    answer = run_alone(model, PROMPT, params)
    assert answer.logprobs is not None
    for place, (token, entries) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        row = (model.row(PROMPT + answer.token_ids[:place])[:USABLE].double() * 0.5).tolist()
        row[1] = -math.inf
        check_logprobs(entries, token, normalised(row), 4)


def test_processed_logprobs_include_temperature_and_truncation(model: ScriptedModel) -> None:
    answer = run_alone(model, PROMPT, sampled(temperature=2.0, top_k=3, logprobs=10, logprobs_mode="processed"))
    assert answer.logprobs is not None
    for place, (token, entries) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        row = (model.row(PROMPT + answer.token_ids[:place])[:USABLE].double() / 2).tolist()
        lowest = sorted(row)[-3]
        check_logprobs(entries, token, normalised([v if v >= lowest else -math.inf for v in row]), 10)
        assert len(entries) == 4


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_tokens_that_are_all_forced_have_log_probabilities(model: ScriptedModel, mode: Any) -> None:
    context = Context(Vocabulary(WIDTH), frozenset({END}))
    one = request(model, "one", PROMPT, greedy(logprobs=0, logprobs_mode=mode))
    one.chain = ProcessorChain([ForcedSequence(ForcedSequence.Args(token_ids=[7]), context)], context)
    one.chain.start(PROMPT)
    plan = Plan((one,), (), (one,))
    samples = Sampler(WIDTH, model.undecodable_ids).sample(model.row(PROMPT)[None], plan_edits(plan), plan)
    assert samples.token_ids == [7]
    assert [entry.token_id for entry in samples.logprobs[0]] == [7]


def test_equal_logprobs_rank_by_id() -> None:
    row = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    one = request(ScriptedModel(), "one", PROMPT, greedy(logprobs=3))
    samples = Sampler(6, ()).sample(row, Edits(), Plan((one,), (), (one,)))
    assert [(entry.token_id, entry.rank) for entry in samples.logprobs[0]] == [(1, 1), (1, 1), (3, 2), (0, 3)]


# -- logits processors


def test_processors_get_the_whole_history_once_per_token(model: ScriptedModel) -> None:
    calls: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> None:
        req_id, logits, token_ids, stream, client = arguments
        calls.append((req_id, tuple(logits.shape), logits.dtype, [list(ids) for ids in token_ids], stream, client))
        token_ids[0].clear()  # their copy

    prompt = list(range(3, 80))
    answer = run_alone(model, prompt, greedy(max_tokens=4, logits_processor=[record, record]))
    assert answer.token_ids == model.greedy(prompt, 4)
    histories = [prompt + answer.token_ids[:count] for count in range(4) for _ in range(2)]
    assert calls == [(0, (1, 1, WIDTH), torch.float32, [history], None, None) for history in histories]


def test_a_list_of_ids_that_a_callable_keeps_stays_as_it_was(model: ScriptedModel) -> None:
    shown: list[list[int]] = []

    def keep(req_id: int, logits: Any, token_ids: list[list[int]], stream: None, client: None) -> None:
        shown.append(token_ids[0])

    prompt = list(range(3, 80))
    answer = run_alone(model, prompt, greedy(max_tokens=6, logits_processor=keep))
    assert shown == [prompt + answer.token_ids[:count] for count in range(6)]


class Overflows(SteeringProcessor):
    """Divides by a number so small that the row becomes infinite, at the third token."""

    name = "acme/overflows"
    stage = Stage.PENALTY
    reads = Reads.GENERATED

    def edit(self) -> Edit | None:
        return Scale.of(range(USABLE), [1e-39] * USABLE) if self.num_generated == 2 else None


def test_a_processor_whose_edits_overflow_is_named(model: ScriptedModel) -> None:
    asked = {name: request(model, name, PROMPT, greedy(max_tokens=4)) for name in ("alone", "overflows")}
    asked["overflows"].chain = ProcessorChain([Overflows(None, CONTEXT)], CONTEXT)
    asked["overflows"].chain.start(PROMPT)
    driver, outputs = stepper(model), list[Output]()
    for each in asked.values():
        driver.add(each)
    while not driver.scheduler.is_idle:
        outputs += driver.step()
    tokens = {name: [one.token_id for one in outputs if one.request_id == name] for name in asked}
    assert tokens == {"alone": model.greedy(PROMPT, 4), "overflows": [*model.greedy(PROMPT, 2), None]}
    (error,) = [one.error for one in outputs if one.error is not None]
    assert error == "logits processor acme/overflows: left +inf in the logits at position 5"


class Adds(SteeringProcessor):
    """Makes one token likelier."""

    name = "acme/adds"
    stage = Stage.BIAS
    reads = Reads.NOTHING

    def edit(self) -> Edit | None:
        return Bias.of([2], [1.0])


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("third_party", [False, True])
def test_what_the_model_computed_is_no_failure_of_built_ins(odd: float, third_party: bool) -> None:
    """Of a row that is not finite they keep what makes it so; a third party may have made it."""
    processors: list[Any] = [TopK(TopK.Args(k=3), CONTEXT), *([Adds(None, CONTEXT)] if third_party else [])]
    chain = ProcessorChain(processors, CONTEXT)
    chain.start(PROMPT)
    logits = torch.zeros(1, WIDTH)
    logits[0, 4] = odd
    one = request(ScriptedModel(), "one", PROMPT, greedy())
    one.chain = chain
    plan = Plan((one,), (), (one,))
    error = Sampler(WIDTH, ()).sample(logits, plan_edits(plan), plan).errors[0]
    problem = "NaN" if math.isnan(odd) else "+inf"
    named = f"logits processor acme/adds: left {problem} in the logits at position {len(PROMPT)}"
    assert error == (named if third_party else "the row of logits holds NaN or +inf")
    assert (chain.failure is not None) == third_party


def test_writing_to_the_list_of_ids_misleads_nobody_else(model: ScriptedModel) -> None:
    seen: list[list[int]] = []

    def overwrites(req_id: int, logits: Any, token_ids: list[list[int]], stream: None, client: None) -> None:
        token_ids[0][:] = [7] * len(token_ids[0])

    def reads(req_id: int, logits: Any, token_ids: list[list[int]], stream: None, client: None) -> None:
        seen.append(list(token_ids[0]))

    answer = run_alone(model, PROMPT, greedy(max_tokens=4, logits_processor=[overwrites, reads]))
    assert answer.token_ids == model.greedy(PROMPT, 4)
    assert seen == [PROMPT + answer.token_ids[:count] for count in range(4)]


def test_processors_edit_in_place_in_order(model: ScriptedModel) -> None:
    to_forty = edit(lambda row: row[40:41].fill_(100.0))
    negate = edit(lambda row: row[:USABLE].mul_(-1))
    assert run_alone(model, PROMPT, greedy(logits_processor=[to_forty])).token_ids == [40] * 20
    assert 40 not in run_alone(model, PROMPT, greedy(logits_processor=[to_forty, negate])).token_ids


class Failing:
    """Signals failure in place of raising, at the third token."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            self.failure = "the reason"


def test_a_processor_may_signal_failure(model: ScriptedModel) -> None:
    answer = run_alone(model, PROMPT, greedy(logits_processor=Failing()))
    assert answer.token_ids == model.greedy(PROMPT, 2)
    assert answer.finish_reason == "error"
    assert "the reason" in str(answer.error)


class Evil:
    """Does something terrible at the third token."""

    def __init__(self, deed: Callable[[torch.Tensor], object]) -> None:
        self.deed = deed

    def __call__(self, req_id: int, logits: torch.Tensor, token_ids: list[list[int]], *_: None) -> None:
        if len(token_ids[0]) == len(PROMPT) + 2:
            self.deed(logits)


def divide_by_zero(_: torch.Tensor) -> None:
    raise ZeroDivisionError("the text")


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (divide_by_zero, "Evil: raised ZeroDivisionError"),
        (lambda logits: logits.fill_(torch.nan), "Evil: left NaN in the logits at position 5"),
        (lambda logits: logits[..., 3:4].fill_(torch.nan), "Evil: left NaN in the logits at position 5"),
        (lambda logits: logits[..., 3:4].fill_(torch.inf), "Evil: left [+]inf in the logits at position 5"),
        (lambda logits: logits.fill_(-torch.inf), "Evil: left no token that can be sampled at position 5"),
    ],
    ids=["raises", "all NaN", "one NaN", "+inf", "all -inf"],
)
@pytest.mark.parametrize("make", [greedy, sampled])
def test_an_evil_processor_ends_its_own_request_alone(
    model: ScriptedModel, make: Callable[..., SamplingParams], deed: Callable[[torch.Tensor], object], said: str
) -> None:
    mates = {
        "greedy": (PROMPT, greedy(logprobs=2)),
        "sampled": ([8], sampled(logprobs=2, top_p=0.9)),
        "processed": ([9, 10], sampled(logprobs=2, logprobs_mode="processed", min_p=0.01)),
    }
    evil = make(logits_processor=Evil(deed), logprobs=2, logprobs_mode="processed")
    answers = run_together(model, {"evil": (PROMPT, evil), **mates})
    assert answers["evil"].finish_reason == "error"
    assert len(answers["evil"].token_ids) == 2
    with pytest.raises(RuntimeError, match=said):
        raise RuntimeError(answers["evil"].error)
    for name, (prompt, params) in mates.items():
        assert answers[name] == run_alone(model, prompt, params)
        assert answers[name].finish_reason == "length"


def test_a_raising_processors_neighbour_runs_once_per_token(model: ScriptedModel) -> None:
    lengths: list[int] = []

    def count(req_id: int, logits: torch.Tensor, token_ids: list[list[int]], *_: None) -> None:
        lengths.append(len(token_ids[0]))

    evil = greedy(logits_processor=Evil(divide_by_zero))
    wanted = {"counting": (PROMPT, greedy(logits_processor=count)), "evil": (PROMPT, evil)}
    answers = run_together(model, wanted)  # type: ignore[arg-type]
    assert (answers["evil"].finish_reason, answers["counting"].finish_reason) == ("error", "length")
    assert lengths == list(range(len(PROMPT), len(PROMPT) + 20))


def test_a_row_that_the_model_spoils_ends_its_request_alone() -> None:
    def spoil(plan: Plan, logits: torch.Tensor) -> None:
        for row, one in enumerate(plan.sampled):
            if one.id == "spoilt":
                logits[row, 4] = torch.nan

    answers = run_together(ScriptedModel(spoil), {"spoilt": ([1], sampled()), "mate": (PROMPT, sampled())})
    assert answers["spoilt"].finish_reason == "error"
    assert answers["mate"] == run_alone(ScriptedModel(), PROMPT, sampled())


# -- length


@pytest.mark.parametrize("max_tokens", [None, 10_000])
def test_answers_end_with_the_context(model: ScriptedModel, max_tokens: int | None) -> None:
    answer = run_alone(model, [3] * 200, greedy(max_tokens=max_tokens))
    assert (len(answer.token_ids), answer.finish_reason) == (model.context_length - 200, "length")


# -- several rows per request


def rows_of(model: ScriptedModel, tokens: list[int], count: int) -> torch.Tensor:
    """Logits of `count` consecutive positions, as when drafted tokens are verified."""
    return torch.stack([model.row(tokens[: len(tokens) - count + 1 + place]) for place in range(count)])


@pytest.mark.parametrize("changes", [{}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 0.0}])
def test_rows_of_one_request_are_its_next_positions(model: ScriptedModel, changes: dict[str, Any]) -> None:
    params = sampled(max_tokens=3, logprobs=2, logprobs_mode="processed", **changes)
    answer = run_alone(model, PROMPT, params)
    drafted = rows_of(model, PROMPT + answer.token_ids[:2], 3)
    mate, none = sampled(seed=5), greedy()
    requests = tuple(request(model, str(i), PROMPT, one) for i, one in enumerate((mate, none, params)))
    sampler = Sampler(WIDTH, model.undecodable_ids)
    logits = torch.cat((model.row(PROMPT)[None], drafted))
    samples = sampler.sample(logits, Edits(), Plan(requests, (), requests), offsets=[0, 1, 1, 4])
    assert samples.token_ids[1:] == answer.token_ids
    assert samples.token_ids[:1] == run_alone(model, PROMPT, sampled(seed=5, max_tokens=1)).token_ids
    assert [samples.logprobs[row] for row in (1, 2, 3)] == answer.logprobs


@pytest.mark.parametrize("offsets", [[0, 1], [1, 1, 2], [0, 2, 1], [0, 1, 2, 3]])
def test_offsets_that_do_not_fit_the_requests(model: ScriptedModel, offsets: list[int]) -> None:
    requests = tuple(request(model, name, PROMPT, greedy()) for name in "ab")
    sampler = Sampler(WIDTH, ())
    with pytest.raises(ValueError, match="offsets must be 3 rising numbers from 0"):
        sampler.sample(torch.zeros(2, WIDTH), Edits(), Plan(requests, (), requests), offsets)


def test_logits_that_do_not_fit_the_requests(model: ScriptedModel) -> None:
    one = request(model, "one", PROMPT, greedy())
    sampler = Sampler(WIDTH, ())
    with pytest.raises(ValueError, match=r"logits must have shape \(1, 96\), got \(2, 96\)"):
        sampler.sample(torch.zeros(2, WIDTH), Edits(), Plan((one,), (), (one,)))


# -- the step's bitmask


@pytest.mark.parametrize("make", [greedy, sampled])
def test_a_bitmask_is_a_hard_mask_that_raw_logprobs_do_not_show(
    model: ScriptedModel, make: Callable[..., SamplingParams]
) -> None:
    one = request(model, "one", PROMPT, make(logprobs=1))
    sampler = Sampler(WIDTH, model.undecodable_ids)
    logits = model.row(PROMPT)[None]
    best = int(logits[0, :USABLE].argmax())
    bitmask = bitmask_of({17, WIDTH - 1}, WIDTH)[None]
    samples = sampler.sample(logits.clone(), Edits(), Plan((one,), (), (one,)), bitmask=bitmask)
    assert samples.token_ids == [17]
    assert [entry.token_id for entry in samples.logprobs[0]] == [17, best]


def test_a_bitmask_without_a_bit_leaves_no_token(model: ScriptedModel) -> None:
    one = request(model, "one", PROMPT, greedy())
    sampler = Sampler(WIDTH, model.undecodable_ids)
    samples = sampler.sample(
        model.row(PROMPT)[None], Edits(), Plan((one,), (), (one,)), bitmask=torch.zeros(1, 3).int()
    )
    assert "unsatisfiable" in samples.errors[0]


@pytest.mark.parametrize("bitmask", [torch.zeros(1, 2).int(), torch.zeros(2, 3).int(), torch.zeros(1, 3)])
def test_a_bitmask_that_does_not_fit_is_refused(model: ScriptedModel, bitmask: torch.Tensor) -> None:
    one = request(model, "one", PROMPT, greedy())
    with pytest.raises(ValueError, match=r"the bitmask must be int32 of shape \(1, 3\)"):
        Sampler(WIDTH, ()).sample(torch.zeros(1, WIDTH), Edits(), Plan((one,), (), (one,)), bitmask=bitmask)


@pytest.mark.parametrize("width", [1, 31, 33, 70])
@pytest.mark.parametrize("make", [greedy, sampled])
def test_bits_beyond_the_vocabulary_are_never_read(
    model: ScriptedModel, make: Callable[..., SamplingParams], width: int
) -> None:
    one = request(model, "one", PROMPT, make())
    bitmask = bitmask_of({width - 1}, width)[None]
    beyond = -1 << (width % 32)
    bitmask[0, -1] |= beyond
    samples = Sampler(width, ()).sample(
        model.row(PROMPT)[None, :width], Edits(), Plan((one,), (), (one,)), bitmask=bitmask
    )
    assert (samples.token_ids, samples.errors) == ([width - 1], {})


# -- shapes and dtypes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}])
def test_half_precision_rows_are_sampled_as_what_they_hold(
    model: ScriptedModel, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    params = greedy(seed=11, logprobs=3, logprobs_mode="processed", **changes)
    requests = tuple(request(model, str(number), [number], params) for number in range(5))
    plan = Plan(requests, (), requests)
    logits = torch.stack([model.row([number]) for number in range(5)]).to(dtype)
    sampler = Sampler(WIDTH, model.undecodable_ids)
    assert sampler.sample(logits.clone(), Edits(), plan) == sampler.sample(logits.float(), Edits(), plan)


def test_an_empty_batch_has_no_tokens(model: ScriptedModel) -> None:
    samples = Sampler(WIDTH, model.undecodable_ids).sample(
        torch.empty(0, WIDTH), Edits(), Plan((), (), ()), bitmask=torch.empty(0, 3).int()
    )
    assert (samples.token_ids, samples.errors, samples.logprobs) == ([], {}, {})
