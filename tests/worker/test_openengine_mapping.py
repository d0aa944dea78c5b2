"""What a GenerateRequest becomes: every field is honoured, or refused by its name."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from effort import examples
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.arguments import parse_arguments
from worker.errors import ConfigurationError, InvalidRequest
from worker.frontdoor.options import parse_options
from worker.frontdoor.process import serve
from worker.installation import check_runtime
from worker.requests.continuation import COMPUTED_WITH
from worker.requests.fields import FIELDS as REQUEST_FIELDS
from worker.requests.request import RequestLimits, parse_request
from worker.requests.rollout import ROLLOUT
from worker.runtimes.direct.request import OWN_FIELDS, parse
from worker.runtimes.openengine import inference, wire
from worker.runtimes.openengine import request as request_module
from worker.runtimes.openengine.answer import MOST_TOKENS, Answer
from worker.runtimes.openengine.asking import own_name, written
from worker.runtimes.openengine.errors import LostEvents, UnknownModel, Unsupported
from worker.runtimes.openengine.kv_events import KvEvents
from worker.runtimes.openengine.request import FIELDS, Asked, CallHints, read, read_hints, renamed
from worker.sampling import SamplingParams

REPOSITORY = Path(__file__).parents[2]
T = TypeVar("T")

LIMITS = RequestLimits(context_length=2**20, vocab_size=2**32, eos_token_ids=(1,))
NAMES = ("tiny", "/models/tiny")

NO_EFFECT = {"request_id": "names the request", "model": "another one is refused"}
"""Fields that change nothing of what is served."""


def reading(request: wire.GenerateRequest) -> Asked:
    return read(request, NAMES, CallHints())


def params_of(request: wire.GenerateRequest) -> SamplingParams:
    """The controls that a request is served with."""
    return parse_request(parse(reading(request).message, None).fields, LIMITS).params


def attempt(call: Callable[[wire.GenerateRequest], T], request: wire.GenerateRequest) -> tuple[Any, str | None]:
    """The result of a call, or the field that it refuses."""
    try:
        return call(request), None
    except InvalidRequest as error:
        return None, error.field


EXAMPLES = {
    FieldDescriptor.TYPE_BOOL: True,
    FieldDescriptor.TYPE_BYTES: b"b",
    FieldDescriptor.TYPE_DOUBLE: 0.5,
    FieldDescriptor.TYPE_ENUM: 1,
    FieldDescriptor.TYPE_INT32: 3,
    FieldDescriptor.TYPE_STRING: "text",
    FieldDescriptor.TYPE_UINT32: 3,
    FieldDescriptor.TYPE_UINT64: 3,
}


def leaves(descriptor: Descriptor, above: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Every way to a field of a request that is no message, or a message without fields."""
    for field in descriptor.fields:
        path = (*above, field)
        if field.message_type is None or not field.message_type.fields or field.message_type.name == "Struct":
            yield path
        else:
            yield from leaves(field.message_type, path)


LEAVES = [path for path in leaves(wire.GenerateRequest.DESCRIPTOR) if path[0].name != "extra"]


def with_leaf(request: wire.GenerateRequest, path: tuple[FieldDescriptor, ...]) -> wire.GenerateRequest:
    """The request with an example in one field."""
    message: Any = request
    *sections, leaf = path
    for section in sections:
        inner = getattr(message, section.name)
        message = inner.add() if section.is_repeated else inner
        message.SetInParent()
    if leaf.message_type is not None:
        getattr(message, leaf.name).SetInParent()
    elif leaf.is_repeated:
        getattr(message, leaf.name).append(EXAMPLES[leaf.type])
    else:
        setattr(message, leaf.name, EXAMPLES[leaf.type])
    return request


def name_of(path: tuple[FieldDescriptor, ...]) -> str:
    return ".".join(field.name for field in path)


@pytest.mark.parametrize("path", LEAVES, ids=name_of)
def test_every_field_is_honoured_or_refused(path: tuple[FieldDescriptor, ...]) -> None:
    base = wire.GenerateRequest(token_ids={"ids": [5, 6]})
    base.response.return_prompt_logprobs = name_of(path) == "response.prompt_logprob_start"
    before = reading(base)
    request = with_leaf(wire.GenerateRequest.FromString(base.SerializeToString()), path)
    after, refused = attempt(reading, request)
    if refused is not None:
        assert refused.partition("[")[0] in name_of(path)
    else:
        assert (after == before) == (name_of(path) in NO_EFFECT)


