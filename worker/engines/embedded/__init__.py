"""The embedded engine: continuous batching in torch, on CPU and CUDA, without a serving framework.

One step, and the file that answers each of its words::

    plan     = scheduler.schedule()                  # scheduler.py, kv_cache.py
    logits   = model.forward(plan)                   # model.py, attention.py
    edits    = plan_edits(plan)                      # the requests' chains: adapters.chain.batch
    launched = sampler.launch(logits, edits, plan)   # sampler.py, rows.py; truncation.py, on CUDA device_sampler.py
    scheduler.settle(plan)                           # what needs no tokens, while a GPU chooses them
    outputs  = scheduler.commit(plan, launched.collect())

`plan.py` holds what they pass to each other, `step.py` the loop, synchronous; `engine.py` runs it in its own
thread and turns it into streams (`stream.py`); `admission.py` decides what a request may ask for.

Without services: `offline.py` is the engine as an object, `controller.py` Megatron-Core's controller; both drive the
loop through `session.py`, whose requests come from `jobs.py` and whose results from `answers.py`.
"""

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.offline import Engine
from worker.engines.embedded.plan import Chunk, Model, Plan, Request
from worker.engines.embedded.serving import EmbeddedEngine

__all__ = ["Chunk", "EmbeddedConfig", "EmbeddedEngine", "Engine", "Model", "Plan", "Request"]
