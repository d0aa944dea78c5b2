"""Fields that are processors by another name: one table; what the operator's policy makes of
them, over all of them.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from adapters.catalog import Catalog, ModelPolicy, Origin, Policy, Requested, Selection
from adapters.chain import ProcessorChain, apply_chain
from adapters.contract import Processor, Stage
from adapters.processors import BUILTINS
from worker.errors import InvalidRequest
from worker.processors.builder import Facts, ProcessorDesk
from worker.requests.fields import FIELDS
from worker.requests.lowering import lower
from worker.requests.request import GenerationRequest, RequestLimits, parse_request
from worker.sampling import SamplingParams
from worker.sampling.controls import CONTROLS, Control, is_drawn, with_field_processors
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

REQUEST_CONTROLS = [control for control in CONTROLS if control.processor.name in VALUES]
controls = st.sampled_from(REQUEST_CONTROLS)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory)
    return Facts.load(str(directory), VOCAB, (END,))


def path_of(control: Control) -> str:
    return [row.path for row in FIELDS if row.target == control.field][-1]


def raw(control: Control | None = None, value: Any = None, **stop_conditions: Any) -> dict[str, Any]:
    """A request as the frontend sends it, with one field set."""
    data: dict[str, Any] = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 20, **stop_conditions}}
    if control is not None:
        *sections, name = path_of(control).split(".")
        inner = data
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value if control.guide is None else {control.guide: value}
    return data


def parsed(data: dict[str, Any]) -> GenerationRequest:
    return parse_request(data, RequestLimits(256, VOCAB))


def desk_with(facts: Facts, **policy: Any) -> ProcessorDesk:
    return ProcessorDesk(CATALOG, Policy(models={MODEL: ModelPolicy(**policy)}), MODEL, facts, CollectorRegistry())


def operators(origin: Origin, name: str, args: dict[str, Any]) -> tuple[Requested, ...]:
    return (Requested(name, args, path=f"models.{MODEL}.{origin}[0]", origin=origin),)


def served(desk: ProcessorDesk, request: GenerationRequest) -> tuple[SamplingParams, ProcessorChain | None]:
    """What the sampler gets of the request: the way of `WorkerEngine` and of an engine's
    admission.
    """
    selection = desk.select(request, {})
    params = lower(request, [END])
    ends, prompt = params.end_token_ids, request.prompt_token_ids
    chain = asyncio.run(desk.chain(selection, prompt, ends, 1, request.max_tokens))
    return with_field_processors(params, chain, prompt, desk.context(ends, 1, request.max_tokens))


def names(chain: ProcessorChain | None) -> list[str]:
    return [] if chain is None else [member.name for member in chain.members]


# The table


def test_every_request_field_that_is_a_processor_is_in_the_table() -> None:
    targets = {row.target for row in FIELDS if row.why.startswith("Runs as the processor")}
    same_name = {row.target for row in FIELDS} & {processor.name for processor in BUILTINS}
    assert targets | same_name == {control.field for control in REQUEST_CONTROLS}
    assert set(VALUES) == {control.processor.name for control in REQUEST_CONTROLS}
    assert len({(control.field, control.guide) for control in CONTROLS}) == len(CONTROLS)


NEUTRAL = {control.processor: value for control in REQUEST_CONTROLS for value in (0, 1) if control.is_neutral(value)}


@pytest.mark.parametrize("kind", NEUTRAL, ids=lambda kind: kind.name)
def test_a_neutral_value_changes_no_row(kind: type[Processor], facts: Facts) -> None:
    """What is left out of a chain because it asks for nothing would have done nothing in it."""
    context = desk_with(facts).context(frozenset({END}), 1, 20)
    argument = next(control.argument for control in CONTROLS if control.processor is kind)
    chain = ProcessorChain(CATALOG.build(Requested(kind.name, {argument: NEUTRAL[kind]}), context), context)
    chain.start(PROMPT)
    chain.accept(9, 3)
    row = torch.linspace(-3, 3, VOCAB)
    changed = row.clone()
    apply_chain(chain, changed)
    assert torch.equal(changed, row)


# Defaults


@given(controls, st.data())
def test_a_default_yields_to_the_clients_field(facts: Facts, control: Control, data: st.DataObject) -> None:
    """The request is served as without a policy, whatever the value; without the field the
    default holds.
    """
    name = control.processor.name
    values, args = VALUES[name]
    value = data.draw(values)
    desk = desk_with(facts, default=operators("default", name, args))
    request = parsed(raw(control, value))
    assert desk.select(request, {}) == desk_with(facts).select(request, {})
    with_policy, without = served(desk, request), served(desk_with(facts), request)
    assert with_policy[0] == without[0]
    assert names(with_policy[1]) == names(without[1])
    assert [one.name for one in desk.select(parsed(raw()), {}).processors] == [name]


@given(controls, controls)
def test_a_default_stays_beside_fields_that_are_something_else(facts: Facts, mine: Control, other: Control) -> None:
    name = mine.processor.name
    desk = desk_with(facts, default=operators("default", name, VALUES[name][1]))
    request = parsed(raw(other, VALUES[other.processor.name][1][other.argument]))
    kept = [one.name for one in desk.select(request, {}).processors if one.origin == "default"]
    yields = other.processor.name == name or (mine.guide is not None and other.guide is not None)
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


def late_desk(facts: Facts, **policy: Any) -> ProcessorDesk:
    made = Policy(models={MODEL: ModelPolicy(**policy)}, watermark_keys={"house": bytes(range(32))})
    return ProcessorDesk(CATALOG, made, MODEL, facts, CollectorRegistry())


def test_all_late_processors_are_tried() -> None:
    assert set(LATE) == {processor.name for processor in BUILTINS if processor.stage >= Stage.TEMPERATURE}


@pytest.mark.parametrize("name", LATE)
def test_an_empty_request_stays_greedy_under_a_default(facts: Facts, name: str) -> None:
    desk = late_desk(facts, default=operators("default", name, LATE[name]))
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    for request in (parsed(raw()), parsed(raw(CONTROLS[1], 0.5))):  # a penalty does not ask for a draw
        params, chain = served(desk, request)
        assert not is_drawn(params, chain)
        assert chain is not None
        logits = row.clone()
        apply_chain(chain, logits)
        assert torch.nonzero(logits > -torch.inf).flatten().tolist() == [int(row.argmax())]


@pytest.mark.parametrize("name", LATE)
def test_who_names_it_himself_is_drawn(facts: Facts, name: str) -> None:
    desk = late_desk(facts)
    selection = Selection((Requested(name, LATE[name], path="processors[0]"),))
    ends = frozenset({END})
    chain = asyncio.run(desk.chain(selection, PROMPT, ends, 1, 20))
    params, chain = with_field_processors(SamplingParams(), chain, PROMPT, desk.context(ends, 1, 20))
    assert not params.is_greedy


@pytest.mark.parametrize("name", LATE)
def test_a_default_shapes_a_request_that_is_drawn(facts: Facts, name: str) -> None:
    desk = late_desk(facts, default=operators("default", name, LATE[name]))
    field = "top_p" if name == "temperature" else "temperature"
    other = next(control for control in CONTROLS if control.field == field)
    params, chain = served(desk, parsed(raw(other, 0.75)))
    assert not params.is_greedy
    assert name in names(chain)


@pytest.mark.parametrize(("name", "drawn"), [(name, name in UNDONE_BY_GREEDY) for name in LATE])
def test_of_what_is_mandatory_only_what_greedy_would_undo_is_drawn(facts: Facts, name: str, drawn: bool) -> None:
    params, chain = served(late_desk(facts, mandatory=operators("mandatory", name, LATE[name])), parsed(raw()))
    assert name in names(chain)
    assert params.is_greedy is not drawn


# Forbidden


@given(controls, st.data())
def test_a_forbidden_processor_cannot_be_had_by_its_field(facts: Facts, control: Control, data: st.DataObject) -> None:
    name = control.processor.name
    value = data.draw(VALUES[name][0])
    desk = desk_with(facts, forbidden=frozenset({name}))
    request = parsed(raw(control, value))
    if control.is_neutral(control.value(request)):
        assert desk.select(request, {}).processors == ()
        return
    with pytest.raises(InvalidRequest, match=f"asks for the logits processor {name}, which is not allowed") as refused:
        desk.select(request, {})
    assert refused.value.field == path_of(control)


# Mandatory


@given(controls, st.data())
def test_a_mandatory_processor_cannot_be_changed_by_its_field(
    facts: Facts, control: Control, data: st.DataObject
) -> None:
    name = control.processor.name
    values, args = VALUES[name]
    desk = desk_with(facts, mandatory=operators("mandatory", name, args))
    value = data.draw(st.just(args[control.argument]) | values)
    request = parsed(raw(control, value))
    set_to = control.value(request)
    same = args[control.argument] == (sorted(set_to) if isinstance(set_to, frozenset) else _lists(set_to))
    if same:
        params, chain = served(desk, request)
        in_sampler = control.in_params and control.processor.stage >= Stage.TEMPERATURE
        assert names(chain).count(name) == (0 if in_sampler else 1)
        assert not in_sampler or control.value(params) == set_to
        return
    with pytest.raises(
        InvalidRequest, match=f"processor {name} is set by the operator and cannot be changed"
    ) as refused:
        desk.select(request, {})
    assert refused.value.field.startswith(path_of(control))


def _lists(value: Any) -> Any:
    return [list(item) for item in value] if isinstance(value, tuple) else value


def test_an_argument_that_the_field_has_beside_its_value_is_compared_too(facts: Facts) -> None:
    desk = desk_with(facts, mandatory=operators("mandatory", "allowed_tokens", {"token_ids": [9, 10]}))
    control = next(control for control in CONTROLS if control.field == "allowed_token_ids")
    with pytest.raises(InvalidRequest, match="allowed_tokens is set by the operator and cannot be changed"):
        desk.select(parsed(raw(control, [9, 10])), {})  # the field would not leave the end tokens allowed


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_a_field_that_lost_digits_on_its_way_is_the_same(facts: Facts, name: str) -> None:
    """Dynamo's frontend keeps 32 bits of a number: who asks for the operator's own 0.7 asks for
    0.699999988079071.
    """
    control = next(control for control in CONTROLS if control.field == name)
    desk = desk_with(facts, mandatory=operators("mandatory", name, {control.argument: 0.7}))
    seen = struct.unpack("f", struct.pack("f", 0.7))[0]
    assert seen != 0.7
    assert names(served(desk, parsed(raw(control, seen)))[1]).count(name) == (name != "temperature")
    with pytest.raises(InvalidRequest, match=f"{name} is set by the operator and cannot be changed"):
        desk.select(parsed(raw(control, 0.7001)), {})


@given(controls)
def test_a_mandatory_processor_is_there_without_its_field(facts: Facts, control: Control) -> None:
    name = control.processor.name
    desk = desk_with(facts, mandatory=operators("mandatory", name, VALUES[name][1]))
    assert names(served(desk, parsed(raw()))[1]).count(name) == 1


def test_a_mandatory_processor_named_twice_is_compared_twice(facts: Facts) -> None:
    desk = desk_with(facts, mandatory=operators("mandatory", "min_tokens", {"n": 3}))
    entries = '{"name": "min_tokens", "args": {"n": 1}}, {"name": "min_tokens", "args": {"n": 3}}'
    data = raw() | {"annotations": [f'logits_processors:{{"version": 1, "processors": [{entries}]}}']}
    with pytest.raises(
        InvalidRequest, match=r"processors\[0\]: the logits processor min_tokens is set by the operator"
    ):
        desk.select(parsed(data), {})


# What a request rules out

ENDING = {
    "loop_stop": {"max_period": 1, "copies": 3},
    "forced_sequence": {"token_ids": [9]},
    "force_last_phrase": {"text": "the end"},
    "json_schema": {"schema": True},
    "multiple_choice": {"choices": ["yes", "no"]},
}


@pytest.mark.parametrize("name", ENDING)
def test_a_default_that_ends_answers_yields_to_ignore_eos(facts: Facts, name: str) -> None:
    desk = desk_with(facts, default=operators("default", name, ENDING[name]))
    assert served(desk, parsed(raw(ignore_eos=True)))[1] is None
    assert name in names(served(desk, parsed(raw()))[1])


@pytest.mark.parametrize("name", ENDING)
def test_a_mandatory_one_names_ignore_eos(facts: Facts, name: str) -> None:
    desk = desk_with(facts, mandatory=operators("mandatory", name, ENDING[name]))
    message = f"must not be true: the operator requires the logits processor {name} for this model"
    with pytest.raises(InvalidRequest, match=message) as refused:
        served(desk, parsed(raw(ignore_eos=True)))
    assert refused.value.field == "stop_conditions.ignore_eos"


def test_what_else_rules_a_mandatory_one_out_is_said(facts: Facts) -> None:
    desk = desk_with(facts, mandatory=operators("mandatory", "min_tokens", {"n": 30}))
    with pytest.raises(InvalidRequest, match=r"requires .* min_tokens .* max_tokens, which is 20") as refused:
        served(desk, parsed(raw()))
    assert refused.value.field == "logits_processors"


def test_what_the_client_asks_for_itself_is_refused_in_its_own_name(facts: Facts) -> None:
    guided = next(control for control in CONTROLS if control.guide == "json")
    with pytest.raises(InvalidRequest, match="needs an end token") as refused:
        served(desk_with(facts), parsed(raw(guided, True, ignore_eos=True)))
    assert refused.value.field.startswith("sampling_options.guided_decoding")


def test_the_order_of_a_request_covers_its_fields(facts: Facts) -> None:
    data = raw()
    data["sampling_options"] = {"temperature": 1.5, "min_p": 0.25, "top_k": 40}
    top_a = [{"name": "top_a", "args": {"a": 0.1}}]
    text = json.dumps({"version": 1, "processors": top_a, "order": ["min_p", "top_a", "temperature"]})
    data["annotations"] = [f"logits_processors:{text}"]
    params, chain = served(desk_with(facts), parsed(data))
    assert names(chain) == ["min_p", "top_a", "temperature", "top_k"]
    assert (params.temperature, params.min_p, params.top_k) == (1.0, None, None)
    data["annotations"] = ['logits_processors:{"version": 1, "order": ["top_k", "temperature"]}']
    _, chain = served(desk_with(facts), parsed(data))
    assert names(chain) == ["top_k", "temperature", "min_p"]
    del data["sampling_options"]  # greedy, as without an order
    params, chain = served(desk_with(facts), parsed(data))
    assert names(chain) == ["temperature"]
    assert params.is_greedy
