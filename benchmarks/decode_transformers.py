"""transformers in `decode.py`.

``python decode_transformers.py CHECKPOINT static|continuous [DTYPE]``

``static`` is `generate` on one padded batch; ``continuous`` is its continuous batching, which has
temperature, top-k and top-p per request, but no min-p.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging
from workload import MOST_ROWS, Reply, Stopwatch, Task, serve


class _Ticking(StoppingCriteria):
    """Stops nothing; is called after each step."""

    def __init__(self, watch: Stopwatch, rows: int) -> None:
        self._watch = watch
        self._going_on = torch.zeros(rows, dtype=torch.bool)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.BoolTensor:
        self._watch.tick()
        return self._going_on  # type: ignore[return-value]


@torch.inference_mode()
def generate(network: Any, task: Task) -> Reply:
    ids = torch.tensor(task.prompts())
    watch = Stopwatch(task.rows)
    controls = task.controls_of(0)
    found = network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=task.new,
        min_new_tokens=task.new,
        do_sample=bool(controls),
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([_Ticking(watch, task.rows)]),
        **controls,
    )
    new = found[:, task.prompt :]
    return watch.fill(Reply(new.numel(), new[:, 0].tolist()))


class Continuous:
    """One manager at a time: per-request controls are fixed when it is made."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._manager: Any = None
        self._samples: bool | None = None

    def answer(self, task: Task) -> Reply:
        self._start(task.controls != "greedy")
        manager = self._manager
        names = {}
        for row, prompt in enumerate(task.prompts()):
            name = manager.add_request(prompt, max_new_tokens=task.new, eos_token_id=-1, **task.controls_of(row))
            names[name] = row
        tokens: dict[int, list[int]] = {}
        while len(tokens) < task.rows:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise SystemExit("continuous batching ended early")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise SystemExit(f"continuous batching failed: {result.error}")
                tokens[names[result.request_id]] = result.generated_tokens
        return Reply(sum(map(len, tokens.values())), [tokens[row][0] for row in range(task.rows)])

    def _start(self, samples: bool) -> None:
        if self._samples == samples:
            return
        if self._manager is not None:
            self._manager.stop(block=True)
        self._samples = samples
        # the values are defaults that each request overrides, and without them its own would be
        # left out
        base = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.92} if samples else {"do_sample": False}
        generation: Any = GenerationConfig
        self._manager = self._network.init_continuous_batching(
            generation_config=generation(eos_token_id=-1, **base),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=32,
                num_blocks=640,
                max_batch_tokens=1024,
                max_requests_per_batch=MOST_ROWS,
                allow_block_sharing=False,
                per_request_processors=samples,
            ),
        )
        self._manager.start()

    def stop(self) -> None:
        """End the manager's thread, without which the process would not end."""
        if self._manager is not None:
            self._manager.stop(block=True, timeout=10)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    path, kind, dtype = (*sys.argv[1:], "bfloat16")[:3]
    loader: Any = AutoModelForCausalLM
    network = loader.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    if kind == "static":
        serve(lambda: lambda task: generate(network, task))
        return
    network.set_attn_implementation("paged|sdpa")
    continuous = Continuous(network)
    try:
        serve(lambda: continuous.answer)
    finally:
        continuous.stop()


if __name__ == "__main__":
    main()
