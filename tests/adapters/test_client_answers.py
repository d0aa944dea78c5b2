"""Answers of the client packages: events in any pieces, typed receipts, and input of a replay."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import quickjs
from dynamo_logits_client import (
    AnswerFailed,
    Chunk,
    Receipt,
    StreamReader,
    digest,
    events,
    last_receipts,
    parse_receipt,
    receipt_of,
    receipts,
    receipts_of,
    replay_request,
)
from dynamo_logits_client.events import Event, EventReader
from dynamo_logits_client.receipts import AdapterRecord, WeightsRecord
from hypothesis import given
from hypothesis import strategies as st

from adapters import chain
from adapters.catalog import Selection
from adapters.chain.receipts import ProcessorRecord
from worker.engines import EngineRequest, TokenDelta
from worker.engines.images import ImageInput
from worker.engines.weights import WeightVersion
from worker.requests.receipts import RequestReceipt, ServerRecord, TokenDigest
from worker.sampling import SamplingParams

MODULE = Path(__file__).parents[2] / "clients" / "javascript" / "dynamo-logits-client.js"

RECEIPT: dict[str, Any] = {
    "version": 1,
    "engine": {"name": "embedded", "version": "2.13.0", "computed_by": "cpu", "options": {"dtype": "auto"}},
    "model": {"name": "m", "digest": None},
    "mode": "aggregated",
    "numerics": "exact",
    "seed": 2**64 - 1,
    "prompt_length": 3,
    "replayed_tokens": 0,
    "processors": [
        {
            "name": "choice",
            "version": 2,
            "steps_active": 2,
            "tokens_forced": 0,
            "tokens_masked": 9,
            "first_position": 3,
            "last_position": None,
        }
    ],
    "tokens": [{"position": 3, "token_id": 7, "processor": "choice", "did": "masked"}],
    "processed_logprobs": [{"position": 3, "logprob": -1}],
    "sampling": {"temperature": {"value": 1, "from": "model"}},
    "preemptions": None,
    "prompt_digest": digest([1, 2, 3]),
    "generated_tokens": 2,
    "answer_digest": digest([7, 8]),
    "request": '{"sampling":{"max_tokens":16},"processors":[],"choice":0,"smoke_test":false}',
}


def answer(*receipts: Any) -> dict[str, Any]:
    """A whole answer whose choices have these receipts, as the front door puts them together."""
    each = [{"engine_data": {"logits_processors": receipt}} for receipt in receipts]
    nvext = each[0] if len(each) == 1 else {"choices": each}
    return {"choices": [{"index": index, "text": str(index)} for index in range(len(each))], "nvext": nvext}


@pytest.fixture(scope="module")
def module() -> quickjs.Context:
    context = quickjs.Context()
    context.eval(re.sub(r"^export ", "", MODULE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    return context


BODY = (
    'event: token_ids\n: "[1,2,3]"\n\n'
    ": keep-alive\n\n"
    'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
    'data: {"choices":[{"index":1,"delta":{"content":"\u00e9"}}]}\r\r'
    'data: {"choices":[{"index":0,"delta":{"content":"\N{GRINNING FACE}"}}],\ndata: "object":"chunk"}\n\n'
    'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n'
    "data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(BODY.encode()))))
def test_a_stream_in_any_pieces(cuts: list[int]) -> None:
    data, reader = BODY.encode(), StreamReader()
    ends = [0, *sorted(cuts), len(data)]
    for start, end in pairwise(ends):
        reader.feed(data[start:end])
    reader.end()
    assert reader.texts == {0: "\N{GRINNING FACE}", 1: "\u00e9"}
    assert reader.prompt_token_ids == [1, 2, 3]
    assert reader.usage == {"prompt_tokens": 3}


@given(st.lists(st.integers(0, len(BODY))))
def test_a_stream_in_any_pieces_in_javascript(module: quickjs.Context, cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(BODY)]
    pieces = [BODY[start:end] for start, end in pairwise(ends)]
    code = """(() => {
        const reader = new StreamReader();
        for (const piece of PIECES) reader.feed(piece);
        reader.end();
        const { texts, promptTokenIds, usage } = reader;
        return JSON.stringify({ texts, promptTokenIds, usage });
    })()"""
    found = json.loads(module.eval(code.replace("PIECES", json.dumps(pieces))))
    assert found["texts"] == {"0": "\N{GRINNING FACE}", "1": "\u00e9"}
    assert (found["promptTokenIds"], found["usage"]) == ([1, 2, 3], {"prompt_tokens": 3})


LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
TEXT = 'event: token_ids\n: [1]\n\ndata: {"choices":[{"index":0,"text":"a"}]}\n\ndata: [DONE]\n\n'


@given(LINE_ENDS, st.sampled_from(["", "\ufeff"]), st.lists(st.integers(0, 120)))
def test_line_ends_of_every_kind_and_a_byte_order_mark(line_end: str, mark: str, cuts: list[int]) -> None:
    """The last line may end with a carriage return; the first event was lost behind a mark."""
    data, reader = (mark + TEXT.replace("\n", line_end)).encode(), StreamReader()
    for start, end in pairwise([0, *sorted(cuts), len(data)]):
        reader.feed(data[start:end])
    reader.end()
    assert (reader.texts, reader.prompt_token_ids) == ({0: "a"}, [1])


@given(LINE_ENDS, st.lists(st.integers(0, 120)))
def test_line_ends_of_every_kind_in_javascript(module: quickjs.Context, line_end: str, cuts: list[int]) -> None:
    text = TEXT.replace("\n", line_end)
    pieces = json.dumps([text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])])
    code = f"(() => {{ const reader = new StreamReader(); for (const each of {pieces}) reader.feed(each);"
    code += " reader.end(); return JSON.stringify([reader.texts, reader.promptTokenIds]); })()"
    assert json.loads(module.eval(code)) == [{"0": "a"}, [1]]


def test_a_long_line_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    class Spy:
        def split(self, text: bytes) -> list[bytes]:
            looked_at.append(len(text))
            return text.split(b"\n")

    monkeypatch.setattr(events, "_LINE_END", Spy())
    reader = EventReader()
    assert [reader.feed(b"data: a"), *(reader.feed(b"b" * 100) for _ in range(100))] == [[]] * 101
    assert reader.feed(b"\n\n") == [Event("", "a" + "b" * 10_000, "")]
    assert sum(looked_at) < 10_100


def test_a_long_line_is_looked_at_once_in_javascript(module: quickjs.Context) -> None:
    code = """(() => {
        const [reader, split] = [new EventReader(), String.prototype.split];
        let lookedAt = 0;
        String.prototype.split = function (...args) { lookedAt += this.length; return split.apply(this, args); };
        reader.feed("data: a");
        for (let place = 0; place < 100; place++) reader.feed("b".repeat(100));
        const [found] = reader.feed("\\n\\n");
        String.prototype.split = split;
        return JSON.stringify([found.data.length, lookedAt < 10100]);
    })()"""
    assert json.loads(module.eval(code)) == [10_001, True]


def test_fields_of_an_event() -> None:
    found = EventReader().feed(b"id: 4\nevent:a\ndata:  b\ndata\n:c\n: d\n\n\n\n: only a comment\n\nretry: 1\n\n")
    assert found == [Event("a", " b\n", "c\nd")]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ('data: {"error":{"message":"too late","param":"deadline"}}\n\n', "too late", "deadline"),
        ('data: {"error":"no"}\n\n', "no", None),
        ('event: error\n: "gone"\n\n', '"gone"', None),
        ('data: {"choices":[]}\n\n', "the stream ended before the answer did", None),
        ('data: {"choices":[],"error":null}\n\n', "the stream ended before the answer did", None),
        ('data: {"error":{"code":7}}\n\n', '{"error":{"code":7}}', None),
        ('data: {"id":"x"}\n\n', 'expected a chunk with choices, got {"id":"x"}', None),
        ("data: 5\n\n", "expected a chunk with choices, got 5", None),
        ("data: null\n\n", "expected a chunk with choices, got null", None),
        ('data: {"choi\n\n', 'expected JSON, got {"choi', None),
        ("event: token_ids\n: [1\n\n", "expected JSON, got [1", None),
    ],
)
def test_a_stream_that_fails(module: quickjs.Context, body: str, message: str, param: str | None) -> None:
    def read() -> None:
        reader = StreamReader()
        reader.feed(body.encode())
        reader.end()

    with pytest.raises(AnswerFailed) as failed:
        read()
    assert (failed.value.message, failed.value.param) == (message, param)
    code = f"(() => {{ const reader = new StreamReader(); try {{ reader.feed({json.dumps(body)}); reader.end(); }}"
    code += " catch (error) { return JSON.stringify([error.name, error.message, error.param]); } })()"
    assert json.loads(module.eval(code)) == ["AnswerFailed", message, param]


LATE = 'data: {"choices":[{"index":0,"text":"a"}]}\n\ndata: {"error":{"message":"too late"}}\n\n'


def test_chunks_before_an_error_in_the_same_piece(module: quickjs.Context) -> None:
    reader, texts = StreamReader(), list[str]()
    with pytest.raises(AnswerFailed, match="too late"):
        texts.extend(chunk.text for chunk in reader.chunks(LATE.encode()))
    assert texts == ["a"]
    code = f"(() => {{ const texts = []; try {{ for (const one of new StreamReader().chunks({json.dumps(LATE)}))"
    code += " texts.push(one.text); } catch (error) { texts.push(error.message); } return JSON.stringify(texts); })()"
    assert json.loads(module.eval(code)) == ["a", "too late"]


def test_the_types_of_a_record_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each chunk of a stream, and each token of a receipt of "debug"."""
    read: list[object] = []

    def spy(kind: Any) -> dict[str, Any]:
        read.append(kind)
        return get_type_hints(kind)

    monkeypatch.setattr(receipts, "get_type_hints", spy)
    receipts._hints.cache_clear()
    for _ in range(3):
        parse_receipt({**RECEIPT, "tokens": RECEIPT["tokens"] * 3})
    assert len(read) == len(set(read))


