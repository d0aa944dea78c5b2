"""Fails a release whose wheel would not run elsewhere: ``check_wheel.py WHEEL...``.

Every native module that ``setup.py`` has for the wheel's platform must be in it, be for that
machine, need no library but the C library and OpenMP's, and no symbol of a C library that is newer
than the platform says.
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

LIBRARIES = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libgomp.so.1"}
"""All but the last are glibc's, its loaders for variables of each thread. libgomp comes with
PyTorch, which has loaded its own before: a second one would have threads of its own.
"""

MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
"""Machines of libraries by the architectures of platforms."""

SETUP = Path(__file__).parents[1] / "setup.py"


def expected(architecture: str) -> set[str]:
    """Paths of the native modules, without their suffixes."""
    modules = runpy.run_path(str(SETUP))["modules"](f"linux-{architecture}")
    return {module.name.replace(".", "/") for module in modules}


def problems(wheel: Path) -> Iterator[str]:
    """One line each."""
    platform = re.search(r"[-.]manylinux_(\d+)_(\d+)_(\w+)\.whl$", wheel.name)
    if platform is None or platform[3] not in MACHINES:
        yield f"{wheel.name}: no manylinux platform of {' or '.join(MACHINES)}"
        return
    newest = int(platform[1]), int(platform[2])
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as directory:
        found = {name.partition(".")[0]: name for name in archive.namelist() if name.endswith(".so")}
        for missing in sorted(expected(platform[3]) - found.keys()):
            yield f"{missing} was not built"
        for name in sorted(found.values()):
            with open(archive.extract(name, directory), "rb") as file:
                yield from (f"{name} {problem}" for problem in library_problems(file, newest, MACHINES[platform[3]]))


def library_problems(file: BinaryIO, newest: tuple[int, int], machine: str) -> Iterator[str]:
    """Problems of one shared library."""
    elf = ELFFile(file)
    if elf["e_machine"] != machine:
        yield f"is for {elf['e_machine']}, not {machine}"
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
