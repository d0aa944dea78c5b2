"""Fields that run as processors: what the operator's policy makes of them, over all of them."""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from adapters.catalog import Catalog, ModelPolicy, Origin, Policy, Requested, Selection, model_context
from adapters.chain import ProcessorChain, apply_chain
from adapters.contract import Context, Stage
from adapters.processors import BUILTINS
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.embedded.admission import SAMPLED
from worker.errors import InvalidRequest
from worker.processors.builder import ServedChainBuilder
from worker.requests.fields import FIELDS
from worker.requests.request import GenerationRequest, RequestLimits, parse_request
from worker.sampling import Control, SamplingParams
from worker.sampling.control import RunsAs
from worker.sampling.field_processors import for_engine, is_sampled, processor_controls, with_field_processors
from worker.tiny_model import write_tiny_model

CATALOG = Catalog.default()
PROMPT = [5, 6, 7]
END = 1
VOCAB = 1024
MODEL = "tiny"

IDS = st.integers(8, 990)
NUMBERS = {"allow_nan": False}


def tagged(pattern: str) -> dict[str, Any]:
    """The format of a structural tag."""
    tag = {"begin": "<f>", "content": {"type": "regex", "pattern": pattern}, "end": "</f>"}
    return {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}


# what a client may send for each control, neutral values among them, and an operator's arguments
# for its processor
VALUES: dict[str, tuple[st.SearchStrategy[Any], dict[str, Any]]] = {
    "repetition_penalty": (st.just(1) | st.floats(0.01, 100, **NUMBERS), {"penalty": 1.25}),
    "frequency_penalty": (st.just(0) | st.floats(-2, 2, **NUMBERS), {"penalty": 0.5}),
    "presence_penalty": (st.just(0) | st.floats(-2, 2, **NUMBERS), {"penalty": 0.5}),
    "min_tokens": (st.integers(0, 20), {"n": 3}),
    "temperature": (st.just(1) | st.floats(0, 100, **NUMBERS), {"value": 0.5}),
    "min_p": (st.just(0) | st.floats(0, 1, **NUMBERS), {"p": 0.25}),
    "top_k": (st.integers(-1, 1000), {"k": 40}),
    "top_p": (st.just(1) | st.floats(0, 1, **NUMBERS), {"p": 0.5}),
    "allowed_tokens": (st.lists(IDS, min_size=1, max_size=4), {"token_ids": [9, 10], "allow_end": False}),
    "bad_words": (st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=3), {"token_ids": [[9, 10]]}),
    "thinking_budget": (st.integers(0, 100), {"tokens": 64}),
    "json_schema": (st.sampled_from([{"type": "integer"}, {"type": "string"}, True]), {"schema": {"type": "string"}}),
    "regex": (st.sampled_from(["[a-z]+", "[0-9]+"]), {"pattern": "[a-z]+"}),
    "choice": (st.sampled_from([["yes", "no"], ["a"]]), {"choices": ["a"]}),
    "structural_tag": (st.sampled_from([tagged("[a-z]"), tagged("[0-9]")]), {"format": tagged("[0-9]")}),
    "grammar": (st.sampled_from(['start: "a"', 'start: "b"']), {"lark": 'start: "b"'}),
}


@dataclass(frozen=True, eq=False)
class Case:
    """A field of a request, or one of its kinds of values, and the processor that it runs as."""

    control: Control
    runs_as: RunsAs

    def value(self, request: GenerationRequest) -> Any:
        """The processor's argument that a request sets."""
        return self.runs_as.value_of(getattr(request.params, self.control.name))

    @property
    def name(self) -> str:
        return self.runs_as.processor.name


CASES = [
    Case(control, runs_as)
    for control in processor_controls(SamplingParams)
    for runs_as in control.runs_as
    if control.paths and runs_as.guide != "json_object"
]
BY_NAME = {case.name: case for case in CASES}
cases = st.sampled_from(CASES)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Context:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory)
    return model_context(Vocabulary.from_pretrained(str(directory), VOCAB, (END,)))


