"""The NATS runtime: a worker without Dynamo, found and asked over NATS.

`protocol` has the subjects, headers and errors that worker and client share (docs/nats.md);
`connection` connects either of them. The worker: `worker.runtimes.direct` turns a message into
requests of `worker.server` and their chunks into messages, `stream` sends them with sequence
numbers and flow control, `open_answers` keeps those that have not ended, `service` registers and
dispatches, `runtime` runs all of it. The client: `client`. Durable batches over JetStream are in
`batch`.
"""
