"""Markdown pages of the repository, and the fenced blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FOLDERS = ("docs", "k8s", "benchmarks", "examples")
PAGES = sorted(
    str(page.relative_to(ROOT))
    for found in (ROOT.glob("*.md"), *((ROOT / each).rglob("*.md") for each in _FOLDERS))
    for page in found
)
"""Every Markdown file of the repository, relative to its root."""

_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is its first line's number."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose_of(page: str) -> str:
    """The text without fenced blocks."""
    return _FENCE.sub("", text_of(page))


def blocks_of(page: str) -> list[Block]:
    text = text_of(page)
    return [
        Block(page, text[: found.start()].count("\n") + 2, found[2], re.sub(f"^{found[1]}", "", found[3], flags=re.M))
        for found in _FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
