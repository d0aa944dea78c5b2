"""``python -m worker doctor``: what this machine offers a worker and what it lacks, a line each.

`command` is the command line; `finding` a line of it; `machine` looks at the processor, memory and
limits of the process, `packages` at what is installed, `ports` at what a worker would listen on.
"""

from worker.doctor.command import main

__all__ = ["main"]
