"""``python -m worker quantize``: what quantisation does to a model's answers, and the quantised
model written for later.

`command` is the command line, `report` measures, `text` is what it measures on, `output` writes the
checkpoint.
"""

from worker.quantize.command import main

__all__ = ["main"]
