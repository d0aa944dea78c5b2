"""Log probabilities in the forms of OpenAI's completions and of vLLM, whatever a worker sends."""

from __future__ import annotations

import codecs
import json
from itertools import pairwise
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.vocabulary import Vocabulary
from worker.engines import LEAST_LOGPROB, TokenLogprob
from worker.frontdoor.completions.asked import MAX_PROMPTS, Asked
from worker.frontdoor.completions.openai_logprobs import Offsets, by_text, of_answer, text_offsets
from worker.frontdoor.completions.prompt_answer import PromptAnswer
from worker.frontdoor.completions.prompt_scores import WorkerData
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.fields import CHAT, COMPLETIONS
from worker.frontdoor.openengine.answer import AnswerForm
from worker.frontdoor.openengine.body import AskedAnswer
from worker.frontdoor.translated import is_translated
from worker.requests.prompt_scores import end_json, scores_json, token_text

TEXTS = st.text(max_size=20)
BYTES = 256


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str] = TEXTS) -> tuple[str, list[bytes]]:
    """A text, and tokens that it is cut into anywhere, within characters too."""
    text = draw(texts)
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=10)))
    return text, [data[start:stop] for start, stop in pairwise([0, *cuts, len(data)])]


@settings(max_examples=examples(300))
@given(cut(), st.integers(0, 9))
def test_an_offset_is_that_of_the_tokens_character(found: tuple[str, list[bytes]], start: int) -> None:
    text, tokens = found
    offsets = text_offsets(tokens, start, start + len(text))
    before = 0
    for token, offset in zip(tokens, offsets, strict=True):
        assert offset - start == len(text.encode()[:before].decode(errors="ignore"))
        before += len(token)


@given(st.text(min_size=1, max_size=8), cut(st.text(min_size=1, max_size=20)))
def test_what_the_text_begins_without_takes_no_place(lead: str, found: tuple[str, list[bytes]]) -> None:
    text, tokens = found
    offsets = text_offsets([lead.encode(), *tokens], 0, len(text), len(lead))
    assert offsets == [0, *text_offsets(tokens, 0, len(text))]


LOGPROBS = st.floats(-50, 0)


@given(st.text(max_size=3), LOGPROBS, st.lists(st.tuples(st.text(max_size=1), LOGPROBS), max_size=6))
def test_equal_texts_have_the_likeliest_ones_entry(token: str, own: float, others: list[tuple[str, float]]) -> None:
    found = by_text(token, own, others)
    assert next(iter(found)) == token
    for text, value in found.items():
        assert value == max(v for t, v in [(token, own), *others] if t == text)


def scored(prompt: list[int], top: int, text: Any = None) -> dict[str, Any]:
    """What the worker sends of a prompt, as it arrives; token i has rank i + 1 everywhere."""
    positions = [None if place == 0 else [entry(token), *map(entry, range(top))] for place, token in enumerate(prompt)]
    sent = scores_json(prompt, positions, text)
    return {"choices": [], "nvext": {"engine_data": json.loads(json.dumps(sent))}}


def entry(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0 - token, token + 1)


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, BYTES - 1), min_size=1, max_size=12), st.integers(0, 6), st.integers(0, 6))
def test_forms_of_a_prompt(prompt: list[int], sent: int, count: int) -> None:
    """Tokens are bytes, so that a prompt is any text, and no text at all."""
    text = bytes(prompt).decode(errors="replace")
    found = WorkerData.taken_from(scored(prompt, max(sent, count), lambda token: bytes([token]))).scores
    assert found is not None
    assert found.text() == text
    likeliest = range(count)
    for place, (token, shown) in enumerate(zip(prompt, found.in_vllm_form(count), strict=True)):
        if place == 0:
            assert shown is None
            continue
        assert shown is not None
        assert next(iter(shown)) == str(token)
        assert set(shown) == {str(token), *map(str, likeliest)}
        assert shown[str(token)] == {
            "logprob": -1.0 - token,
            "rank": token + 1,
            "decoded_token": bytes([token]).decode(errors="replace"),
        }
    form = found.in_openai_form(count, text)
    assert form["token_logprobs"] == [None, *(-1.0 - token for token in prompt[1:])]
    assert form["top_logprobs"][0] is None
    assert all(0 < len(top) <= count + 1 for top in form["top_logprobs"][1:])
    assert form["text_offset"] == text_offsets([bytes([token]) for token in prompt], 0, len(text))


def test_the_least_log_probability_is_json() -> None:
    sent = scores_json([1, 2], [None, [TokenLogprob(2, float("-inf"), 5)]], None)
    assert sent["prompt_logprobs"][1] == {"2": {"logprob": LEAST_LOGPROB, "rank": 5}}
    assert token_text(Vocabulary(8)) is None


