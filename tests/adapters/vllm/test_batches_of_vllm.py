"""Requests in vLLM's batches have the tokens, and the rows, of each request alone."""

from __future__ import annotations

import json
import math
import pickle
import random
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_stand_in import FirstRunner, Params, Request, SecondRunner, alone, served_model

import adapters.vllm.requests
from adapters.catalog import SelectionError
from adapters.chain import ProcessorChain, ProcessorFailed, apply_chain
from adapters.contract import Processor
from adapters.processors.masks import BannedTokens
from adapters.processors.seeded_sampler import SeededSampler
from adapters.processors.stochastic import Mirostat
from adapters.testing.kit_model import NUM_PADDING, kit_context, kit_vocabulary
from adapters.vllm.indexed import Indexed
from adapters.vllm.model import ServedModel
from adapters.vllm.reports import REPORTS
from adapters.vllm.requests import chain_of, read
from adapters.vllm.rows import Builder, Row, RowEditor, rows_of
from adapters.vllm.slots import Slots
from worker.engines.vllm.chain_receiver import ChainReceiver
from worker.engines.vllm.params import SHIPPED, Shipped

sys.path.append(str(Path(__file__).resolve().parents[1] / "conformance"))
from builtin_examples import EMBEDDED_ONLY, EXAMPLES
from effort import examples

MODELS: dict[type, ServedModel] = {
    runner: served_model(penalises_first=runner is SecondRunner) for runner in (FirstRunner, SecondRunner)
}
EVERY: dict[str, list[dict[str, Any]]] = {
    **{name: args for name, args in EXAMPLES.items() if name not in EMBEDDED_ONLY},
    "acme/fatigue": [{}],
}
PROCESSORS: list[dict[str, Any]] = [
    {"name": name, "args": args} for name, examples_ in EVERY.items() for args in examples_
]
STATEFUL = ("mirostat", "acme/fatigue")


