"""Makes what `worker.runtimes.openengine.wire` loads of ``openengine.proto``: its descriptors, and
the types of its messages for mypy. With ``--check`` it compares them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).resolve().parents[1] / "worker" / "runtimes" / "openengine" / "openengine.proto"
MADE = {"openengine.binpb": "openengine.binpb", "openengine_pb2.pyi": "wire.pyi"}
"""Files that protoc writes, and their names beside the source."""


def made(directory: Path) -> dict[Path, bytes]:
    """The files made of the source, with their contents; ``directory`` is scratch space."""
    arguments = [
        "protoc",
        f"--proto_path={SOURCE.parent}",
        f"--proto_path={protoc._get_resource_file_name('grpc_tools', '_proto')}",
        f"--descriptor_set_out={directory / 'openengine.binpb'}",
        f"--pyi_out={directory}",
        SOURCE.name,
    ]
    status = protoc.main(arguments)
    if status:
        raise SystemExit(status)
    return {SOURCE.with_name(name): (directory / written).read_bytes() for written, name in MADE.items()}


def main() -> int:
    """The exit status: 1 if ``--check`` finds a file that is not what the source makes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the files instead of writing them")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        files = made(Path(scratch))
    for path, content in files.items():
        if not check:
            path.write_bytes(content)
        elif not path.is_file() or path.read_bytes() != content:
            print(f"{path.name} is not what {SOURCE.name} makes; run scripts/generate_openengine.py")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
