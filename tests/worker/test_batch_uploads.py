"""Uploads: forms as clients write them, hostile ones, and their room on the disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from batch_services import form
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from system_faults import no_descriptors

from worker.frontdoor import uploads as uploads_module
from worker.frontdoor.batches import multipart
from worker.frontdoor.batches.multipart import Form, boundary_of, read_form
from worker.frontdoor.batches.requests import UPLOAD_FILES, UPLOAD_TEXTS
from worker.frontdoor.bodies import WINDOW_S
from worker.frontdoor.errors import Refused
from worker.frontdoor.uploads import Uploads

FILE = ("file", b"content")


def read(body: bytes, boundary: bytes = b"xyz") -> tuple[Form, bytes]:
    """The form, and the content of its file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "body"
        path.write_bytes(body)
        found = read_form(path, boundary, UPLOAD_TEXTS, UPLOAD_FILES)
        file = found.files.get("file")
        return found, b"" if file is None else body[file.begin : file.end]


def refusal(body: bytes, boundary: bytes = b"xyz") -> str:
    with pytest.raises(Refused) as refused:
        read(body, boundary)
    assert refused.value.status == 400
    return refused.value.message


contents = st.binary(max_size=300) | st.lists(
    st.sampled_from([b"\r\n--xy", b"\r\n--", b"--xyz", b"\r", b"\n", b"\r\n", b"-", b"\r\n-", b"xyz"]), max_size=12
).map(b"".join)


@given(content=contents, block=st.integers(1, 40))
@settings(max_examples=examples(400), deadline=None)
def test_a_file_comes_out_as_it_went_in(content: bytes, block: int) -> None:
    """However the body is cut into blocks, unless the content has the boundary itself."""
    if b"\r\n--xyz" in b"\r\n" + content:
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(multipart, "BLOCK", block)
        found, read_back = read(form(("purpose", b"batch"), ("file", content)))
    assert read_back == content
    assert found.texts == {"purpose": "batch"}
    assert found.files["file"].filename == "in.jsonl"


