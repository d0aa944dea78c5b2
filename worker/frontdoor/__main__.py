"""``python -m worker.frontdoor``; see `process`."""

from __future__ import annotations

import sys

from adapters import lean_torch
from worker.importing import uncollected


def run() -> int:
    """The exit status."""
    lean_torch.install()
    with uncollected():
        from worker.frontdoor.process import main
    return main()


if __name__ == "__main__":
    sys.exit(run())