def test_the_data_of_others_stays() -> None:
    chunk = scored([1, 2], 0)
    chunk["nvext"]["engine_data"]["logits_processors"] = {"seed": 1}
    assert WorkerData.taken_from(chunk).scores is not None
    assert chunk["nvext"] == {"engine_data": {"logits_processors": {"seed": 1}}}
    assert WorkerData.taken_from(chunk) == WorkerData()
    plain: dict[str, Any] = scored([1], 0)
    assert WorkerData.taken_from(plain).scores is not None
    assert "nvext" not in plain


def test_the_frontends_rounding_is_undone() -> None:
    """Harnesses compare the token's value with the highest of its alternatives."""
    top = [{"token": "a", "logprob": -2.4339818954467773}, {"token": "b", "logprob": -3.0}]
    found = of_answer({"tokens": ["a"], "token_logprobs": [-2.433982], "top_logprobs": [top]}, Offsets(4))
    assert found["token_logprobs"] == [max(found["top_logprobs"][0].values())]
    assert found["text_offset"] == [4]


@settings(max_examples=examples(100))
@given(
    st.lists(st.sampled_from(["a", " a", "b", "ba", "\n", " ", "é", "\ufffd", "a\ufffd"]), min_size=1, unique=True),
    st.sampled_from(["c", " b a", "\n\n", "<b>"]),
    st.booleans(),
)
def test_a_token_as_likely_as_alternatives_is_itself(others: list[str], token: str, as_map: bool) -> None:
    """Logits of 16 bits tie often."""
    tops = dict.fromkeys(others, -1.25)
    listed = [{"token": text, "logprob": value} for text, value in tops.items()]
    chunk = {"tokens": [token], "token_logprobs": [-1.25], "top_logprobs": [tops if as_map else listed]}
    found = of_answer(chunk, Offsets())
    assert found["tokens"] == [token]
    assert found["top_logprobs"] == [{token: -1.25, **tops}]


@pytest.mark.parametrize(
    ("name", "text"),
    [(" a", "a"), ("a", " a"), ("", "<end>"), ("é", "\ufffd"), ("\ufffdab", "ab"), ("  ", " "), (" ", "")],
)
def test_a_token_has_the_text_that_it_has_alone(name: str, text: str) -> None:
    chunk = {"tokens": [name], "token_logprobs": [-1.0], "top_logprobs": [[{"token": text, "logprob": -1.0 + 1e-9}]]}
    assert of_answer(chunk, Offsets())["tokens"] == [text]
    assert of_answer(chunk, Offsets())["token_logprobs"] == [-1.0 + 1e-9]


def test_parts_of_characters_have_the_text_that_they_have_alone() -> None:
    """The frontend withholds them, and gives them to the token that follows."""
    tops = [[{"token": "\ufffd", "logprob": -1.0}], [{"token": "a", "logprob": -2.0}, {"token": "b", "logprob": -2.5}]]
    found = of_answer({"tokens": ["", "\ufffda"], "token_logprobs": [-1.0, -2.0], "top_logprobs": tops}, Offsets(3))
    assert found["tokens"] == ["\ufffd", "a"]
    assert found["top_logprobs"] == [{"\ufffd": -1.0}, {"a": -2.0, "b": -2.5}]
    assert found["text_offset"] == [3, 4]


@settings(max_examples=examples(300))
@given(cut(), st.integers(0, 9), st.data())
def test_offsets_of_an_answer_are_those_of_characters(
    found: tuple[str, list[bytes]], start: int, data: st.DataObject
) -> None:
    """Whatever part of a character is among the alternatives, where it has a text of its own."""
    text, tokens = found
    decoder = codecs.getincrementaldecoder("utf-8")()
    said = [decoder.decode(token) for token in tokens]
    tops = [[{"token": token.decode(errors="replace"), "logprob": -1.0}] for token in tokens]
    shown = [data.draw(st.sampled_from([top, []])) for top in tops]
    chunk = {"tokens": said, "token_logprobs": [-1.0] * len(said), "top_logprobs": shown}
    assert of_answer(chunk, Offsets(start))["text_offset"] == text_offsets(tokens, start, start + len(text))


def test_offsets_behind_parts_of_no_character() -> None:
    """A frontend holds back what ends within a character; what begins one completes nothing."""
    tokens = ["\ufffd", "ки\ufffd", "и\ufffd", "pro", '{"', "a\ufffd", "\ufffd", "b"]
    names = ["", "", "", "\ufffdки\ufffdи\ufffdpro", '{"', "", "aé", "b"]
    tops = [[{"token": token, "logprob": -1.0}] for token in tokens]
    chunk = {"tokens": names, "token_logprobs": [-1.0] * len(names), "top_logprobs": tops}
    assert of_answer(chunk, Offsets(2))["text_offset"] == [2, 3, 6, 8, 11, 13, 14, 15]


