"""Pictures of Responses and Messages requests: the parts of the chat that they become, and the
names of fields in errors about them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from responses_requests import CALL, RESULT, translated, user
from rewritten_requests import rewritten
from test_messages_request import CALLED, made, refusal
from test_messages_request import RESULT as TOOL_RESULT

from adapters.catalog import Catalog
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.messages.pictures import MEDIA_TYPES
from worker.frontdoor.messages.request import counted
from worker.frontdoor.requests import names_of

CATALOG = Catalog.default()
CONTENT = b"\x89PNG, or whatever an engine finds in it"
DATA = base64.b64encode(CONTENT).decode()
URL = f"data:image/png;base64,{DATA}"
FAR = "https://pictures.example/a.png"

Asked = Sequence[str | tuple[str, bytes]]
ASKED: st.SearchStrategy[Asked] = st.lists(
    st.text(max_size=4) | st.tuples(st.sampled_from(MEDIA_TYPES), st.binary(min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)
"""Contents of a message: texts, and pictures by type of media and bytes."""


def url_of(picture: tuple[str, bytes]) -> str:
    return f"data:{picture[0]};base64,{base64.b64encode(picture[1]).decode()}"


def urls_in(messages: Any) -> list[str]:
    """The pictures of a chat, which the front door takes as it is."""
    rewritten(CHAT, json.dumps({"model": "m", "messages": messages}).encode(), {}, CATALOG)
    parts = [part for one in messages if isinstance(one["content"], list) for part in one["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def texts_in(messages: Any) -> list[str]:
    contents = [[one["content"]] if isinstance(one["content"], str) else one["content"] for one in messages]
    parts = [part for content in contents for part in content]
    return [
        part if isinstance(part, str) else part["text"] for part in parts if isinstance(part, str) or "text" in part
    ]


def input_image(url: str = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "auto", **fields}


def as_input(asked: Asked) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": one} if isinstance(one, str) else input_image(url_of(one)) for one in asked]
    return {"role": "user", "content": parts}


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source or {"type": "base64", "media_type": "image/png", "data": DATA}}


def as_blocks(asked: Asked) -> dict[str, Any]:
    blocks = [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else image(type="base64", media_type=one[0], data=base64.b64encode(one[1]).decode())
        for one in asked
    ]
    return {"role": "user", "content": blocks}


@given(turns=st.lists(ASKED, min_size=1, max_size=3))
@settings(max_examples=examples(100), deadline=None)
def test_pictures_of_responses_arrive_in_order_and_lead_back(turns: Sequence[Asked]) -> None:
    request = translated(input=[as_input(asked) for asked in turns])
    messages = request.fields["messages"]
    assert urls_in(messages) == [url_of(one) for asked in turns for one in asked if not isinstance(one, str)]
    assert texts_in(messages) == [one for asked in turns for one in asked if isinstance(one, str)]
    named = names_of(CHAT, request.fields, {})
    places = [(i, j) for i, asked in enumerate(turns) for j, one in enumerate(asked) if not isinstance(one, str)]
    for number, (i, j) in enumerate(places):
        field = named(f"multi_modal_data.image_url[{number}].Url")
        assert request.origins.client_path(field) == f"input[{i}].content[{j}].image_url"
    if places:
        i, j = places[0]
        assert request.origins.client_path(named("multi_modal_data")) == f"input[{i}].content[{j}]"


@given(asked=ASKED, before=ASKED)
@settings(max_examples=examples(100), deadline=None)
def test_pictures_of_messages_arrive_in_order_and_lead_back(asked: Asked, before: Asked) -> None:
    answer = {"role": "assistant", "content": "b"}
    request = made(system="s", messages=[as_blocks(before), answer, as_blocks(asked)])
    messages = request.chat["messages"]
    pictures = [one for one in (*before, *asked) if not isinstance(one, str)]
    assert urls_in(messages) == list(map(url_of, pictures))
    lines = "\n".join(texts_in([messages[1], messages[3]])).split("\n")
    assert lines == "\n".join(one for one in (*before, *asked) if isinstance(one, str)).split("\n")
    named = names_of(CHAT, request.chat, {})
    places = [(i, j) for i, all_ in ((0, before), (2, asked)) for j, one in enumerate(all_) if not isinstance(one, str)]
    for number, (i, j) in enumerate(places):
        field = named(f"multi_modal_data.image_url[{number}].Url")
        assert request.paths.path(field) == f"messages[{i}].content[{j}].source.data"


def test_a_chat_with_pictures_is_named_by_its_parts() -> None:
    parts = [{"type": "text", "text": "a"}, *[{"type": "image_url", "image_url": {"url": URL}}] * 2]
    fields: Any = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]}
    named = names_of(CHAT, fields, {})
    assert named("multi_modal_data") == named("multi_modal_data.image_url") == "messages[1].content[1]"
    assert named("multi_modal_data.image_url[1].Url") == "messages[1].content[2].image_url.url"
    for other in ("multi_modal_data.image_url[2].Url", "multi_modal_data.video_url", "multi_modal_uuids"):
        assert named(other) == other
    assert (
        names_of(CHAT, {"messages": [{"role": "user", "content": "a"}]}, {})("multi_modal_data") == "multi_modal_data"
    )


def test_consecutive_texts_stay_lines_beside_a_picture() -> None:
    (message,) = made(messages=[as_blocks(["a", "b", ("image/png", b"x"), "c"])]).chat["messages"]
    assert [part.get("text") for part in message["content"]] == ["a\nb", None, "c"]


def test_a_url_goes_to_the_engine_as_it_is() -> None:
    request = made(messages=[{"role": "user", "content": [image(type="url", url=FAR)]}])
    assert urls_in(request.chat["messages"]) == [FAR]
    named = names_of(CHAT, request.chat, {})("multi_modal_data.image_url[0].Url")
    assert request.paths.path(named) == "messages[0].content[0].source.url"
    assert urls_in(translated(input=[{"role": "user", "content": [input_image(FAR)]}]).fields["messages"]) == [FAR]


def test_pictures_stand_between_the_results_of_tools() -> None:
    content = [TOOL_RESULT, image(), {"type": "text", "text": "a"}]
    messages = made(messages=[*CALLED, {"role": "user", "content": content}]).chat["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert urls_in(messages[3:]) == [URL]


def test_pictures_are_counted_with_the_prompt() -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": [image()]}]}
    assert urls_in(counted(fields).chat["messages"]) == [URL]


def of_input(*parts: Any) -> dict[str, Any]:
    return {"input": [user("a"), {"role": "user", "content": list(parts)}]}


RESPONSES: dict[str, tuple[dict[str, Any], str]] = {
    "file": (of_input({"type": "input_image", "file_id": "file-1", "detail": "auto"}), "input[1].content[0].file_id"),
    "file and URL": (of_input(input_image(file_id="file-1")), "input[1].content[0].file_id"),
    "none": (of_input({"type": "input_image"}), "input[1].content[0].image_url"),
    "chat's": (of_input(input_image({"url": URL})), "input[1].content[0].image_url"),  # type: ignore[arg-type]
    "key": (of_input(input_image(width=3)), "input[1].content[0].width"),
    "chat's type": (of_input({"type": "image_url", "image_url": {"url": URL}}), "input[1].content[0].type"),
    "role": ({"input": [{"role": "system", "content": [input_image()]}]}, "input[0].content[0].type"),
    "answer": ({"input": [{"role": "assistant", "content": [input_image()]}]}, "input[0].content[0].type"),
    "result": ({"input": [CALL, {**RESULT, "output": [input_image()]}]}, "input[1].output[0].type"),
    "other media": (of_input({"type": "input_file", "file_url": FAR}), "input[1].content[0].type"),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_refusals_of_responses_name_the_field(name: str) -> None:
    fields, param = RESPONSES[name]
    with pytest.raises(FieldRefused) as caught:
        translated(**fields)
    assert caught.value.param == param


def test_a_detail_is_refused_by_its_name() -> None:
    request = translated(**of_input(input_image(detail="high")))
    with pytest.raises(Refused) as caught:
        rewritten(CHAT, json.dumps(request.fields).encode(), {}, CATALOG)
    refused = request.origins.of_client(caught.value)
    assert refused.message == (
        "input[1].content[0].detail: must be auto: the model's own processor sizes pictures, got 'high'"
    )


def base64_of(**source: Any) -> dict[str, Any]:
    return image(**{"type": "base64", "media_type": "image/png", "data": DATA, **source})


MESSAGES: dict[str, tuple[Any, str]] = {
    "no source": ({"type": "image"}, "source"),
    "no type": (image(data=DATA), "source.type"),
    "unknown type": (image(type="s3", url=FAR), "source.type"),
    "file": (image(type="file", file_id="file_1"), "source.type"),
    "media type": (base64_of(media_type="image/tiff"), "source.media_type"),
    "no media type": (base64_of(media_type=None), "source.media_type"),
    "other media": (base64_of(media_type="application/pdf"), "source.media_type"),
    "no data": (base64_of(data=None), "source.data"),
    "empty": (base64_of(data=""), "source.data"),
    "padding": (base64_of(data="AAA"), "source.data"),
    "line breaks": (base64_of(data=f"{DATA[:4]}\n{DATA[4:]}"), "source.data"),
    "beyond ASCII": (base64_of(data="é" * 4), "source.data"),
    "URL for data": (base64_of(data=URL), "source.data"),
    "no URL": (image(type="url"), "source.url"),
    "both": (image(type="url", url=FAR, data=DATA), "source.data"),
    "key": ({**image(), "title": "a"}, "title"),
    "transformations": ({**image(), "transformations": {"oversized": "resize"}}, "transformations"),
    "hint": ({**image(), "cache_control": 1}, "cache_control"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_refusals_of_messages_name_the_field(name: str) -> None:
    block, key = MESSAGES[name]
    found = refusal(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, block]}])
    assert found.param == f"messages[0].content[1].{key}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"system": [image()]}, "system[0].type"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [image()]}]}, "messages[1]"),
        ({"messages": [*CALLED, {"role": "user", "content": [{**TOOL_RESULT, "content": [image()]}]}]}, "messages[2]"),
    ],
)
def test_pictures_belong_to_the_user(fields: dict[str, Any], param: str) -> None:
    found = refusal(**fields)
    assert (found.param or "").startswith(param)
    assert "pictures stand in messages of the user" in found.message


def test_what_asks_for_nothing_changes_nothing() -> None:
    plain = made(messages=[{"role": "user", "content": [image()]}]).chat
    more = {**image(), "cache_control": {"type": "ephemeral"}, "transformations": {}}
    assert made(messages=[{"role": "user", "content": [more]}]).chat == plain
    hinted = translated(**of_input(input_image(prompt_cache_breakpoint={"mode": "explicit"}, detail=None)))
    assert hinted.fields == translated(**of_input(input_image())).fields
