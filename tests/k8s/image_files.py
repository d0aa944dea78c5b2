"""The packages that `k8s/Dockerfile` installs, and an environment of just those."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import sys
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

from manifest_files import FOLDER, REPOSITORY
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def stage(name: str) -> list[str]:
    """The instructions of one stage, one per line."""
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    starts = [index for index, line in enumerate(lines) if line.startswith("FROM ")] + [len(lines)]
    ((first, end),) = (
        (start, end) for start, end in itertools.pairwise(starts) if lines[start].endswith(f" AS {name}")
    )
    return [" ".join(line.split()) for line in lines[first:end]]


def commands(name: str) -> list[str]:
    """The commands of the stage's RUN instructions, one by one."""
    runs = [line.removeprefix("RUN ") for line in stage(name) if line.startswith("RUN ")]
    return [command.strip() for run in runs for command in run.split("&&")]


def install_command(name: str) -> str:
    """The one command of a stage that installs."""
    (found,) = (command for command in commands(name) if re.search(r"\bpip install\b", command))
    return found


def extras(name: str) -> set[str]:
    """Extras of the worker that the stage installs."""
    return {extra for found in re.findall(r"\[([\w,-]+)\]", install_command(name)) for extra in found.split(",")}


def requirements(names: Iterable[str]) -> list[Requirement]:
    """Requirements of the worker, with these extras."""
    texts = [*PROJECT["dependencies"], *(text for one in names for text in PROJECT["optional-dependencies"][one])]
    return [Requirement(text) for text in texts]


def pins() -> dict[str, str]:
    """Versions of `constraints.txt`, by canonical name."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pinned}


def closure(needed: Iterable[Requirement]) -> set[str]:
    """Canonical names of all that pip would install for these requirements, as the installed
    versions say.
    """
    found: set[str] = set()
    waiting = [(one, "") for one in needed]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        first = name not in found
        found.add(name)
        for wanted in [*([""] if first else []), *requirement.extras]:
            waiting += [(Requirement(text), wanted) for text in importlib.metadata.requires(name) or ()]
    return found


def environment_of(names: Iterable[str], directory: Path) -> Path:
    """An environment with these installed distributions alone; returns its Python."""
    venv.create(directory, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = directory / "lib" / version / "site-packages"
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
            target = packages / top
            if not target.exists():
                target.symlink_to(str(distribution.locate_file(top)))
    return directory / "bin" / "python"
