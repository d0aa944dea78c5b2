"""`scripts/canary` says what the newest ai-dynamo of an index breaks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CANARY = Path(__file__).resolve().parents[2] / "scripts" / "canary"

INSTALL = """#!/usr/bin/env bash
set -e
[[ $# == 0 || $2 != 6.6.6 ]]
for directory in .venv ${2:+.venv-dynamo-$2}; do
    mkdir -p "$directory/bin"
    cp python "$directory/bin/python"
done
"""
"""Stand-in for `scripts/install`; 6.6.6 does not install."""

PYTHON = """#!/usr/bin/env bash
if [[ $* == "-m pip index versions ai-dynamo --json" ]]; then
    cat index.json
elif [[ $2 == pytest && -f killed ]]; then
    exit 137
else
    exec "{python}" "$@"
fi
"""
"""Stand-in for an environment's Python: pip asks a recorded index."""

TESTS = {
    "worker": ("test_dynamo_contract", "test_llm_engine"),
    "e2e": ("test_worker_chat", "test_worker_smoke", "test_planner_metrics", "test_busy_rejection"),
}
FIELD = "'routing.rank' in {'routing.dp_rank'}"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A tree with the script, an index whose newest ai-dynamo is 9.9.9, and tests that pass."""
    (tmp_path / "scripts").mkdir()
    shutil.copy2(CANARY, tmp_path / "scripts" / "canary")
    for path, text in (("scripts/install", INSTALL), ("python", PYTHON.format(python=sys.executable))):
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    (tmp_path / "index.json").write_text('{"name": "ai-dynamo", "versions": ["9.9.9", "1.4.2"], "latest": "9.9.9"}')
    for folder, names in TESTS.items():
        (tmp_path / "tests" / folder).mkdir(parents=True)
        for name in names:
            write(tmp_path, f"{folder}/{name}.py")
    return tmp_path


def write(repository: Path, path: str, body: str = "pass") -> None:
    text = f"import os\n\ndef test_{Path(path).stem[5:]}():\n    {body}\n"
    (repository / "tests" / path).write_text(text)


def canary(repository: Path, *argv: str) -> tuple[int, str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DLW_"))}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take seconds to load, and none is needed
    done = subprocess.run(
        [repository / "scripts" / "canary", *argv], capture_output=True, text=True, env=environ, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_nothing_is_broken(repository: Path) -> None:
    write(repository, "e2e/test_worker_chat.py", "assert os.environ['DLW_VENV'].endswith('/.venv-dynamo-9.9.9')")
    status, said, _ = canary(repository)
    assert (status, said.partition(" in ")[0]) == (0, "canary: ai-dynamo 9.9.9: 6 passed")


def test_what_is_broken_is_named_last(repository: Path) -> None:
    write(repository, "worker/test_dynamo_contract.py", f"assert {FIELD}")
    (repository / "tests/e2e/test_planner_metrics.py").write_text("import dynamo_has_moved_it\n")
    status, said, _ = canary(repository, "--version", "1.6.1")
    whole, _, broken = said.partition("canary: ai-dynamo 1.6.1 broke:\n")
    assert status == 1
    assert FIELD in whole
    assert sorted(line.split(" - ")[0] for line in broken.splitlines()) == [
        "ERROR tests/e2e/test_planner_metrics.py",
        "FAILED tests/worker/test_dynamo_contract.py::test_dynamo_contract",
    ]


def test_tests_that_do_not_run_are_no_success(repository: Path) -> None:
    (repository / "killed").touch()
    assert canary(repository)[:2] == (1, "canary: ai-dynamo 9.9.9 broke:\nthe tests did not run (pytest: 137)\n")


def test_a_test_that_is_gone_is_named(repository: Path) -> None:
    (repository / "tests/e2e/test_worker_chat.py").unlink()
    status, said, _ = canary(repository)
    assert status == 1
    assert said.endswith("broke:\nERROR: file or directory not found: tests/e2e/test_worker_chat.py\n")


@pytest.mark.parametrize(
    ("index", "argv", "problem"),
    [
        ("", [], "the package index names no ai-dynamo"),
        ('{"latest": "6.6.6"}', [], "ai-dynamo 6.6.6 does not install"),
        ('{"latest": "../elsewhere"}', [], "--version must be a version, got ../elsewhere"),
        ("{}", ["--versions"], "unknown argument --versions (see --help)"),
    ],
)
def test_a_canary_that_cannot_sing_says_why(repository: Path, index: str, argv: list[str], problem: str) -> None:
    (repository / "index.json").write_text(index)
    status, _, problems = canary(repository, *argv)
    assert (status, problems.splitlines()[-1]) == (1, f"canary: {problem}")
