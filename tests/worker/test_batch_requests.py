"""Requests for files and batches, and the lines of input files: honoured, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from batch_services import CHAT, jsonl, line
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.frontdoor.batches import lines as lines_module
from worker.frontdoor.batches.lines import BadLine, checked, lines_of, request_of
from worker.frontdoor.batches.requests import batch_listing, file_listing, new_batch, upload_lifetime_s
from worker.frontdoor.errors import FieldRefused

BATCH: dict[str, Any] = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
LONGEST = 2000


def problems(tmp_path: Path, content: bytes) -> list[tuple[int | None, str, str | None]]:
    path = tmp_path / "input"
    path.write_bytes(content)
    return [(each.line, each.code, each.param) for each in checked(path, CHAT, LONGEST, {"m"}).problems]


@pytest.mark.parametrize(
    ("changed", "code", "param"),
    [
        ({"custom_id": None}, "invalid_custom_id", "custom_id"),
        ({"custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/completions"}, "invalid_url", "url"),
        ({"body": []}, "invalid_body", "body"),
        ({"body": {}}, "missing_required_parameter", "body.model"),
        ({"body": {"model": "other"}}, "model_not_found", "body.model"),
        ({"body": {"model": "m", "stream": True}}, "unsupported_parameter", "body.stream"),
        ({"body": {"model": "m", "background": True}}, "unsupported_parameter", "body.background"),
        ({"nonsense": 1}, "unknown_parameter", "nonsense"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, changed: dict[str, Any], code: str, param: str) -> None:
    content = jsonl([line("a"), line("b") | changed, line("c")])
    assert problems(tmp_path, content) == [(2, code, param)]


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    given = line("a")
    del given[name]
    assert problems(tmp_path, jsonl([given])) == [(1, "missing_required_parameter", name)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", [(None, "empty_file", None)]),
        (b"\n \n\r\n", [(None, "empty_file", None)]),
        (b"\x00\xff\xfe", [(1, "invalid_json_line", None)]),
        (b"[]\n1\nnull", [(n, "invalid_json_line", None) for n in (1, 2, 3)]),
        (b'{"custom_id": "a", "custom_id": "b"}', [(1, "invalid_json_line", "custom_id")]),
        (rb'{"body": {"prompt": "\ud800"}}', [(1, "invalid_json_line", "body.prompt")]),
        (b"[" * 1500, [(1, "invalid_json_line", None)]),
        (b"x" * 5000 + b"\n" + jsonl([line("a")]), [(1, "line_too_long", None)]),
        (jsonl([line("a"), line("b"), line("a")]), [(3, "duplicate_custom_id", "custom_id")]),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, expected: list[Any]) -> None:
    assert problems(tmp_path, content) == expected


def test_a_good_file_has_no_problems(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"\r\n" + jsonl([line("a")]) + b"\n \n" + jsonl([line("b")]).rstrip())
    found = checked(path, CHAT, LONGEST, {"m", "other"})
    assert (found.total, found.model, found.problems) == (2, "m", [])
    path.write_bytes(jsonl([line("a"), line("b", model="other")]))
    assert checked(path, CHAT, LONGEST, {"m", "other"}).model is None


def test_a_hundred_thousand_lines_are_refused_by_number(tmp_path: Path) -> None:
    content = b"".join(b'{"custom_id":"%d"}\n' % n for n in range(100_000))
    assert problems(tmp_path, content) == [(None, "too_many_requests", None)]


def test_a_file_may_have_as_many_requests_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINES", 2)
    path = tmp_path / "input"
    for number, problems in ((2, []), (3, ["too_many_requests"])):
        path.write_bytes(jsonl(line(f"r{n}") for n in range(number)))
        assert [each.code for each in checked(path, CHAT, LONGEST, ["m"]).problems] == problems


@pytest.mark.parametrize(("method", "waits"), [("POST", True), ("GET", False)])
def test_a_model_is_waited_for_where_nothing_else_is_wrong(tmp_path: Path, method: str, waits: bool) -> None:
    path = tmp_path / "input"
    path.write_bytes(jsonl([line("a"), line("b", method=method)]))
    assert checked(path, CHAT, LONGEST, ["another"]).lacks_models_alone is waits


def test_problems_beyond_the_shown_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "SHOWN_PROBLEMS", 2)
    assert [code for _, code, _ in problems(tmp_path, b"x\n" * 5)] == ["invalid_json_line"] * 2 + ["too_many_errors"]


@given(texts=st.lists(st.binary(max_size=30).map(lambda text: text.replace(b"\n", b"")), max_size=8), begin=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_lines_can_be_read_from_any_line_on(
    texts: list[bytes], begin: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "input"
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    found = list(lines_of(path, 10))
    assert [each.number for each in found] == list(range(1, len(texts) + 1))
    assert [each.is_too_long for each in found] == [len(text) > 10 for text in texts]
    for each, text in zip(found, texts, strict=True):
        assert text.startswith(each.data) if each.is_too_long else each.data == text.rstrip(b"\r")
    first = begin.draw(st.integers(0, len(texts)))
    offset = found[first - 1].end if first else 0
    assert list(lines_of(path, 10, offset, first + 1)) == found[first:]


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "input"
    mark = "\ufeff".encode()
    path.write_bytes(mark + jsonl([line("a"), line("b")]))
    first, second = lines_of(path, LONGEST)
    assert [request_of(each, CHAT).custom_id for each in (first, second)] == ["a", "b"]
    assert list(lines_of(path, LONGEST, first.end, 2)) == [second]
    path.write_bytes(jsonl([line("a")]) + mark + jsonl([line("b")]))
    with pytest.raises(BadLine, match="not JSON"):  # it has no meaning elsewhere
        request_of(list(lines_of(path, LONGEST))[1], CHAT)


def test_a_long_line_that_begins_with_blanks_is_named(tmp_path: Path) -> None:
    """Its request may stand behind what is read of it."""
    long = b" " * (LONGEST + 1) + json.dumps(line("b")).encode()
    content = jsonl([line("a")]) + long + b"\n" + jsonl([line("c")])
    assert problems(tmp_path, content) == [(2, "line_too_long", None)]


def test_a_line_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(json.dumps(line("ä ")).encode())
    (only,) = lines_of(path, LONGEST)
    request = request_of(only, CHAT)
    assert (request.custom_id, request.url, request.body) == ("ä ", CHAT, line("ä ")["body"])


def param_of(fields: dict[str, Any]) -> str | None:
    with pytest.raises(FieldRefused) as refused:
        new_batch(fields, (CHAT,))
    return refused.value.param


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": [CHAT]}, "endpoint"),
        ({"completion_window": "48h"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"k" * 65: ""}}, f"metadata.{'k' * 57}..."),
        ({"output_expires_after": 1}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": True}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600, "x": 1}}, "output_expires_after.x"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_bad_field_of_a_batch_is_named(changed: dict[str, Any], param: str) -> None:
    assert param_of(BATCH | changed) == param


def test_the_fields_of_a_batch_are_honoured() -> None:
    given = BATCH | {"metadata": {"a": "b"}, "output_expires_after": {"anchor": "created_at", "seconds": 7200}}
    made = new_batch(given, (CHAT,))
    assert (made.input_file_id, made.endpoint, made.window_s) == ("file-1", CHAT, 86_400)
    assert (made.metadata, made.output_lifetime_s) == ({"a": "b"}, 7200)


@pytest.mark.parametrize(
    ("texts", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after.anchor"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "x"},
            "expires_after.seconds",
        ),
    ],
)
def test_a_bad_field_of_an_upload_is_named(texts: dict[str, str], param: str) -> None:
    with pytest.raises(FieldRefused) as refused:
        upload_lifetime_s(texts)
    assert refused.value.param == param


def test_an_upload_is_kept_as_long_as_asked() -> None:
    given = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    assert upload_lifetime_s(given) == 3600


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "10001"}, {"limit": "x"}, {"order": "up"}, {"purpose": "x"}, {"x": ""}]
)
def test_a_bad_parameter_of_a_list_is_named(query: dict[str, str]) -> None:
    with pytest.raises(FieldRefused) as refused:
        file_listing(query)
    assert refused.value.param in query


def test_lists_have_openais_defaults() -> None:
    files, batches = file_listing({}), batch_listing({})
    assert (files.limit, files.descending, batches.limit) == (10_000, True, 20)
    with pytest.raises(FieldRefused):
        batch_listing({"limit": "101"})
    with pytest.raises(FieldRefused):
        batch_listing({"order": "asc"})
