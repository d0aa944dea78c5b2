"""``python -m worker replay``: makes one answer again, offline, from its receipt and its prompt.

`command` is the command line; `run` the replay itself and `verdict` its result; `recorded` reads a
receipt, `prompt` the file of the prompt; `position` tells what each processor did.
"""

from worker.replay.command import main

__all__ = ["main"]
