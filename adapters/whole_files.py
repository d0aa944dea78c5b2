"""Text files that are whole: what is written of one on a full disk takes the place of no other."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors of a file whose directory, owner or mount lets no other one take its place."""


def write_whole(path: Path, text: str) -> None:
    """Write a file in UTF-8 whole, or leave what is there, and no part of it.

    A pipe, as all that is no regular file, gets the text as it is, and so does a file whose place
    no other one of the same owner can take; of a link its target is written.

    Raises:
        OSError: it cannot be written.
    """
    if not path.exists():
        _replace(path, text)
    elif not os.access(path, os.W_OK) or not Path(os.path.realpath(path)).is_file():  # of /dev/stdout it may be none
        path.write_text(text, encoding="utf-8")
    else:
        try:
            _replace(path, text)
        except OSError as error:
            if error.errno not in _IN_PLACE:
                raise
            path.write_text(text, encoding="utf-8")


def _replace(path: Path, text: str) -> None:
    target = Path(os.path.realpath(path))
    aside = target.with_name(f".{secrets.token_hex(8)}")  # a name of any length has room for it
    try:
        aside.write_text(text, encoding="utf-8")
        if target.exists():
            before = target.stat()
            os.chown(aside, before.st_uid, before.st_gid)
            aside.chmod(before.st_mode)
        aside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):  # as where the directory cannot be written
            aside.unlink(missing_ok=True)
        raise