def test_the_fields_that_are_named_exist() -> None:
    known = {row.path for row in REQUEST_FIELDS} | set(OWN_FIELDS)
    guides = {"sampling_options.guided_decoding"}
    for theirs, ours in FIELDS.items():
        assert ours in known | {"sampling_options.n"} or ours.rpartition(".")[0] in guides, ours
        descriptor: Any = wire.GenerateRequest.DESCRIPTOR
        for name in theirs.split("."):
            if descriptor.name != "Struct":
                field = descriptor.fields_by_name[name]
                descriptor = field.message_type or descriptor


INTEGERS = {
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
}
CONTROLS = {
    name: INTEGERS[field.type]
    for descriptor in (wire.SamplingParams.DESCRIPTOR, wire.StoppingOptions.DESCRIPTOR)
    for name, field in descriptor.fields_by_name.items()
    if name not in ("conditions", "num_sequences", "include_stop_in_output")
}


MEDIA: list[tuple[dict[str, Any], str]] = [
    ({"url": "https://a.example/b.png"}, "https://a.example/b.png"),
    ({"data_uri": "data:image/png;base64,AAAA", "mime_type": "image/png"}, "data:image/png;base64,AAAA"),
    ({"raw_bytes": b"\x00\x01", "mime_type": "image/webp"}, "data:image/webp;base64,AAE="),
    ({"raw_bytes": b"\x00\x01", "uuid": "a picture of that name"}, "data:image/*;base64,AAE="),
]


def test_pictures_are_those_of_docs_request() -> None:
    items = [{"modality": wire.MODALITY_IMAGE, **item} for item, _ in MEDIA]
    request = wire.GenerateRequest(token_ids={"ids": [5]}, media=items)
    message = reading(request).message
    assert message["multi_modal_data"] == {"image_url": [{"Url": url} for _, url in MEDIA]}
    again = written(message, "r")
    assert reading(again).message == message
    assert [item.WhichOneof("source") for item in again.media] == ["url", *["data_uri"] * 3]
    error = InvalidRequest("multi_modal_data.image_url[2].Url", "is no picture")
    told = renamed(error, request)
    assert told.field == "media[2]"
    assert own_name(told.field, message) == error.field


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({}, "media[0]"),
        ({"data_uri": "http://a"}, "media[0].data_uri"),
        ({"raw_bytes": b"a", "mime_type": "image"}, "media[0].mime_type"),
        ({"url": "http://a", "modality": wire.MODALITY_VIDEO}, "media[0].modality"),
        ({"url": "http://a", "modality": wire.MODALITY_UNSPECIFIED}, "media[0].modality"),
    ],
)
def test_what_is_no_picture_is_refused(item: dict[str, Any], field: str) -> None:
    request = wire.GenerateRequest(token_ids={"ids": [5]}, media=[{"modality": wire.MODALITY_IMAGE, **item}])
    assert attempt(reading, request) == (None, field)


@pytest.mark.parametrize("value", [{"video_url": []}, {"image_url": {}}, {"image_url": [{"Decoded": {}}]}, 3])
def test_other_media_have_no_field_in_the_protocol(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="multi_modal_data"):
        written({"token_ids": [5], "multi_modal_data": value}, "r")


@settings(max_examples=examples(300))
@given(st.fixed_dictionaries({}, optional=CONTROLS))
def test_controls_arrive_or_are_refused(chosen: dict[str, Any]) -> None:
    stopping = {name: chosen[name] for name in ("max_tokens", "min_tokens", "ignore_eos") if name in chosen}
    sampling = {name: value for name, value in chosen.items() if name not in stopping}
    request = wire.GenerateRequest(token_ids={"ids": [5]}, sampling=sampling, stopping=stopping)
    params, refused = attempt(params_of, wire.GenerateRequest.FromString(request.SerializeToString()))
    if refused is not None:
        assert refused.rpartition(".")[2] in chosen
        return
    room = LIMITS.context_length - 1
    most = min(chosen.get("max_tokens", room), room)
    expected = {**chosen, "max_tokens": most}
    if "min_tokens" in chosen:
        expected["min_tokens"] = min(chosen["min_tokens"], most)
    if "top_k" in chosen:
        expected["top_k"] = max(chosen["top_k"], 0)
    assert {name: getattr(params, name) for name in expected} == expected


