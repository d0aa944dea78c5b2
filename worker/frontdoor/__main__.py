"""``python -m worker.frontdoor``; see `process`."""

from __future__ import annotations

import sys

from worker.importing import prepare, uncollected


def run() -> int:
    """The exit status."""
    prepare(uses_torch=False)
    with uncollected():
        from worker.frontdoor.process import main
    return main()


if __name__ == "__main__":
    sys.exit(run())
