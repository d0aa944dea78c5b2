"""First steps of a process of this package, with which it starts faster."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from adapters import lean_torch, torch_at_use


def prepare(environ: MutableMapping[str, str] = os.environ, *, uses_torch: bool = True) -> None:
    """Settings of the process; before torch and numpy are imported.

    numpy's BLAS starts a thread for each core, which spin for a while, and nothing here multiplies
    matrices with it.

    Args:
        environ: The environment.
        uses_torch: Whether it is sure to use torch; a process that is not imports it at its use.
    """
    _fill_standard_streams()
    if os.getpid() == 1:  # in a container, where a signal that nothing handles yet is lost
        signal.signal(signal.SIGTERM, end_at_once)
    lean_torch.install()
    if not uses_torch:
        torch_at_use.install()
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _fill_standard_streams() -> None:
    """Have ``/dev/null`` in place of a standard stream that the process was started without: else
    the next file, or a client's connection, would get its number, and what libraries write there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free


def end_at_once(number: int, _frame: object) -> None:
    """End this process as a signal ends one that does not handle it."""
    os._exit(128 + number)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects no garbage: modules make hundreds of thousands of objects that stay, and to look
    through them again and again takes a fifth of the time of importing.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
