"""Installed packages: the requirements of this one, and the runtimes and engines that it drives."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from worker.doctor.finding import Finding
from worker.errors import ServingError
from worker.installation import check_adapters_package, check_dynamo

DISTRIBUTION = "dynamo-logits-worker"

EXTRAS = {
    "disagg": "prefill and decode in two workers",
    "nats": "keys of NATS",
    "openengine": "--runtime openengine, --upstream grpc://",
    "otel": "traces",
    "trtllm": "--engine trtllm",
}
"""Extras of the distribution, and what needs each."""

MENDS = {"trtllm": "docs/installation.md says how, which pip cannot resolve"}
"""Mends of extras that ``pip install`` cannot bring."""

PINS = Path(__file__).parents[2] / "constraints.txt"
"""The versions that every test ran with; beside the package in a checkout, nowhere else."""


def packages() -> Iterator[Finding]:
    """Findings about what is installed."""
    yield Finding("Python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        found = f"{DISTRIBUTION} is not installed: nothing says what it needs"
        yield Finding("packages", "note", found, "pip install -e ., in the checkout")
    else:
        plain = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
        yield _needed(plain)
        for extra, use in EXTRAS.items():
            yield _extra(extra, use, [each for each in requirements if each not in plain and _belongs(each, extra)])
    yield _engine("vLLM", "vllm", "--engine vllm")
    yield _dynamo()
    if PINS.is_file():
        yield pinned(PINS.read_text(encoding="utf-8"))


def _belongs(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is not None and requirement.marker.evaluate({"extra": extra})


def unmet(requirements: list[Requirement]) -> list[str]:
    """The requirements that are not met, each with what is there instead."""
    problems = []
    for each in requirements:
        version = _version(each.name)
        if version is None or not each.specifier.contains(version, prereleases=True):
            problems.append(f"{each.name}{each.specifier} ({version or 'absent'})")
    return problems


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _needed(requirements: list[Requirement]) -> Finding:
    problems = unmet(requirements)
    try:
        check_adapters_package()
    except ServingError as error:
        problems.append(str(error))
    if problems:
        return Finding("packages", "lacks", ", ".join(problems), "scripts/install, or pip install of what is named")
    return Finding("packages", "ok", f"all {len(requirements)} required ones")


def _extra(extra: str, use: str, requirements: list[Requirement]) -> Finding:
    problems = unmet(requirements)
    if not problems:
        return Finding(f"extra {extra}", "ok", use)
    found = f"not for {use}: {', '.join(problems)}"
    mend = MENDS.get(extra, f"pip install '{DISTRIBUTION}[{extra}]'")
    return Finding(f"extra {extra}", "note", found, f"{mend}, if it is wanted")


def _engine(name: str, distribution: str, use: str) -> Finding:
    version = _version(distribution) or _version(f"{distribution}-cpu")
    if version is None:
        mend = "scripts/install --vllm makes an environment with its CPU build, if it is wanted"
        return Finding(name, "note", f"not for {use}: absent", mend)
    return Finding(name, "ok", f"{version}, for {use}")


def _dynamo() -> Finding:
    try:
        check_dynamo()
    except ServingError as error:
        return Finding("ai-dynamo", "note", f"not for --runtime dynamo: {error}", "pip install 'ai-dynamo>=1.4.2'")
    versions = [_version(name) for name in ("ai-dynamo", "ai-dynamo-runtime")]
    if versions[0] != versions[1]:
        found = f"ai-dynamo {versions[0]} with ai-dynamo-runtime {versions[1]}"
        return Finding("ai-dynamo", "note", found, "the same version of both")
    return Finding("ai-dynamo", "ok", f"{versions[0]}, for --runtime dynamo")


def pinned(constraints: str) -> Finding:
    """Installed versions that differ from the pins in `constraints`, a file's text."""
    others = []
    for line in constraints.splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = _version(requirement.name)
        if version is not None and not requirement.specifier.contains(Version(version).public, prereleases=True):
            others.append(f"{requirement.name} {version} ({requirement.specifier})")
    if others:
        found = f"other versions than the tests': {', '.join(others)}"
        return Finding("pins", "note", found, "pip install -c constraints.txt -e ., in an environment of its own")
    return Finding("pins", "ok", "the versions that the tests ran with")
