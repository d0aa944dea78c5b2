"""The embedded engine in `neighbours.py`: ``python decode_ours.py CHECKPOINT DTYPE``.

A separate process, since OpenMP reads how its threads wait when torch is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from workload import LONGEST, MOST_ROWS, Reply, Stopwatch, Task, serve

from worker.engines.embedded import Engine
from worker.engines.embedded.model import HfModel
from worker.sampling import SamplingParams

NO_DRAFTS = {"method": "none"}
"""`Engine(..., speculative_config=NO_DRAFTS)`: peers draft nothing, and random models repeat
themselves.
"""


def answer(engine: Engine, task: Task) -> Reply:
    """One reply, through the steps of the engine."""
    watch = Stopwatch(task.rows)
    for row, prompt in enumerate(task.prompts()):
        controls: dict[str, Any] = task.controls_of(row)
        engine.add(prompt, SamplingParams(max_tokens=task.new, ignore_eos=True, **controls))
    tokens: dict[str, list[int]] = {name: [] for name in engine.unfinished}
    while engine.unfinished:
        events = engine.session.step()
        if len(events) == task.rows:
            watch.tick()
        for event in events:
            tokens[event.group.id].append(event.token_id if event.token_id is not None else -1)
    return watch.fill(Reply(sum(map(len, tokens.values())), [row[0] for row in tokens.values()]))


def made_by(engine: Engine) -> str:
    """Name of the kernels and numerics that an engine computes with."""
    model = engine.session.stepper.model
    assert isinstance(model, HfModel)
    return model.made_by


def start() -> Callable[[Task], Reply]:
    path, dtype = sys.argv[1:]
    settings: dict[str, Any] = {"dtype": dtype, "max_num_seqs": MOST_ROWS, "context_length": LONGEST}
    engine = Engine(path, device="cpu", speculative_config=NO_DRAFTS, **settings)
    print("decode_ours.py:", made_by(engine), file=sys.stderr)
    return lambda task: answer(engine, task)


if __name__ == "__main__":
    serve(start)
