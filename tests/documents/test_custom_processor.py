"""`examples/custom_processor`: the package installs, conforms and serves, and its page shows it."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from document_pages import ROOT, blocks_of

from adapters.catalog import Catalog, CatalogError
from adapters.testing import CHECKS
from worker.engines.embedded import Engine
from worker.sampling import SamplingParams

pytest_plugins = ["pytester"]

EXAMPLE = ROOT / "examples" / "custom_processor"
COPIED = "copied/digit_limit"


def test_the_page_shows_the_files() -> None:
    shown = [block.text for block in blocks_of("docs/custom-processor.md")]
    for name in ("acme_processors.py", "test_acme_processors.py", "pyproject.toml"):
        assert (EXAMPLE / name).read_text(encoding="utf-8") in shown, name


@pytest.mark.campaign
def test_it_passes_the_conformance_kit(pytester: pytest.Pytester) -> None:
    for name in ("acme_processors.py", "test_acme_processors.py"):
        shutil.copy(EXAMPLE / name, pytester.path)
    # a process of its own: later tests would import again what is imported here for the first time
    result = pytester.runpytest_subprocess("-p", "adapters.testing.plugin", "-p", "no:asyncio", "--strict-markers")
    result.assert_outcomes(passed=len(CHECKS))


def test_it_installs_and_serves(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    for name in ("acme_processors.py", "pyproject.toml"):  # who follows the page has it installed as it is
        text = (source / name).read_text(encoding="utf-8").replace("acme/", "copied/")
        (source / name).write_text(text.replace('name = "acme-', 'name = "copied-'), encoding="utf-8")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--disable-pip-version-check", "--target", str(installed), str(source)], check=True)
    with pytest.raises(CatalogError, match="no installed distribution offers"):
        Catalog.load(allow=[COPIED])
    monkeypatch.syspath_prepend(installed)
    monkeypatch.delitem(sys.modules, "acme_processors", raising=False)
    catalog = Catalog.load(allow=[COPIED])
    assert Path(inspect.getfile(catalog[COPIED].processor)).parent == installed

    engine = Engine(tiny_model, catalog=catalog)
    forced = {"name": "forced_prefix", "args": {"text": "1 2 3 4 5"}}
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    (free,) = engine.generate("Hello", params, progress=False, processors=[forced])
    assert "5" in free.text  # type: ignore[operator]
    params = SamplingParams(max_tokens=200, temperature=2.0, seed=3, ignore_eos=True)
    (limited,) = engine.generate("Hello", params, progress=False, processors=[{"name": COPIED, "args": {"tokens": 2}}])
    tokens = [engine.tokenizer.decode([token_id]) for token_id in limited.token_ids]
    assert sum(any(letter.isdigit() for letter in text) for text in tokens) == 2
    receipt = limited.outputs[0].receipt.as_json()  # type: ignore[union-attr]
    assert receipt["processors"][0]["tokens_masked"] > 0
