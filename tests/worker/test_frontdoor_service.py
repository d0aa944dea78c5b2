"""Small paths of the front door, and what it says of paths that it does not serve."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_frontdoor_exchange import CHUNKS, STREAM_HEAD, as_refused, event
from test_frontdoor_server import House, chunked, error_of, get, house, post
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from worker import __version__
from worker.frontdoor.elsewhere import ELSEWHERE, instead_of
from worker.frontdoor.encoding import encoded
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.routes import Routes
from worker.frontdoor.service import MAX_TOKENS
from worker.frontdoor.texts import Texts
from worker.tiny_model import write_tiny_model

MODELS = encoded({"data": [{"id": "m", "context_window": 512}]})


class Scripted:
    """A frontend with one model; asked for token ids it says ``ids``."""

    def __init__(self, ids: list[int] | None = None) -> None:
        self.ids = ids
        self.at: House

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = self.at.frontends[0].requests[-1]
        if request.startswith(b"POST"):
            writer.write(STREAM_HEAD)
            if self.ids is not None:
                writer.write(chunked(b"event: token_ids\n: " + encoded(json.dumps(self.ids)) + b"\n\n"))
            writer.write(b"".join(map(event, CHUNKS)) + b"0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
        await writer.drain()


def body_of(answer: bytes) -> Any:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    return json.loads(body)


def ask(path: str, **fields: Any) -> bytes:
    return post(encoded(fields), path=path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    return path


@pytest.mark.parametrize(
    "fields",
    [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": 1}}],
    ids=["prompt", "chat"],
)
async def test_tokens_are_those_of_the_frontend(fields: dict[str, Any], model: Path) -> None:
    frontend = Scripted([5, 6])
    async with house(frontend, model_path=str(model)) as frontend.at:
        found = body_of(await frontend.at.ask(ask("/tokenize", model="m", return_token_strs=True, **fields)))
        sent = json.loads(frontend.at.frontends[0].requests[-1].partition(b"\r\n\r\n")[2])
    texts = found.pop("token_strs")
    assert found == {"count": 2, "max_model_len": 512, "tokens": [5, 6]}
    assert len(texts) == 2
    assert {**sent, **fields} == sent
    assert sent["max_tokens"] == 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "m"}, 400, "prompt"),
        ({"model": "m", "prompt": 3}, 400, "prompt"),
        ({"prompt": "a"}, 400, "model"),
        ({"model": "x", "prompt": "a"}, 404, "model"),
        ({"model": "m", "prompt": "a", "b": 1}, 400, "b"),
        ({"model": "m", "prompt": "a", "add_special_tokens": False}, 400, "add_special_tokens"),
        ({"model": "m", "prompt": "a", "add_special_tokens": 0}, 400, "add_special_tokens"),
        ({"model": "m", "prompt": "a", "return_token_strs": []}, 400, "return_token_strs"),
        (
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0]",
        ),
        ({"model": "m", "prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        ({"model": "m", "prompt": "a"}, 502, None),
    ],
)
async def test_a_bad_request_for_tokens_is_named(fields: dict[str, Any], status: int, param: str | None) -> None:
    frontend = Scripted()
    async with house(frontend) as frontend.at:
        found, error = error_of(await frontend.at.ask(ask("/tokenize", **fields)))
    assert (found, (error["param"] or "").startswith(param or "")) == (status, True)


async def test_a_prompt_beside_messages_is_refused_as_in_a_chat() -> None:
    async with house(Scripted()) as at:
        asked = ask("/tokenize", model="m", prompt="a", messages=[{"role": "user", "content": "a"}])
        status, error = error_of(await at.ask(asked))
    assert (status, error["message"]) == (400, "prompt: cannot be given beside messages; give one of them")


async def test_text_of_tokens(model: Path) -> None:
    frontend = Scripted()
    async with house(frontend, model_path=str(model)) as frontend.at:
        texts = [
            body_of(await frontend.at.ask(ask("/detokenize", model="m", tokens=ids)))["prompt"]
            for ids in ([70, 71], [])
        ]
        for tokens in ([10**6], [-1], "a", [True], [1.0], None):
            status, error = error_of(await frontend.at.ask(ask("/detokenize", model="m", tokens=tokens)))
            assert (status, error["param"][:6]) == (400, "tokens")
    assert texts[0]
    assert texts[1] == ""


async def test_text_of_many_tokens_is_made_beside_the_event_loop(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million of them held all other clients up for 0.5 s."""
    frontend, threads, text = Scripted(), list[str](), Texts.text

    def noted(texts: Texts, ids: list[int]) -> str:
        threads.append(threading.current_thread().name)
        return text(texts, ids)

    monkeypatch.setattr(Texts, "text", noted)
    async with house(frontend, model_path=str(model)) as frontend.at:
        found = [
            body_of(await frontend.at.ask(ask("/detokenize", model="m", tokens=[70] * count)))
            for count in (3, MAX_TOKENS)
        ]
        status, error = error_of(await frontend.at.ask(ask("/detokenize", model="m", tokens=[70] * (MAX_TOKENS + 1))))
    assert [len(each["prompt"]) for each in found] == [3, MAX_TOKENS]
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("front-door-bodies")
    assert (status, error["message"]) == (400, f"tokens: must be a list of at most {MAX_TOKENS} token ids")


