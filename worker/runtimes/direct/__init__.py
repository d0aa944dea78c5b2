"""Requests that come to a worker without Dynamo's frontend: `worker.runtimes.nats` and
`worker.runtimes.openengine` bring them.

`request` reads a prompt that is text and prepares several choices, `server` serves every choice as
a request of `worker.server`, and `answer` makes the text of its chunks and ends it at a stop
string. `probes` answers ``/metrics``, ``/live`` and ``/health`` over HTTP, as Dynamo's runtime does
for its own workers.
"""