def test_a_receipt_is_typed() -> None:
    receipt = receipt_of(answer(RECEIPT))
    assert isinstance(receipt, Receipt)
    assert receipt.seed == 2**64 - 1
    assert receipt.engine.options == {"dtype": "auto"}
    assert receipt.model.digest is None
    assert receipt.processor("choice").tokens_masked == 9
    assert receipt.processor("choice").rollbacks is None
    assert receipt.tokens[0].did == "masked"
    assert receipt.processed_logprobs[0].logprob == -1
    assert receipt.controls == json.loads(RECEIPT["request"])
    assert (receipt.sampling["temperature"].value, receipt.sampling["temperature"].source) == (1, "model")
    assert receipt.raw == RECEIPT
    with pytest.raises(KeyError):
        receipt.processor("top_k")


def test_a_newer_workers_receipt_has_more_fields() -> None:
    newer = {**RECEIPT, "more": 1, "model": {**RECEIPT["model"], "more": {}}}
    receipt = parse_receipt(newer)
    assert receipt == parse_receipt(RECEIPT)
    assert receipt.raw == newer


def whole_receipt() -> dict[str, Any]:
    """A receipt with every field that a worker writes."""
    server = ServerRecord("embedded", "2.13.0", "cpu", {"dtype": "auto"}, "m", "d", {}, "")
    asked = EngineRequest(
        "1",
        [1, 2],
        SamplingParams(),
        lora_name="a",
        images=[ImageInput("messages[0]", "data:image/png;base64,")],
        lora_digest="e",
        draft_model="f",
    )
    work = ProcessorRecord(name="phrase_ban", version=3, steps_active=2, rollbacks=1)
    counted = chain.Receipt([work], attribution=True, tokens=[(2, 7, "phrase_ban", "masked")], logprobs=[(2, -1.0)])
    receipt = RequestReceipt(server, asked, Selection())
    receipt.take(TokenDelta([7], finish_reason="length", weights=[(0, WeightVersion(1, "6", "g"))]))
    return receipt.as_json(counted.as_json(), ends=True)


