"""The asynchronous engine: requests go to the step thread, outputs come back as streams.

`engine` is the event loop's side, `step_thread` the thread that steps, at the `pacing` of arrivals
and consumers; `outbox` carries outputs to the loop, `stream` is one request's output. `constant` is
an engine without a model.
"""

from worker.engines.embedded.serving.constant import load_constant
from worker.engines.embedded.serving.engine import EmbeddedEngine, load, load_for_serving
from worker.engines.embedded.serving.weights import weights_digest

__all__ = ["EmbeddedEngine", "load", "load_constant", "load_for_serving", "weights_digest"]