async def test_decoding_leaves_the_interpreter_to_others(model: Path) -> None:
    """A million tokens kept it for 0.1 s, in whichever thread, and all other clients waited."""
    texts, shares = Texts(str(model)), list[float]()
    await texts.tokenizer()
    for _ in range(5):
        decoding = threading.Thread(target=texts.text, args=([70] * MAX_TOKENS,))
        decoding.start()
        times = [time.perf_counter()]
        while decoding.is_alive():
            times.append(time.perf_counter())
        shares.append(max(later - earlier for earlier, later in pairwise(times)) / (times[-1] - times[0]))
    assert min(shares) < 0.4


async def test_text_of_tokens_behind_a_gap(tmp_path: Path) -> None:
    """Ids may have gaps, so that the highest ones are above the number of tokens."""
    tokenizer = Tokenizer(WordLevel({"low": 3, "high": 9}, unk_token="low"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = Texts(str(tmp_path))
    await texts.tokenizer()
    assert texts.text([9, 3]) == "high low"
    assert texts.text([5]) == ""
    assert await texts.token_texts([9, 5]) == ["high", ""]
    with pytest.raises(FieldRefused, match="must be a token id below 10, got 10"):
        texts.text([3, 10])


async def test_text_of_tokens_needs_the_model(tmp_path: Path) -> None:
    for options in ({}, {"model_path": str(tmp_path)}):
        frontend = Scripted()
        async with house(frontend, **options) as frontend.at:
            status, error = error_of(await frontend.at.ask(ask("/detokenize", model="m", tokens=[1])))
        assert status == 501
        assert "--model-path" in error["message"]


async def test_version_and_ping() -> None:
    frontend = Scripted()
    async with house(frontend) as frontend.at:
        assert body_of(await frontend.at.ask(get("/version"))) == {"version": __version__}
        assert (await frontend.at.ask(get("/ping"))).startswith(b"HTTP/1.1 200 ")
        await frontend.at.frontends[0].stop()
        assert (await frontend.at.ask(get("/ping"))).startswith(b"HTTP/1.1 503 ")


async def test_what_others_serve_is_named(tmp_path: Path) -> None:
    frontend = Scripted()
    async with house(frontend) as frontend.at:
        for path in ("/v1/embeddings", "/api/chat", "/v1/fine_tuning/jobs/a"):
            status, error = error_of(await frontend.at.ask(ask(path)))
            assert status == 404
            assert str(instead_of(path)) in error["message"]
        assert frontend.at.frontends[0].requests == []


@pytest.mark.parametrize("path", sorted(ELSEWHERE))
def test_nothing_is_both_served_and_elsewhere(path: str) -> None:
    assert Routes().at(path) is None
    assert instead_of(path + "/below") == ELSEWHERE[path]


@pytest.mark.parametrize("path", ["/pause", "/resume", "/update_weights", "/sleep", "/wake_up", "/is_sleeping"])
def test_vllms_routes_of_trainers_are_at_workers(path: str) -> None:
    assert "at a worker's --engine-port" in str(instead_of(path))


def test_a_path_that_nobody_serves() -> None:
    assert instead_of("/v1/zzz") is None


async def test_a_refused_prompt_has_the_workers_message() -> None:
    """1.4.2 leaves it out of streams."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = at.frontends[0].requests[-1]
        if request.startswith(b"POST"):
            asked = json.loads(request.partition(b"\r\n\r\n")[2])
            writer.write(STREAM_HEAD + event(as_refused(asked, "token_ids", "is empty")) + b"0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
        await writer.drain()

    async with house(say) as at:
        status, error = error_of(await at.ask(ask("/tokenize", model="m", prompt="a")))
    assert (status, error["param"], error["message"]) == (400, "prompt", "prompt: is empty")
