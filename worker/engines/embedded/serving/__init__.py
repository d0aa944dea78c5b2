"""The asynchronous engine: requests go to the step thread, outputs come back as streams.

`engine` is the event loop's side, `step_thread` the thread that steps, `stream` one request's
output.
"""

from worker.engines.embedded.serving.engine import EmbeddedEngine, load

__all__ = ["EmbeddedEngine", "load"]
