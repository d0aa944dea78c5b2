"""Requests that nobody would write, to workers behind OpenEngine: each is answered, or refused with
the name of a field of the protocol, and the next one is served as ever.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from colour_model import data_url
from effort import examples
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openengine_workers import OpenEngineClient
from test_openengine_capabilities import VARIANTS, served_as

from worker.runtimes.openengine import wire

PROMPT = [9, 30, 41, 77]
WAIT_S = 60.0
REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
)
TEXT = st.sampled_from(["", "a", "yes", "{", "[", "(", "null", "tiny", '{"type":"object"}', "é\u0000", "x" * 300])
URL = st.sampled_from(["", "data:,", "data:image/png;base64,!", "http://127.0.0.1:9/a", "file:///etc/passwd", "a b"])
NUMBERS = {
    FieldDescriptor.TYPE_DOUBLE: st.sampled_from(
        [0.0, -0.0, 1.0, 0.5, -1.0, 1e-320, 1e308, float("inf"), float("nan")]
    ),
    FieldDescriptor.TYPE_INT32: st.sampled_from([0, 1, 5, -1, -(2**31), 2**31 - 1]),
    FieldDescriptor.TYPE_UINT32: st.sampled_from([0, 1, 3, 41, 2**16, 2**32 - 1]),
    FieldDescriptor.TYPE_UINT64: st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_ENUM: st.sampled_from([0, 1, 2, 3]),
    FieldDescriptor.TYPE_BYTES: st.sampled_from([b"", b"\x89PNG", b"\x00" * 50]),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, 1, -1, 2.5, 2.0**60, float("nan")]) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["name", "args", "processors", "n", "text", "pattern", "a"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
KEYS = (
    *("logits_processors", "annotations", "continues", "detokenize", "allowed_token_ids", "bad_words_token_ids"),
    *("max_thinking_tokens", "require_reasoning", "skip_special_tokens", "x"),
)
EXTRA = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=2)


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return EXTRA if field.message_type.name == "Struct" else messages(field.message_type)
    if field.type == FieldDescriptor.TYPE_STRING:
        return URL if field.name in ("url", "data_uri") else TEXT
    return NUMBERS[field.type]


def messages(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a message, up to three of them."""
    named = {field.name: values(field) for field in descriptor.fields}
    named = {
        name: st.lists(inner, max_size=3) if descriptor.fields_by_name[name].is_repeated else inner
        for name, inner in named.items()
    }
    if not named:
        return st.just({})
    chosen = st.sets(st.sampled_from(sorted(named)), max_size=3)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: named[name] for name in sorted(names)}))


LIMITS = st.sampled_from([0, 1, 3])  # what is answered is short
FIELDS = {field.name: values(field) for field in wire.GenerateRequest.DESCRIPTOR.fields if field.name != "request_id"}
FIELDS["media"] = st.lists(FIELDS["media"] | st.just({"modality": 1, "data_uri": data_url((252, 0, 0))}), max_size=3)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=3))
    made: dict[str, Any] = {name: draw(FIELDS[name]) for name in sorted(names)}
    if {"prompt", "token_ids"}.isdisjoint(names):
        made["token_ids"] = {"ids": PROMPT}
    made["stopping"] = {**made.get("stopping", {}), "max_tokens": draw(LIMITS)}
    return made


def is_field(path: str) -> bool:
    """Whether a path, or a path in the JSON text of a field, is one of the protocol."""
    if path in ("input", "request"):  # the oneof of prompts; numbers that the schema does not have
        return True
    descriptor: Descriptor | None = wire.GenerateRequest.DESCRIPTOR
    for name in re.sub(r"\[\d+\]", "", path).split("."):
        if descriptor is None or descriptor.name == "Struct":
            return path.startswith(("guided.", "extra."))
        if name not in descriptor.fields_by_name:
            return False
        descriptor = descriptor.fields_by_name[name].message_type
    return True


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["embedded", "TensorRT-LLM", "pictures", "drafts"])
async def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> AsyncIterator[OpenEngineClient]:
    async with served_as(VARIANTS[request.param], tmp_path_factory.mktemp("worker"), tiny_model) as found:
        yield found


async def plain(client: OpenEngineClient) -> list[int]:
    return (await client.answer(token_ids={"ids": PROMPT}, stopping={"max_tokens": 3})).ids()


@given(fields=requests())
@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.asyncio(loop_scope="module")
async def test_any_request_is_answered_or_refused_by_a_known_field(
    client: OpenEngineClient, fields: dict[str, Any]
) -> None:
    expected = await plain(client)
    events: list[wire.GenerateResponse] = []
    refused: grpc.aio.AioRpcError | None = None
    try:
        events = [event async for event in client.generate(timeout=WAIT_S, **fields)]
    except grpc.aio.AioRpcError as error:
        refused = error
    if refused is None:
        assert events[-1].WhichOneof("event") in ("finished", "error")
        assert [event for event in events if "internal" in event.error.message.lower()] == []
    else:
        assert refused.code() in REFUSED, refused
        assert is_field(str(refused.details()).partition(": ")[0]), refused.details()
    assert await plain(client) == expected
