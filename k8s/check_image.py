"""Fails the build of an image that the worker could not run in: ``check_image.py [--extra NAME]
[--distribution NAME] [--native-kernels] MODULE...``.

Every requirement of the installed worker must be met, also those of its extras that are named, and
every module must be importable. A distribution must be installed, with a package of that name; it
is not imported, because a build has no GPU and so no libcuda. The native kernels must load, where
that is asked for: without them the worker runs too, but slowly.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence

from packaging.requirements import Requirement

DISTRIBUTION = "dynamo-logits-worker"


def problems(extras: Iterable[str], modules: Iterable[str]) -> Iterator[str]:
    """One line for each package that is missing, too old or too new, or cannot be imported."""
    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if not any(requirement.marker is None or requirement.marker.evaluate({"extra": one}) for one in ("", *extras)):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name} is not installed, need {requirement}"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name} is {found}, need {requirement}"
    for name in modules:
        problem = import_problem(name)
        if problem is not None:
            yield f"import {name}: {problem}"


def distribution_problem(name: str) -> str | None:
    """The reason for which a distribution cannot be used, as far as a build can tell, or None."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed"
    package = name.replace("-", "_")
    return None if importlib.util.find_spec(package) else f"{name} is installed without its package {package}"


def import_problem(name: str) -> str | None:
    """The error of a module's import, None if it can be imported."""
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever an import runs into
        return f"{type(error).__name__}: {error}"
    return None


def kernels_problem() -> str | None:
    """The reason for which there are no native kernels, None if there are."""
    import torch

    from worker.engines.embedded import native

    problem = native.unavailable(torch.float32)
    return None if problem is None else f"no native kernels: {problem}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[], help="an extra of the worker whose requirements count")
    parser.add_argument("--distribution", action="append", default=[], help="must be installed; is not imported")
    parser.add_argument("--native-kernels", action="store_true", help="they must load")
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="what must be importable")
    arguments = parser.parse_args(argv)
    found = list(filter(None, map(distribution_problem, arguments.distribution)))
    found += problems(arguments.extra, arguments.modules)
    if arguments.native_kernels and not found:
        found += filter(None, [kernels_problem()])
    for line in found:
        sys.stderr.write(f"check_image: {line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
