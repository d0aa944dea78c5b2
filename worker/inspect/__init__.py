"""``python -m worker inspect``: what each processor did at every position of an answer.

`command` is the command line; `recording` decodes an answer and
keeps what `worker.replay.position` sees of it, `comparison` aligns two answers; `terminal` and
`page` show them. ``page.css`` and ``page.js`` are written into the page.
"""

from worker.inspect.command import main

__all__ = ["main"]
