"""The OpenEngine runtime: a worker without Dynamo in its process, asked over gRPC by Dynamo's
sidecar, a router or any other client (docs/openengine.md).

`openengine.proto` is the schema and `wire` its messages. `request` turns a ``GenerateRequest`` into
what `worker.runtimes.direct` serves, `answer` its chunks into events, `errors` errors into statuses
and events. `inference` and `control` are the two services: `description`, `health` and `kv_events`
have what the second one tells. `endpoint` serves them, and `runtime` runs all of it.
"""
