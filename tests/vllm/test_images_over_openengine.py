"""Pictures in vLLM without a process of Dynamo: over OpenEngine, and from chats, Responses and
Messages of the front door before it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from e2e_stack import MODEL, REPOSITORY, http, wait_for
from engine_stack import EXACT, running_engines
from front_door_process import Door
from PIL import Image
from processor_requests import of
from test_images_in_vllm import BLUE, NUM_TOKENS, RED, expected
from tiny_vision import NUM_IMAGE_TOKENS, PLACEHOLDER, data_url, png, write_tiny_vision
from transformers import PreTrainedTokenizerFast
from vllm_stack import OPTIONS, START_S

from adapters.client import processor
from worker.runtimes.openengine import wire

pytestmark = pytest.mark.timeout(900)

QUESTION = "What is it?"
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
COLOURS = (RED, BLUE)


@dataclass
class Served:
    """A worker that drives vLLM behind OpenEngine, and a front door before it."""

    door: Door
    target: str
    files: Path
    model: Path

    def chat(self, *urls: str, **fields: Any) -> tuple[int, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return self.ask("chat/completions", [*parts, {"type": "text", "text": QUESTION}], **fields)

    def messages(self, *sources: dict[str, str], path: str = "messages", **fields: Any) -> tuple[int, Any]:
        blocks = [{"type": "image", "source": source} for source in sources]
        return self.ask(path, [*blocks, {"type": "text", "text": QUESTION}], **fields)

    def ask(self, path: str, content: Sequence[Any], **fields: Any) -> tuple[int, Any]:
        status, text = self.door.post(path, messages=[{"role": "user", "content": content}], **fields)
        return status, json.loads(text)

    def text(self, *urls: str, **fields: Any) -> str:
        status, answer = self.chat(*urls, **GREEDY | fields)
        assert status == 200, answer
        return str(answer["choices"][0]["message"]["content"])

    def generate(self, *media: dict[str, Any], **fields: Any) -> list[wire.GenerateResponse]:
        """The events of a request to the worker itself; its prompt has a place for one picture."""
        given = fields.setdefault("token_ids", {"ids": self.prompt(1)})
        assert given["ids"]
        extra = fields.pop("extra", {})
        items = [wire.MediaItem(modality=wire.MODALITY_IMAGE, **one) for one in media]
        fields.setdefault("stopping", {"max_tokens": NUM_TOKENS, "ignore_eos": True})
        fields.setdefault("sampling", {"temperature": 0})
        request = wire.GenerateRequest(media=items, **fields)
        request.extra.update(extra)
        with grpc.insecure_channel(self.target) as channel:
            return list(_call(channel, "Inference/Generate", request, wire.GenerateResponse, is_stream=True))

    def prompt(self, num_pictures: int) -> list[int]:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.model)
        messages = [{"role": "user", "content": f"{PLACEHOLDER * num_pictures}{QUESTION}"}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _call(channel: grpc.Channel, name: str, request: Any, answer: Any, *, is_stream: bool = False) -> Any:
    make = channel.unary_stream if is_stream else channel.unary_unary
    call = make(
        f"/openengine.v1.{name}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=answer.FromString,
    )
    return call(request, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    files = tmp_path_factory.mktemp("pictures")
    (files / "blue.png").write_bytes(png(BLUE))
    with running_engines(tmp_path_factory.mktemp("stack") / "stack", model) as stack:
        ours = {key: value for key, value in stack.environ.items() if not key.startswith(("VLLM_", "DLW_PROCESSOR"))}
        stack.environ = {key: value for key, value in ours.items() if key.removeprefix("WORKER_") not in EXACT}
        stack.environ["PYTHONPATH"] = f"{REPOSITORY}:{REPOSITORY / 'tests' / 'e2e'}"
        worker = stack.start_engine(*OPTIONS, "--modality", "multimodal", "--allowed-local-media-path", str(files))
        probe = f"http://127.0.0.1:{worker.port}/health"
        wait_for(lambda: http(probe)[0] == 200 or not worker.running, "vLLM to load", START_S)
        yield Served(Door(stack), stack.targets[0].removeprefix("grpc://"), files, model)


@pytest.fixture(scope="module")
def texts(model: Path) -> list[str]:
    """The answers of vLLM itself to a red and a blue picture."""
    return expected(model, *COLOURS)


def ids_of(events: Sequence[wire.GenerateResponse]) -> list[int]:
    return [token.token_id for event in events for token in event.token.tokens]


def base64_source(content: bytes, media_type: str = "image/png") -> dict[str, str]:
    return {"type": "base64", "media_type": media_type, "data": base64.b64encode(content).decode()}


def test_answers_are_those_of_vllm_itself(served: Served, texts: list[str]) -> None:
    assert texts[0] != texts[1]
    assert [served.text(data_url(each)) for each in COLOURS] == texts
    assert served.text((served.files / "blue.png").as_uri()) == texts[1]
    assert served.text(data_url(RED), data_url(BLUE)) not in texts
    found = [served.messages(base64_source(png(each)), **GREEDY) for each in COLOURS]
    assert [answer["content"][0]["text"] for _, answer in found] == texts
    url = {"type": "url", "url": (served.files / "blue.png").as_uri()}
    assert served.messages(url, **GREEDY)[1]["content"][0]["text"] == texts[1]


def test_responses_are_those_of_vllm_itself(served: Served, texts: list[str]) -> None:
    with served.door.client() as client:
        for image, text in zip(COLOURS, texts, strict=True):
            picture: Any = {"type": "input_image", "image_url": data_url(image), "detail": "auto"}
            given: Any = [{"role": "user", "content": [picture, {"type": "input_text", "text": QUESTION}]}]
            found = client.responses.create(
                model=MODEL, input=given, max_output_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
            )
            assert found.output_text == text
            assert found.usage is not None
            num_tokens = found.usage.input_tokens
            assert client.responses.input_tokens.count(model=MODEL, input=given).input_tokens == num_tokens
        further = client.responses.create(model=MODEL, input="And now?", previous_response_id=found.id, temperature=0)
        assert further.usage is not None
        assert further.usage.input_tokens > num_tokens + NUM_TOKENS


def test_the_prompt_is_counted_with_its_pictures(served: Served) -> None:
    sources = [[base64_source(png(RED))] * count for count in range(3)]
    asked = [served.messages(*each, **{**GREEDY, "max_tokens": 1})[1]["usage"] for each in sources]
    none, one, two = [each["input_tokens"] + each["cache_read_input_tokens"] for each in asked]
    assert (one - none, two - one) == (NUM_IMAGE_TOKENS, NUM_IMAGE_TOKENS)
    counted = [served.messages(*each, path="messages/count_tokens")[1]["input_tokens"] for each in sources]
    assert counted == [none, one, two]


def test_each_source_of_the_protocol_is_the_same_picture(served: Served) -> None:
    blue: list[dict[str, Any]] = [
        {"data_uri": data_url(BLUE)},
        {"raw_bytes": png(BLUE)},
        {"raw_bytes": png(BLUE), "mime_type": "image/png", "uuid": "blue"},
        {"url": (served.files / "blue.png").as_uri()},
    ]
    answers = [served.generate(each) for each in (*blue, {"data_uri": data_url(RED)})]
    ids = [ids_of(each) for each in answers]
    assert ids[0] == ids[1] == ids[2] == ids[3] != ids[4]
    assert answers[0][-1].usage.prompt_tokens == len(served.prompt(1)) - 1 + NUM_IMAGE_TOKENS
    with grpc.insecure_channel(served.target) as channel:
        info = _call(channel, "Control/GetModelInfo", wire.GetModelInfoRequest(), wire.ModelInfo)
    assert info.supports_multimodal


def test_every_control_works_beside_a_picture(served: Served, texts: list[str]) -> None:
    penalised = of(processor("no_repeat_ngram", n=1), receipt=True)
    status, answer = served.chat(data_url(RED), **GREEDY, **penalised)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] != texts[0]
    assert answer["nvext"]["engine_data"]["logits_processors"]["images"] == 1
    schema = {"type": "integer", "minimum": 10, "maximum": 12}
    events = served.generate(
        {"raw_bytes": png(RED)},
        guided={"json_schema": json.dumps(schema)},
        stopping={"max_tokens": NUM_TOKENS},
    )
    assert 10 <= json.loads("".join(event.token.text for event in events)) <= 12
    drawn = [
        ids_of(served.generate({"raw_bytes": png(each)}, sampling={"temperature": 1.0, "seed": 3}))
        for each in (RED, RED, BLUE)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_answer_beside_a_picture_goes_on_in_another_request(served: Served) -> None:
    sampling = {"temperature": 1.0, "seed": 3}
    whole = ids_of(served.generate({"raw_bytes": png(RED)}, sampling=sampling))
    with grpc.insecure_channel(served.target) as channel:
        told = _call(channel, "Control/GetServerInfo", wire.GetServerInfoRequest(), wire.ServerInfo).extra
    known = {"numerics": told["numerics"], "kv_dtype": told["kv_dtype"]}
    rest = served.generate(
        {"raw_bytes": png(RED)},
        token_ids={"ids": [*served.prompt(1), *whole[:5]]},
        sampling=sampling,
        extra={"continues": {"generated_tokens": 5, **known}},
    )
    assert ids_of(rest) == whole[5:]


NO_PICTURE = "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:9/a.png", "'127.0.0.1' is no host of --allowed-media-domains"),
        ("file:///etc/passwd", "is no file below --allowed-local-media-path"),
        (NO_PICTURE, "is no picture that can be read"),
        ("data:image/png,AAAA", "is no picture that can be read"),
        ("data:image/png;base64,!", "is no picture that can be read"),
        ("data:,", "is no picture that can be read"),
        ("a.png", "must be a URL of data:, file:, http: or https:"),
    ],
)
def test_what_is_no_picture_is_refused_by_the_clients_name(served: Served, url: str, problem: str) -> None:
    status, answer = served.chat(data_url(RED), url, **GREEDY)
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[1].image_url.url"), answer
    assert problem in answer["error"]["message"]
    status, answer = served.messages({"type": "url", "url": url}, **GREEDY)
    assert status == 400, answer
    assert answer["error"]["message"].startswith(f"messages[0].content[0].source.url: {problem}")
    picture: Any = {"type": "input_image", "image_url": url, "detail": "auto"}
    with served.door.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=[{"role": "user", "content": [picture]}])
    assert caught.value.param == "input[0].content[0].image_url"
    source = "data_uri" if url.startswith("data:") else "url"
    assert refusal(served, {source: url}).startswith(f"media[0]: {problem}")


def refusal(served: Served, *media: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        served.generate(*media, **fields)
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    return str(caught.value.details())


def test_hostile_media_is_refused_and_the_worker_serves_on(served: Served, texts: list[str]) -> None:
    bomb = png(RED)[:60]
    wide = png(Image.new("1", (13000, 13000)))  # a small file, and half a gigabyte in RGB
    for media, problem in (
        ([{"raw_bytes": bomb}], "media[0]: is no picture that can be read"),
        ([{"raw_bytes": b""}], "media[0]: is no picture that can be read"),
        ([{}], "media[0]: must have one of"),
        ([{"raw_bytes": png(RED), "mime_type": "a;b"}], "media[0].mime_type: must be a type of media"),
        ([{"raw_bytes": png(RED)}] * 2, "media"),
        ([{"raw_bytes": png(RED)}] * 257, "media"),
        ([{"raw_bytes": wide}] * 2, "media[1]: has more pixels than the 268435456"),
    ):
        assert problem in refusal(served, *media)
    assert "media" in refusal(served, {"raw_bytes": png(RED)}, token_ids={"ids": served.prompt(0)})
    video: dict[str, Any] = {"raw_bytes": png(RED), "modality": wire.MODALITY_VIDEO}
    request = wire.GenerateRequest(token_ids={"ids": served.prompt(1)}, media=[wire.MediaItem(**video)])
    with grpc.insecure_channel(served.target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(_call(channel, "Inference/Generate", request, wire.GenerateResponse, is_stream=True))
    assert "media[0].modality: must be MODALITY_IMAGE" in caught.value.details()
    assert served.text(data_url(RED)) == texts[0]