@settings(max_examples=examples(300))
@given(st.floats() | st.integers(-(2**70), 2**70).map(float))
def test_numbers_of_a_struct_keep_their_value_or_are_refused(number: float) -> None:
    request = wire.GenerateRequest(prompt="a")
    request.extra.update({"logits_processors": [{"name": "x", "args": {"deep": [number]}}]})
    asked, refused = attempt(reading, request)
    if refused is not None:
        assert refused == "extra.logits_processors[0].args.deep[0]"
        assert not math.isfinite(number) or (number.is_integer() and abs(number) >= 2**53)
        return
    found = asked.message["logits_processors"][0]["args"]["deep"][0]
    assert found == number
    assert isinstance(found, int) == number.is_integer()


def test_a_selection_may_be_json_text() -> None:
    request = wire.GenerateRequest(prompt="a")
    request.extra.update({"logits_processors": '[{"name": "watermark", "args": {"key": 18446744073709551615}}]'})
    assert reading(request).message["logits_processors"][0]["args"] == {"key": 2**64 - 1}
    for text in ("{", '{"a": 1, "a": 2}', "[" * 100_000, "NaN"):
        request.extra.update({"logits_processors": text})
        with pytest.raises(InvalidRequest, match=r"extra\.logits_processors: must be JSON"):
            reading(request)


def test_fields_of_another_schema_are_refused() -> None:
    plain = wire.GenerateRequest(prompt="a").SerializeToString()
    unknown = b"\xb8\x3e\x01"  # field 999 is 1
    for added, where in (
        (unknown, "request"),
        (b"\x2a\x03" + unknown, "sampling"),
        (b"\x42\x05\x0a\x03" + unknown, "kv.session"),
        (b"\x32\x05\x1a\x03" + unknown, "stopping.conditions"),
        (b"\x42\x03\x22\x01s", "kv"),  # an earlier schema had the cache salt there
    ):
        with pytest.raises(Unsupported, match=f"^{where}: field number (999|4) is not in the schema"):
            reading(wire.GenerateRequest.FromString(plain + added))