def raw(case: Case | None = None, value: Any = None, **stop_conditions: Any) -> dict[str, Any]:
    """A request as the frontend sends it, with one field set."""
    data: dict[str, Any] = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 20, **stop_conditions}}
    if case is not None:
        *sections, name = case.control.path.split(".")
        inner = data
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value if case.runs_as.guide is None else {case.runs_as.guide: value}
    return data


def parsed(data: dict[str, Any]) -> GenerationRequest:
    return parse_request(data, RequestLimits(256, VOCAB, (END,)))


def chains_with(facts: Context, **policy: Any) -> ServedChainBuilder:
    policies = Policy(models={MODEL: ModelPolicy(**policy)})
    return ServedChainBuilder(CATALOG, policies, MODEL, facts, CollectorRegistry())


def operators(origin: Origin, name: str, args: dict[str, Any]) -> tuple[Requested, ...]:
    return (Requested(name, args, path=f"models.{MODEL}.{origin}[0]", origin=origin),)


def served(chains: ServedChainBuilder, request: GenerationRequest) -> tuple[SamplingParams, ProcessorChain | None]:
    """What the sampler gets of the request: the way of `WorkerEngine` and of an engine's
    admission.
    """
    params, prompt = request.params, request.prompt_token_ids
    selection, ends = chains.select(request, {}), params.end_token_ids
    chain = asyncio.run(chains.prepare(EngineRequest("", prompt, params, seed=1), selection, params.max_tokens)).chain
    context = chains.builder.context(ends, 1, params.max_tokens)
    return with_field_processors(for_engine(params), chain, prompt, context, by_sampler=SAMPLED)


def names(chain: ProcessorChain | None) -> list[str]:
    return [] if chain is None else [member.name for member in chain.members]


# The table


def test_every_request_field_that_is_a_processor_is_in_the_table() -> None:
    targets = {row.target for row in FIELDS if row.why.startswith("Runs as the processor")}
    same_name = {row.target for row in FIELDS} & {processor.name for processor in BUILTINS}
    assert targets | same_name == {case.control.name for case in CASES}
    assert set(VALUES) == set(BY_NAME)


@pytest.mark.parametrize("case", [case for case in CASES if case.control.client_bounds], ids=lambda case: case.name)
def test_a_client_may_send_what_the_processor_takes(case: Case) -> None:
    """Bounds stand beside the field and in the processor's arguments; they are the same."""
    limits: dict[str, Any] = {}
    for limit in case.runs_as.processor.Args.model_fields[case.runs_as.argument].metadata:
        limits |= {name: getattr(limit, name) for name in ("ge", "le") if hasattr(limit, name)}
    bounds = case.control.client_bounds
    assert bounds is not None
    assert limits == {"ge": bounds.low, "le": bounds.high}


NEUTRAL = {case: value for case in CASES for value in (0, 1) if value == case.control.neutral}


@pytest.mark.parametrize("case", NEUTRAL, ids=lambda case: case.name)
def test_a_neutral_value_changes_no_row(case: Case, facts: Context) -> None:
    """What is left out of a chain because it asks for nothing would have done nothing in it."""
    context = chains_with(facts).builder.context(frozenset({END}), 1, 20)
    requested = Requested(case.name, {case.runs_as.argument: NEUTRAL[case]})
    chain = ProcessorChain(CATALOG.find(requested).build(requested, context), context)
    chain.start(PROMPT)
    chain.accept(9, 3)
    row = torch.linspace(-3, 3, VOCAB)
    changed = row.clone()
    apply_chain(chain, changed)
    assert torch.equal(changed, row)


# Defaults


@given(cases, st.data())
def test_a_default_yields_to_the_clients_field(facts: Context, case: Case, data: st.DataObject) -> None:
    """The request is served as without a policy, whatever the value; without the field the
    default holds.
    """
    name = case.name
    values, args = VALUES[name]
    value = data.draw(values)
    chains = chains_with(facts, default=operators("default", name, args))
    request = parsed(raw(case, value))
    assert chains.select(request, {}) == chains_with(facts).select(request, {})
    with_policy, without = served(chains, request), served(chains_with(facts), request)
    assert with_policy[0] == without[0]
    assert names(with_policy[1]) == names(without[1])
    assert [one.name for one in chains.select(parsed(raw()), {}).processors] == [name]