def test_every_field_of_a_receipt_is_typed() -> None:
    """In both packages: that of TypeScript has its keys."""
    written = whole_receipt()
    receipt = parse_receipt(written)
    assert written.keys() <= {each.name for each in fields(receipt)}
    assert receipt.model.adapter == AdapterRecord("a", "e")
    assert (receipt.model.draft_model, receipt.images) == ("f", 1)
    assert receipt.weights == (WeightsRecord("6", 0, "g"),)
    types = MODULE.with_suffix(".d.ts").read_text(encoding="utf-8")
    (declared,) = re.findall(r"^export interface Receipt \{\n(.*?)^\}", types, re.DOTALL | re.MULTILINE)
    (work,) = re.findall(r"^export interface ProcessorWork \{\n(.*?)^\}", types, re.DOTALL | re.MULTILINE)
    open_keys = {*written["engine"]["options"], *written["sampling"]}  # of records of any keys
    assert keys_of(written) - open_keys <= set(re.findall(r"(\w+)\??:", declared + work))


def keys_of(data: Any) -> set[str]:
    """The keys of all objects in JSON data."""
    if isinstance(data, list):
        return set().union(*map(keys_of, data))
    return set(data).union(*map(keys_of, data.values())) if isinstance(data, dict) else set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "7"}, r"logits_processors\.seed: expected int, got '7'"),
        ({"seed": True}, r"logits_processors\.seed: expected int, got True"),
        ({"model": 7}, r"logits_processors\.model: expected an object, got 7"),
        ({"tokens": {}}, r"logits_processors\.tokens: expected a list"),
        ({"tokens": [{"position": 1}]}, r"logits_processors\.tokens\[0\].*missing 3 required"),
        ({"sampling": {"top_p": 1}}, r"logits_processors\.sampling\.top_p: expected an object, got 1"),
        ({"engine": {**RECEIPT["engine"], "options": 1}}, r"logits_processors\.engine\.options: expected an object"),
    ],
)
def test_a_malformed_receipt_names_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        receipt_of(answer({**RECEIPT, **change}))


