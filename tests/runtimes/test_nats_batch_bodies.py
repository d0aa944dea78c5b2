"""Bodies of batch requests: whatever they hold, they are read or refused with a field."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from adapters.vocabulary import Vocabulary
from worker.engines import TokenLogprob
from worker.errors import InvalidRequest
from worker.requests.prompt_scores import end_json
from worker.runtimes.direct.openai_fields import places
from worker.runtimes.direct.request import parse
from worker.runtimes.nats.batch.answerer import BatchAnswerer
from worker.runtimes.nats.batch.layout import URLS, QueuedRequest
from worker.runtimes.nats.batch.openai import CHAT, COMPLETIONS, message_of, response_body, told
from worker.runtimes.nats.batch.running import RunningRequest
from worker.sampling import SamplingParams

DIGEST = "0123456789abcdef"

_SCALARS = st.none() | st.booleans() | st.integers(-2, 300) | st.sampled_from(["", "5", "text", "none"])
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["5", "processors", "type", "order", "schema"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_FIELDS = (
    *("messages", "prompt", "stop", "stream", "logprobs", "top_logprobs", "response_format", "max_tokens", "seed"),
    *("max_completion_tokens", "tools", "tool_choice", "n", "temperature"),
)
_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": _VALUES | st.dictionaries(st.sampled_from(["5", "7", "x"]), st.integers(-101, 101), min_size=1),
        "logits_processors": _VALUES,
        **dict.fromkeys(_FIELDS, _VALUES),
    },
)


@settings(max_examples=examples(2000), deadline=None)
@given(st.sampled_from(URLS), _BODIES)
def test_any_body_is_read_or_refused_with_a_field(url: str, body: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):  # which names a field
        parse(message_of(url, body, DIGEST), None)


@pytest.mark.parametrize("chosen", ["x", 5, True, {"processors": 5}, {"processors": {"name": "ban"}}])
def test_processors_of_another_form_beside_a_bias(chosen: Any) -> None:
    """They are left to the reader of processors, which refuses them."""
    message = message_of(URLS[1], {"prompt": [9], "logit_bias": {"5": 1}, "logits_processors": chosen}, DIGEST)
    assert message["logits_processors"] == chosen


@pytest.mark.parametrize("chosen", ["", 0, False, "x"])
def test_processors_that_are_no_list_are_refused(chosen: Any) -> None:
    with pytest.raises(InvalidRequest, match="logits_processors: must be a list"):
        parse(message_of(URLS[1], {"prompt": [9], "logits_processors": chosen}, DIGEST), None)


@pytest.mark.parametrize(("name", "value"), [("logprobs", 1), ("logprobs", 0), ("stream", 0), ("logit_bias", [])])
def test_values_that_python_takes_for_others_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        message_of(URLS[0], {"messages": [], name: value}, DIGEST)
    assert caught.value.field == f"body.{name}"


@pytest.mark.parametrize("choice", ["required", "x", True, {"type": "function", "function": {"name": "f"}}])
def test_a_call_cannot_be_forced(choice: Any) -> None:
    """It was left out of account where there were no tools."""
    with pytest.raises(InvalidRequest, match="must be none or auto without tools") as caught:
        message_of(CHAT, {"messages": [], "tool_choice": choice}, DIGEST)
    assert caught.value.field == "body.tool_choice"


@pytest.mark.parametrize(("url", "field"), [(CHAT, "body.messages"), (COMPLETIONS, "body.prompt")])
def test_a_missing_prompt_is_named(url: str, field: str) -> None:
    with pytest.raises(InvalidRequest, match="is missing") as caught:
        message_of(url, {"max_tokens": 1}, DIGEST)
    assert caught.value.field == field


@pytest.mark.parametrize(("name", "section"), places(SamplingParams).items())
def test_controls_are_named_as_the_client_wrote_them(name: str, section: str) -> None:
    error = told(InvalidRequest(f"{section}.{name}[1]", "must not be"), CHAT, {name: 1})
    assert (error.field, str(error)) == (f"body.{name}[1]", f"body.{name}[1]: must not be")


_BIAS = {"logit_bias": {"5": 1}}


@pytest.mark.parametrize(
    ("url", "field", "body", "expected"),
    [
        (COMPLETIONS, "token_ids[2]", {"prompt": [1]}, "body.prompt[2]"),
        (CHAT, "token_ids", {"messages": []}, "body.messages"),
        (CHAT, "messages[1].content", {"messages": []}, "body.messages[1].content"),
        (CHAT, "stop_conditions.max_tokens", {"max_completion_tokens": 0}, "body.max_completion_tokens"),
        (CHAT, "stop_conditions.max_tokens", {"max_tokens": 0, "max_completion_tokens": None}, "body.max_tokens"),
        (CHAT, "output_options.logprobs", {"logprobs": True, "top_logprobs": 999}, "body.top_logprobs"),
        (COMPLETIONS, "output_options.logprobs", {"logprobs": 999}, "body.logprobs"),
        (CHAT, "sampling_options.guided_decoding.args.schema", {"response_format": {}}, "body.response_format"),
        (CHAT, "logits_processors.processors[0].args.bias", _BIAS, "body.logit_bias"),
        (CHAT, "logits_processors.processors[1].args.bias", {"logits_processors": [1], **_BIAS}, "body.logit_bias"),
        (CHAT, "logits_processors.processors[0].name", {"logits_processors": [1]}, "body.logits_processors[0].name"),
        (
            CHAT,
            "logits_processors.processors[0].name",
            {"logits_processors": {"processors": [1]}},
            "body.logits_processors.processors[0].name",
        ),
        (CHAT, "body.stream", {"stream": 1}, "body.stream"),
        (CHAT, "request id", {"messages": []}, "request id"),
    ],
)
def test_errors_of_a_message_name_the_field_of_the_body(url: str, field: str, body: Any, expected: str) -> None:
    assert told(InvalidRequest(field, "must not be"), url, body).field == expected


def test_a_token_is_decoded_once_for_an_answer() -> None:
    """A long answer with twenty alternatives for each token took seconds."""
    decoded = Counter[int]()

    def letter(token_id: int) -> bytes:
        decoded[token_id] += 1
        return bytes([ord("a") + token_id])

    top = [{"token_id": one, "logprob": -1.0} for one in range(3)]
    chunk = {"index": 0, "text": "ab", "token_ids": [0, 1], "log_probs": [-1.0, -2.0], "top_logprobs": [top, top]}
    request = QueuedRequest("batch", 0, "one", CHAT)
    answer = response_body(request, {}, [chunk, {**chunk, "finish_reason": "stop"}], letter)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "abab"
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["a", "b", "a", "b"]
    assert [[each["token"] for each in one["top_logprobs"]] for one in choice["logprobs"]["content"]] == [
        ["a", "b", "c"]
    ] * 4
    assert decoded == {0: 1, 1: 1, 2: 1}


PARTS = (b" a", b"\xc3", b"\xa9")
LOGPROBS: dict[str, Any] = {
    "index": 0,
    "text": " a\u00e9",
    "token_ids": [0, 1, 2],
    "log_probs": [-1.0, -2.0, -float("inf")],
    "top_logprobs": [[{"token_id": one, "logprob": -1.0} for one in (0, 1, 2)]] * 3,
    "finish_reason": "length",
}


def choice_of(url: str) -> dict[str, Any]:
    """The only choice of the response to a request whose answer is `LOGPROBS`."""
    request = QueuedRequest("batch", 0, "one", url)
    (choice,) = response_body(request, {}, [LOGPROBS], PARTS.__getitem__)["choices"]
    found: dict[str, Any] = choice
    return found


def test_log_probabilities_of_a_chat_have_the_bytes_of_tokens() -> None:
    """Parts of a character had those of U+FFFD, and words of SentencePiece lacked their space."""
    content = choice_of(CHAT)["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == " a\u00e9"
    assert [one["token"] for one in content] == [" a", "\ufffd", "\ufffd"]
    assert [bytes(one["bytes"]) for one in content[0]["top_logprobs"]] == list(PARTS)
    assert content[2]["logprob"] == -9999.0  # JSON has no infinity


def test_log_probabilities_of_a_completion_are_four_lists() -> None:
    """They had the form of a chat's, which clients of OpenAI do not take for a completion."""
    assert choice_of(COMPLETIONS)["logprobs"] == {
        "tokens": [" a", "\ufffd", "\ufffd"],
        "token_logprobs": [-1.0, -2.0, -9999.0],
        "top_logprobs": [{" a": -1.0, "\ufffd": -1.0}, {"\ufffd": -1.0, " a": -1.0}, {"\ufffd": -1.0, " a": -1.0}],
        "text_offset": [0, 2, 2],
    }


