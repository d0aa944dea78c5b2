"""``python -m worker replay``: makes one answer again, offline, from its receipt and its prompt.

`command` is the command line; `run` the replay itself, `on_vllm` that on vLLM, and `verdict` its
result, which goes to `output`; `recorded` reads a receipt, `prompt` the file of the prompt;
`position` tells what each processor did, and `decisions` whether each token of the recorded answer
is chosen again.
"""

from worker.replay.command import main

__all__ = ["main"]
