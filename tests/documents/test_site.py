"""The site of `mkdocs.yml` builds without a warning and loads nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from document_pages import ROOT

LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
NOT_LOADED = {"canonical", "next", "prev"}


class Loaded(HTMLParser):
    """What a browser fetches for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in LOADING and given.get("rel") not in NOT_LOADED:
            self.addresses.append(given.get(LOADING[tag]) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return directory


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        page = Loaded()
        page.feed(path.read_text(encoding="utf-8"))
        assert page.addresses
        assert [one for one in page.addresses if re.match(r"(https?:)?//", one)] == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", path.read_text(encoding="utf-8")), path


def test_decision_records_are_listed(site: Path) -> None:
    listed = (site / "decisions" / "index.html").read_text(encoding="utf-8")
    for record in (ROOT / "docs" / "decisions").glob("0*.md"):
        assert f'href="{record.stem}/"' in listed


def test_the_calculator_has_its_script_and_its_figures(site: Path) -> None:
    page = (site / "calculator" / "index.html").read_text(encoding="utf-8")
    (script,) = re.findall(r'<script src="([^"]*calculator\.js)"', page)
    assert (site / "calculator" / script).resolve().is_file()
    (found,) = re.findall(r'<script type="application/json" id="calculator-figures">(.*?)</script>', page)
    assert {"front door", "NATS"} <= json.loads(found)["parts"].keys()
