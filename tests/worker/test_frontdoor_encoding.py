"""Large answers are encoded in turns with other clients, and nothing of a stream is made twice."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_frontdoor_exchange import USAGE, says
from test_frontdoor_server import house, post
from test_frontdoor_service import Scripted

from worker.frontdoor.completions import handler
from worker.frontdoor.completions.asked import Asked
from worker.frontdoor.completions.prompt_answer import PromptAnswer
from worker.frontdoor.completions.prompt_scores import PromptScores
from worker.frontdoor.encoding import FEW, MOST_DEEP, encoded, encoded_in_turns, json_parts
from worker.frontdoor.fields import CHAT, COMPLETIONS
from worker.frontdoor.rewriting import Rewriting
from worker.frontdoor.rollouts import sglang
from worker.frontdoor.rollouts.generation import Generated

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3))
LONG = st.integers(FEW - 1, 3 * FEW).map(lambda length: [{"a": place} for place in range(length)])
CONTENTS = st.recursive(
    st.one_of(SCALARS, LONG),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=4)),
)


@given(CONTENTS, st.integers(0, 2 * MOST_DEEP))
def test_the_parts_are_what_is_encoded_at_once(content: Any, depth: int) -> None:
    for _ in range(depth):
        content = [content]
    whole = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    assert "".join(json_parts(content)) == whole
    assert encoded(content) == asyncio.run(encoded_in_turns(content)) == whole.encode()


def with_logprobs(num_tokens: int) -> dict[str, Any]:
    """A whole chat with 20 alternatives for each token."""
    tops = [{"token": "a", "logprob": -1.5}] * 20
    content = [{"token": "a", "logprob": -1.5, "top_logprobs": tops}] * num_tokens
    return {"choices": [{"index": 0, "logprobs": {"content": content, "refusal": None}}]}


def answer_to_one() -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": [None] + [{"5": {"logprob": -1.5, "rank": 1}}] * 20_000}]}


async def turns_of_others(work: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
    """The result of ``work``, and the turns that others have had beside it."""
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    result = await work
    task.cancel()
    return result, num_turns


@pytest.mark.parametrize("content", [with_logprobs(2000), answer_to_one()], ids=["answer", "prompt"])
async def test_others_have_turns_while_a_large_answer_is_encoded(content: Any) -> None:
    """10,000 tokens with 20 alternatives each held all other clients up for 0.3 s."""
    whole, num_turns = await turns_of_others(encoded_in_turns(content))
    assert num_turns > len(whole) / 2**18


async def test_others_have_turns_while_entries_of_a_prompt_are_made() -> None:
    """Those of 131,072 tokens held all other clients up for 0.2 s."""
    count = 2000
    scores = PromptScores([{"token_id": 7}] * count, [None] + [{"7": {"logprob": -1.0, "rank": 1}}] * (count - 1))
    caller, request = SimpleNamespace(), SimpleNamespace(rid=None, top=2, scores_from=0)
    form = sglang._Form(caller, request, has_texts=False)  # type: ignore[arg-type]
    made, num_turns = await turns_of_others(form._input(scores))
    assert made["input_token_logprobs"] == [[None, 7, None]] + [[-1.0, 7, None]] * (count - 1)
    assert made["input_top_logprobs"] == [None] + [[[-1.0, 7, None]]] * (count - 1)
    assert num_turns > count / FEW


def test_no_part_of_a_large_answer_is_large() -> None:
    parts = list(map(len, json_parts(with_logprobs(2000))))
    assert max(parts) < sum(parts) / 20


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (COMPLETIONS, {"model": "m", "logprobs": 1, "prompt": [7] * 20_000}, "Asked.completion"),
        (CHAT, {"model": "m", "prompt": [7] * 20_000}, "with_prompt_as_messages"),
        ("/generate", {"model": "m", "input_ids": [7] * 20_000}, "read"),
        ("/inference/v1/generate", {"model": "m", "token_ids": [7] * 20_000, "sampling_params": {}}, "read"),
    ],
)
async def test_a_long_prompt_is_looked_at_beside_the_event_loop(
    path: str, fields: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of a body of 8 MiB held all other clients up for 0.3 s."""
    aside, beside = Rewriting.aside, list[str]()

    async def noted(rewriting: Rewriting, client: bytes, rewrite: Any) -> Any:
        beside.append(getattr(getattr(rewrite, "func", rewrite), "__qualname__", ""))
        return await aside(rewriting, client, rewrite)

    monkeypatch.setattr(Rewriting, "aside", noted)
    async with house(Scripted()) as at:
        await at.ask(post(encoded(fields), path=path))
    assert name in beside


