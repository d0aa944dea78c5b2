"""Generate, asked with a real client over loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openengine_workers import GeneratedAnswer, OpenEngineClient, engine_error_of, serving

from worker.runtimes.openengine import wire

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tiny_model: Path) -> AsyncIterator[OpenEngineClient]:
    async with serving(tiny_model) as found:
        yield found


async def test_an_answer_is_streamed_and_counted(client: OpenEngineClient) -> None:
    answer = await client.answer(request_id="one", stopping={"max_tokens": 6})
    assert {event.request_id for event in answer.events} == {"one"}
    assert answer.kinds[-1] == "finished"
    assert set(answer.kinds[:-1]) == {"token"}
    assert answer.finished == [wire.GenerationFinished(output_index=0, reason=wire.FINISH_REASON_LENGTH)]
    assert all(output.HasField("output_index") for output in answer.tokens)
    assert len(answer.ids()) == 6
    assert "".join(info.token for info in answer.infos()) == answer.text()
    counts = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert answer.usage == wire.Usage(**counts, cached_prompt_tokens=0, reasoning_tokens=0)
    assert not any(event.HasField("usage") for event in answer.events[:-1])


async def test_text_and_token_ids_ask_the_same(client: OpenEngineClient) -> None:
    scored = await client.answer(response={"return_prompt_logprobs": True})
    ids = [info.token_id for info in scored.prompts[0].tokens]
    answer = await client.answer(token_ids={"ids": ids})
    assert answer.ids() == scored.ids()
    unread = await client.answer(token_ids={"ids": ids}, extra={"detokenize": False})
    assert (unread.ids(), unread.text()) == (answer.ids(), "")
    assert not any(info.token for info in unread.infos())


async def test_log_probabilities_of_prompt_and_answer(client: OpenEngineClient) -> None:
    options = {
        "return_prompt_logprobs": True,
        "prompt_candidates": {"top_n": 2},
        "return_output_logprobs": True,
        "output_candidates": {"top_n": 3},
        "prompt_logprob_start": 2,
    }
    answer = await client.answer(response=options)
    assert answer.kinds.count("prompt") == 1
    assert answer.kinds[0] == "prompt"
    first, second, third = answer.prompts[0].tokens
    for unscored in (first, second):  # the first has none, the second stands before the start
        assert not unscored.HasField("logprob")
        assert not unscored.candidates
    assert [one.rank for one in third.candidates] == [1, 2]
    assert third.logprob < third.candidates[1].logprob
    assert third.rank > 2
    for info in answer.infos():
        assert [one.rank for one in info.candidates] == [1, 2, 3]
        assert info.candidates[0].token_id == info.token_id
        assert (info.logprob, info.rank) == (info.candidates[0].logprob, 1)
    plain = await client.answer(response={"return_output_logprobs": True})
    assert [info.logprob for info in plain.infos()] == [info.logprob for info in answer.infos()]
    assert not any(info.candidates for info in plain.infos())


async def test_several_answers_to_one_prompt(client: OpenEngineClient) -> None:
    sampling = {"num_sequences": 3, "temperature": 1.0, "seed": 2**64 - 2}
    answer = await client.answer(
        sampling=sampling, response={"return_prompt_logprobs": True}, stopping={"max_tokens": 8}
    )
    assert sorted(one.output_index for one in answer.finished) == [0, 1, 2]
    assert len({tuple(answer.ids(index)) for index in range(3)}) == 3
    assert answer.kinds.count("prompt") == 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 24, 27)
    again = await client.answer(sampling=sampling, stopping={"max_tokens": 8})
    assert [again.ids(index) for index in range(3)] == [answer.ids(index) for index in range(3)]


_TAG = """{"type": "triggered_tags", "triggers": ["<a"], "at_least_one": true, "stop_after_first": true,
    "tags": [{"begin": "<a>", "content": {"type": "regex", "pattern": "bb"}, "end": "</a>"}]}"""
GUIDES: list[tuple[dict[str, Any], Any]] = [
    ({"regex": "(ab){3}"}, lambda text: text == "ababab"),
    ({"choice": {"choices": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
    ({"ebnf_grammar": 'start: "x"+ "y"'}, lambda text: set(text[:-1]) == {"x"}),
    (
        {"json_schema": '{"type": "array", "items": {"const": 7}, "minItems": 2, "maxItems": 2}'},
        lambda text: text == "[7,7]",
    ),
    ({"json_object": {}}, lambda text: text.startswith("{")),
    ({"structural_tag": _TAG}, lambda text: text == "<a>bb</a>"),
]


@pytest.mark.parametrize(
    ("guided", "holds"), GUIDES, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
async def test_guides_hold(client: OpenEngineClient, guided: dict[str, Any], holds: Any) -> None:
    answer = await client.answer(guided=guided, stopping={"max_tokens": 24})
    assert holds(answer.text()), answer.text()


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("detokenize", [False, True])
async def test_a_stop_text_ends_an_answer(client: OpenEngineClient, include: bool, detokenize: bool) -> None:
    whole = await client.answer(stopping={"max_tokens": 12})
    tokens = [info.token for info in whole.infos()]
    stop = tokens[4] + tokens[5][:1]
    at = whole.text().index(stop)
    options = {"max_tokens": 12, "conditions": [{"stop_text": stop}], "include_stop_in_output": include}
    answer = await client.answer(stopping=options, extra={"detokenize": detokenize})
    (end,) = answer.finished
    assert end.reason == wire.FINISH_REASON_STOP
    assert end.stop_match == wire.StopMatch(stop_text=stop)
    if detokenize:
        assert answer.text() == whole.text()[: at + len(stop) if include else at]
    else:  # the client makes the text: it gets the token that completes the stop text, and cuts
        text = "".join(tokens[: len(answer.ids())])
        assert text.startswith(whole.text()[: at + len(stop)])
        assert stop not in "".join(tokens[: len(answer.ids()) - 1])
    assert answer.usage.HasField("cached_prompt_tokens")


@pytest.mark.parametrize("detokenize", [False, True])
@pytest.mark.parametrize("least", [0, 9])
async def test_an_answer_goes_on_behind_any_token(client: OpenEngineClient, detokenize: bool, least: int) -> None:
    """A stop text may have begun in what the client has, and the fewest tokens are those of all."""
    told = (await client.call("Control.GetServerInfo", wire.GetServerInfoRequest())).extra
    plain = await client.answer(response={"return_prompt_logprobs": True}, stopping={"max_tokens": 12})
    prompt = [info.token_id for info in plain.prompts[0].tokens]
    tokens = [info.token for info in plain.infos()]
    stop = tokens[7][-1] + tokens[8] + tokens[9][:1]
    assert plain.text().index(stop) > len("".join(tokens[:7]))
    options = {"max_tokens": 12, "min_tokens": least, "conditions": [{"stop_text": stop}]}
    extra = {"detokenize": detokenize, "annotations": ["return_token_ids"]}
    asked: dict[str, Any] = {"stopping": options, "sampling": {"seed": 1}}
    whole = await client.answer(token_ids={"ids": prompt}, extra=extra, **asked)
    for count in range(1, len(whole.ids())):
        known = {"numerics": told["numerics"], "kv_dtype": told["kv_dtype"]}
        goes_on = {**extra, "continues": {"generated_tokens": count, **known}}
        rest = await client.answer(token_ids={"ids": prompt + whole.ids()[:count]}, extra=goes_on, **asked)
        assert rest.ids() == whole.ids()[count:]
        assert "".join(tokens[:count]) + rest.text() == whole.text() or not detokenize
        assert sampled(rest) == sampled(whole)[count:]
        assert rest.finished == whole.finished
        assert rest.usage.completion_tokens == whole.usage.completion_tokens


def sampled(answer: GeneratedAnswer) -> list[int]:
    """The ids of an answer, the stop text's too, that are told beside its tokens."""
    return [one for event in answer.events if event.engine_data for one in json.loads(event.engine_data)["token_ids"]]


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_token_ends_an_answer(client: OpenEngineClient, include: bool) -> None:
    whole = (await client.answer(stopping={"max_tokens": 12})).ids()
    stop = next(token_id for place, token_id in enumerate(whole) if place > 1 and token_id not in whole[:place])
    options = {"max_tokens": 12, "conditions": [{"stop_token_id": stop}], "include_stop_in_output": include}
    answer = await client.answer(stopping=options)
    assert answer.ids() == whole[: whole.index(stop) + include]
    assert answer.finished[0].stop_match == wire.StopMatch(stop_token_id=stop)
    later = await client.answer(stopping={**options, "min_tokens": 12})
    assert len(later.ids()) == 12