@given(body=st.binary(max_size=200) | contents.map(lambda rest: b"--xyz\r\n" + rest))
@settings(max_examples=examples(400), deadline=None)
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(Refused):
        form_read, content = read(body)
        assert content in body
        assert set(form_read.files) <= {"file"}


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("../../etc/passwd", "../../etc/passwd"),
        ("a;b.jsonl", "a;b.jsonl"),
        ("anführung.jsonl", "anführung.jsonl"),
        ('a\\"b', 'a"b'),
        ("Screenshot at 5.30\u202fPM.jsonl", "Screenshot at 5.30\u202fPM.jsonl"),  # as macOS names them
        ("\u8a18\u9332\u3000\u4e00.jsonl", "\u8a18\u9332\u3000\u4e00.jsonl"),
        ("\U0001f469\u200d\U0001f467.jsonl", "\U0001f469\u200d\U0001f467.jsonl"),
    ],
)
def test_a_filename_is_a_text(filename: str, expected: str) -> None:
    assert read(form(FILE, filename=filename))[0].files["file"].filename == expected


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "does not begin with its boundary"),
        (b"rubbish", "does not begin with its boundary"),
        (b"\r\n" + form(FILE), "does not begin with its boundary"),
        (form(FILE, boundary="other"), "does not begin with its boundary"),
        (form(FILE, end=b""), "ends within a part"),
        (form(FILE, end=b"--xy"), "ends within a part"),
        (form(FILE, end=b"--xyz"), "neither a line end nor its end"),
        (form(FILE, end=b"--xyzzy--\r\n"), "neither a line end nor its end"),
        (form(FILE) + b"more", "text behind its end"),
        (form(FILE, FILE), "file: occurs twice"),
        (form(("purpose", b"batch"), ("purpose", b"x")), "purpose: occurs twice"),
        (form(("nonsense", b"x"), FILE), "nonsense: no field of an upload"),
        (form(("purpose", b"\xff")), "purpose: must be a text in UTF-8"),
        (form(("purpose", b"x" * 5000)), "purpose: must have at most"),
        (form(FILE, filename=""), "file.filename: must be"),
        (form(FILE, filename="x" * 300), "file.filename: must be"),
        (form(FILE, filename="a\x00b"), "a control character"),
        (form(FILE, filename="a\u0085b"), "a control character"),
        (form(FILE, filename="a\u2028b"), "a control character"),
        (form(FILE, filename="x" * 20_000), "bytes of them"),
        (form(*[("purpose", b"x")] * 20), "occurs twice"),
        (b"--xyz\r\n\r\nx\r\n--xyz--", "content-disposition"),
        (b"--xyz\r\nContent-Disposition: attachment; name=\"file\"\r\n\r\nx\r\n--xyz--", "content-disposition"),
        (b"--xyz\r\nContent-Disposition: form-data; name=\"a\"; name=\"b\"\r\n\r\nx\r\n--xyz--", "content-disposition"),
        (b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx\r\n--xyz--", "without a name"),
        (b"--xyz\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nx\r\n--xyz--", "file: must be a file"),
        (b"--xyz\r\nnonsense\r\n\r\nx\r\n--xyz--", "malformed"),
        (
            b"--xyz\r\nContent-Disposition: form-data; name=\"purpose\"\r\n"
            b"Content-Disposition: form-data; name=\"file\"\r\n\r\nx\r\n--xyz--",
            "is there twice",
        ),
        (
            b"--xyz\r\nContent-Disposition: form-data; name=\"purpose\"\r\n"
            b"Content-Transfer-Encoding: base64\r\n\r\nx\r\n--xyz--",
            "content-transfer-encoding",
        ),
        (b"--xyz\r\nContent-Disposition: form-data; name=\"\xff\"\r\n\r\nx\r\n--xyz--", "not UTF-8"),
    ],
)  # fmt: skip
def test_a_malformed_form_is_refused(body: bytes, problem: str) -> None:
    assert problem in refusal(body)


def test_headers_have_so_many_semicolons() -> None:
    """The standard library looks at all that is before each of them, again and again."""
    assert read(form(FILE, filename=";" * 255))[0].files["file"].filename == ";" * 255
    assert "semicolons" in refusal(form(FILE, filename=";" * 300))
    with pytest.raises(Refused, match="semicolons") as refused:
        boundary_of(b'multipart/form-data; boundary=xyz; a="' + b";" * 60_000)
    assert refused.value.status == 400


def test_a_form_has_a_limit_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "MAX_PARTS", 2)
    assert "more than 2 parts" in refusal(form(("purpose", b"x"), FILE, ("expires_after[anchor]", b"x"), ("z", b"")))


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (b"", 415),
        (b"application/json", 415),
        (b"multipart/form-data", 400),
        (b"multipart/form-data; boundary=", 400),
        (b"multipart/form-data; boundary=" + b"x" * 71, 400),
        (b'multipart/form-data; boundary="a\xc3\xa9"', 400),
        (b"multipart/mixed; boundary=x", 415),
        (b"multipart/form-data; boundary=x; boundary=y", 400),
        (b"multipart/form-data; boundary=x; Boundary=x", 400),
        (b"multipart/form-data; boundary*0=x; boundary=y", 400),
    ],
)
def test_a_content_type_without_a_boundary_is_refused(content_type: bytes, status: int) -> None:
    with pytest.raises(Refused) as refused:
        boundary_of(content_type)
    assert refused.value.status == status


def test_a_boundary_may_be_quoted() -> None:
    assert boundary_of(b'multipart/form-data; boundary="a b:c"; charset=utf-8') == b"a b:c"


@pytest.mark.parametrize("charset", ["idna", "punycode", "undefined", "a%00b", "hex", ""])
def test_a_filename_names_no_codec_of_python(charset: str) -> None:
    body = form(FILE).replace(b'filename="in.jsonl"', f"filename*={charset}''a%80".encode())
    assert b"filename*=" in body
    assert "a filename in a charset that is none of utf-8" in refusal(body)


