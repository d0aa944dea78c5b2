"""The embedded engine: continuous batching in torch, on CPU and CUDA, without a serving framework.

One step, and the folders behind its words::

    plan    = scheduler.schedule()                  # scheduler.py, kv_cache/
    plan    = scheduler.add_drafts(plan, ...)       # speculation/
    logits  = model.forward(plan)                   # model/, attention/
    edits   = plan_edits(plan)                      # the requests' chains: adapters.chain
    samples = sampler.sample(logits, edits, plan)   # sampling/
    scheduler.settle(plan)
    outputs = scheduler.commit(plan, samples)

Rows with a draft repeat the last four lines at each position where the draft was right.

`step.py` is that loop, synchronous, `plan.py` the data types that it exchanges. Requests come in
through `admission.py`. The scheduler keeps them in `queues.py`; `admission_order.py` chooses those
that join the batch, `turns.py` the next client, `prompt_chunks.py` the prompt tokens of a step,
`pinned.py` has the pages of KV transfers, `advance.py` appends a sampled token, and
`held_outputs.py` holds outputs back that a chain may still rewind.

Three folders drive the loop: `serving/` in its own thread, for streams; `offline/` in the caller's
thread; `controller/` under Megatron-Core's names. `fused.py` is the sampler alone, under MAX's.
`transfer/` moves KV between workers, `native/` has the C kernels, and `host/` memory, threads and
the watchdog. Imports run one way through these folders (``pyproject.toml``).
"""

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.offline import Engine
from worker.engines.embedded.plan import Chunk, Model, Plan, Request
from worker.engines.embedded.serving import EmbeddedEngine

__all__ = ["Chunk", "EmbeddedConfig", "EmbeddedEngine", "Engine", "Model", "Plan", "Request"]
