"""`scripts/release --dry-run` and `scripts/build-image`, as a maintainer runs them: minutes
each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from image_files import pins

import worker

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]


def run(*command: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DLW_VENV")}
    done = subprocess.run(command, cwd=REPOSITORY, env=environ, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_release_installs_and_passes_the_smoke_test(tmp_path: Path) -> None:
    assert "smoke: Hello world!" in run("scripts/release", "--dry-run", "--output", str(tmp_path))
    name = f"dynamo-logits-worker-{worker.__version__}"
    wheels = sorted(tmp_path.glob("dynamo_logits_worker-*.whl"))
    platforms = [re.search(r"manylinux_\d+_\d+_(\w+)\.whl$", wheel.name) for wheel in wheels]
    assert [platform and platform[1] for platform in platforms] == ["aarch64", "x86_64"]
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / f"{name}.sha256").read_text().splitlines())  # type: ignore[arg-type, var-annotated]
    files = {path.name for path in tmp_path.iterdir()} - {f"{name}.sha256"}
    assert sums.keys() == files
    for file, expected in sums.items():
        assert hashlib.sha256((tmp_path / file).read_bytes()).hexdigest() == expected
    bill = json.loads((tmp_path / f"{name}.cdx.json").read_text())
    assert bill["metadata"]["component"]["name"] == "dynamo-logits-worker"
    versions = {part["name"].lower(): part["version"].partition("+")[0] for part in bill["components"]}
    assert versions["torch"] == pins()["torch"]
    assert versions["ai-dynamo"] == pins()["ai-dynamo"]


OLDEST = """
import sys
import worker.tiny_model
from worker.engines.embedded import Engine
from worker.sampling import SamplingParams

schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
worker.tiny_model.write_tiny_model(sys.argv[1])
for kernels in ("torch", "auto"):
    engine = Engine(sys.argv[1], kernels=kernels, packed_copy="off")
    chosen = [{"name": "json_schema", "args": {"schema": schema}}, {"name": "bad_words", "args": {"words": ["1"]}}]
    found = engine.generate("Hello", SamplingParams(max_tokens=64), progress=False, processors=chosen)
    print(found[0].text)
"""


def test_the_oldest_versions_that_are_allowed_serve(tmp_path: Path) -> None:
    """The lower bounds in pyproject.toml: what is used of each distribution was there then."""
    venv, python = tmp_path / "venv", str(tmp_path / "venv/bin/python")
    run(sys.executable, "-m", "uv", "venv", "--quiet", "--no-config", "--python", sys.executable, str(venv))
    oldest = ("--quiet", "--no-config", "--resolution", "lowest-direct", "--cache-dir", str(tmp_path / "cache"))
    run(sys.executable, "-m", "uv", "pip", "install", *oldest, "--python", python, f"{REPOSITORY}[disagg,nats]")
    said = run(python, "-P", "-c", OLDEST, str(tmp_path / "tiny"))
    assert [json.loads(line) for line in said.splitlines()] == [{"a": 2}] * 2
    assert "smoke: Hello world!" in run(python, "scripts/smoke.py")


def test_an_image_is_built_and_passes_the_smoke_test() -> None:
    """Needs root, buildah and, where no registry can be reached, debootstrap."""
    assert "smoke: Hello world!" in run("scripts/build-image", "--tag", "localhost/dlw-test:1.4.2")
    run("env", "STORAGE_DRIVER=vfs", "buildah", "rmi", "localhost/dlw-test:1.4.2")