async def test_the_models_end_token_ends_an_answer(client: OpenEngineClient) -> None:
    end = await client.answer(guided={"choice": {"choices": ["a"]}})
    assert end.finished[0].stop_match.WhichOneof("match") == "eos_token_id"
    on = await client.answer(stopping={"max_tokens": 6, "ignore_eos": True})
    assert on.finished[0].reason == wire.FINISH_REASON_LENGTH


async def test_processors_and_receipts_in_extra(client: OpenEngineClient) -> None:
    plain = await client.answer()
    forced = {"processors": [{"name": "forced_prefix", "args": {"text": "Yes"}}], "receipt": True}
    answer = await client.answer(extra={"logits_processors": forced})
    assert answer.text().startswith("Yes")
    receipt = json.loads(answer.finished[0].message)["logits_processors"]
    assert [one["name"] for one in receipt["processors"]] == ["forced_prefix"]
    assert not plain.finished[0].message
    banned = {"name": "banned_tokens", "args": {"token_ids": [plain.ids()[0]]}}
    for chosen in ([banned], json.dumps([banned])):  # a Struct's numbers are doubles; token ids are integers
        answer = await client.answer(extra={"logits_processors": chosen})
        assert answer.ids()[0] != plain.ids()[0]


async def test_cache_options(client: OpenEngineClient) -> None:
    ids = {"ids": list(range(10, 90))}
    assert (await client.answer(token_ids=ids)).usage.cached_prompt_tokens == 0
    assert (await client.answer(token_ids=ids)).usage.cached_prompt_tokens >= 64
    salted = await client.answer(token_ids=ids, kv={"cache_salt": "mine"})
    assert salted.usage.cached_prompt_tokens == 0
    bypassed = await client.answer(token_ids=ids, kv={"cache_salt": "mine", "bypass_prefix_cache": True})
    assert bypassed.usage.cached_prompt_tokens == 0
    assert (await client.answer(token_ids=ids, kv={"cache_salt": "mine"})).usage.cached_prompt_tokens >= 64


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"sampling": {"top_p": 7.0}}, "INVALID_ARGUMENT", "sampling.top_p: must be at least 0"),
    ({"sampling": {"temperature": float("nan")}}, "INVALID_ARGUMENT", "sampling.temperature: must be"),
    ({"sampling": {"num_sequences": 0}}, "INVALID_ARGUMENT", "sampling.num_sequences: must be an integer from 1"),
    ({"stopping": {"max_tokens": 0}}, "INVALID_ARGUMENT", "stopping.max_tokens: must be"),
    (
        {"stopping": {"conditions": [{"stop_text": "a"}, {"stop_token_id": 10**6}]}},
        "INVALID_ARGUMENT",
        "stopping.conditions.stop_token_id: token id",
    ),
    ({"stopping": {"conditions": [{}]}}, "INVALID_ARGUMENT", "stopping.conditions[0]: must have"),
    ({"response": {"output_candidates": {"top_n": 101}}}, "INVALID_ARGUMENT", "response.output_candidates: must be"),
    ({"response": {"output_candidates": {"all": {}}}}, "UNSUPPORTED_FEATURE", "response.output_candidates.all: "),
    ({"response": {"prompt_logprob_start": 1}}, "INVALID_ARGUMENT", "response.prompt_logprob_start: needs"),
    ({"token_ids": {"ids": []}}, "INVALID_ARGUMENT", "token_ids.ids: the prompt is empty"),
    ({"token_ids": {"ids": [10**6]}}, "INVALID_ARGUMENT", "token_ids.ids: token id 1000000"),
    ({"token_ids": {"ids": [5] * 4000}}, "INVALID_ARGUMENT", "token_ids.ids: prompt is too long: 4000 tokens"),
    ({"guided": {"regex": "("}}, "INVALID_ARGUMENT", "guided.regex: "),
    ({"guided": {"json_schema": "{"}}, "INVALID_ARGUMENT", "guided.json_schema: must be a JSON Schema"),
    ({"guided": {"json_schema": '{"type": "x"}'}}, "INVALID_ARGUMENT", "guided.json_schema: "),
    ({"guided": {"ebnf_grammar": "root ::= 'a'"}}, "INVALID_ARGUMENT", "guided.ebnf_grammar: "),
    ({"guided": {"backend": "xgrammar", "regex": "a"}}, "INVALID_ARGUMENT", "guided.backend: "),
    ({"kv": {"session": {"session_id": "s"}}}, "ROLE_MISMATCH", "kv.session: "),
    ({"media": [{"modality": 1, "url": "http://a"}]}, "INVALID_ARGUMENT", "media: this worker serves text only"),
    ({"media": [{"modality": 2, "url": "http://a"}]}, "UNSUPPORTED_FEATURE", "media[0].modality: "),
    ({"media": [{"modality": 1}]}, "INVALID_ARGUMENT", "media[0]: must have one of url, data_uri, raw_bytes"),
    ({"lora_name": "a"}, "INVALID_ARGUMENT", "lora_name: this worker has no LoRA adapter 'a'; it has none"),
    ({"model": "other"}, "MODEL_NOT_FOUND", "model: 'other' is not served here"),
    ({"extra": {"logit_processors": []}}, "UNSUPPORTED_FEATURE", "extra.logit_processors: unknown"),
    ({"extra": {"logits_processors": [{"name": "none"}]}}, "INVALID_ARGUMENT", "extra.logits_processors.processors[0]"),
    (
        {"extra": {"logits_processors": [{"name": "watermark", "args": {"key": 2.0**53 + 2}}]}},
        "INVALID_ARGUMENT",
        "extra.logits_processors[0].args.key: a Struct's numbers are doubles",
    ),
    (
        {"extra": {"logits_processors": [{"k" * 20_000: float("nan")}]}},  # which no status could carry
        "INVALID_ARGUMENT",
        "extra.logits_processors[0].kkk",
    ),
    ({"prompt": ""}, "INVALID_ARGUMENT", "prompt: the prompt is empty"),
    ({"prompt": "a " * 4000}, "INVALID_ARGUMENT", "prompt: prompt is too long: "),
    ({"extra": {"detokenize": "no"}}, "INVALID_ARGUMENT", "extra.detokenize: must be true or false"),
    ({"extra": {"allowed_token_ids": [10**6]}}, "INVALID_ARGUMENT", "extra.allowed_token_ids: expected token ids"),
    ({"extra": {"bad_words_token_ids": [[10**6]]}}, "INVALID_ARGUMENT", "extra.bad_words_token_ids"),
]


