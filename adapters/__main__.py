"""``python -m adapters``; see `command`."""

from __future__ import annotations

import sys

from adapters import lean_torch, torch_at_use


def run() -> int:
    """The exit status."""
    lean_torch.install()
    torch_at_use.install()
    from adapters.command import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