@pytest.mark.parametrize(("body", "offsets"), [({}, [0, 1, 1]), ({"skip_special_tokens": False}, [0, 1, 4])])
def test_a_token_that_is_not_shown_takes_no_place(body: dict[str, Any], offsets: list[int]) -> None:
    parts = [b"a", b"<s>", b"b"]
    chunk = {**LOGPROBS, "text": "ab" if not body else "a<s>b", "top_logprobs": [[]] * 3}
    request = QueuedRequest("batch", 0, "one", COMPLETIONS)
    answer = response_body(request, body, [chunk], parts.__getitem__, {1})
    lists = answer["choices"][0]["logprobs"]
    assert (lists["tokens"], lists["text_offset"]) == (["a", "<s>", "b"], offsets)


class Answering:
    """A server of one answer, whose end token is no special one of the tokenizer's."""

    def __init__(self) -> None:
        backend = Tokenizer(WordLevel({"a": 0, "END": 1, "b": 2}, unk_token="a"))
        tokenizer = cast(Any, PreTrainedTokenizerFast)(tokenizer_object=backend)
        vocabulary = Vocabulary(3, tokenizer, eos_token_ids=(1,))
        reports = SimpleNamespace(reading=lambda request_id: contextlib.nullcontext())
        self.server = SimpleNamespace(chains=SimpleNamespace(vocabulary=vocabulary), reports=reports)

    async def parsed(self, message: Any) -> None:
        return None

    async def chunks(self, request_id: str, request: Any) -> AsyncIterator[dict[str, Any]]:
        yield {**LOGPROBS, "token_ids": [0, 1, 2], "text": "a END b", "top_logprobs": [[]] * 3}


