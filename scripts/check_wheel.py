"""Fails a release whose wheel would not run elsewhere: ``check_wheel.py WHEEL...``.

Every native module of ``setup.py`` must be in it, need no library but the C library and
OpenMP's, and no symbol of a C library that is newer than the platform of its name says.
"""

from __future__ import annotations

import re
import runpy
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from elftools.elf.elffile import ELFFile  # comes with auditwheel

LIBRARIES = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "libgomp.so.1"}
"""The first three are glibc's, its loader for variables of each thread. libgomp comes with PyTorch,
which has loaded its own before: a second one would have threads of its own.
"""

SETUP = Path(__file__).parents[1] / "setup.py"


def expected() -> set[str]:
    """Paths of the native modules, without their suffixes."""
    return {module.name.replace(".", "/") for module in runpy.run_path(str(SETUP))["MODULES"]}


def problems(wheel: Path) -> Iterator[str]:
    """One line each."""
    platform = re.search(r"[-.]manylinux_(\d+)_(\d+)_\w+\.whl$", wheel.name)
    if platform is None:
        yield f"{wheel.name}: no manylinux platform"
        return
    newest = int(platform[1]), int(platform[2])
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as directory:
        found = {name.partition(".")[0]: name for name in archive.namelist() if name.endswith(".so")}
        for missing in sorted(expected() - found.keys()):
            yield f"{missing} was not built"
        for name in sorted(found.values()):
            with open(archive.extract(name, directory), "rb") as file:
                yield from (f"{name} {problem}" for problem in library_problems(file, newest))


def library_problems(file: BinaryIO, newest: tuple[int, int]) -> Iterator[str]:
    """Problems of one shared library."""
    elf = ELFFile(file)
    needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    for other in sorted(needed - LIBRARIES):
        yield f"needs {other}"
    for _, versions in elf.get_section_by_name(".gnu.version_r").iter_versions():
        for version in versions:
            glibc = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version.name)
            if glibc and (int(glibc[1]), int(glibc[2])) > newest:
                yield f"needs {version.name}"


def main() -> int:
    found = [problem for name in sys.argv[1:] for problem in problems(Path(name))]
    for line in found:
        sys.stderr.write(f"check_wheel: {line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