def test_more_conditions_than_can_be_kept_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 million of them are 64 MiB, and took minutes in the event loop."""
    monkeypatch.setattr(request_module, "_refuse_unknown", lambda *_: pytest.fail("each of them was looked at"))
    many = wire.GenerateRequest(prompt="a")
    many.stopping.conditions.extend([wire.StopCondition(stop_token_id=5)] * 1089)
    assert attempt(reading, many)[1] == "stopping.conditions"


@pytest.mark.parametrize("count", [1, 40_000])
async def test_a_large_request_is_read_beside_the_event_loop(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(*_: Any) -> Asked:
        threads.append(threading.current_thread())
        raise InvalidRequest("input", "is read")

    monkeypatch.setattr(inference, "read", noted)
    arguments = SimpleNamespace(served_model_name="tiny", model_path="/models/tiny")
    reports = SimpleNamespace(reading=lambda request_id: contextlib.nullcontext())
    server: Any = SimpleNamespace(arguments=arguments, info=SimpleNamespace(honours_priority=False), reports=reports)
    served, context = inference.Inference(server), SimpleNamespace(invocation_metadata=tuple)
    served.direct = server
    asked = wire.GenerateRequest(token_ids=wire.TokenIds(ids=[5] * count))
    with pytest.raises(InvalidRequest, match="is read"):
        await served.generate(asked, context)
    assert [thread is threading.current_thread() for thread in threads] == [count == 1]


def test_other_models_are_refused() -> None:
    for model in ("", *NAMES):
        assert reading(wire.GenerateRequest(prompt="a", model=model))
    with pytest.raises(UnknownModel):
        reading(wire.GenerateRequest(prompt="a", model="Tiny"))
    for request_id in ("a" * 257, "a\n"):
        with pytest.raises(InvalidRequest, match="request_id: must be at most"):
            reading(wire.GenerateRequest(prompt="a", request_id=request_id))


def test_priority_and_trace_come_from_metadata() -> None:
    metadata = [("openengine-priority", "-7"), ("traceparent", "00-a"), ("tracestate", "b=c"), ("user-agent", "x")]
    hints = read_hints(metadata, honours_priority=True)
    assert hints == CallHints(-7, {"traceparent": "00-a", "tracestate": "b=c"})
    asked = read(wire.GenerateRequest(prompt="a"), NAMES, hints)
    assert asked.message["routing"] == {"priority": -7}


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.distribution

    def without_grpc(name: str) -> importlib.metadata.Distribution:
        if name == "grpcio":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    arguments = parse_arguments(["--runtime", "openengine", "--model-path", "/models/tiny"], {})
    check_runtime(arguments, {})
    monkeypatch.setattr(importlib.metadata, "distribution", without_grpc)
    with pytest.raises(ConfigurationError, match="openengine: grpcio is not installed; it is in the extra openengine"):
        check_runtime(arguments, {})
    with pytest.raises(ConfigurationError, match="--upstream grpc://: grpcio is not installed; it is in the extra"):
        asyncio.run(serve(parse_options(["--upstream", "grpc://127.0.0.1:1", "--model-path", "/models/tiny"], {})))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as before, for the other tests


def test_no_runtime_is_in_its_process() -> None:
    names = "[name for name in sys.modules if name.partition('.')[0] in ('dynamo', 'nats')]"
    program = f"import sys, worker.__main__, worker.runtimes.openengine.runtime; print({names})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert run.stdout == "[]\n"


def test_the_schema_files_are_what_protoc_makes() -> None:
    script = REPOSITORY / "scripts" / "generate_openengine.py"
    run = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


def test_an_event_has_no_more_tokens_than_a_client_takes() -> None:
    """A chunk may have all that a slow client has not taken yet."""
    request = parse({"token_ids": [1], "text": False}, None)
    answer = Answer("a", Asked({}, None, 0), request, None, ())
    count = 2 * MOST_TOKENS + 1
    chunk = {"index": 0, "token_ids": list(range(count)), "log_probs": [-1.0] * count, "text": "t"}
    outputs = [event.token for event in answer.events(chunk)]
    assert [len(each.tokens) for each in outputs] == [MOST_TOKENS, MOST_TOKENS, 1]
    assert [token.token_id for each in outputs for token in each.tokens] == chunk["token_ids"]
    assert [each.text for each in outputs] == ["", "", "t"]
    (output,) = answer.events({**chunk, "engine_data": {ROLLOUT: "{}"}})
    assert len(output.token.tokens) == count


def test_each_event_of_tokens_says_what_computed_them() -> None:
    """Behind the first of them another worker went on with the weights of the tokens before."""
    request = parse({"token_ids": [1], "text": False}, None)
    answer = Answer("a", Asked({}, None, 0), request, None, ())
    data = {COMPUTED_WITH: {"weights": "new", "adapter": ""}}
    chunk = {"index": 0, "token_ids": [5] * (MOST_TOKENS + 1), "engine_data": data}
    assert [event.computed_with.weights for event in answer.events(chunk)] == ["new", "new"]


def test_the_usage_has_the_thinking_of_all_answers() -> None:
    request = parse({"token_ids": [1], "text": False, "sampling_options": {"n": 2}}, None)
    answer = Answer("a", Asked({}, None, 0), request, None, ())
    usage = {"prompt_tokens": 1, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 4}}
    chunk = {"token_ids": [], "finish_reason": "stop", "completion_usage": usage}
    events = [event for index in range(2) for event in answer.events({**chunk, "index": index})]
    assert events[-1].usage == wire.Usage(prompt_tokens=1, completion_tokens=18, total_tokens=19, reasoning_tokens=8)
    assert not events[0].HasField("usage")


async def test_kv_events_are_kept_for_a_while() -> None:
    events = KvEvents(block_size=2, kept=3)
    live = events.subscribe(0, snapshot=False)
    first = asyncio.create_task(anext(live))
    await asyncio.sleep(0)
    events.stored(None, [1, 2], [5, 6, 7, 8], "salt")
    stored = (await first).events[0].block_stored
    assert [int.from_bytes(one.value, "big") for one in stored.block_hashes] == [1, 2]
    assert [list(one.values) for one in stored.extra_keys] == [["salt"], ["salt"]]
    events.stored(2, [2**64 - 1], [9, 9])
    events.removed([2**64 - 1])
    assert [(await anext(live)).sequence_number for _ in range(2)] == [2, 3]
    snapshot = [await anext(events.subscribe(0, snapshot=True))]
    assert [event.WhichOneof("event") for event in snapshot[0].events] == ["all_blocks_cleared", *["block_stored"] * 2]
    assert snapshot[0].events[2].block_stored.parent_block_hash == snapshot[0].events[1].block_stored.block_hashes[0]
    assert list(snapshot[0].events[2].block_stored.token_ids) == [7, 8]
    for number in range(4):
        events.stored(None, [number], [1, 1])
    await asyncio.sleep(0)
    with pytest.raises(LostEvents, match="4 is no longer kept, the oldest is 5"):
        await anext(live)  # too slow
    for start, message in ((2, "2 is no longer kept"), (9, "9 is not there yet, the newest is 7")):
        with pytest.raises(LostEvents, match=message):
            await anext(events.subscribe(start, snapshot=False))
    assert (await anext(events.subscribe(5, snapshot=False))).sequence_number == 5
