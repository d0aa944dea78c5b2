"""The embedded engine: continuous batching in torch, on CPU and CUDA, without a serving framework.

One step, and the folder or file that answers each of its words::

    plan     = scheduler.schedule()                  # scheduler.py, kv_cache/
    plan     = scheduler.add_drafts(plan, ...)       # speculation/
    logits   = model.forward(plan)                   # model/, attention/
    edits    = plan_edits(plan)                      # the requests' chains: adapters.chain
    launched = sampler.launch(logits, edits, plan)   # sampling/
    scheduler.settle(plan)                           # what needs no tokens, while a GPU samples
    outputs  = scheduler.commit(plan, launched.collect())

Rows with a draft repeat the last four lines at each position where the draft was right.

`plan.py` holds what they pass to each other, `step.py` the loop, synchronous; `admission.py`
decides what a request may ask for, `turns.py` whose comes next, and `advance.py` takes it one token
further; `held_outputs.py` holds back what a chain may still rewind. Who drives the loop: `serving/`
in its own thread, for streams; `offline/` in the caller's thread; `controller/` under
Megatron-Core's names; `fused.py` is the
sampler alone, under MAX's. `transfer/` moves KV between workers, `native/` has the C kernels, and
`host/` the machine under it all. Imports run one way through these folders (``pyproject.toml``).
"""

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.offline import Engine
from worker.engines.embedded.plan import Chunk, Model, Plan, Request
from worker.engines.embedded.serving import EmbeddedEngine

__all__ = ["Chunk", "EmbeddedConfig", "EmbeddedEngine", "Engine", "Model", "Plan", "Request"]
