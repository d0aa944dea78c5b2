"""Durable batches over JetStream: every request is answered once, even if workers die.

`layout` names streams and buckets, `store` is their client side, `command` is ``dlw-batch``;
`consumer` is the worker's side, `openai` translates requests and results, `progress` shows how far
a batch is. Delivery is at least once; the result is created by key before the request is
acknowledged, so there is one.
"""