@settings(max_examples=examples(100))
@given(cut())
def test_offsets_of_openengine_are_those_of_characters(found: tuple[str, list[bytes]]) -> None:
    text, tokens = found
    form = AnswerForm(AskedAnswer({}, is_chat=False, model="m"), "1", 0, lambda token: tokens[token])
    offsets, found_offsets = Offsets(), []
    for token in range(len(tokens)):
        chunk = {"text": "", "token_ids": [token], "log_probs": [-1.0], "top_logprobs": [[]]}
        (event,) = form.events(chunk)
        logprobs = event["choices"][0]["logprobs"]
        found_offsets += of_answer(logprobs, offsets)["text_offset"]
    assert found_offsets == text_offsets(tokens, 0, len(text))


ASKED = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 2}


def answer(fields: dict[str, Any], *chunks: dict[str, Any]) -> list[dict[str, Any]]:
    made = PromptAnswer(Asked.completion({**ASKED, **fields}), 0)
    found = [one for chunk in chunks for one in made.take(chunk)]
    made.check_complete()
    return [one["choices"][0] for one in found]


def text_chunk(text: str, **choice: Any) -> dict[str, Any]:
    logprobs = {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": [[{"token": text, "logprob": -1.0}]]}
    return {"id": "c", "choices": [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None, **choice}]}


def test_chunks_wait_for_the_prompts_scores() -> None:
    with_scores = {**text_chunk("b"), "nvext": scored([65, 66, 67], 1, lambda token: bytes([token]))["nvext"]}
    found = answer({"echo": True, "logprobs": 1}, text_chunk("a"), with_scores, text_chunk("c"))
    assert [choice["text"] for choice in found] == ["ABCa", "b", "c"]
    offsets = [offset for choice in found for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3, 4, 5]


def test_a_worker_that_says_nothing_of_the_prompt() -> None:
    with pytest.raises(Refused, match="no log probabilities of the prompt") as caught:
        answer({"echo": True}, text_chunk("a", finish_reason="length"))
    assert caught.value.status == 502


def test_the_end_token_takes_no_place_in_the_text() -> None:
    end = end_json([entry(2), entry(0)], lambda token: b"</s>")
    last = {**text_chunk("", finish_reason="stop", logprobs=None), "nvext": {"engine_data": end}}
    (first, second) = answer({"logprobs": 1}, text_chunk("abc"), last)
    assert first["logprobs"]["text_offset"] == [0]
    assert second["logprobs"] == {
        "tokens": ["</s>"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"</s>": -1.0}],
        "text_offset": [3],
    }