def test_receipts_of_several_choices(module: quickjs.Context) -> None:
    whole = answer(RECEIPT, None, {**RECEIPT, "generated_tokens": 5})
    assert [each and each.generated_tokens for each in receipts_of(whole)] == [2, None, 5]
    theirs = module.eval(f"JSON.stringify(receiptsOf({json.dumps(whole)}).map((each) => each?.generated_tokens))")
    assert json.loads(theirs) == [2, None, 5]
    for none in ({}, {"nvext": None}, {"nvext": {"worker_id": 3}}, answer(None, None)):
        assert receipts_of(none) == ()
        assert receipt_of(none) is None
        assert module.eval(f"receiptsOf({json.dumps(none)}).length") == 0


def test_receipts_of_the_openai_packages_objects() -> None:
    chunks: list[Any] = [
        SimpleNamespace(choices=[SimpleNamespace(index=1)], nvext=answer({**RECEIPT, "generated_tokens": 1})["nvext"]),
        SimpleNamespace(choices=[SimpleNamespace(index=1)], nvext=answer(RECEIPT)["nvext"]),
        SimpleNamespace(choices=[]),
    ]
    assert {index: each.generated_tokens for index, each in last_receipts(chunks).items()} == {1: 2}


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_the_digest_is_the_workers(token_ids: list[int]) -> None:
    assert digest(token_ids) == str(TokenDigest(token_ids))