async def test_an_end_token_that_is_shown_has_its_place() -> None:
    """With ignore_eos; all end tokens of the model were taken for special ones, which texts leave
    out.
    """
    running = RunningRequest(cast(Any, None), QueuedRequest("batch", 0, "one", COMPLETIONS, {"prompt": "a"}))
    line = await BatchAnswerer(cast(Any, Answering()), cast(Any, Storage()), 5)._answer(running)
    lists = line["response"]["body"]["choices"][0]["logprobs"]
    lengths = [len(token) for token in lists["tokens"]]
    assert lists["text_offset"] == [0, lengths[0], lengths[0] + lengths[1]]


def test_the_token_that_ended_a_completion_is_its_last() -> None:
    """It was among the data of the response, which nobody had asked for."""
    parts = [b"a", b"b", b"</s>"]
    end = end_json([TokenLogprob(2, -1.0, 1), TokenLogprob(0, -2.0, 2)], parts.__getitem__)
    chunk = {
        "index": 0,
        "text": "a",
        "token_ids": [0],
        "log_probs": [-1.0],
        "finish_reason": "stop",
        "engine_data": end,
    }
    found = [
        response_body(QueuedRequest("batch", 0, "one", url), {}, [chunk], parts.__getitem__)
        for url in (CHAT, COMPLETIONS)
    ]
    assert not any("nvext" in answer for answer in found)
    assert found[1]["choices"][0]["logprobs"] == {
        "tokens": ["a", "</s>"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"a": -1.0}, {"</s>": -1.0, "a": -2.0}],
        "text_offset": [0, 1],
    }


def test_each_choice_has_its_receipt() -> None:
    """The first one alone had."""
    said: list[dict[str, Any]] = [
        {"index": index, "text": "", "token_ids": [], "engine_data": {"logits_processors": {"choice": index}}}
        for index in (1, 0)
    ]
    request = QueuedRequest("batch", 0, "one", CHAT)
    assert response_body(request, {}, said[1:], None)["nvext"] == {"engine_data": {"logits_processors": {"choice": 0}}}
    assert response_body(request, {}, said, None)["nvext"] == {
        "choices": [{"engine_data": {"logits_processors": {"choice": index}}} for index in (0, 1)]
    }


def test_arguments_of_earlier_calls_are_objects_for_the_template() -> None:
    """As through the front door: a template that writes them as JSON wrote a text in quotes."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": given}} for given in ('{"a": 1}', "{")]
    body = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    shown: list[Any] = []

    def rendered(messages: Any, **_: Any) -> str:
        shown.extend(messages)
        return ""

    tokenizer = SimpleNamespace(apply_chat_template=rendered, encode=lambda *_, **__: [5])
    parse(message_of(CHAT, body, DIGEST), tokenizer)
    (message,) = shown
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == [{"a": 1}, "{"]


class Storage:
    """Records of a batch whose large bodies the server does not send in time."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    async def has_result(self, request: QueuedRequest) -> bool:
        return False

    async def body(self, digest: str) -> Any:
        await asyncio.sleep(0.01)
        raise TimeoutError

    async def write_result(self, request: QueuedRequest, line: Any) -> None:
        self.results.append(line)

    async def end(self, message: Any) -> None:
        pass


class Delivered:
    """A message that was delivered for the first time."""

    metadata = SimpleNamespace(num_delivered=1)

    def __init__(self) -> None:
        self.delays: list[float] = []

    async def nak(self, delay: float) -> None:
        self.delays.append(delay)


@pytest.mark.parametrize("left_s", [None, 3600.0, -1.0])
async def test_a_body_that_is_late_ends_no_request(left_s: float | None) -> None:
    """It was a result ``batch_expired`` of a request whose deadline had not passed."""
    storage, message = Storage(), Delivered()
    deadline_s = None if left_s is None else time.time() + left_s
    request = QueuedRequest("batch", 0, "one", CHAT, body_digest="0" * 32, deadline_s=deadline_s)
    running = RunningRequest(cast(Any, message), request)
    await BatchAnswerer(cast(Any, None), cast(Any, storage), 5).run(running)
    is_over = left_s is not None and left_s < 0
    assert [line["error"]["code"] for line in storage.results] == ["batch_expired"] * is_over
    assert len(message.delays) == (not is_over)
