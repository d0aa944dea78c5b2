"""Serves requests with one of our engines, whatever the runtime.

`server` has the `RequestServer` that runtimes use; `preparation` turns a request into an
`EngineRequest`; `served_request` is one request from its arrival to its end; `reports` counts,
logs and traces requests; `kv_load` is the KV in use, and `description` the worker for operators.
"""

from worker.server.server import RequestServer

__all__ = ["RequestServer"]
