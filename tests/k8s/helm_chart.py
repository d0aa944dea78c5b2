"""Renders the chart by Helm's own library, compiled, as Helm 4.2.3 does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from manifest_files import FOLDER

CHART = FOLDER / "chart"
HELM = "helm-python-sdk==0.2.2"

Rendered = dict[str, str] | str
"""Files by their names, or why the values were refused."""

RENDER = """
import json, sys
import helm_python as helm
path, *asked = json.load(sys.stdin)
answers = []
for release, values in asked:
    release, _, namespace = release.partition("@")
    with helm.Chart.load(path) as chart:
        try:
            answers.append(chart.render(values, name=release, namespace=namespace or "dlw"))
        except helm.HelmError as error:
            answers.append(str(error))
print(json.dumps([helm.lint(path)["errors"], answers]))
"""


def install_helm(folder: Path) -> None:
    """Installs Helm's library into ``folder``."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), HELM]
    subprocess.run(pip, check=True)


def render(helm: Path, asked: Iterable[tuple[str, dict[str, Any]]], chart: Path = CHART) -> list[Rendered]:
    """What the chart gives for each release and its values; Helm finds nothing wrong with the
    chart itself.

    Args:
        helm: Folder with Helm's library.
        asked: Names of releases, with ``@`` and the namespace behind them if it is not ``dlw``,
            and their values.
        chart: Folder of the chart.
    """
    ran = subprocess.run(
        [sys.executable, "-c", RENDER],
        input=json.dumps([str(chart), *asked]),
        env=os.environ | {"PYTHONPATH": str(helm)},
        capture_output=True,
        text=True,
        check=True,
    )
    errors, answers = json.loads(ran.stdout.splitlines()[-1])
    assert errors == []
    found: list[Rendered] = answers
    return found


def resources_of(files: Rendered) -> list[dict[str, Any]]:
    """The resources of what was rendered."""
    assert isinstance(files, dict), files
    return [each for text in files.values() for each in yaml.safe_load_all(text) if each]


def by_name(found: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Resources by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in found}
