"""Text files that are written whole, or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from system_faults import full_disk

from adapters.whole_files import write_whole

LONG = "a line\n" * 1000


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """Half of a file of lines would look like a shorter one."""
    path = tmp_path / "results.jsonl"
    for kept in (None, "from before\n"):
        if kept is not None:
            path.write_text(kept)
        with full_disk(1000), pytest.raises(OSError, match="File too large"):
            write_whole(path, LONG)
        assert (path.read_text() if path.exists() else None) == kept
        assert [each for each in tmp_path.iterdir() if each != path] == []


def test_a_written_file_has_the_mode_of_the_one_before(tmp_path: Path) -> None:
    path, link = tmp_path / "page.md", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to("page.md")
    write_whole(link, LONG)
    assert (path.read_text(), path.stat().st_mode & 0o777, link.is_symlink()) == (LONG, 0o640, True)


def test_a_new_file_has_the_mode_that_others_get(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    write_whole(tmp_path / "\u00fc \n%#", "\u00fc\n")
    assert (tmp_path / "\u00fc \n%#").read_bytes() == b"\xc3\xbc\n"
    assert {each.stat().st_mode for each in tmp_path.iterdir()} == {(tmp_path / "other").stat().st_mode}


def test_a_pipe_gets_the_text(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_whole(path, LONG)
    reader.join()
    assert read == [LONG]


def test_standard_output_gets_the_text() -> None:
    """Of a pipe, it is a link to what has no path."""
    program = "import pathlib, sys; from adapters.whole_files import write_whole; "
    program += "write_whole(pathlib.Path('/dev/stdout'), 'a line\\n')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("a line\n", "")


@pytest.mark.parametrize("call", ["pathlib.Path.replace", "os.chown"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY])
def test_one_that_cannot_be_replaced_is_written(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file that a container has mounted alone, or one of another user."""
    path = tmp_path / "page.md"
    path.write_text("before")
    same = path.stat().st_ino

    def refuse(*given: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(call, refuse)
    write_whole(path, LONG)
    assert (path.read_text(), path.stat().st_ino) == (LONG, same)
    assert list(tmp_path.iterdir()) == [path]


def test_one_that_may_not_be_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.md"
    path.write_text("before")
    path.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda *given: False)  # to root everything is writable
    monkeypatch.setattr(Path, "replace", None)
    write_whole(path, "in place, where the system refuses it")
    assert path.read_text() == "in place, where the system refuses it"


def test_a_directory_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "page.md", LONG)