@given(cases, cases)
def test_a_default_stays_beside_fields_that_are_something_else(facts: Context, mine: Case, other: Case) -> None:
    name = mine.name
    chains = chains_with(facts, default=operators("default", name, VALUES[name][1]))
    request = parsed(raw(other, VALUES[other.name][1][other.runs_as.argument]))
    kept = [one.name for one in chains.select(request, {}).processors if one.origin == "default"]
    yields = other.name == name or (mine.runs_as.guide is not None and other.runs_as.guide is not None)
    assert kept == ([] if yields else [name])


LATE = {
    "temperature": {"value": 0.5},
    "dynamic_temperature": {"low": 0.2, "high": 1.5},
    "top_a": {"a": 0.1},
    "top_k": {"k": 40},
    "top_p": {"p": 0.5},
    "min_p": {"p": 0.25},
    "typical_p": {"p": 0.5},
    "top_n_sigma": {"n": 1.5},
    "epsilon_cutoff": {"epsilon": 0.001},
    "eta_cutoff": {"epsilon": 0.001},
    "xtc": {"threshold": 0.001, "probability": 1.0},
    "mirostat": {},
    "watermark": {"key_id": "house"},
    "synthid": {"key_id": "house"},
}


UNDONE_BY_GREEDY = {"temperature", "dynamic_temperature", "watermark", "synthid"}


def late_chains(facts: Context, **policy: Any) -> ServedChainBuilder:
    made = Policy(models={MODEL: ModelPolicy(**policy)}, watermark_keys={"house": bytes(range(32))})
    return ServedChainBuilder(CATALOG, made, MODEL, facts, CollectorRegistry())


def test_all_late_processors_are_tried() -> None:
    assert set(LATE) == {processor.name for processor in BUILTINS if processor.stage >= Stage.TEMPERATURE}


@pytest.mark.parametrize("name", LATE)
def test_an_empty_request_stays_greedy_under_a_default(facts: Context, name: str) -> None:
    chains = late_chains(facts, default=operators("default", name, LATE[name]))
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    for request in (parsed(raw()), parsed(raw(BY_NAME["frequency_penalty"], 0.5))):  # a penalty does not ask for a draw
        params, chain = served(chains, request)
        assert not is_sampled(params, chain)
        assert chain is not None
        logits = row.clone()
        apply_chain(chain, logits)
        assert torch.nonzero(logits > -torch.inf).flatten().tolist() == [int(row.argmax())]


def named(facts: Context, name: str, params: SamplingParams) -> SamplingParams:
    """What is left to the sampler of a request that names a late processor."""
    chains = late_chains(facts)
    selection = Selection((Requested(name, LATE[name], path="processors[0]"),))
    ends = frozenset({END})
    asked = EngineRequest("", PROMPT, replace(params, max_tokens=20, stop_token_ids=[END]), seed=1)
    chain = asyncio.run(chains.prepare(asked, selection, 20)).chain
    return with_field_processors(params, chain, PROMPT, chains.builder.context(ends, 1, 20), by_sampler=SAMPLED)[0]


@pytest.mark.parametrize("name", LATE)
def test_who_names_it_himself_is_drawn(facts: Context, name: str) -> None:
    assert not named(facts, name, SamplingParams()).is_greedy


@pytest.mark.parametrize("name", sorted(LATE.keys() - {"min_p"}))
def test_a_field_that_asks_for_nothing_undoes_no_name(facts: Context, name: str) -> None:
    assert not named(facts, name, SamplingParams(min_p=0.0)).is_greedy


@pytest.mark.parametrize("field", [{"temperature": 0}, {"min_p": 1}, {"top_k": 1}, {"top_p": 0}])
def test_a_greedy_field_stays_greedy_beside_a_name(facts: Context, field: dict[str, Any]) -> None:
    assert named(facts, "xtc", SamplingParams(**field)).is_greedy


@pytest.mark.parametrize("name", LATE)
def test_a_default_shapes_a_request_that_is_drawn(facts: Context, name: str) -> None:
    chains = late_chains(facts, default=operators("default", name, LATE[name]))
    field = "top_p" if name == "temperature" else "temperature"
    params, chain = served(chains, parsed(raw(BY_NAME[field], 0.75)))
    assert not params.is_greedy
    assert name in names(chain)


