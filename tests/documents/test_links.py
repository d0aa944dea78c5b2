"""Links of README and documents resolve, and README fits into 100 columns."""

from __future__ import annotations

import re

import pytest
from document_pages import PAGES, ROOT, prose_of, text_of

MAX_COLUMNS = 100
MAX_README_LINES = 260


def anchors_of(page: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        if not linked.exists() or (anchor and anchor not in anchors_of(str(linked.resolve().relative_to(ROOT)))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("folder", ["worker", "adapters", "launch", "scripts", "k8s", "examples", "benchmarks"])
def test_pages_that_code_names_exist(folder: str) -> None:
    """Errors, options and comments refer to documents by their path."""
    files = [
        path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in (".so", ".pyc", ".md")
    ]
    named = {
        page
        for path in files
        for page in re.findall(r"(?<![\w/.-])docs/[\w/-]+\.md", path.read_text(encoding="utf-8", errors="replace"))
    }
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_readme_is_short_and_fits_into_100_columns() -> None:
    lines = text_of("README.md").splitlines()
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []
    assert len(lines) <= MAX_README_LINES
