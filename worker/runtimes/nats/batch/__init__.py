"""Durable batches over JetStream: every request is answered once, even if workers die.

`layout` names streams and buckets, `store` is their client side, `command` is ``dlw-batch``;
the worker's side is `consumer`, which fetches from the `queues` what the engine has room for,
`running`, `answerer` and `storage`, whose calls `patience` repeats while the server is away;
`openai` translates requests and results. Delivery is at least once; the result is created by key
before the request is acknowledged, so there is one.
"""