def threads_of(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """The name of the thread of each call of a method from now on."""
    threads, method = list[str](), getattr(owner, name)

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return method(*arguments)

    monkeypatch.setattr(owner, name, noted)
    return threads


@pytest.mark.parametrize("count", [3, 2000])
async def test_scores_of_a_long_prompt_are_made_beside_the_loop(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 131,072 tokens held all other clients up for a second."""
    threads = threads_of(monkeypatch, PromptAnswer, "take")
    own = {"7": {"logprob": -1.5, "rank": 1, "decoded_token": "a"}}
    tokens = [{"token_id": 7, "decoded_token": "a"}] * count
    data = {"prompt_logprobs": [None, *[own] * (count - 1)], "prompt_tokens": tokens}
    chunk = {"choices": [{"index": 0, "text": "b"}], "nvext": {"engine_data": data}}
    asked = Asked.completion({"model": "m", "prompt": [7] * count, "echo": True, "logprobs": 1})
    rewriting = Rewriting()
    caller: Any = SimpleNamespace(door=SimpleNamespace(rewriting=rewriting), request=SimpleNamespace(label=b"a"))
    (made,) = await handler._taken(caller, PromptAnswer(asked, 0), chunk)
    rewriting.close()
    assert made["choices"][0]["text"] == "a" * count + "b"
    assert made["choices"][0]["logprobs"]["token_logprobs"] == [None, *[-1.5] * (count - 1)]
    assert threads[0].startswith("front-door-bodies") == (count > FEW)


@pytest.mark.parametrize("count", [3, 2000])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0, "stream": True}),
        ("/inference/v1/generate", {"token_ids": [7], "sampling_params": {"prompt_logprobs": 0}}),
    ],
    ids=["chat", "stream", "tokens"],
)
async def test_the_scores_are_put_into_form_beside_the_loop(
    path: str, fields: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 131,072 tokens held all other clients up for 0.6 s."""
    threads = threads_of(monkeypatch, PromptScores, "in_vllm_form")
    own = {"7": {"logprob": -1.5, "rank": 1, "decoded_token": "a"}}
    tokens = [{"token_id": 7, "decoded_token": "a"}] * count
    data = {"prompt_logprobs": [None, *[own] * (count - 1)], "prompt_tokens": tokens}
    choice = {"index": 0, "delta": {"content": "c"}, "text": "c", "finish_reason": "stop"}
    chunks = [{"choices": [choice], "nvext": {"engine_data": data}}, {"choices": [], "usage": USAGE}]
    async with house(says(*chunks)) as at:
        answer = await at.ask(post(encoded({"model": "m", **fields}), path=path))
    assert answer.count(b'"7":') == count - 1
    assert threads[0].startswith("front-door-bodies") == (count > FEW)


async def test_an_entry_of_a_stream_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of SGLang's streams have all tokens so far: each made all of them again."""
    num_tokens, num_made = 200, 0
    entry = sglang._Form._entry

    async def counted(form: sglang._Form, *arguments: Any) -> list[Any]:
        nonlocal num_made
        num_made += 1
        return await entry(form, *arguments)

    monkeypatch.setattr(sglang._Form, "_entry", counted)
    caller: Any = SimpleNamespace(request=SimpleNamespace(request_id=b"a", num_before=0))
    tokens = [{"token_id": 7}] * num_tokens
    positions = [None] + [{"7": {"logprob": -1.0, "rank": 1}}] * (num_tokens - 1)
    request: Any = SimpleNamespace(rid=None, top=2, scores_from=0)
    form, growing = sglang._Form(caller, request, has_texts=False), [Generated(), Generated()]
    for place in range(num_tokens):
        for index, generated in enumerate(growing):
            generated.scores = PromptScores(tokens, positions)
            generated.token_ids.append(place)
            generated.per_token["tempered"].append(-float(place))
            generated.per_token["top"].append([[place, -1.0], [index, -2.0]])
            answer = await form.answer(index, generated, 0.0)
            meta = answer["meta_info"]
            assert meta["output_token_logprobs"] == [[-float(one), one, None] for one in range(place + 1)]
            assert meta["output_top_logprobs"][-1] == [[-1.0, place, None], [-2.0, index, None]]
            assert len(meta["output_top_logprobs"]) == place + 1
            assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == num_tokens
    assert num_made < 20 * num_tokens
