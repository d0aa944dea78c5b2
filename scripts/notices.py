"""Prints ``THIRD_PARTY_NOTICES.md`` with its table made anew: what the worker installs, with its
licence, as the installed distributions say.

``python scripts/notices.py``; with ``--texts DIRECTORY`` it also copies the licence texts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path

from install_packages import CUDA
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WORKER = "dynamo-logits-worker"
EXTRAS = ("", "disagg", "nats", "otel")
LICENCE_FILES = ("licen", "copying", "notice", "copyright")

NOTICES = Path(__file__).parents[1] / "THIRD_PARTY_NOTICES.md"
HEAD = "| --- | --- | --- |\n"


def pinned() -> dict[str, Distribution]:
    """The installed distributions that ``constraints.txt`` pins for the worker, by canonical name;
    without those of PyTorch's CUDA build, which have a section of their own.
    """
    lines = NOTICES.with_name("constraints.txt").read_text(encoding="utf-8").splitlines()
    names = {canonicalize_name(line.partition("==")[0]) for line in lines if not line.startswith("#")}
    return {name: each for name, each in closure().items() if name in names and not CUDA.match(name)}


def closure() -> dict[str, Distribution]:
    """All that is installed for the worker, by canonical name."""
    found: dict[str, Distribution] = {}
    waiting = [(Requirement(WORKER), extra) for extra in EXTRAS]
    seen = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found[name] = importlib.metadata.distribution(name)
        for text in found[name].requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed, one) for one in ("", *needed.extras)]
    del found[WORKER]
    return dict(sorted(found.items()))


def licence(distribution: Distribution) -> str:
    """The licence in one line. Raises `LookupError` if the metadata do not say."""
    metadata = distribution.metadata
    if metadata["License-Expression"]:
        return str(metadata["License-Expression"])
    classifiers = metadata.get_all("Classifier") or []
    names = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: OSI Approved :: ")]
    if names:
        return ", ".join(names)
    text = (metadata["License"] or "").strip()
    if text and "\n" not in text and len(text) < 80:
        return text
    raise LookupError(f"{distribution.name} does not say its licence")


def page(distributions: Iterable[Distribution]) -> str:
    """The page as it is, with the rows of these."""
    rows = (f"| {each.name} | {each.version.partition('+')[0]} | {licence(each)} |\n" for each in distributions)
    before, _, after = NOTICES.read_text(encoding="utf-8").partition(HEAD)
    return before + HEAD + "".join(rows) + after[after.index("\n## ") :]


def licence_texts(distribution: Distribution) -> Iterator[Path]:
    """Files of its metadata that look like licences."""
    for file in distribution.files or ():
        in_metadata = any(part.endswith(".dist-info") for part in file.parts)
        if in_metadata and any(word in file.name.lower() for word in LICENCE_FILES):
            yield Path(str(distribution.locate_file(file)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, metavar="DIRECTORY", help="where the licence texts are copied")
    options = parser.parse_args()
    found = pinned()
    for name, distribution in found.items() if options.texts else ():
        for number, path in enumerate(licence_texts(distribution)):
            target = options.texts / name / f"{number}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    sys.stdout.write(page(found.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
