"""Offline inference: prompts in, results out, in the caller's own thread.

`engine` is the public `Engine`; `request_builder` makes requests from prompts and `SamplingParams`;
`session` drives the steps, `answer_queue` fills the batch; `results` are the growing answers and
the final results, whose text comes from `worker.text`.
"""

from worker.engines.embedded.offline.answer_queue import Event
from worker.engines.embedded.offline.engine import Engine
from worker.engines.embedded.offline.results import Answer, Completion, RequestGroup

__all__ = ["Answer", "Completion", "Engine", "Event", "RequestGroup"]