def test_a_filename_in_utf_8_may_be_escaped() -> None:
    body = form(FILE).replace(b'filename="in.jsonl"', b"filename*=UTF-8''anf%C3%BChrung.jsonl")
    assert read(body)[0].files["file"].filename == "anf\u00fchrung.jsonl"


@pytest.mark.parametrize(
    ("filenames", "expected"),
    [
        ("filename=in.jsonl; filename*=utf-8''in.jsonl", "in.jsonl"),
        ("filename=\"=?utf-8?B?YW5mw7xo?=\"; filename*=utf-8''anf%C3%BCh", "anf\u00fch"),
        ("filename*=utf-8''b; filename=\"a\"", "b"),
    ],
)
def test_of_both_forms_of_a_filename_the_extended_counts(filenames: str, expected: str) -> None:
    """Clients of .NET send both."""
    body = form(FILE).replace(b'filename="in.jsonl"', filenames.encode())
    assert read(body)[0].files["file"].filename == expected


@pytest.mark.parametrize("written", ["filename=a; filename=a", "filename=a; name*=utf-8''purpose"])
def test_a_part_has_one_name_and_one_filename(written: str) -> None:
    assert "is not that of one field" in refusal(form(FILE).replace(b'filename="in.jsonl"', written.encode()))


def room(tmp_path: Path, largest: int, clock: list[float]) -> Uploads:
    return Uploads(tmp_path, largest, 1024, 60, lambda: clock[0])


def test_an_upload_is_a_file_until_it_is_freed(tmp_path: Path) -> None:
    upload = room(tmp_path, 100, [0.0]).begin(_never)
    upload.add(b"ab")
    upload.add(b"cd")
    assert upload.take() == b""
    assert upload.path.read_bytes() == b"abcd"
    upload.free()
    upload.free()
    assert list(tmp_path.iterdir()) == []


def test_the_slowest_upload_makes_room(tmp_path: Path) -> None:
    clock, gone = [0.0], list[Refused]()
    uploads = room(tmp_path, 10, clock)
    slow = uploads.begin(gone.append)
    slow.add(b"x")
    clock[0] = 5.0
    fast = uploads.begin(_never)
    fast.add(b"x" * uploads_module.AT_ONCE * 10)
    assert [each.status for each in gone] == [408]
    assert [path.name for path in tmp_path.iterdir()] == [fast.path.name]
    fast.free()
    assert uploads.room.num_bytes == 0


def test_an_upload_has_time_for_its_size(tmp_path: Path) -> None:
    clock = [0.0]
    upload = room(tmp_path, 10**8, clock).begin(_never)
    assert upload.left_s() == WINDOW_S
    upload.add(b"x" * 64 * 1024 * 100)  # a hundred seconds at the least rate
    clock[0] = 155.0
    assert upload.left_s() == 5.0
    clock[0] = 170.0
    assert upload.left_s() == 0.0
    upload.free()


def test_what_is_no_full_disk_is_not_called_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uploads = room(tmp_path, 100, [0.0])
    with no_descriptors(), pytest.raises(Refused) as refused:
        uploads.begin(_never)
    assert (refused.value.status, refused.value.code) == (500, "storage_failed")
    assert "its log says why" in refused.value.message
    assert "Too many open files" in caplog.text
    uploads.begin(_never).free()


def test_a_full_disk_refuses_the_upload_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = room(tmp_path, 100, [0.0])
    upload = uploads.begin(_never)

    def full(file: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(Refused) as refused:
            upload.add(b"x")
    assert refused.value.status == 507
    assert refused.value.code == "insufficient_storage"
    upload.free()
    other = uploads.begin(_never)
    other.add(b"x")
    other.free()


def _never(refused: Refused) -> None:
    raise AssertionError(refused)
