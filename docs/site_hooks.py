"""Hooks of `mkdocs.yml`: pages that lie outside of `docs/` join the site, and links follow."""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]

_OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "k8s/README.md": "kubernetes.md",
}
"""Pages by their path in the repository, and where they are in the site."""

_RESULTS = Path("benchmarks/results")
_BLOCK = r"^ *```.*?^ *```$"
_LINK = r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)"


def _outside() -> dict[str, str]:
    results = (REPOSITORY / _RESULTS).iterdir()
    shown = {str(_RESULTS / one.name): f"benchmarks/{one.name}" for one in results if one.suffix in (".md", ".svg")}
    return _OUTSIDE | shown


def _decisions() -> str:
    """A link to each record, by its title."""
    records = sorted((REPOSITORY / "docs" / "decisions").glob("0*.md"))
    titles = (record.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for record in records)
    return "".join(f"\n- [{title}]({record.name})" for title, record in zip(titles, records, strict=True))


def _figures() -> str:
    """The figures that the calculator reckons with, for its script."""
    sys.path.append(str(REPOSITORY / "benchmarks"))
    from fleet_plan import figures

    return f'\n<script type="application/json" id="calculator-figures">{json.dumps(figures())}</script>\n'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie outside of `docs/`."""
    for path, name in _outside().items():
        files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links as in the site; one to a file that is not in it becomes text."""
    if page.file.src_uri == "decisions/index.md":
        markdown += _decisions()
    if page.file.src_uri == "calculator.md":
        markdown += _figures()
    names = _outside()
    here = next((path for path, name in names.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")

    def follow(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, mark, anchor = (target or "").partition("#")
        if not path or re.match(r"[a-z]+:", path):  # a block, an anchor of this page, another site
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        name = names.get(path, path.removeprefix("docs/"))
        if (REPOSITORY / path).is_dir():
            name += "/index.md"
        if files.get_file_from_path(name) is not None:
            name = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")
            return match[0].replace(f"({target})", f"({name}{mark}{anchor})")
        return text if (REPOSITORY / path).exists() else match[0]  # of the latter --strict complains

    return re.sub(f"{_BLOCK}|{_LINK}", follow, markdown, flags=re.MULTILINE | re.DOTALL)