@pytest.mark.parametrize(("name", "drawn"), [(name, name in UNDONE_BY_GREEDY) for name in LATE])
def test_mandatory_processors_sample_only_if_greedy_undoes_them(facts: Context, name: str, drawn: bool) -> None:
    params, chain = served(late_chains(facts, mandatory=operators("mandatory", name, LATE[name])), parsed(raw()))
    assert name in names(chain)
    assert params.is_greedy is not drawn


# Forbidden


@given(cases, st.data())
def test_a_forbidden_processor_cannot_be_had_by_its_field(facts: Context, case: Case, data: st.DataObject) -> None:
    name = case.name
    value = data.draw(VALUES[name][0])
    chains = chains_with(facts, forbidden=frozenset({name}))
    request = parsed(raw(case, value))
    if case.value(request) == case.control.neutral:
        assert chains.select(request, {}).processors == ()
        return
    with pytest.raises(InvalidRequest, match=f"asks for the logits processor {name}, which is not allowed") as refused:
        chains.select(request, {})
    assert refused.value.field == case.control.path


# Mandatory


@given(cases, st.data())
def test_a_mandatory_processor_cannot_be_changed_by_its_field(facts: Context, case: Case, data: st.DataObject) -> None:
    name = case.name
    values, args = VALUES[name]
    chains = chains_with(facts, mandatory=operators("mandatory", name, args))
    value = data.draw(st.just(args[case.runs_as.argument]) | values)
    request = parsed(raw(case, value))
    set_to = case.value(request)
    if args[case.runs_as.argument] == set_to:
        params, chain = served(chains, request)
        in_sampler = case.control.refused is None and case.runs_as.is_late
        assert names(chain).count(name) == (0 if in_sampler else 1)
        assert not in_sampler or getattr(params, case.control.name) == set_to
        return
    with pytest.raises(
        InvalidRequest, match=f"processor {name} is set by the operator and cannot be changed"
    ) as refused:
        chains.select(request, {})
    assert refused.value.field.startswith(case.control.path)


def test_a_fields_arguments_beside_its_value_are_compared_too(facts: Context) -> None:
    chains = chains_with(facts, mandatory=operators("mandatory", "allowed_tokens", {"token_ids": [9, 10]}))
    with pytest.raises(InvalidRequest, match="allowed_tokens is set by the operator and cannot be changed"):
        chains.select(
            parsed(raw(BY_NAME["allowed_tokens"], [9, 10])), {}
        )  # the field would not leave the end tokens allowed


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_a_field_that_lost_digits_on_its_way_is_the_same(facts: Context, name: str) -> None:
    """Dynamo's frontend keeps 32 bits of a number: who asks for the operator's own 0.7 asks for
    0.699999988079071.
    """
    case = BY_NAME[name]
    chains = chains_with(facts, mandatory=operators("mandatory", name, {case.runs_as.argument: 0.7}))
    seen = struct.unpack("f", struct.pack("f", 0.7))[0]
    assert seen != 0.7
    assert names(served(chains, parsed(raw(case, seen)))[1]).count(name) == (name != "temperature")
    with pytest.raises(InvalidRequest, match=f"{name} is set by the operator and cannot be changed"):
        chains.select(parsed(raw(case, 0.7001)), {})


@given(cases)
def test_a_mandatory_processor_is_there_without_its_field(facts: Context, case: Case) -> None:
    name = case.name
    chains = chains_with(facts, mandatory=operators("mandatory", name, VALUES[name][1]))
    assert names(served(chains, parsed(raw()))[1]).count(name) == 1


def test_a_mandatory_processor_named_twice_is_compared_twice(facts: Context) -> None:
    chains = chains_with(facts, mandatory=operators("mandatory", "min_tokens", {"n": 3}))
    entries = '{"name": "min_tokens", "args": {"n": 1}}, {"name": "min_tokens", "args": {"n": 3}}'
    data = raw() | {"annotations": [f'logits_processors:{{"version": 1, "processors": [{entries}]}}']}
    with pytest.raises(
        InvalidRequest, match=r"processors\[0\]: the logits processor min_tokens is set by the operator"
    ):
        chains.select(parsed(data), {})