@pytest.fixture(autouse=True, scope="module")
def _one_seed() -> Any:
    """Requests without a seed draw the same one, so that each can be repeated alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters.vllm.requests, "randbits", lambda bits: 2**33 + 5)
        yield


def selected(*processors: dict[str, Any]) -> dict[str, Any]:
    return {"logits_processors": json.dumps({"version": 1, "processors": processors})}


@st.composite
def some_params(draw: st.DrawFn) -> Params:
    chosen = draw(st.lists(st.sampled_from(PROCESSORS), min_size=1, max_size=3, unique_by=lambda each: each["name"]))
    stateful = draw(st.sampled_from([None, None, *STATEFUL, "acme/raises"]))
    if stateful is not None and stateful not in {each["name"] for each in chosen}:
        chosen.append({"name": stateful, "args": {}})
    return Params(
        temperature=draw(st.sampled_from([0.0, 0.8])),
        seed=draw(st.sampled_from([None, 7])),
        top_k=draw(st.sampled_from([0, 20])),
        max_tokens=draw(st.integers(2, 12)),
        extra_args=selected(*chosen),
    )


def is_served(params: Params, model: ServedModel) -> bool:
    try:
        asked = read(params, model)
        assert asked is not None
        chain_of(asked, params, model)
    except SelectionError:
        return False
    return True


@st.composite
def some_requests(draw: st.DrawFn, runner: type) -> list[Request]:
    """Requests of which some share parameters and prompt, as the answers to n > 1 do."""
    requests: list[Request] = []
    for params in draw(st.lists(some_params(), max_size=4)):
        if not is_served(params, MODELS[runner]):
            continue
        prompt = draw(st.lists(st.integers(0, 300), min_size=1, max_size=8))
        for _ in range(draw(st.integers(1, 3))):
            requests.append(Request(len(requests), params, prompt))
    return requests


def apart(params: Params) -> Params:
    """Equal parameters that no row is kept with."""
    return replace(params, extra_args={"logits_processors": (params.extra_args or {})["logits_processors"]})


def may_be_lost(request: Request, requests: list[Request]) -> bool:
    """Whether several answers share a state made of logits: one that is resumed after tokens that
    another has too fails.
    """
    selection = (request.params.extra_args or {})["logits_processors"]
    is_shared = sum(each.params is request.params for each in requests) > 1
    return is_shared and any(f'"{name}"' in selection for name in STATEFUL)


def until_lost(request: Request, answer: Request) -> Request:
    """The answer as far as the request has not been ended by a lost state, which is checked."""
    ends = kit_vocabulary().eos_token_ids | set(request.params.stop_token_ids or ())
    for number, row in enumerate(request.rows):
        if number == len(answer.rows) or not torch.equal(row, answer.rows[number]):
            assert int((row > -torch.inf).sum()) == 1, request.params
            assert int(row.argmax()) in ends, request.params
            length = len(request.prompt) + number
            return replace(request, tokens=request.tokens[:length], rows=request.rows[:number], is_aborted=True)
    return request


def check_equal(requests: list[Request], answers: list[Request]) -> None:
    for asked, answer in zip(requests, answers, strict=True):
        request = until_lost(asked, answer) if may_be_lost(asked, requests) else asked
        length = len(request.tokens) if request.is_aborted else len(answer.tokens)
        assert request.tokens == answer.tokens[:length], request.params
        for row, expected in zip(request.rows, answer.rows, strict=not request.is_aborted):
            assert torch.equal(row, expected), request.params


@settings(max_examples=examples(50))
@given(some_requests(SecondRunner), st.integers(0, 2**32))
def test_slots_drafts_and_preemption_change_no_row(requests: list[Request], seed: int) -> None:
    model = MODELS[SecondRunner]
    answers = [alone(each.number, apart(each.params), each.prompt, model) for each in requests]
    runner = SecondRunner(model, random.Random(seed), 4, lambda request: answers[request.number].tokens)
    runner.run(requests)
    check_equal(requests, answers)


@settings(max_examples=examples(50))
@given(some_requests(FirstRunner), st.integers(0, 2**32))
def test_moves_and_preemption_change_no_row(requests: list[Request], seed: int) -> None:
    model = MODELS[FirstRunner]
    answers = [alone(each.number, apart(each.params), each.prompt, model) for each in requests]
    FirstRunner(model, random.Random(seed), 4).run(requests)
    check_equal(requests, answers)


@settings(max_examples=examples(40))
@given(st.sampled_from([FirstRunner, SecondRunner]), st.integers(0, 2**32), st.integers(2, 5))
def test_answers_take_no_state_of_each_other(runner: type, seed: int, count: int) -> None:
    """Answers to n > 1 with mostly equal tokens, and states made of logits that differ."""
    model = MODELS[runner]
    few = {"name": "allowed_tokens", "args": {"token_ids": [40, 41]}}
    params = Params(temperature=0, max_tokens=8, extra_args=selected(few, {"name": "acme/fatigue"}))
    requests = [Request(number, params, [5, 6]) for number in range(count)]
    answers = [alone(each.number, apart(each.params), each.prompt, model) for each in requests]
    dice = random.Random(seed)
    if runner is SecondRunner:
        SecondRunner(model, dice, 3, lambda request: answers[request.number].tokens).run(requests)
    else:
        FirstRunner(model, dice, 3).run(requests)
    check_equal(requests, answers)


@pytest.mark.parametrize("runner", [FirstRunner, SecondRunner])
def test_the_stand_ins_do_all_that_vllm_does(runner: type) -> None:
    model = MODELS[runner]
    happened: Counter[str] = Counter()
    for seed in range(24):
        params = [Params(seed=seed, extra_args=selected({"name": name})) for name in STATEFUL]
        requests = [Request(number, params[number % 2], [number, 1, 2, 3]) for number in range(6)]
        answers = [alone(each.number, apart(each.params), each.prompt, model) for each in requests]
        dice = random.Random(seed)
        if runner is SecondRunner:
            second = SecondRunner(model, dice, 3, lambda request: answers[request.number].tokens)  # noqa: B023
            second.run(requests)
            happened.update(
                preempted=second.num_preempted,
                accepted=second.num_accepted,
                rejected=second.num_rejected,
                chunks=second.num_chunks,
                aborted=second.num_aborted,
            )
        else:
            first = FirstRunner(model, dice, 3)
            first.run(requests)
            happened.update(preempted=first.num_preempted, moved=first.num_moved, aborted=first.num_aborted)
        check_equal(requests, answers)
    assert min(happened.values()) > 5, happened


@pytest.mark.parametrize("name", ["acme/raises", "acme/overflows"])
@pytest.mark.parametrize("runner", [FirstRunner, SecondRunner])
def test_a_failing_row_ends_and_its_neighbours_keep_theirs(runner: type, name: str) -> None:
    model = MODELS[runner]
    params = [
        Params(temperature=0, ignore_eos=True, extra_args=selected({"name": each})) for each in (name, "acme/fatigue")
    ]
    requests = [Request(number, params[number % 2], [5, 6]) for number in range(4)]
    answers = [alone(each.number, apart(each.params), each.prompt, model) for each in requests]
    if runner is SecondRunner:
        SecondRunner(model, random.Random(4), 4, lambda request: answers[request.number].tokens).run(requests)
    else:
        FirstRunner(model, random.Random(4), 4).run(requests)
    check_equal(requests, answers)
    end_id = min(kit_vocabulary().eos_token_ids)
    stayed = [each for each in requests if not each.is_aborted]
    assert {each.params is params[0] for each in stayed} == {True, False}
    for each in stayed:
        failed = each.params is params[0]
        assert (each.tokens[4:] == [end_id] * len(each.tokens[4:])) == failed


BEHIND: dict[str, list[dict[str, Any]]] = {
    "no token is left": [
        {"name": "forced_sequence", "args": {"token_ids": [40, 41]}},
        {"name": "no_repeat_ngram", "args": {"n": 1}},
    ],
    "raises after a draft": [{"name": "logit_bias", "args": {"bias": {"0": 100.0}}}, {"name": "acme/raises"}],
}


@pytest.mark.parametrize("what", BEHIND)
@pytest.mark.parametrize("runner", [FirstRunner, SecondRunner])
def test_a_step_behind_the_end_is_no_failure(runner: type, what: str) -> None:
    """The end token must not come again, nor another one; or a processor fails at what comes."""
    REPORTS.take_failures()
    model, num_behind = MODELS[runner], 0
    for seed in range(8):
        params = Params(temperature=0.0, extra_args=selected(*BEHIND[what]))
        requests = [Request(number, params, [5, 6]) for number in range(4)]
        if runner is SecondRunner:
            SecondRunner(model, random.Random(seed), 3, lambda request: request.prompt).run(requests)
        else:
            FirstRunner(model, random.Random(seed), 3).run(requests)
        num_behind += sum(each.num_behind for each in requests)
        assert all(each.has_ended for each in requests if not each.is_aborted)
    assert num_behind
    assert REPORTS.take_failures() == []


def test_a_preempted_request_keeps_its_receipt() -> None:
    """With asynchronous scheduling too, which leaves the newest token out of its list."""
    model = MODELS[FirstRunner]
    counts = set()
    for seed in range(40):
        banned = {"name": "banned_tokens", "args": {"token_ids": [9]}}
        request = Request(0, Params(temperature=0.0, ignore_eos=True, extra_args=selected(banned)), [5, 6])
        runner = FirstRunner(model, random.Random(seed), 1)
        runner.run([request])
        if not request.is_aborted and runner.num_preempted:
            (row,) = rows_of(request.params)
            assert row.chain is not None
            (record,) = row.chain.receipt.records
            counts.add(record.steps_active)
    assert counts == {15}  # no step shows the last token


class OtherProcess(SecondRunner):
    """Parameters come anew each time that a request joins: from a scheduler in another process."""

    def _join(self, request: Request) -> None:
        sent = {SHIPPED: (request.params.extra_args or {})[SHIPPED]}
        request.params = replace(request.params, extra_args=sent)
        super()._join(request)


@pytest.mark.parametrize("kind", [BannedTokens, Mirostat])
def test_a_receipt_outlives_parameters_that_come_anew(kind: type[Processor]) -> None:
    """Of a worker's request that vLLM's second runner has preempted; so does a state of logits."""
    REPORTS.take_failures()
    counts, num_preempted = set(), 0
    args = kind.Args(token_ids=[9]) if kind is BannedTokens else kind.Args()
    for seed in range(40):
        context = replace(kit_context(), seed=seed, max_tokens=12)
        chain = ProcessorChain([*kind.build(args, context), SeededSampler(seed, 0)], context)
        chain.start([5, 6])
        shipped = Shipped(pickle.dumps(chain), 0, f"resumed {seed}", chain.suspects)
        params = Params(ignore_eos=True, max_tokens=12, extra_args={SHIPPED: tuple(shipped)})
        request = Request(0, params, [5, 6])
        runner = OtherProcess(MODELS[SecondRunner], random.Random(seed), 1, lambda request: [])
        facts = replace(MODELS[SecondRunner].facts, tokenizer=None)
        runner.slots = Slots(runner.states, ChainReceiver(facts), RowEditor([]))
        runner.run([request])
        receipt = REPORTS.take_receipt(shipped.report, (request.tokens[-1], len(request.tokens) - 1))
        if not request.is_aborted and runner.num_preempted:
            num_preempted += runner.num_preempted
            assert receipt is not None
            counts.add(receipt.records[0].steps_active)
            expected = _answered(chain, request)
            assert request.tokens == expected.tokens
    assert num_preempted > 10
    assert counts == {12}
    assert REPORTS.take_failures() == []


def _answered(chain: ProcessorChain, request: Request) -> Request:
    """The answer with the chain in this process, a row at a time."""
    alone_ = Request(request.number, request.params, request.prompt)
    goes_on = True
    while goes_on:
        row = alone_.logits(alone_.tokens)
        apply_chain(chain, row)
        goes_on = alone_.take(int(row.argmax()), row)
        chain.accept(alone_.tokens[-1], chain.position)
    return alone_


def test_a_request_that_begins_has_a_row_of_its_own() -> None:
    """With the parameters of another one, which has left after its first step: it draws anew."""
    model = MODELS[FirstRunner]
    editor = Indexed(Builder(model), RowEditor(model.never_ids))
    params, found = Params(extra_args=selected({"name": "xtc", "args": {"threshold": 0.1, "probability": 0.5}})), []
    for _ in range(2):
        request = editor.new(params, [5, 6], [])
        assert request is not None
        found.append(request.row)
        editor.requests[0] = request
        editor.apply(torch.zeros(1, model.facts.vocab_size))
        request.output.append(7)
        editor.leave([0])
    assert found[0] is not found[1]


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"temperature": 1.0}, {"seed": 3}])
@pytest.mark.parametrize("name", ["logit_bias", "acme/fills", "xtc"])
def test_no_id_that_is_no_token_can_be_sampled(name: str, asked: dict[str, Any]) -> None:
    """Neither the model's own logits of them nor what a processor writes there is sampled from."""
    model = MODELS[FirstRunner]
    args = {"logit_bias": {"bias": {"9": 2.0}}, "xtc": {"threshold": 0.1, "probability": 0.5}}.get(name, {})
    editor = Indexed(Builder(model), RowEditor(model.never_ids))
    found = editor.new(Params(**asked, extra_args=selected({"name": name, "args": args})), [5, 6], [])
    assert found is not None
    editor.requests[0] = found
    logits = torch.zeros(1, model.facts.vocab_size)
    logits[0, model.never_ids] = 50.0
    editor.apply(logits)
    assert len(model.never_ids) == NUM_PADDING
    assert logits[0, model.never_ids].eq(-torch.inf).all()
    assert int(logits[0].argmax()) < kit_vocabulary().num_tokens


