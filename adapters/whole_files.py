"""Text files that are whole: what is written of one on a full disk takes the place of no other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in UTF-8 whole, or leave what is there, and no part of it.

    What is no regular file, as a pipe, gets the text as it is; of a link its target is written.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    aside = target.with_name(f".{secrets.token_hex(8)}")  # a name of any length has room for it
    try:
        aside.write_text(text, encoding="utf-8")
        if target.exists():
            aside.chmod(target.stat().st_mode)
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
