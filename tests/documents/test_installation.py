"""docs/installation.md: what it installs without Dynamo is enough for what it promises there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from document_pages import ROOT, text_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROGRAM = """
import sys

absent, model = set(sys.argv[2:]), sys.argv[1]

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())

import adapters.catalog, adapters.client, adapters.pipe, adapters.trtllm
from worker.engines.embedded import Engine
from worker.sampling import SamplingParams

(result,) = Engine(model).generate("Hello", SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
print(len(result.token_ids))
"""


def test_the_parts_without_dynamo_need_no_more(tiny_model: Path) -> None:
    (listed,) = re.findall(r"^pip install -c constraints.txt (.+)$", text_of("docs/installation.md"), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {canonicalize_name(Requirement(one).name) for one in project["dependencies"]}
    left_out = declared - _with_their_own(listed.split())
    assert "ai-dynamo" in left_out
    owners = metadata.packages_distributions()
    absent = [name for name, found in owners.items() if {canonicalize_name(one) for one in found} & left_out]
    command = [sys.executable, "-c", PROGRAM, str(tiny_model), *absent]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("2\n", 0), ran.stderr


def _with_their_own(names: Iterable[str]) -> set[str]:
    """The distributions and all that they require."""
    found: set[str] = set()
    wanted = [canonicalize_name(name) for name in names]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                wanted.append(canonicalize_name(needed.name))
    return found
