"""The programs in `docs/pipe.md` run, one after the other, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "pipe.md"


def test_the_programs_of_the_page_run():
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(programs) == 5
    names: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, str(PAGE), "exec"), names)