# What a request rules out

ENDING = {
    "loop_stop": {"max_period": 1, "copies": 3},
    "forced_sequence": {"token_ids": [9]},
    "force_last_phrase": {"text": "the end"},
    "json_schema": {"schema": True},
    "multiple_choice": {"choices": ["yes", "no"]},
}


@pytest.mark.parametrize("name", ENDING)
def test_a_default_that_ends_answers_yields_to_ignore_eos(facts: Context, name: str) -> None:
    chains = chains_with(facts, default=operators("default", name, ENDING[name]))
    assert served(chains, parsed(raw(ignore_eos=True)))[1] is None
    assert name in names(served(chains, parsed(raw()))[1])


@pytest.mark.parametrize("name", ENDING)
def test_a_mandatory_one_names_ignore_eos(facts: Context, name: str) -> None:
    chains = chains_with(facts, mandatory=operators("mandatory", name, ENDING[name]))
    message = f"must not be true: the operator requires the logits processor {name} for this model"
    with pytest.raises(InvalidRequest, match=message) as refused:
        served(chains, parsed(raw(ignore_eos=True)))
    assert refused.value.field == "stop_conditions.ignore_eos"


def test_what_else_rules_a_mandatory_one_out_is_said(facts: Context) -> None:
    chains = chains_with(facts, mandatory=operators("mandatory", "min_tokens", {"n": 30}))
    with pytest.raises(InvalidRequest, match=r"requires .* min_tokens .* at most 20, the most tokens") as refused:
        served(chains, parsed(raw()))
    assert refused.value.field == "logits_processors"


def test_a_clients_own_field_is_named_in_its_refusal(facts: Context) -> None:
    with pytest.raises(InvalidRequest, match="needs an end token") as refused:
        served(chains_with(facts), parsed(raw(BY_NAME["json_schema"], True, ignore_eos=True)))
    assert refused.value.field.startswith("sampling_options.guided_decoding")


def test_the_order_of_a_request_covers_its_fields(facts: Context) -> None:
    data = raw()
    data["sampling_options"] = {"temperature": 1.5, "min_p": 0.25, "top_k": 40}
    top_a = [{"name": "top_a", "args": {"a": 0.1}}]
    text = json.dumps({"version": 1, "processors": top_a, "order": ["min_p", "top_a", "temperature"]})
    data["annotations"] = [f"logits_processors:{text}"]
    params, chain = served(chains_with(facts), parsed(data))
    assert names(chain) == ["min_p", "top_a", "temperature", "top_k"]
    assert (params.temperature, params.min_p, params.top_k) == (1.0, None, None)
    data["annotations"] = ['logits_processors:{"version": 1, "order": ["top_k", "temperature"]}']
    _, chain = served(chains_with(facts), parsed(data))
    assert names(chain) == ["top_k", "temperature", "min_p"]
    del data["sampling_options"]  # greedy, as without an order
    params, chain = served(chains_with(facts), parsed(data))
    assert names(chain) == ["temperature"]
    assert params.is_greedy


@pytest.mark.parametrize("changes", [{}, {"seed": 3}, {"seed": None}, {"logits_processor": None}, {"logprobs": True}])
def test_what_an_engine_gets_is_a_copy(changes: dict[str, Any]) -> None:
    given = SamplingParams(max_tokens=9, top_p=0.5, seed=7, stop_token_ids=[3], allowed_token_ids=[4], logprobs=2)
    cleared = {one.name: None for one in processor_controls(SamplingParams) if one.refused is not None}
    made = for_engine(given, **changes)
    assert made == replace(given, **cleared | changes)
    assert made is not given
    assert given.allowed_token_ids == [4]


@pytest.mark.parametrize(("field", "value"), [("seed", -1), ("seed", 2**64), ("seed", 1.5), ("top_p", 2.0)])
def test_a_change_out_of_range_is_an_error(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        for_engine(SamplingParams(), **{field: value})