@pytest.mark.parametrize(
    ("prompt", "written"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ("Once", {"prompt": "Once"}),
        ({"messages": [], "tools": None, "model": "m", "temperature": 1}, {"messages": []}),
        ({"prompt": [1, 2, 3], "max_tokens": 4}, {"prompt": [1, 2, 3]}),
        *[
            ({"messages": [], name: value, "seed": 1}, {"messages": [], name: value})
            for name, value in {
                "tools": [],
                "chat_template_args": {"a": 1},
                "chat_template_kwargs": {"enable_thinking": False},
                "thinking": {"type": "disabled"},
                "reasoning_effort": "low",
                "add_generation_prompt": False,
                "continue_final_message": True,
            }.items()
        ],
    ],
)
def test_the_files_of_a_replay(module: quickjs.Context, tmp_path: Path, prompt: Any, written: Any) -> None:
    arguments = replay_request(answer(RECEIPT), prompt).save(tmp_path / "new")
    assert arguments[0] == "replay"
    assert json.loads(Path(arguments[1]).read_text()) == RECEIPT
    assert arguments[2] == "--prompt-file"
    assert json.loads(Path(arguments[3]).read_text()) == written
    exact = json.dumps(answer({**RECEIPT, "seed": 7}))
    assert json.loads(module.eval(f"JSON.stringify(replayRequest({exact}, {json.dumps(prompt)}).prompt)")) == written


@pytest.mark.parametrize(
    ("receipts", "prompt", "message"),
    [
        ((None,), [1], "the answer has no receipt"),
        (({**RECEIPT, "request": None},), [1], "it comes with the chunk that has the finish reason"),
        ((RECEIPT,), [1, 2], "it had 3 tokens of digest"),
        ((RECEIPT,), {"input": "Hi", "tools": []}, "neither messages nor a prompt"),
    ],
)
def test_what_cannot_be_replayed(receipts: Any, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay_request(answer(*receipts), prompt)


def test_javascript_replays_no_body_without_a_prompt(module: quickjs.Context) -> None:
    exact = json.dumps(answer({**RECEIPT, "seed": 7}))
    with pytest.raises(quickjs.JSException, match="neither messages nor a prompt"):
        module.eval(f'replayRequest({exact}, {{input: "Hi", messages: null}})')


def test_javascript_replays_no_rounded_seed(module: quickjs.Context) -> None:
    with pytest.raises(quickjs.JSException, match="the receipt's seed was rounded"):
        module.eval(f"replayRequest({json.dumps(answer(RECEIPT))}, [1])")
    with pytest.raises(quickjs.JSException, match=r"choices\[0\].seed: expected number, got"):
        module.eval(f"receiptOf({json.dumps(answer({**RECEIPT, 'seed': '7'}))})")


def test_receipts_of_a_streams_chunks_are_by_choice() -> None:
    """As chunks of the package, and as their data."""
    digests = [digest([number]) for number in range(3)]
    chunks = [
        {
            "choices": [{"index": number % 3, "text": "a"}],
            "nvext": {"engine_data": {"logits_processors": {**RECEIPT, "answer_digest": digests[number % 3]}}},
        }
        for number in range(6)
    ]
    for given_ in (chunks, [Chunk(each) for each in chunks]):
        found = {choice: each.answer_digest for choice, each in last_receipts(given_).items()}
        assert found == dict(enumerate(digests))


@pytest.mark.parametrize("data", [None, "x", [1]])
def test_no_receipt_is_a_value_error(data: Any) -> None:
    with pytest.raises(ValueError, match="logits_processors: expected an object"):
        parse_receipt(data)
