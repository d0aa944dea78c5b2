"""Writes what the client packages in ``clients/`` have of the catalogue: ``generate_clients.py``.

    .venv/bin/python scripts/generate_clients.py [--check]

The Python package gets a builder for each processor, a copy of `adapters.client`, which needs no
other module, and the version; the JavaScript module gets the names of arguments, and their types.
With ``--check`` it writes nothing, and fails if a file is not what it would write.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from client_javascript import javascript_section, typescript_section, with_processors
from client_python import python_module

import worker
from adapters.catalog import Catalog

ROOT = Path(__file__).parents[1]
PYTHON = Path("clients/python/dynamo_logits_client")
JAVASCRIPT = Path("clients/javascript")

COPIED = "# Copied from adapters/client.py by scripts/generate_clients.py of dynamo-logits-worker.\n"
VERSION = '"""The version of dynamo-logits-worker that this client belongs to."""\n\n__version__ = "{}"\n'


def generated() -> Mapping[Path, str]:
    """The text of each file, by its path from the root of the repository."""
    catalog = Catalog.default()
    module, types = (JAVASCRIPT / f"dynamo-logits-client.{suffix}" for suffix in ("js", "d.ts"))
    package = json.loads((ROOT / JAVASCRIPT / "package.json").read_text(encoding="utf-8"))
    return {
        PYTHON / "processors.py": python_module(catalog),
        PYTHON / "selections.py": COPIED + (ROOT / "adapters" / "client.py").read_text(encoding="utf-8"),
        PYTHON / "version.py": VERSION.format(worker.__version__),
        JAVASCRIPT / "package.json": json.dumps({**package, "version": worker.__version__}, indent=2) + "\n",
        module: with_processors(
            (ROOT / module).read_text(encoding="utf-8"), javascript_section(catalog, worker.__version__)
        ),
        types: with_processors((ROOT / types).read_text(encoding="utf-8"), typescript_section(catalog)),
    }


def main() -> int:
    """Write the files, or compare them; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write what the client packages have of the catalogue.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not up to date")
    check = parser.parse_args().check
    status = 0
    for path, text in generated().items():
        there = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else None
        if there == text:
            continue
        if check:
            sys.stderr.write(f"{path}: is not what scripts/generate_clients.py writes\n")
            status = 1
        else:
            (ROOT / path).write_text(text, encoding="utf-8")
            print(path)
    return status


if __name__ == "__main__":
    sys.exit(main())