@pytest.mark.parametrize(
    ("fields", "code", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_refusals_name_the_field(
    client: OpenEngineClient, fields: dict[str, Any], code: str, message: str
) -> None:
    error = await client.refusal(**fields)
    assert (error.details() or "").startswith(message), error.details()
    found = engine_error_of(error)
    assert wire.ErrorCode.Name(found.code) == f"ERROR_CODE_{code}"
    assert (found.message, found.retryable) == (error.details(), False)
    assert (await client.answer()).kinds[-1] == "finished"


METADATA: list[tuple[list[tuple[str, str]], str]] = [
    ([("openengine-priority", "1")], "openengine-priority: this engine serves its clients in turn"),
    ([("openengine-priority", "high")], "openengine-priority: must be an integer from -2147483648"),
    ([("openengine-priority", "0"), ("openengine-priority", "0")], "openengine-priority: must be given once"),
    ([("openengine-target-dp-rank", "1")], "openengine-target-dp-rank: must be 0"),
    ([("openengine-target-dp-rank", "-1")], "openengine-target-dp-rank: must be an integer from 0"),
    ([("openengine-deadline", "1")], "openengine-deadline: unknown metadata"),
    ([("x-dynamo-meta-client", "a b")], "x-dynamo-meta-client: must be 1 to 64 printable"),
]


@pytest.mark.parametrize(
    ("metadata", "message"), METADATA, ids=lambda value: value[:30] if isinstance(value, str) else ""
)
async def test_metadata_is_honoured_or_refused(
    client: OpenEngineClient, metadata: list[tuple[str, str]], message: str
) -> None:
    error = await client.refusal(metadata)
    assert (error.details() or "").startswith(message), error.details()
    neutral = [("openengine-routing-key", "a"), ("openengine-target-dp-rank", "0"), ("openengine-priority", "0")]
    traced = [*neutral, ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("other", "1")]
    assert (await client.answer(traced)).kinds[-1] == "finished"


async def test_a_failing_processor_ends_its_own_request(client: OpenEngineClient) -> None:
    chosen = [
        {"name": "forced_prefix", "args": {"token_ids": [60, 61, 60, 61]}},
        {"name": "no_repeat_ngram", "args": {"n": 2}},
    ]
    failing, other = await asyncio.gather(
        client.answer(extra={"logits_processors": chosen}, stopping={"max_tokens": 9}),
        client.answer(stopping={"max_tokens": 30}),
    )
    (found,) = failing.errors
    assert wire.ErrorCode.Name(found.code) == "ERROR_CODE_INVALID_ARGUMENT"
    assert not found.retryable
    assert "forced_prefix" in found.message
    assert failing.kinds[-1] == "error"
    assert len(other.ids()) == 30


async def test_twenty_clients_at_a_time(client: OpenEngineClient) -> None:
    alone = [(await client.answer(prompt=f"{n} times", stopping={"max_tokens": 10})).ids() for n in range(4)]
    asked = (client.answer(prompt=f"{n % 4} times", stopping={"max_tokens": 10}) for n in range(20))
    assert [answer.ids() for answer in await asyncio.gather(*asked)] == [alone[n % 4] for n in range(20)]
