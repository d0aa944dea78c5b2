"""``python -m worker replay``: makes one answer again, offline, from its receipt and its prompt.

`command` is the command line and the replay itself; `recorded` reads a receipt, `prompt` the file
of the prompt; `position` shows what each processor did at one position.
"""

from worker.replay.command import main

__all__ = ["main"]