def test_padding_that_a_processor_writes_is_not_counted() -> None:
    """The nucleus of equal logits is that of a row in which nothing was written."""
    model = MODELS[FirstRunner]
    drawn = []
    for names in (("acme/fills", "top_p"), ("top_p",)):
        editor = Indexed(Builder(model), RowEditor(model.never_ids))
        named = [{"name": name, "args": {"p": 0.5} if name == "top_p" else {}} for name in names]
        found = editor.new(Params(seed=3, extra_args=selected(*named)), [5, 6], [])
        assert found is not None
        editor.requests[0] = found
        logits = torch.ones(1, model.facts.vocab_size)
        editor.apply(logits)
        drawn.append(int(logits[0].argmax()))
    assert drawn[0] == drawn[1]


def test_masks_that_leave_no_token_are_a_failure() -> None:
    """Padding of the row is none: what two bans leave is not sampled."""
    REPORTS.take_failures()
    model = MODELS[FirstRunner]
    count = kit_vocabulary().num_tokens
    halves = [list(range(count // 2)), list(range(count // 2, count))]
    editor = Indexed(Builder(model), RowEditor(model.never_ids))
    banned = [{"name": "banned_tokens", "args": {"token_ids": half}} for half in halves]
    found = editor.new(Params(temperature=0.0, extra_args=selected(*banned)), [5, 6], [])
    assert found is not None
    editor.requests[0] = found
    editor.apply(torch.zeros(1, model.facts.vocab_size))
    (failure,) = REPORTS.take_failures()
    assert failure["reason"] == "empty"


class ExitsWhenLoaded:
    """Exits where it is unpickled, as a module does that is imported then."""

    def __setstate__(self, state: object) -> None:
        raise SystemExit(0)

    def __getstate__(self) -> object:
        return {"any": "state"}


def test_a_chain_that_exits_when_it_is_loaded_fails_alone() -> None:
    with ThreadPoolExecutor(1) as threads:
        row = Row(threads.submit(pickle.loads, pickle.dumps(ExitsWhenLoaded())), 1)
    with pytest.raises(ProcessorFailed, match="cannot be built: raised SystemExit"):
        row.chain_after([5, 6])


def test_a_token_that_is_never_shown_ends_the_answer() -> None:
    """vLLM fills in the newest token for classes that its command line names, and for no other."""
    REPORTS.take_failures()
    model = MODELS[FirstRunner]
    editor = Indexed(Builder(model), RowEditor(model.never_ids))
    outputs: list[list[int]] = [[], []]
    for index, output in enumerate(outputs):
        asked = selected({"name": "banned_tokens", "args": {"token_ids": [9]}})
        found = editor.new(Params(extra_args=asked), [5, 6], output)
        assert found is not None
        editor.requests[index] = found
    for newest in ((), (-1, 7)):
        for output, token_id in zip(outputs, newest, strict=False):
            output.append(token_id)
        logits = torch.zeros(2, model.facts.vocab_size)
        editor.apply(logits)
    (failure,) = REPORTS.take_failures()
    assert "name adapters.vllm:Processors with --logits-processors" in failure["message"]
    assert int((logits[0] > -torch.inf).sum()) == 1
    assert int((logits[1] > -torch.inf).sum()) > 1


def test_ranks_of_tensor_parallelism_draw_the_same() -> None:
    """Each feeds its part of the model what it has drawn itself; no clock decides either."""
    model = MODELS[FirstRunner]
    asked = selected({"name": "xtc", "args": {"threshold": 0.1, "probability": 0.5}})
    drawn = []
    for _ in range(2):
        editor = Indexed(Builder(model, shared_seed=3), RowEditor(model.never_ids))
        for index in range(8):
            found = editor.new(Params(extra_args=asked), [5, 6], [])
            assert found is not None
            editor.requests[index] = found
        logits = torch.zeros(8, model.facts.vocab_size)
        editor.apply(logits)
        drawn.append(logits.argmax(-1).tolist())
        chains = [each.row.chain_after([5, 6]) for each in editor.requests.values()]
        assert {chain.failures.step_budget_s for chain in chains} == {math.inf}
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 1


def test_a_migrated_answer_goes_on_behind_its_pictures() -> None:
    """The worker's chain began behind a prompt with one token for a picture; vLLM's has more."""
    model = MODELS[FirstRunner]
    params = Params(extra_args=selected({"name": "forced_prefix", "args": {"token_ids": [40, 41, 42]}}))
    asked = read(params, model)
    assert asked is not None
    chain, _ = chain_of(asked, params, model)
    chain.start([5, 6], [40], mode="migrated")
    built: Future[ProcessorChain] = Future()
    built.set_result(chain)
    row = Row(built, 0)
    found = row.chain_after([5, 5, 5, 6, 40])
    assert (found.prompt_length, found.receipt.mode, found.receipt.replayed) == (4, "migrated", 1)
    logits = torch.zeros(1, model.facts.vocab_size)
    RowEditor(model.never_ids).apply(logits, [(0, row, found)])
    assert int(logits[0].argmax()) == 41