def test_ids_may_stand_for_the_texts_of_all_tokens() -> None:
    """Those of the prompt and the end token had texts among the ids of the others."""
    prompt = {"nvext": scored([5, 6, 7], 1, lambda token: bytes([65 + token]))["nvext"]}
    answered = {"tokens": ["token_id:11"], "token_logprobs": [-1.0]}
    answered["top_logprobs"] = [[{"token": "token_id:11", "logprob": -1.0}]]
    first = {**text_chunk("b", logprobs=answered), **prompt}
    end = end_json([entry(2), entry(0)], lambda token: b"</s>")
    last = {**text_chunk("", finish_reason="stop", logprobs=None), "nvext": {"engine_data": end}}
    found = answer({"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}, first, last)
    lists = {name: [one for each in found for one in each["logprobs"][name]] for name in found[0]["logprobs"]}
    assert lists["tokens"] == ["token_id:5", "token_id:6", "token_id:7", "token_id:11", "token_id:2"]
    assert lists["text_offset"] == [0, 10, 20, 30, 41]
    assert [*lists["top_logprobs"][1]] == ["token_id:6", "token_id:0"]
    assert [*lists["top_logprobs"][4]] == ["token_id:2", "token_id:0"]
    assert found[0]["text"] == "FGHb"


def test_a_scored_prompt_has_no_ids_of_an_answer() -> None:
    """nvext had that of the token that is asked for since there is no less."""
    asked = {"max_tokens": 0, "return_token_ids": True, "nvext": {"extra_fields": ["completion_token_ids"]}}
    made = PromptAnswer(Asked.completion({**ASKED, **asked}), 0)
    data = {"rollout": json.dumps({"prompt_token_ids": [5, 6, 7], "token_ids": [9]})}
    (chunk,) = made.take({**text_chunk("b", finish_reason="length"), "nvext": {"engine_data": data}})
    (choice,) = chunk["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], [5, 6, 7])
    assert chunk["nvext"] == {"completion_token_ids": []}


PROMPTS: dict[str, tuple[Any, int]] = {
    "text": ("a", 1),
    "ids": ([1, 2], 1),
    "texts": (["a", "b"], 2),
    "lists of ids": ([[1], [2, 3]], 2),
    "one list of ids": ([[1, 2]], 1),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_a_request(name: str) -> None:
    prompt, count = PROMPTS[name]
    asked = Asked.completion({**ASKED, "prompt": prompt, "echo": True})
    assert len(asked.prompts) == count
    sent = asked.request(asked.prompts[0])
    assert "echo" not in sent
    assert ("prompt_logprobs" in sent) == isinstance(asked.prompts[0], list)


@pytest.mark.parametrize("prompt", [5, {}, [True], [[True]], ["a", 1], [[]], [], None, ["a"] * (MAX_PROMPTS + 1)])
def test_what_is_no_prompt_is_named(prompt: Any) -> None:
    with pytest.raises(FieldRefused, match=r"^prompt(\[\d\])?: must "):
        Asked.completion({**ASKED, "prompt": prompt})


@pytest.mark.parametrize(
    ("fields", "name"), [({"prompt": ["a", "b"]}, "nvext.token_data"), ({"prompt": "a", "echo": True}, "echo")]
)
def test_ids_beside_a_text_are_those_of_it(fields: dict[str, Any], name: str) -> None:
    """Nothing that several texts have in common, and nothing that is shown as the text."""
    ids = {"nvext": {"token_data": [5, 6]}}
    assert Asked.completion({**ASKED, "prompt": "a", "logprobs": 1, **ids}).prompts == ["a"]
    with pytest.raises(FieldRefused) as caught:
        Asked.completion({**ASKED, **fields, **ids})
    assert caught.value.param == name


@pytest.mark.parametrize("nvext", [None, {}, {"extra_fields": None}, {"extra_fields": ["timing", "engine_data"]}])
def test_the_workers_data_is_asked_for(nvext: Any) -> None:
    sent = Asked.completion({**ASKED, "logprobs": 1, "nvext": nvext}).request("a")
    assert "engine_data" in sent["nvext"]["extra_fields"]
    assert sent["nvext"]["extra_fields"].count("engine_data") == 1


@pytest.mark.parametrize("nvext", [[], "x", {"extra_fields": "engine_data"}])
def test_what_is_no_extension_is_left_to_the_checks(nvext: Any) -> None:
    assert Asked.completion({**ASKED, "logprobs": 1, "nvext": nvext}).request("a")["nvext"] == nvext


TRANSLATED: tuple[tuple[str, dict[str, Any], bool], ...] = (
    (COMPLETIONS, {}, False),
    (COMPLETIONS, {"echo": False, "logprobs": None, "max_tokens": 1}, False),
    (COMPLETIONS, {"logprobs": 0}, True),
    (COMPLETIONS, {"echo": True}, True),
    (COMPLETIONS, {"max_tokens": 0}, True),
    (COMPLETIONS, {"prompt_logprobs": 0}, True),
    (COMPLETIONS, {"prompt": ["a"] * 128}, False),
    (COMPLETIONS, {"prompt": ["a"] * 129}, True),
    (COMPLETIONS, {"prompt": [1] * 129}, False),
    (COMPLETIONS, {"prompt": ["a", "b"], "stream": True}, True),
    (COMPLETIONS, {"prompt": ["a", "b"], "stream": True, "stream_options": {"continuous_usage_stats": True}}, False),
    (COMPLETIONS, {"prompt": ["a"], "stream": True}, False),
    (COMPLETIONS, {"prompt": ["a", "b"], "logits_processors": {"receipt": "debug"}}, True),
    (COMPLETIONS, {"prompt": ["a", "b"], "logits_processors": [{"name": "top_k", "args": {"k": 1}}]}, False),
    (COMPLETIONS, {"prompt": [[1], [2]], "nvext": {"extra_fields": ["engine_data"]}}, True),
    (COMPLETIONS, {"prompt": ["a"], "logits_processors": {"receipt": True}}, False),
    (CHAT, {"logprobs": True, "max_tokens": 0}, False),
    (CHAT, {"prompt_logprobs": 1}, True),
)


@pytest.mark.parametrize(("path", "fields", "expected"), TRANSLATED)
def test_which_requests_are_translated(path: str, fields: dict[str, Any], expected: bool) -> None:
    assert is_translated(path, fields) == expected
