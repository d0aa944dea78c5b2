"""JSON files of a checkpoint that are nested deeper than Python reads are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.errors import StartupError
from worker.models.json_files import has_code
from worker.models.special_tokens import read_special_tokens

DEEP = "[" * 100_000


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_files_that_may_name_code(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(StartupError, match=f"cannot read {tmp_path / name}: "):
        has_code(str(tmp_path))


def test_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        read_special_tokens(tmp_path)
